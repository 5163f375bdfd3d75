//! Byte streams independent of the layer below: TCP, TLS over TCP, or an upgraded HTTP connection.

use tokio::io::{AsyncRead, AsyncWrite};

pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub type Wire = Box<dyn Stream>;
