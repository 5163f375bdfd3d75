//! Egress: the only way from a sandbox to a network. A proxy on the host applies the policy, resolves names, checks
//! addresses and inserts secrets.
//!
//! The proxy accepts connections directly on a socket that listens inside the sandbox. No relay is needed in between,
//! and the socket itself identifies the sandbox. The proxy speaks HTTP, CONNECT and SOCKS5. It resolves names itself
//! and checks the address that it then connects to.
#![warn(unreachable_pub)]

use std::collections::BTreeMap;
use std::io;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::pki_types::CertificateDer;

mod address;
mod authority;
mod connect;
mod denial;
mod dns;
mod gate;
mod http;
mod limits;
mod loopback;
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
mod upstream_proxy;
mod vault;
mod wire;

pub use denial::Denial;
pub use gate::{ConnectionSink, Gate, Narrowed, PassedConnection, Watched};
pub use loopback::NAME as HOST_NAME;
pub use policy::{Policy, Table};
pub use secrets::{Secret, Value, is_host_name};
pub use upstream_proxy::{UpstreamProxy, Upstreams};

/// The egress state that all sandboxes of one server share: the resolver, the certificate authorities and the
/// secrets.
#[derive(Debug, Clone)]
pub struct Egress {
    shared: Arc<shared::EgressShared>,
}

#[derive(Debug, Clone, Default)]
pub struct EgressConfig {
    pub secrets: Vec<Secret>,
    /// Addresses of names that the operator resolves statically, such as `pages.test → 127.0.0.1`. They take precedence
    /// over DNS.
    pub hosts: BTreeMap<String, std::net::IpAddr>,
    /// Certificates, in DER, of authorities that may vouch for hosts with a secret, in addition to those that this
    /// machine trusts.
    pub roots: Vec<CertificateDer<'static>>,
    /// Path of NSS's `certutil`, if it is installed. It is needed to make the browser trust hosts with a secret.
    pub certutil: Option<PathBuf>,
    pub upstreams: Upstreams,
    /// Whether the names of this machine's resolver may lead to the addresses that transparent proxies hand out in
    /// place of the real ones: 198.18.0.0/15 and fc00::/18.
    pub fake_ip_dns: bool,
}

/// Totals over all gates since the server started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of connections that sandboxes opened, including those that failed or were denied.
    pub connections: u64,
    /// Number of bytes exchanged with outside hosts, in both directions together.
    pub bytes: u64,
}

/// The environment variables and files that a sandbox with egress needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxSetup {
    /// Proxy variables such as `HTTP_PROXY`, the locations of the certificates, and the placeholders.
    pub env: BTreeMap<String, String>,
    /// Certificate files, each as an absolute path inside the sandbox and its content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// Directory inside the sandbox that holds the browser's certificate database, if `files` contains one.
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

    /// Returns an egress with another configuration, for sandboxes that are opened from now on, and what is different.
    /// Sandboxes of this egress keep its secrets. The limits of the whole server and the totals continue. If nothing is
    /// different, this egress is returned.
    pub fn reload(&self, config: EgressConfig) -> io::Result<(Self, Vec<&'static str>)> {
        let new = self.shared.reload(config)?.map(|(shared, changes)| (Self { shared: Arc::new(shared) }, changes));
        Ok(new.unwrap_or_else(|| (self.clone(), Vec::new())))
    }

    /// Serves one sandbox of `tenant` until the gate is dropped. Reports denials to `sink`.
    pub fn open(&self, listener: TcpListener, tenant: &str, policy: Policy, sink: denial::Sink) -> io::Result<Gate> {
        Gate::open(Arc::clone(&self.shared), listener, tenant, &policy, sink)
    }

    /// Returns the setup for a sandbox of `tenant`. It contains the placeholders of that tenant's secrets and no
    /// others.
    pub async fn setup(&self, tenant: &str) -> Arc<SandboxSetup> {
        self.shared.setup(tenant).await
    }

    pub fn traffic(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic { connections: read(&self.shared.connections), bytes: read(&self.shared.bytes) }
    }
}

/// Locks a mutex, even if a holder of it has panicked.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
