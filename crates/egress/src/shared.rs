//! What all gates of a server have in common.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Resource, getrlimit};
use tokio::sync::{OnceCell, Semaphore};

use crate::resolve::Resolver;
use crate::tls::Interceptor;
use crate::vault::SecretSet;
use crate::{EgressConfig, SandboxSetup, trust};

/// A furnishing, once somebody has made it.
type SetupCell = Arc<OnceCell<Arc<SandboxSetup>>>;

#[derive(Debug)]
pub struct EgressShared {
    certutil: Option<PathBuf>,
    /// What sandboxes are given, by the secrets of their tenant; made when the first of them is.
    furnishings: Mutex<HashMap<Option<SecretSet>, SetupCell>>,
    pub resolver: Resolver,
    pub interceptor: Interceptor,
    /// One for each connection of any sandbox, so that they leave the server enough descriptors.
    pub places: Arc<Semaphore>,
    /// Of all sandboxes, for the figures.
    pub connections: AtomicU64,
    pub bytes: AtomicU64,
}

impl EgressShared {
    pub fn new(config: EgressConfig) -> io::Result<Self> {
        let interceptor = Interceptor::new(&config.secrets, &config.roots)?;
        if !interceptor.is_empty() && config.certutil.is_none() {
            tracing::warn!(
                "browsers cannot reach hosts with a secret: `certutil` is not on this machine; it is in `libnss3-tools`"
            );
        }
        Ok(Self {
            certutil: config.certutil,
            furnishings: Mutex::default(),
            resolver: Resolver::new(&config.hosts)?,
            interceptor,
            places: Arc::new(Semaphore::new(most_connections())),
            connections: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    /// What a sandbox of this tenant is given. Nothing in it is about the secrets of others.
    pub async fn furnishing(&self, tenant: &str) -> Arc<SandboxSetup> {
        let set = self.interceptor.set(tenant);
        let place = {
            let mut furnishings = self.furnishings.lock().unwrap_or_else(PoisonError::into_inner);
            Arc::clone(furnishings.entry(set.clone()).or_default())
        };
        let made = place.get_or_init(|| async {
            let Some(trusted) = set.and_then(|set| self.interceptor.trusted(&set)) else {
                return Arc::new(trust::plain());
            };
            let certutil = self.certutil.clone();
            // A program is started and waited for.
            let making = tokio::task::spawn_blocking(move || trust::furnishing(trusted, certutil.as_deref()));
            Arc::new(making.await.unwrap_or_default())
        });
        Arc::clone(made.await)
    }
}

/// Each has two descriptors, one to each side: together half of what the process may have.
fn most_connections() -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(16, 65_536)
}
