//! What all gates of a server have in common.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::process::{Resource, getrlimit};
use tokio::sync::Semaphore;

use crate::resolve::Resolver;
use crate::tls::Interceptor;
use crate::{EgressConfig, Furnishing, trust};

#[derive(Debug)]
pub struct Shared {
    furnishing: Furnishing,
    pub resolver: Resolver,
    pub interceptor: Interceptor,
    /// One for each connection of any sandbox, so that they leave the server enough descriptors.
    pub places: Arc<Semaphore>,
    /// Of all sandboxes, for the figures.
    pub connections: AtomicU64,
    pub bytes: AtomicU64,
}

impl Shared {
    pub fn new(config: EgressConfig) -> io::Result<Self> {
        let interceptor = Interceptor::new(&config.secrets, &config.roots)?;
        Ok(Self {
            furnishing: trust::furnishing(&interceptor, config.certutil.as_deref()),
            resolver: Resolver::new(&config.hosts)?,
            interceptor,
            places: Arc::new(Semaphore::new(most_connections())),
            connections: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
        })
    }

    pub fn furnishing(&self) -> Furnishing {
        self.furnishing.clone()
    }
}

/// Each has two descriptors, one to each side: together half of what the process may have.
fn most_connections() -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 4;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(16, 65_536)
}
