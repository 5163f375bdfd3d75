//! The operator's view of the engine: the contexts of all tenants and the conversations in which code runs, what each
//! tenant used, and ways to stop a context and to drain the engine.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use sandbox::Stats;

use crate::conversation::ConversationRun;
use crate::engine::{Engine, Inner};
use crate::metering::TenantUsage;
use crate::op::{ContextInfo, ContextSelector, EngineError, NoticeKind, Op, Realm, Tenant};
use crate::registry::LiveSandbox;

/// A context as the operator sees it, or a conversation in which code runs.
#[derive(Debug, Clone)]
pub struct ContextView {
    pub tenant: Tenant,
    pub realm: Realm,
    pub info: ContextInfo,
    /// Number of runs that execute or wait for their turn.
    pub runs: usize,
    /// Statistics of its sandbox; `None` if it has no sandbox at the moment, or if they are not known.
    pub stats: Option<Stats>,
    pub has_sandbox: bool,
    /// Bytes that its sandbox exchanged with the network.
    pub network_bytes: u64,
    /// Names of the policies that have to allow each of its connections; none if it has no network.
    pub policies: Vec<String>,
    /// Time until the context is stopped because nobody uses it; `None` while it is in use, or if it is never stopped.
    pub expires_in: Option<Duration>,
}

/// A call that does work. It is counted until this value is dropped.
pub(crate) struct Working(Arc<AtomicUsize>);

impl Drop for Working {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Inner {
    /// Counts a call that begins work, or refuses it while the engine is drained. Other calls pass uncounted.
    pub(crate) fn begin_work(&self, op: &Op) -> Result<Option<Working>, EngineError> {
        op.is_work().then(|| self.working()).transpose()
    }

    /// Counts work, or refuses it while the engine is drained.
    pub(crate) fn working(&self) -> Result<Working, EngineError> {
        self.working.fetch_add(1, Ordering::SeqCst);
        let working = Working(self.working.clone());
        // The call is counted first, so that a drain either waits for it or refuses it.
        if self.draining.load(Ordering::SeqCst) {
            return Err(EngineError::NotReady("the server accepts no new work at the moment; retry later".into()));
        }
        Ok(working)
    }
}

impl ContextView {
    /// Describes something that has this sandbox, or none at the moment.
    async fn of(tenant: Tenant, realm: Realm, info: ContextInfo, runs: usize, sandbox: Option<&LiveSandbox>) -> Self {
        let stats = match sandbox {
            Some(sandbox) => sandbox.stats().await,
            None => None,
        };
        let policy = sandbox.and_then(LiveSandbox::egress_spec).map(|spec| &spec.policy);
        Self {
            tenant,
            realm,
            info,
            runs,
            stats,
            has_sandbox: sandbox.is_some(),
            network_bytes: sandbox.map_or(0, LiveSandbox::network_bytes),
            policies: policy.iter().flat_map(|policy| &policy.tables).map(|table| table.name.clone()).collect(),
            expires_in: None,
        }
    }
}

impl Engine {
    /// Returns the contexts of all tenants and the conversations in which code runs, oldest first.
    pub async fn contexts(&self) -> Vec<ContextView> {
        let mut all = Vec::new();
        for tenancy in self.inner().tenants.all() {
            let (tenant, config) = (&tenancy.tenant.tenant, tenancy.config());
            for context in tenancy.newest_first() {
                let (sandbox, runs) = (context.live_sandbox(), context.running());
                let view =
                    ContextView::of(tenant.clone(), config.realm, context.info(), runs, sandbox.as_deref()).await;
                let idle = context.idle_since().zip(config.idle_timeout);
                let expires_in = idle.map(|(since, limit)| limit.saturating_sub(since.elapsed()));
                all.push(ContextView { expires_in, ..view });
            }
        }
        for ConversationRun { tenant, realm, info, sandbox } in self.inner().conversations.running() {
            all.push(ContextView::of(tenant, realm, info, 1, Some(&sandbox)).await);
        }
        all.sort_by_key(|view| view.info.created_at);
        all
    }

    /// Stops a context of a tenant together with everything that runs in it, or the code that runs in a conversation.
    pub fn stop_context(&self, tenant: &Tenant, realm: Realm, id: &str) -> Result<(), EngineError> {
        const WHY: &str = "the operator stopped its context";
        let unknown = || EngineError::ContextNotFound(id.into());
        let tenancy = self.inner().tenants.known(tenant, realm).ok_or_else(unknown)?;
        let is_meant = |run: &ConversationRun| (&run.tenant, run.realm, run.info.id.as_str()) == (tenant, realm, id);
        if let Some(run) = self.inner().conversations.running().into_iter().find(is_meant) {
            // Its call destroys the sandbox. The files of the conversation stay.
            run.sandbox.guest.close("the operator stopped it");
            self.inner().notify_with(&tenancy, id, NoticeKind::Stopped, WHY);
            return Ok(());
        }
        let removed = tenancy.remove(&ContextSelector::Id(id.into()), None)?;
        self.inner().end_now(&tenancy, removed, WHY);
        Ok(())
    }

    /// Reads the counters of all sandboxes in use, and returns what each tenant used since the last call.
    pub async fn take_usage(&self) -> BTreeMap<Tenant, TenantUsage> {
        self.inner().registry.take_usage().await
    }

    /// Refuses calls that begin work, or accepts them again. Calls that only read or end something always work.
    pub fn set_draining(&self, draining: bool) {
        self.inner().draining.store(draining, Ordering::SeqCst);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.inner().draining.load(Ordering::SeqCst)
    }

    /// Returns the number of calls that do work, and the number of background runs that have not ended.
    pub fn work(&self) -> (usize, usize) {
        let inner = self.inner();
        let background = inner.tenants.tenants().iter().map(|tenant| tenant.background.running()).sum();
        (inner.working.load(Ordering::SeqCst), background)
    }
}
