//! The state that all gates of a server share.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};

use rustix::process::{Resource, getrlimit};
use tokio::sync::{OnceCell, Semaphore};

use crate::resolve::Resolver;
use crate::tls::Interceptor;
use crate::upstream_proxy::Routes;
use crate::vault::SecretSet;
use crate::{EgressConfig, SandboxSetup, lock, trust};

/// A sandbox setup, which is created on first use.
type SetupCell = Arc<OnceCell<Arc<SandboxSetup>>>;

#[derive(Debug)]
pub(crate) struct EgressShared {
    certutil: Option<PathBuf>,
    /// Sandbox setups by the set of secrets of the tenant. Each is created when the first sandbox needs it.
    setups: Mutex<HashMap<Option<SecretSet>, SetupCell>>,
    pub resolver: Resolver,
    pub routes: Routes,
    pub fake_ip_dns: bool,
    pub interceptor: Interceptor,
    /// Permits for the connections of all sandboxes, bounded so that the server has enough descriptors left.
    pub permits: Arc<Semaphore>,
    /// Number of connections of all sandboxes, for the metrics.
    pub connections: AtomicU64,
    pub bytes: AtomicU64,
}

impl EgressShared {
    pub(crate) fn new(config: EgressConfig) -> io::Result<Self> {
        let interceptor = Interceptor::new(&config.secrets, &config.roots)?;
        if !interceptor.is_empty() && config.certutil.is_none() {
            tracing::warn!(
                "browsers cannot reach hosts with a secret: `certutil` is not on this machine; it is in `libnss3-tools`"
            );
        }
        Ok(Self {
            certutil: config.certutil,
            setups: Mutex::default(),
            resolver: Resolver::new(&config.hosts)?,
            routes: Routes::new(config.upstreams).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?,
            fake_ip_dns: config.fake_ip_dns,
            interceptor,
            permits: Arc::new(Semaphore::new(max_connections())),
            connections: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// Returns the setup for a sandbox of this tenant. It reveals nothing about the secrets of other tenants.
    pub(crate) async fn setup(&self, tenant: &str) -> Arc<SandboxSetup> {
        let set = self.interceptor.set(tenant);
        let cell = {
            let mut setups = lock(&self.setups);
            Arc::clone(setups.entry(set.clone()).or_default())
        };
        let setup = cell.get_or_init(|| async {
            let Some(trusted) = set.and_then(|set| self.interceptor.trusted(&set)) else {
                return Arc::new(trust::plain());
            };
            let certutil = self.certutil.clone();
            // The function starts a program and waits for it, so it runs on a thread that may block.
            let creating = tokio::task::spawn_blocking(move || trust::setup(trusted, certutil.as_deref()));
            Arc::new(creating.await.unwrap_or_default())
        });
        Arc::clone(setup.await)
    }
}

/// Returns the maximum number of connections. Each one uses two descriptors, one towards each side, so together they
/// use half of the descriptors that the process may open.
fn max_connections() -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(16, 65_536)
}
