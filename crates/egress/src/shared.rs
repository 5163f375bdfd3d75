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
use crate::upstream_proxy::{Routes, Upstreams};
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
    pub connections: Arc<AtomicU64>,
    pub bytes: Arc<AtomicU64>,
}

impl EgressShared {
    pub(crate) fn new(config: EgressConfig) -> io::Result<Self> {
        let interceptor = interceptor(&config)?;
        Ok(Self {
            certutil: config.certutil,
            setups: Mutex::default(),
            resolver: Resolver::new(&config.hosts)?,
            routes: routes(config.upstreams)?,
            fake_ip_dns: config.fake_ip_dns,
            interceptor,
            permits: Arc::new(Semaphore::new(max_connections())),
            connections: Arc::default(),
            bytes: Arc::default(),
        })
    }

    /// Returns the state for another configuration, which has the same permits and counters, and what is different.
    /// Returns `None` if nothing is.
    pub(crate) fn reload(&self, config: EgressConfig) -> io::Result<Option<(Self, Vec<&'static str>)>> {
        let (interceptor, resolver) = (interceptor(&config)?, self.resolver.with_hosts(&config.hosts)?);
        let routes = routes(config.upstreams)?;
        let mut changes = self.interceptor.changes(&interceptor);
        changes.extend((!self.resolver.has_hosts_of(&resolver)).then_some("host names"));
        let as_before = self.routes.has_proxies_of(&routes) && self.fake_ip_dns == config.fake_ip_dns;
        changes.extend((!as_before).then_some("upstream proxies"));
        let new = Self {
            certutil: config.certutil,
            setups: Mutex::default(),
            resolver,
            routes,
            fake_ip_dns: config.fake_ip_dns,
            interceptor,
            permits: Arc::clone(&self.permits),
            connections: Arc::clone(&self.connections),
            bytes: Arc::clone(&self.bytes),
        };
        Ok((!changes.is_empty()).then_some((new, changes)))
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

fn routes(upstreams: Upstreams) -> io::Result<Routes> {
    Routes::new(upstreams).map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))
}

fn interceptor(config: &EgressConfig) -> io::Result<Interceptor> {
    let interceptor = Interceptor::new(&config.secrets, &config.roots)?;
    if !interceptor.is_empty() && config.certutil.is_none() {
        tracing::warn!(
            "browsers cannot reach hosts with a secret: `certutil` is not on this machine; it is in `libnss3-tools`"
        );
    }
    Ok(interceptor)
}

/// Returns the maximum number of connections. Each one uses two descriptors, one towards each side, so together they
/// use half of the descriptors that the process may open.
fn max_connections() -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(16, 65_536)
}
