//! The gate of one sandbox: its policy, its current connections and its denials.

use std::collections::HashMap;
use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::denial::{Denial, Denials, Sink};
use crate::limits::{Meter, Metered};
use crate::lock;
use crate::policy::{CompiledPolicy, DenyReason, Policy};
use crate::proxy;
use crate::resolve::LOOKUPS_PER_SANDBOX;
use crate::shared::EgressShared;
use crate::target::Target;
use crate::upstream_proxy::Route;

/// The egress proxy of one sandbox. Dropping the gate closes it and cuts every connection through it.
pub struct Gate {
    state: Arc<GateState>,
}

/// A connection of a sandbox that has ended.
#[derive(Debug, Clone)]
pub struct PassedConnection {
    pub began: SystemTime,
    pub ended: SystemTime,
    /// Host and port that the sandbox asked for, if it got that far.
    pub target: Option<(String, u16)>,
}

/// Receives the connections of a sandbox when they end. It must not block.
pub type ConnectionSink = Arc<dyn Fn(PassedConnection) + Send + Sync>;

/// Watches the connections that begin until this value is dropped.
#[must_use]
pub struct Watched {
    state: Arc<GateState>,
    id: u64,
}

impl Drop for Watched {
    fn drop(&mut self) {
        lock(&self.state.watchers).retain(|(id, _)| *id != self.id);
    }
}

/// Narrows the policy of a gate until this value is dropped.
#[must_use]
pub struct Narrowed {
    state: Arc<GateState>,
    id: u64,
}

impl Gate {
    pub(crate) fn open(
        shared: Arc<EgressShared>,
        listener: TcpListener,
        tenant: &str,
        policy: &Policy,
        sink: Sink,
    ) -> io::Result<Self> {
        let compiled = CompiledPolicy::new(policy, shared.fake_ip_dns)
            .map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        listener.set_nonblocking(true)?;
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let state = Arc::new(GateState {
            shared,
            tenant: tenant.to_owned(),
            meter: Meter::new(compiled.limits()),
            bytes: Arc::default(),
            denials: Denials::new(sink),
            lookups: Semaphore::new(LOOKUPS_PER_SANDBOX),
            policies: Mutex::new(PolicyStack { base: Arc::new(compiled), narrower: Vec::new() }),
            connections: Mutex::default(),
            watchers: Mutex::default(),
            ids: AtomicU64::new(0),
            closed: CancellationToken::new(),
        });
        tokio::spawn(state.closed.clone().run_until_cancelled_owned(proxy::accept(listener, Arc::clone(&state))));
        Ok(Self { state })
    }

    /// Narrows the policy until the returned value is dropped, and cuts connections that are no longer allowed. With
    /// `None` nothing may pass, otherwise only what `to` allows as well. The limits of the gate stay the same.
    pub fn narrow(&self, to: Option<Policy>) -> Narrowed {
        // A policy that cannot be parsed allows nothing.
        let compile = |policy| CompiledPolicy::new(&policy, self.state.shared.fake_ip_dns).unwrap_or_default();
        let narrower = to.map_or_else(CompiledPolicy::off, compile);
        let id = self.state.next_id();
        lock(&self.state.policies).narrower.push((id, Arc::new(narrower)));
        self.state.cut();
        Narrowed { state: Arc::clone(&self.state), id }
    }

    /// Returns the counter of the bytes that pass in both directions.
    pub fn bytes(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.state.bytes)
    }

    /// Reports connections that begin from now on to `sink` when they end. Of several watchers, the newest one gets them.
    pub fn watch(&self, sink: ConnectionSink) -> Watched {
        let id = self.state.next_id();
        lock(&self.state.watchers).push((id, sink));
        Watched { state: Arc::clone(&self.state), id }
    }

    /// Returns the number of denials so far, for use with [`Gate::denied_since`].
    pub fn mark(&self) -> u64 {
        self.state.denials.mark()
    }

    /// Returns the first few distinct denials after `mark`, and the number of further ones.
    pub fn denied_since(&self, mark: u64) -> (Vec<Denial>, u64) {
        self.state.denials.since(mark)
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.state.closed.cancel();
    }
}

impl Drop for Narrowed {
    fn drop(&mut self) {
        lock(&self.state.policies).narrower.retain(|(id, _)| *id != self.id);
    }
}

pub(crate) struct GateState {
    pub shared: Arc<EgressShared>,
    /// The tenant that the sandbox belongs to.
    pub tenant: String,
    pub meter: Meter,
    pub lookups: Semaphore,
    bytes: Arc<AtomicU64>,
    denials: Denials,
    policies: Mutex<PolicyStack>,
    connections: Mutex<HashMap<u64, Arc<TrackedConnection>>>,
    watchers: Mutex<Vec<(u64, ConnectionSink)>>,
    ids: AtomicU64,
    closed: CancellationToken,
}

/// The policies in force. All of them have to allow a request.
struct PolicyStack {
    base: Arc<CompiledPolicy>,
    narrower: Vec<(u64, Arc<CompiledPolicy>)>,
}

impl GateState {
    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Applies the policies that are in force at this moment.
    pub(crate) fn judge(&self, by: impl Fn(&CompiledPolicy) -> Result<(), DenyReason>) -> Result<(), DenyReason> {
        let (base, narrower) = {
            let policies = lock(&self.policies);
            (Arc::clone(&policies.base), policies.narrower.clone())
        };
        // The narrower policies come first, because they are the most immediate reason for a denial.
        narrower.iter().map(|(_, policy)| policy).chain([&base]).try_for_each(|policy| by(policy))
    }

    /// Cuts the connections that the policies no longer allow.
    fn cut(&self) {
        let connections: Vec<_> = lock(&self.connections).values().cloned().collect();
        for tracked in connections {
            let info = lock(&tracked.info).clone();
            if let Some(info) = info
                && self.judge(|policy| info.judged(policy)).is_err()
            {
                tracked.cut.cancel();
            }
        }
    }

    pub(crate) fn deny(&self, what: &str, refusal: DenyReason) -> Denial {
        let denial = Denial::new(what, refusal);
        tracing::debug!(sentence = denial.sentence, "denied");
        self.denials.add(&denial);
        denial
    }
}

impl Metered for GateState {
    fn meter(&self) -> &Meter {
        &self.meter
    }

    fn moved(&self, bytes: usize) {
        self.meter.charge(bytes);
        for counter in [&self.bytes, &self.shared.bytes] {
            counter.fetch_add(bytes as u64, Ordering::Relaxed);
        }
    }

    fn overdrawn(&self, refusal: DenyReason) {
        self.deny("a connection", refusal);
    }
}

/// The facts about the traffic on a connection that policies judge.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionInfo {
    pub target: Target,
    pub inside: Visibility,
    pub route: Option<Route>,
    /// The name in the TLS ClientHello or the `Host` header, if the target is an address.
    pub name: Option<Target>,
}

/// How much of the traffic on a connection the proxy can see.
#[derive(Debug, Clone)]
pub(crate) enum Visibility {
    /// A tunnel whose requests are judged one by one.
    Requests,
    /// A request with this method.
    Method(hyper::Method),
    /// A tunnel whose content the proxy cannot see.
    Opaque,
}

impl ConnectionInfo {
    pub(crate) fn new(target: Target, inside: Visibility) -> Self {
        Self { target, inside, route: None, name: None }
    }

    fn judged(&self, policy: &CompiledPolicy) -> Result<(), DenyReason> {
        policy.asked(&self.target)?;
        if let Some(name) = &self.name {
            policy.asked(name)?;
        }
        match &self.inside {
            Visibility::Requests => {}
            Visibility::Method(method) => policy.method(method.as_str())?,
            Visibility::Opaque => policy.opaque()?,
        }
        self.route.as_ref().map_or(Ok(()), |route| policy.routed(&self.target, route))
    }
}

/// The gate's record of a connection.
struct TrackedConnection {
    info: Mutex<Option<ConnectionInfo>>,
    cut: CancellationToken,
}

/// A connection from the sandbox, with its permits. It ends when the last task that serves it has ended.
pub(crate) struct Connection {
    pub state: Arc<GateState>,
    tracked: Arc<TrackedConnection>,
    id: u64,
    watched: Option<(SystemTime, ConnectionSink)>,
    _permits: (OwnedSemaphorePermit, OwnedSemaphorePermit),
}

impl Connection {
    pub(crate) fn new(state: Arc<GateState>, permits: (OwnedSemaphorePermit, OwnedSemaphorePermit)) -> Self {
        let tracked = Arc::new(TrackedConnection { info: Mutex::default(), cut: state.closed.child_token() });
        let id = state.next_id();
        state.shared.connections.fetch_add(1, Ordering::Relaxed);
        lock(&state.connections).insert(id, Arc::clone(&tracked));
        let watched = lock(&state.watchers).last().map(|(_, sink)| (SystemTime::now(), Arc::clone(sink)));
        Self { state, tracked, id, watched, _permits: permits }
    }

    /// Checks whether the traffic that `info` describes may pass, and checks it again whenever the policy changes.
    pub(crate) fn cross(&self, info: ConnectionInfo) -> Result<(), DenyReason> {
        self.state.meter.spent()?;
        // It is recorded before it is judged, so that a policy change in between also applies to it.
        *lock(&self.tracked.info) = Some(info.clone());
        self.state.judge(|policy| info.judged(policy))
    }

    /// Spawns a task that ends when the gate closes or when the connection is no longer allowed.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let cut = self.tracked.cut.clone();
        tokio::spawn(async move {
            cut.run_until_cancelled(task).await;
        });
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        lock(&self.state.connections).remove(&self.id);
        if let Some((began, sink)) = self.watched.take() {
            let target = lock(&self.tracked.info).take().map(|info| (info.target.host.to_string(), info.target.port));
            sink(PassedConnection { began, ended: SystemTime::now(), target });
        }
    }
}
