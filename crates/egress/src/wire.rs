//! Byte streams of any kind: TCP, TLS over TCP, or an upgraded HTTP connection.

use tokio::io::{AsyncRead, AsyncWrite};

pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub(crate) type Wire = Box<dyn Stream>;
