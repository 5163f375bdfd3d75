//! The operations. Each file of this module implements one kind of `Op` as methods of `OpContext`.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use crate::context::{Context, ContextLease, ContextState, NewContextNotice};
use crate::engine::{Inner, panicked};
use crate::keyed::Turn;
use crate::op::{
    Call, ContextSelector, EngineError, Environment, FoundContext, LimitKind, Network, NoticeKind, Op, Outcome, Stage,
    Stages, Target, Waiting,
};
use crate::provision::{FIRST_KERNEL, Shape};
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::stock::SandboxKind;
use crate::tenancy::Tenancy;
use proto::{FromGuest, Language};
use sandbox::KeptVolume;

mod admit;
mod background;
mod browse;
mod create_context;
mod edit_file;
mod file_access;
mod list_contexts;
mod list_files;
pub(crate) mod read_file;
mod read_link;
mod run_code;
mod run_command;
mod run_once;
mod search_files;
pub(crate) mod stop_context;
mod upload_link;
mod write_file;

/// Maximum time that a guest may take for a file operation.
pub(crate) const FILE_WAIT: Duration = Duration::from_secs(30);
const MAX_PATH: usize = 4096;

pub(crate) async fn run(inner: Arc<Inner>, call: Call, op: Op) -> Result<Outcome, EngineError> {
    let tenancy = inner.tenants.of(&call.tenant, call.realm)?;
    let (gone, cancel) = (tenancy.tenant.gone.clone(), call.cancel.clone());
    let (stages, found) = (call.stages.clone(), call.found.clone());
    let mut work = pin!(perform(OpContext { inner, tenancy, stages, found }, call, op));
    tokio::select! {
        biased;
        result = &mut work => return result,
        // The calls of a tenant that is removed end as if their clients had cancelled them.
        () = gone.cancelled() => cancel.cancel(),
    }
    work.await
}

async fn perform(ops: OpContext, call: Call, op: Op) -> Result<Outcome, EngineError> {
    match op {
        Op::CreateContext(new) => ops.create_context(&call, new).await,
        Op::ListContexts => Ok(ops.list_contexts()),
        Op::StopContext { which } => ops.stop_context(&call, &which).await,
        Op::RunCode(run) => ops.run_code(&call, run).await,
        Op::RunCommand(run) => ops.run_command(&call, run).await,
        Op::Browse(browse) => ops.browse(&call, browse).await,
        Op::RunOnce(once) => ops.run_once(&call, once).await,
        Op::WaitRun { run, cursor, wait } => ops.wait_run(&call, &run, cursor, wait).await,
        Op::CancelRun { run } => ops.cancel_run(&run),
        Op::WriteFile { owner, path, content } => ops.write_file(&call, owner, path, content).await,
        Op::ReadFile { owner, path } => ops.read_file(&call, owner, path).await,
        Op::ListFiles { owner, path, depth } => ops.list_files(&call, owner, path, depth).await,
        Op::EditFile { owner, path, edit } => ops.edit_file(&call, owner, path, edit).await,
        Op::SearchFiles { owner, path, search } => ops.search_files(&call, owner, path, search).await,
        Op::UploadLink { target, path } => ops.upload_link(&call, target, path).await,
        Op::ReadLink { key, path, max_bytes } => ops.read_link(&call, &key, &path, max_bytes).await,
        Op::RecentFiles => Ok(ops.recent_files().await),
        Op::ListVolumes => Ok(Outcome::Volumes(ops.tenancy.config().volumes.clone())),
        Op::ListRuntimes => {
            let provisioner = ops.inner.provisioner()?;
            Ok(Outcome::Runtimes(provisioner.runtimes.list(ops.inner.registry.backend().name())))
        }
        Op::Health => Ok(Outcome::Health(ops.inner.health())),
    }
}

/// Everything that an operation may touch: the engine, and only the tenancy of the calling tenant in the realm of the
/// call.
#[derive(Clone)]
struct OpContext {
    inner: Arc<Inner>,
    tenancy: Arc<Tenancy>,
    stages: Stages,
    found: FoundContext,
}

/// A context that was found or created for a call.
struct ResolvedContext {
    context: ContextLease,
    new_notice: NewContextNotice,
    /// True if the context was created for this call alone. No client learns its id without the answer.
    exclusive: bool,
    /// Turn to create the context. Other calls for the same context wait until it is dropped.
    creation_turn: Option<Turn<()>>,
}

impl ResolvedContext {
    /// Returns the context if it was created for this call alone.
    fn exclusive(&self) -> Option<Arc<Context>> {
        self.exclusive.then(|| self.context.context().clone())
    }
}

impl OpContext {
    /// Stops a context that was created for this call alone if the call failed, because no client can use it.
    fn dismiss_exclusive(&self, exclusive: Option<Arc<Context>>, failed: bool) {
        if let Some(removed) = exclusive.filter(|_| failed).and_then(|context| self.tenancy.remove_exact(&context)) {
            self.inner.dismiss(&self.tenancy, removed, NoticeKind::Stopped);
        }
    }

    /// Finds the context or creates it. Only one is created, however many calls ask for it at once. `wanted` is the
    /// language of the kernel that a new context starts with.
    async fn resolve(
        &self,
        call: &Call,
        target: Target,
        wanted: Option<Language>,
    ) -> Result<ResolvedContext, EngineError> {
        let Target { which, make } = target;
        let connection = call.connection.as_deref();
        let find = || self.find(&which, connection);
        let found = |context: ContextLease, creation_turn| {
            Ok(ResolvedContext {
                new_notice: NewContextNotice::found(context.context()),
                context,
                exclusive: false,
                creation_turn,
            })
        };
        let Some(mut make) = make else { return found(find()?, None) };
        let name = match &which {
            ContextSelector::Id(id) => Some(format!("id {id}")),
            ContextSelector::Named(name) => Some(format!("name {name}")),
            ContextSelector::Current => Some(format!("current {}", connection.unwrap_or_default())),
            ContextSelector::New => None,
        };
        let creation_turn = match name {
            None => None,
            // While one call creates the context the others queue up, so that they keep their order of arrival.
            Some(name) => match (self.tenancy.creation_turns.has(&name), find()) {
                (false, Ok(context)) => return found(context, None),
                (false, Err(error)) if !may_create(&error) => return Err(error),
                _ => Some(self.unless_over(call, self.tenancy.creation_turns.turn(&name)).await?),
            },
        };
        match find() {
            Ok(context) => return found(context, creation_turn),
            Err(error) if !may_create(&error) => return Err(error),
            Err(_) => {}
        }
        let exclusive = which == ContextSelector::New;
        match which {
            ContextSelector::Id(id) => make.id = Some(id),
            ContextSelector::Named(name) if make.name.is_empty() => make.name = name,
            _ => {}
        }
        make.language = wanted.unwrap_or(make.language);
        let (context, _) = self.create(call, make, wanted).await?;
        Ok(ResolvedContext {
            new_notice: NewContextNotice::created(context.context()),
            context,
            exclusive,
            creation_turn,
        })
    }

    /// Finds a context, which from now on is the one that the call concerns.
    fn find(&self, which: &ContextSelector, connection: Option<&str>) -> Result<ContextLease, EngineError> {
        self.tenancy.find(which, connection).inspect(|context| self.found.set(&context.id))
    }

    /// Waits for `work` unless the call is cancelled or the engine closes first.
    async fn unless_over<T>(&self, call: &Call, work: impl Future<Output = T>) -> Result<T, EngineError> {
        tokio::select! {
            biased;
            done = work => Ok(done),
            () = call.cancel.cancelled() => Err(EngineError::Cancelled),
            () = self.inner.closing.cancelled() => Err(EngineError::ShuttingDown),
        }
    }

    /// Provisions a sandbox for a context of this kind: a ready one if possible, otherwise a new one. A new sandbox
    /// gets a kernel if a language is `wanted`.
    async fn provision(
        &self,
        kind: SandboxKind,
        wanted: Option<Language>,
        kept: Option<&KeptVolume>,
    ) -> Result<ContextState, EngineError> {
        let _stage = self.stages.begin(Stage::Create);
        let provisioner = self.inner.provisioner()?;
        let failed = |failure: SandboxFailure| {
            tracing::error!(why = failure.log, "no sandbox for a context");
            EngineError::CreateFailed(failure.public)
        };
        let language = wanted.unwrap_or(kind.language);
        let browser = kind.browser && provisioner.browses(self.tenancy.config());
        // A ready sandbox was created without the workspace.
        let ready = match kept {
            Some(_) => None,
            None => self.inner.stock()?.take(&self.tenancy, SandboxKind { language, browser, ..kind }).await,
        };
        if let Some((id, sandbox)) = ready.and_then(|ready| Some((ready.id.clone(), ready.leave()?))) {
            tracing::debug!(session = id, "a ready sandbox becomes a context");
            return Ok(ContextState::with(sandbox, language, FIRST_KERNEL));
        }
        let shape = Shape { kept: kept.cloned(), ..Shape::of(&self.tenancy, kind.size) };
        let _waiting = provisioner.caller_waits();
        let sandbox = provisioner.create_with_workspace(&shape, wanted).await.map_err(failed)?;
        let Some(language) = wanted else { return Ok(ContextState::at(sandbox)) };
        let sandbox = provisioner.first_kernel(sandbox, language).await.map_err(failed)?;
        Ok(ContextState::with(sandbox, language, FIRST_KERNEL))
    }

    /// Checks that a runtime for the language is installed.
    fn check_language(&self, language: Language) -> Result<(), EngineError> {
        if self.inner.provisioner()?.runtimes.runs(language) {
            return Ok(());
        }
        Err(EngineError::CreateFailed("no JavaScript runtime is installed".into()))
    }

    /// Returns the sandbox of a context for a file operation, which creates it again if it is lost. If a run creates it
    /// meanwhile, that sandbox is returned.
    async fn sandbox_for_files(&self, call: &Call, context: &Context) -> Result<Arc<LiveSandbox>, EngineError> {
        if let Some(sandbox) = context.live_sandbox() {
            return Ok(sandbox);
        }
        let mut state = match context.state.try_lock() {
            Ok(state) => state,
            Err(_) => {
                let _queued = self.enqueue()?;
                let over = (&context.gone, context.not_found());
                let why = || Waiting::Other("the sandbox of this context is being made".into());
                let next = async {
                    tokio::select! {
                        biased;
                        sandbox = context.next_sandbox() => Err(sandbox),
                        state = context.state.lock() => Ok(state),
                    }
                };
                match self.wait(call, &over, why, next).await? {
                    Ok(state) => state,
                    Err(sandbox) => return Ok(sandbox),
                }
            }
        };
        self.ensure_sandbox(context, &mut state, None).await
    }

    /// Makes sure that the context has a sandbox.
    async fn ensure_sandbox(
        &self,
        context: &Context,
        state: &mut ContextState,
        wanted: Option<Language>,
    ) -> Result<Arc<LiveSandbox>, EngineError> {
        if context.gone.is_cancelled() {
            return Err(context.not_found());
        }
        if let Some(sandbox) = state.live_sandbox() {
            return Ok(sandbox);
        }
        // A browser is started only by an operation that needs one.
        let kind = SandboxKind { size: context.size, language: context.language, browser: false };
        let mut provisioned =
            self.provision(kind, wanted, context.kept.as_ref()).await.map_err(|error| match error {
                EngineError::CreateFailed(why) => EngineError::Sandbox(why),
                other => other,
            })?;
        // If the sandbox was lost since the last run its files are gone too, so this notice replaces any other.
        let lost = match &state.sandbox {
            Some(sandbox) => Some(match sandbox.stats().await.and_then(|stats| stats.ended_at_bytes) {
                Some(limit_bytes) => (NoticeKind::OutOfMemory, run_code::over_memory(limit_bytes)),
                None => (NoticeKind::Lost, sandbox.guest.why_lost().0),
            }),
            None => None,
        };
        let lost = lost.map(|(what, why)| {
            self.inner.notify(&self.tenancy, &context.id, what);
            why
        });
        provisioned.notice = lost.map(|why| context.lost_notice(&why)).or_else(|| state.notice.take());
        *state = provisioned;
        let sandbox = state.sandbox.clone().ok_or_else(|| EngineError::Sandbox("no sandbox".into()))?;
        context.set_sandbox(&sandbox);
        // A stop meanwhile found no sandbox to close. It ends this one.
        if context.gone.is_cancelled() {
            return Err(context.not_found());
        }
        Ok(sandbox)
    }
}

/// Returns whether a context may be created after this error. If it is unclear which of several contexts is meant, one
/// more would not help.
fn may_create(missing: &EngineError) -> bool {
    match missing {
        EngineError::ContextNotFound(_) => true,
        EngineError::NoCurrent { ids } => ids.is_empty(),
        _ => false,
    }
}

impl ContextState {
    fn with(sandbox: Arc<LiveSandbox>, language: Language, kernel: proto::KernelId) -> Self {
        Self { kernels: [(language, kernel)].into(), last_kernel: kernel, ..Self::at(sandbox) }
    }
}

/// Runs `work` in a task and waits for it until the call is cancelled. The work continues in any case.
async fn unless_cancelled<T: Send + 'static>(
    call: &Call,
    work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    inner: &Inner,
) -> Result<T, EngineError> {
    let working = inner.tasks.spawn(work);
    tokio::select! {
        result = working => result.unwrap_or_else(|_| panicked()),
        () = call.cancel.cancelled() => Err(EngineError::Cancelled),
    }
}

/// Message that says how the operator can turn the network on.
pub(crate) const NETWORK_OFF: &str =
    "the operator gives sandboxes none; `network.default` in sandpool.toml or `--network-allow` changes that";

impl OpContext {
    /// Checks the environment variables and the network that a run asks for.
    fn check_env_and_network(&self, env: &Environment, network: Network) -> Result<(), EngineError> {
        if network == Network::On && !self.tenancy.has_network() {
            return Err(EngineError::NetworkOff(NETWORK_OFF.into()));
        }
        proto::check_environment(&env.0).map_err(|error| EngineError::InvalidEnvironment(error.to_string()))
    }
}

/// Rejects paths that are too long or contain a zero byte before they are sent. The guest does the actual resolution.
pub(crate) fn check_path(path: &str) -> Result<(), EngineError> {
    if path.len() > MAX_PATH || path.contains('\0') {
        let path: String = path.chars().take(100).collect();
        return Err(EngineError::InvalidPath {
            path,
            why: format!("longer than {MAX_PATH} bytes, or with a zero byte"),
        });
    }
    Ok(())
}

/// Converts a guest's refusal of a file operation into an error of the engine.
pub(crate) fn file_error(path: &str, limit: u64, answer: FromGuest, sandbox: &LiveSandbox) -> EngineError {
    let FromGuest::Failed { failure, message } = answer else {
        return EngineError::Sandbox(sandbox.guest.close("the guest answered something else").0);
    };
    let path = path.to_owned();
    match failure {
        proto::GuestFailure::InvalidPath => EngineError::InvalidPath { path, why: crate::registry::one_line(&message) },
        proto::GuestFailure::NotFound => EngineError::FileNotFound(path),
        proto::GuestFailure::TooLarge => EngineError::FileTooLarge { path, limit },
        proto::GuestFailure::NoSpace => EngineError::NoSpace { disk_bytes: sandbox.disk_bytes() },
        proto::GuestFailure::DiskFull => EngineError::HostDiskFull(crate::registry::one_line(&message)),
        proto::GuestFailure::Pattern => EngineError::InvalidPattern(crate::registry::one_line(&message)),
        // Of the calls about files, only a search is refused for this.
        proto::GuestFailure::Busy => {
            EngineError::OverLimit { what: LimitKind::SearchesAtOnce, limit: proto::MAX_SEARCHES.to_string() }
        }
        proto::GuestFailure::Kernel
        | proto::GuestFailure::Browser
        | proto::GuestFailure::Environment
        | proto::GuestFailure::Io => EngineError::Sandbox(crate::registry::one_line(&message)),
    }
}
