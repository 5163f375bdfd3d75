//! The only way out of a sandbox: a proxy on the host's side that knows the policy, and the names, addresses and secrets.
//!
//! A socket that listens inside the sandbox is accepted on here, so that there is no relay in between and the socket itself says whose
//! connection it is. HTTP, CONNECT and SOCKS5. Names are resolved here; what is checked is the address that is connected to.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;

mod address;
mod pattern;
pub mod policy;
mod proxy;
mod secrets;
mod target;
mod tls;
mod wire;

pub use policy::{Policy, Table};
pub use proxy::{Denial, Gate, Narrowed, Sink};
pub use secrets::{Secret, Value, is_host_name};

/// What one server has of it: resolver, authority, secrets.
#[derive(Debug, Clone)]
pub struct Egress {
    shared: Arc<proxy::Shared>,
}

#[derive(Debug, Clone, Default)]
pub struct EgressConfig {
    pub secrets: Vec<Secret>,
    /// Names that the operator resolves himself, before anybody is asked: `pages.test → 127.0.0.1`.
    pub hosts: BTreeMap<String, std::net::IpAddr>,
}

/// What a sandbox with a way out has to have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Furnishing {
    /// `HTTP_PROXY` and its kin, where the certificates are, the placeholders.
    pub env: BTreeMap<String, String>,
    /// Certificates: absolute path inside, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// The directory inside with the browser's certificate database, if there is one among the files.
    pub nssdb: Option<String>,
}

impl PartialEq for Egress {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Egress {
    pub fn new(config: EgressConfig) -> io::Result<Self> {
        Ok(Self { shared: Arc::new(proxy::Shared::new(config)) })
    }

    /// Serves one sandbox until the gate is dropped. `sink` hears of each denial.
    pub fn open(&self, listener: TcpListener, policy: Policy, sink: Sink) -> io::Result<Gate> {
        Gate::open(Arc::clone(&self.shared), listener, policy, sink)
    }

    pub fn furnishing(&self) -> Furnishing {
        self.shared.furnishing()
    }
}
