//! Creates a context. It gets a ready sandbox if one fits. At a limit, an idle context is evicted where the realm
//! allows it.

use std::sync::Arc;

use proto::Language;

use super::OpContext;
use crate::context::{Context, ContextLease, Plan};
use crate::ids;
use crate::links::Keys;
use crate::op::{Call, ContextSelector, EngineError, NewContext, NoticeKind, Outcome};
use crate::ops::stop_context;
use crate::stock::SandboxKind;
use crate::tenancy::{Full, Reservation};
use crate::workspaces::{self, OPENED_AGAIN};

/// Maximum number of bytes of a name or an id. Like `MAX_DESCRIPTION`, it only keeps unreasonable values out of the
/// tables; dialects have stricter rules.
const MAX_NAME: usize = 1024;
const MAX_DESCRIPTION: usize = 64 << 10;

impl OpContext {
    pub(super) async fn create_context(&self, call: &Call, new: NewContext) -> Result<Outcome, EngineError> {
        // If a context may run any language, its first run decides which kernel is needed.
        let wanted = Some(new.language).filter(|_| self.tenancy.config().one_language);
        // Calls take turns: of two that replace the same context, the second replaces the context of the first.
        let name = match (&call.connection, &new.id) {
            (Some(connection), _) if new.replace => Some(format!("current {connection}")),
            _ if self.tenancy.config().unique_names && !new.name.is_empty() => Some(format!("name {}", new.name)),
            (_, id) => id.as_ref().map(|id| format!("id {id}")),
        };
        let creation_turn = match name {
            Some(name) => Some(self.unless_over(call, self.tenancy.creation_turns.turn(&name)).await?),
            None => None,
        };
        if self.tenancy.config().unique_names
            && let Ok(taken) = self.tenancy.find(&ContextSelector::Named(new.name.clone()), None)
        {
            self.found.set(&taken.id);
            return Err(EngineError::NameTaken { name: new.name, id: taken.id.clone() });
        }
        let browser = new.browser && self.browser_command().is_ok();
        let (context, replaced) = self.create(call, new, wanted).await?;
        drop(creation_turn);
        if browser {
            self.start_browser_early(&context);
        }
        let context = context.info();
        Ok(match replaced {
            Some(old) => Outcome::Replaced { context, old },
            None => Outcome::Created(context),
        })
    }

    /// Creates a context, and returns it with the id of the context that it replaced.
    pub(super) async fn create(
        &self,
        call: &Call,
        new: NewContext,
        wanted: Option<Language>,
    ) -> Result<(ContextLease, Option<String>), EngineError> {
        self.check_language(new.language)?;
        let old = call.connection.as_deref().filter(|_| new.replace).and_then(|c| self.tenancy.created_by(c));
        let browser = new.browser;
        let plan = self.plan(call, new)?;
        let reservation = self.reserve(plan.limits.memory_bytes, old.as_ref()).await?;
        // New workspaces take turns, so that no two of them are counted as the last one that is allowed.
        let (is_opened_again, workspace_turn) = match &plan.kept {
            Some(volume) => {
                let turn = self.unless_over(call, self.tenancy.creation_turns.turn("workspaces")).await?;
                let exists = self.inner.has_workspace(&self.tenancy, volume).await?;
                (exists, Some(turn).filter(|_| !exists))
            }
            None => (false, None),
        };
        let kind = SandboxKind { size: plan.size, language: plan.language, browser };
        let mut state = self.provision(kind, wanted, plan.kept.as_ref()).await?;
        drop(workspace_turn);
        state.notice = is_opened_again.then(|| OPENED_AGAIN.into());
        let Some(sandbox) = state.sandbox.clone() else { return Err(EngineError::CreateFailed("no sandbox".into())) };
        if call.cancel.is_cancelled() {
            // No client would learn its id.
            let _ = sandbox.destroy("the call that made it was cancelled").await;
            return Err(EngineError::Cancelled);
        }
        let taken = EngineError::CreateFailed(format!("there is a context `{}` already", plan.id));
        let context = Context::new(plan, state, sandbox.isolation().clone());
        let Some((context, removed)) = reservation.fill(context, old.as_ref()) else {
            let _ = sandbox.destroy("its id is taken").await;
            return Err(taken);
        };
        self.found.set(&context.id);
        self.inner.notify(&self.tenancy, &context.id, NoticeKind::Created);
        if let Some(removed) = removed {
            self.inner.dismiss(&self.tenancy, removed, NoticeKind::Stopped);
        }
        Ok((context, old.map(|old| old.id.clone())))
    }

    fn plan(&self, call: &Call, new: NewContext) -> Result<Plan, EngineError> {
        let NewContext { id, name, description, language, size, replace: _, browser: _ } = new;
        let config = self.tenancy.config();
        let id = id.unwrap_or_else(|| {
            let random = if config.short_ids { ids::short() } else { uuid::Uuid::new_v4().to_string() };
            format!("{}{random}", config.id_prefix)
        });
        let kept = workspaces::volume_of(&self.inner.config.file_secret, &self.tenancy, &name);
        let name = if name.is_empty() { id.clone() } else { name };
        let unfit = |text: &str| text.is_empty() || text.len() > MAX_NAME || text.chars().any(char::is_control);
        if unfit(&name) || unfit(&id) {
            return Err(EngineError::CreateFailed(
                "the name or id is empty, too long or has control characters".into(),
            ));
        }
        if description.len() > MAX_DESCRIPTION {
            return Err(EngineError::CreateFailed(format!("the description is longer than {MAX_DESCRIPTION} bytes")));
        }
        let limits = config.limits_of(size);
        let keys = Keys::of_context(&self.inner.config.file_secret, &call.tenant, config.realm, &id);
        let (mounts, connection) = (self.tenancy.mounts().cloned().collect(), call.connection.clone());
        Ok(Plan { id, name, description, language, size, limits, mounts, kept, keys, connection })
    }

    /// Reserves room within the limits. In realms that evict idle contexts, the one unused for the longest time goes
    /// first.
    async fn reserve(&self, memory: u64, old: Option<&Arc<Context>>) -> Result<Reservation, EngineError> {
        loop {
            let removed = match self.tenancy.reserve(memory) {
                Ok(reservation) => return Ok(reservation),
                Err(Full::Evict(removed)) => {
                    tracing::info!(context = removed.context.id, "an idle context makes room for another");
                    self.inner.context_removed(&self.tenancy, &removed, NoticeKind::Evicted);
                    removed
                }
                Err(Full::Refused(error)) => {
                    // Stopping the old context before its successor exists is better than failing.
                    let removed = old.and_then(|old| self.tenancy.remove_exact(old)).ok_or(error)?;
                    self.inner.context_removed(&self.tenancy, &removed, NoticeKind::Stopped);
                    removed
                }
            };
            let _ = stop_context::finish(removed).await;
        }
    }
}
