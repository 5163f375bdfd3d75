//! Hosts that have a secret: TLS ends here, so that the secret can be put in on the way out.
//!
//! The way of such a request: CONNECT or SOCKS names the host, the policy allows it, [`Interceptor::takes`] says yes, and
//! [`Interceptor::accept`] ends the client's TLS. Each request inside goes the same way as a plain one (policy, methods, address), then
//! [`Interceptor::dress`] puts the secret in, [`Interceptor::connect`] begins TLS on the connection that was checked and opened,
//! and [`Dressed::clean`] takes the secret out of an answer that repeats it.

use std::io;

use hyper::body::Body;
use hyper::{HeaderMap, Response};

use crate::wire::Wire;

#[derive(Debug, Default)]
pub struct Interceptor {}

impl Interceptor {
    /// Whether TLS to this host ends here. `name` is lower case, without a dot at its end.
    pub fn takes(&self, _name: &str, _port: u16) -> bool {
        false
    }

    /// Ends the client's TLS, with a certificate for `name`. HTTP/1.1 is all that is offered inside.
    pub async fn accept(&self, client: Wire, _name: &str) -> io::Result<Wire> {
        Ok(client)
    }

    /// Begins TLS with the host itself, whose certificate has to be good for `name`.
    pub async fn connect(&self, upstream: Wire, _name: &str) -> io::Result<Wire> {
        Ok(upstream)
    }

    /// Puts the secrets of this host into the headers of a request to it.
    pub fn dress(&self, _name: &str, _port: u16, _headers: &mut HeaderMap) -> Dressed {
        Dressed {}
    }
}

/// A request that has secrets in it, and what its answer must not have.
#[derive(Debug)]
pub struct Dressed {}

impl Dressed {
    /// The answer without the secrets. An error is a sentence for whoever asked: the answer cannot be looked through.
    pub fn clean<B: Body>(self, response: Response<B>) -> Result<Response<B>, &'static str> {
        Ok(response)
    }
}
