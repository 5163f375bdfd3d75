//! Accepts the connections of sandboxes, and lets out what their policies allow.

use std::io;
use std::net::TcpListener;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::task::AbortOnDropHandle;

use crate::{EgressConfig, Furnishing, Policy};

#[derive(Debug)]
pub struct Shared {
    config: EgressConfig,
}

impl Shared {
    pub fn new(config: EgressConfig) -> Self {
        Self { config }
    }

    pub fn furnishing(&self) -> Furnishing {
        let env = self.config.secrets.iter().map(|secret| (secret.name.clone(), String::new())).collect();
        Furnishing { env, ..Furnishing::default() }
    }
}

/// Something that was not let out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// `GET http://10.0.0.1/`, `CONNECT evil.test:443`, as far as it is known.
    pub what: String,
    /// Which rule said so: `policy "corp": deny "*.evil.test"`.
    pub rule: String,
    /// The whole sentence: what, by which rule, how the operator can allow it.
    pub sentence: String,
}

pub type Sink = Arc<dyn Fn(&Denial) + Send + Sync>;

/// The way out of one sandbox. Dropped, it is closed, with every connection through it.
pub struct Gate {
    policy: Arc<Mutex<Policy>>,
    denials: Arc<Mutex<Vec<Denial>>>,
    _accepting: AbortOnDropHandle<()>,
}

/// A narrower policy, as long as this is held.
pub struct Narrowed {}

impl Gate {
    pub(crate) fn open(_shared: Arc<Shared>, listener: TcpListener, policy: Policy, _sink: Sink) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let accepting = tokio::spawn(async move { while listener.accept().await.is_ok() {} });
        Ok(Self {
            policy: Arc::new(Mutex::new(policy)),
            denials: Arc::default(),
            _accepting: AbortOnDropHandle::new(accepting),
        })
    }

    /// Nothing goes out as long as it is held (`None`), or only what this policy allows too.
    #[must_use]
    pub fn narrow(&self, _to: Option<Policy>) -> Narrowed {
        Narrowed {}
    }

    pub fn policy(&self) -> Policy {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// How many denials there were; for [`Gate::denied_since`].
    pub fn mark(&self) -> u64 {
        self.denials.lock().unwrap_or_else(PoisonError::into_inner).len() as u64
    }

    /// Those after a mark, each once, the first few; and how many more there were.
    pub fn denied_since(&self, mark: u64) -> (Vec<Denial>, u64) {
        let denials = self.denials.lock().unwrap_or_else(PoisonError::into_inner);
        (denials.iter().skip(mark as usize).cloned().collect(), 0)
    }
}
