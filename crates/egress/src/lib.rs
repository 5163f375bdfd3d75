//! The only way out of a sandbox: a proxy on the host's side that knows the policy, and the names, addresses and secrets.
//!
//! A socket that listens inside the sandbox is accepted on here, so that there is no relay in between and the socket itself says whose
//! connection it is. HTTP, CONNECT and SOCKS5. Names are resolved here; what is checked is the address that is connected to.

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rustls::pki_types::CertificateDer;

mod address;
mod authority;
mod connect;
mod denial;
mod dns;
mod gate;
mod http;
mod limits;
mod pattern;
pub mod policy;
mod proxy;
mod resolve;
mod scrub;
mod secrets;
mod shared;
mod socks;
mod target;
mod tls;
mod trust;
mod tunnel;
mod upstream;
mod vault;
mod wire;

pub use denial::{Denial, Sink};
pub use gate::{Gate, Narrowed};
pub use policy::{Policy, Table};
pub use secrets::{Secret, Value, is_host_name};

/// What one server has of it: resolver, authority, secrets.
#[derive(Debug, Clone)]
pub struct Egress {
    shared: Arc<shared::EgressShared>,
}

#[derive(Debug, Clone, Default)]
pub struct EgressConfig {
    pub secrets: Vec<Secret>,
    /// Names that the operator resolves himself, before anybody is asked: `pages.test → 127.0.0.1`.
    pub hosts: BTreeMap<String, std::net::IpAddr>,
    /// Authorities that hosts with a secret may be vouched for by, besides those of this machine. DER.
    pub roots: Vec<CertificateDer<'static>>,
    /// NSS's program, if this machine has it: makes the browser trust hosts with a secret.
    pub certutil: Option<PathBuf>,
}

/// What went through all gates since the beginning.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Of sandboxes, also those that came to nothing.
    pub connections: u64,
    /// To and from what is outside.
    pub bytes: u64,
}

/// What a sandbox with a way out has to have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxSetup {
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
        Ok(Self { shared: Arc::new(shared::EgressShared::new(config)?) })
    }

    /// Serves one sandbox of this tenant until the gate is dropped. `sink` hears of each denial.
    pub fn open(&self, listener: TcpListener, tenant: &str, policy: Policy, sink: Sink) -> io::Result<Gate> {
        Gate::open(Arc::clone(&self.shared), listener, tenant, policy, sink)
    }

    /// What a sandbox of this tenant has to have, with the placeholders of its own secrets and no others.
    pub async fn furnishing(&self, tenant: &str) -> Arc<SandboxSetup> {
        self.shared.furnishing(tenant).await
    }

    pub fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic { connections: read(&self.shared.connections), bytes: read(&self.shared.bytes) }
    }
}
