//! A byte stream, whatever is under it: TCP, TLS on TCP, what is left of an HTTP connection after an upgrade.

use tokio::io::{AsyncRead, AsyncWrite};

pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

pub type Wire = Box<dyn Stream>;
