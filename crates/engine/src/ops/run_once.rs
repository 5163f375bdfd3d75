//! Runs code of a conversation in a new kernel, which ends with the call. The files of the conversation stay.

use std::sync::Arc;

use proto::{KernelId, KernelSpec, Language, ListOrder, Root};
use text::unix_now;
use tokio_util::sync::CancellationToken;

use super::OpContext;
use super::list_files::{ListRequest, NEWEST, list};
use super::run_code::may_be_out_of_memory;
use crate::config::{DATA, KeptConfig};
use crate::context::ContextState;
use crate::conversation::{ConversationRun, ParkingSlot};
use crate::keyed::Turn;
use crate::links::conversation_key;
use crate::op::{
    Call, ContextInfo, EngineError, Environment, FileListing, Network, NoticeKind, Outcome, Ran, RunOnce, RunOutcome,
    Stage, Waiting,
};
use crate::provision::Shape;
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::sandbox_egress::EgressSpec;

/// Maximum number of bytes of a conversation's id. Dialects count characters, which may have four bytes.
const MAX_CONVERSATION: usize = 1024;

/// A conversation together with its turn.
pub(super) struct Conversation {
    pub(super) key: String,
    pub(super) shape: Shape,
    pub(super) turn: Turn<ParkingSlot>,
}

impl OpContext {
    pub(super) async fn run_once(&self, call: &Call, once: RunOnce) -> Result<Outcome, EngineError> {
        let RunOnce { conversation: id, language, code, env, network } = once;
        self.check_env_and_network(&env, network)?;
        self.check_language(language)?;
        let mut conversation = self.open_conversation(call, &id).await?;
        conversation.shape.egress = self.egress_for(network);
        let info = self.info_of(&id, &conversation, language);
        if let Some(refused) = self.too_long(code.len(), usize::MAX, info.clone()) {
            return Ok(Outcome::Ran(Box::new(refused)));
        }
        let never = (&CancellationToken::new(), EngineError::Cancelled);
        let permits = self.permits(call, Some(self.inner.config.queue_wait), &never).await?;
        let continues = self.inner.conversations.record_run(&conversation.key);
        let spec = self.kernel_of(&conversation.key, language)?;
        let stage = self.stages.begin(Stage::Create);
        let creating = self.inner.sandbox_for_code(&mut conversation.turn, &conversation.shape, spec.clone());
        let (sandbox, kernel) = creating.await.map_err(no_sandbox)?;
        drop(stage);
        let run = OneShotRun { ops: self, call, sandbox: &sandbox, kernel, info };
        let result = run.run(&code, &env).await;
        drop(permits);
        // The destruction does not delay the caller, unless too many sandboxes of the tenant are ending. The next call
        // of the conversation waits for it, because it needs the turn.
        let permit = self.tenancy.tenant.ending();
        let has_permit = permit.is_some();
        permit.into_iter().for_each(|permit| sandbox.keep_until_gone(permit));
        let (inner, (destroyed, wait)) = (self.inner.clone(), tokio::sync::oneshot::channel());
        self.inner.tasks.spawn(async move {
            let _ = sandbox.destroy("its call is over").await;
            let Conversation { key, shape, turn } = conversation;
            drop((turn, destroyed));
            if continues {
                inner.prepare(&key, shape, spec).await;
            }
        });
        if !has_permit {
            let _: Result<(), _> = wait.await;
        }
        let ran = result?;
        self.notify_of_end(&id, &ran.end);
        Ok(Outcome::Ran(Box::new(ran)))
    }

    /// Returns the egress of a call's sandbox, or `None` if the call has no network.
    fn egress_for(&self, network: Network) -> Option<EgressSpec> {
        let is_on = match network {
            Network::On => true,
            Network::Usual => !self.tenancy.config().network_on_call,
            Network::Off => false,
        };
        self.tenancy.egress(None).filter(|_| is_on)
    }

    /// Registers the conversation and waits for its turn.
    pub(super) async fn open_conversation(&self, call: &Call, conversation: &str) -> Result<Conversation, EngineError> {
        let kept = self.kept()?;
        if conversation.is_empty() || conversation.len() > MAX_CONVERSATION {
            let why = format!("a conversation's id has 1 to {MAX_CONVERSATION} bytes");
            return Err(EngineError::CreateFailed(why));
        }
        self.found.set(conversation);
        let key = conversation_key(&self.inner.config.file_secret, &call.tenant, conversation);
        let conversations = &self.inner.conversations;
        conversations.register(&key, &self.tenancy, conversation)?;
        let shape = Shape::with_data(&self.tenancy, &key, kept);
        let turn = match conversations.turns.try_turn(&key) {
            Some(turn) => turn,
            None => {
                let _queued = self.enqueue()?;
                let never = (&CancellationToken::new(), EngineError::Cancelled);
                let why = "an earlier call of this conversation is not finished";
                self.wait(call, &never, || Waiting::Other(why.into()), conversations.turns.turn(&key)).await?
            }
        };
        Ok(Conversation { key, shape, turn })
    }

    fn kept(&self) -> Result<KeptConfig, EngineError> {
        let config = self.tenancy.config();
        let none = || EngineError::CreateFailed(format!("`{}` has no conversations", config.realm.0));
        config.kept.ok_or_else(none)
    }

    /// Returns how to start the kernel of a conversation's call.
    fn kernel_of(&self, key: &str, language: Language) -> Result<KernelSpec, EngineError> {
        let Some(mut spec) = self.inner.provisioner()?.runtimes.kernel(language, DATA) else {
            return Err(EngineError::CreateFailed("no JavaScript runtime is installed".into()));
        };
        spec.merge_output = true;
        let of_realm = &self.tenancy.config().env;
        spec.env.extend(of_realm.iter().map(|(name, value)| (name.clone(), value.replace("{key}", key))));
        Ok(spec)
    }

    fn info_of(&self, id: &str, conversation: &Conversation, language: Language) -> ContextInfo {
        let now = unix_now();
        ContextInfo {
            id: id.into(),
            name: id.into(),
            description: String::new(),
            language,
            created_at: now,
            last_used: now,
            busy: false,
            size: None,
            limits: conversation.shape.limits,
            isolation: sandbox::Isolation {
                level: sandbox::Level::Basic,
                missing: Vec::new(),
                unheld: sandbox::UnheldLimits::default(),
            },
            mounts: Vec::new(),
            key: conversation.key.clone(),
        }
    }
}

pub(super) fn no_sandbox(failure: SandboxFailure) -> EngineError {
    tracing::error!(why = failure.log, "no sandbox for a conversation");
    if failure.in_use { EngineError::InUse(failure.public) } else { EngineError::CreateFailed(failure.public) }
}

/// A run in a sandbox that exists only for this call.
struct OneShotRun<'a> {
    ops: &'a OpContext,
    call: &'a Call,
    sandbox: &'a Arc<LiveSandbox>,
    kernel: KernelId,
    info: ContextInfo,
}

impl OneShotRun<'_> {
    async fn run(mut self, code: &str, env: &Environment) -> Result<Ran, EngineError> {
        self.info.isolation = self.sandbox.isolation().clone();
        self.sandbox.belongs_to(&self.info.id);
        let _listed = self.ops.inner.conversations.list(ConversationRun {
            tenant: self.call.tenant.clone(),
            realm: self.ops.tenancy.config().realm,
            info: self.info.clone(),
            sandbox: self.sandbox.clone(),
        });
        if self.call.cancel.is_cancelled() {
            return Err(EngineError::Cancelled);
        }
        // The sandbox has an egress only if the call may use it, so nothing has to be narrowed.
        let cell = self.ops.cell(self.call, self.sandbox);
        // A kept output would be lost with the sandbox.
        let mut report = cell.code(self.kernel, code, env, false).await?;
        let mut end = report.outcome();
        if let RunOutcome::TimedOut { state_kept, .. } | RunOutcome::Cancelled { state_kept } = &mut end {
            // No variables are kept, whatever the guest says.
            *state_kept = false;
        }
        let stats = match may_be_out_of_memory(&end) {
            true => self.sandbox.stats().await,
            false => None,
        };
        let end = ContextState::default().explain(end, stats, 0);
        let files = self.files().await;
        Ok(Ran { files, ..report.ran(end, self.info, None) })
    }

    async fn files(&self) -> Option<FileListing> {
        let wanted = ListRequest { root: Root::Data, path: "", max_entries: NEWEST, order: ListOrder::Newest };
        let listed = list(self.sandbox, wanted, self.ops.inner.config.max_file_bytes).await;
        let (entries, total) = listed.inspect_err(|error| tracing::debug!(%error, "no list of files")).ok()?;
        Some(FileListing { entries, total, key: self.info.key.clone() })
    }
}

impl OpContext {
    /// Sends a notice if the run ended abnormally.
    pub(super) fn notify_of_end(&self, id: &str, end: &RunOutcome) {
        let what = match end {
            RunOutcome::TimedOut { .. } => NoticeKind::TimedOut,
            RunOutcome::OutOfMemory { .. } | RunOutcome::SandboxOutOfMemory { .. } => NoticeKind::OutOfMemory,
            RunOutcome::Ended { .. } => NoticeKind::Crashed,
            RunOutcome::SandboxLost { .. } => NoticeKind::Lost,
            _ => return,
        };
        self.inner.notify(&self.tenancy, id, what);
    }
}
