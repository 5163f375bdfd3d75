//! The operations, one a file; each is what its `Op` means.

use std::sync::Arc;
use std::time::Duration;

use proto::{FromGuest, Language};

use crate::context::{Context, Holdings, Home};
use crate::engine::{Inner, given_up};
use crate::live::{Failure, Place};
use crate::op::{Call, EngineError, Holder, Op, Outcome, Target, Which};
use crate::pool::FIRST_KERNEL;

mod create_context;
mod list_contexts;
mod list_files;
mod read_file;
mod run_code;
pub(crate) mod stop_context;
mod write_file;

/// How long a guest may take for a file operation.
const FILE_WAIT: Duration = Duration::from_secs(30);
const MAX_PATH: usize = 4096;

pub(crate) async fn run(inner: Arc<Inner>, call: Call, op: Op) -> Result<Outcome, EngineError> {
    let holdings = inner.tenants.of(&call.tenant, &inner.config);
    let world = World { inner, holdings };
    let unbuilt = || Err(EngineError::Sandbox("not built yet".into()));
    let named = |target: Target| match target.which {
        Which::Named(context) | Which::Id(context) => Ok(context),
        Which::Current | Which::New => Err(EngineError::Sandbox("not built yet".into())),
    };
    let of = |place: Holder| match place {
        Holder::Context(target) => named(target),
        Holder::Conversation(_) => Err(EngineError::Sandbox("not built yet".into())),
    };
    match op {
        Op::CreateContext(new) => world.create_context(&call, new.name, new.language, new.description).await,
        Op::ListContexts => Ok(world.list_contexts()),
        Op::StopContext { which } => world.stop_context(&call, &named(Target::existing(which))?).await,
        Op::RunCode(run) => world.run_code(&call, &named(run.target)?, run.code, run.timeout).await,
        Op::WriteFile { place, path, content } => world.write_file(&call, &of(place)?, path, content).await,
        Op::ReadFile { place, path } => world.read_file(&call, &of(place)?, path).await,
        Op::ListFiles { place, path } => world.list_files(&call, &of(place)?, path).await,
        Op::Health => Ok(Outcome::Health(world.inner.health())),
        _ => unbuilt(),
    }
}

/// What an operation may touch: the engine, and of the tenants only the one that asks.
struct World {
    inner: Arc<Inner>,
    holdings: Arc<Holdings>,
}

impl World {
    /// A sandbox with a running interpreter: a session of the pool where one fits, else a new one.
    async fn settle(&self, language: Language) -> Result<Home, EngineError> {
        let maker = self.inner.maker()?;
        let failed = |failure: Failure| {
            tracing::error!(why = failure.log, "no sandbox for a context");
            EngineError::CreateFailed(failure.public)
        };
        if language != Language::Python && maker.runtimes.node.is_none() {
            return Err(EngineError::CreateFailed("no JavaScript runtime is installed".into()));
        }
        let pool = self.inner.pool()?;
        // A sandbox cannot change its group: only the pool's own tenant is served from it.
        let session = if *pool.group() == self.holdings.group { pool.take() } else { None };
        let Some(session) = session else {
            let place = maker.started(self.holdings.group.clone(), language).await.map_err(failed)?;
            return Ok(Home::at(place, FIRST_KERNEL));
        };
        let place = session.place;
        tracing::debug!(session = session.id, "a session becomes a context");
        if language == Language::Python {
            return Ok(Home::at(place, FIRST_KERNEL));
        }
        let kernel = FIRST_KERNEL + 1;
        let exchange =
            async { tokio::try_join!(place.stop_kernel(FIRST_KERNEL), maker.start_kernel(&place, kernel, language)) };
        if let Err(failure) = exchange.await {
            let _ = place.destroy("its interpreter did not start").await;
            return Err(failed(failure));
        }
        Ok(Home::at(place, kernel))
    }

    /// The sandbox of a context for a file operation, which needs no turn unless the sandbox has to be made anew.
    async fn place_for_files(&self, context: &Arc<Context>) -> Result<Arc<Place>, EngineError> {
        if let Some(place) = context.live_place() {
            return Ok(place);
        }
        let mut home = tokio::select! {
            home = context.turn.lock() => home,
            () = context.gone.cancelled() => return Err(context.not_found()),
        };
        self.move_in(context, &mut home).await
    }

    /// Makes sure that the context has a sandbox. The turn is the caller's.
    async fn move_in(&self, context: &Context, home: &mut Home) -> Result<Arc<Place>, EngineError> {
        if context.gone.is_cancelled() {
            return Err(context.not_found());
        }
        if let Some(place) = home.place.clone().filter(|place| !place.guest.is_lost()) {
            return Ok(place);
        }
        let mut settled = self.settle(context.language).await.map_err(|error| match error {
            EngineError::CreateFailed(why) => EngineError::Sandbox(why),
            other => other,
        })?;
        // A sandbox that is lost since the last run takes the files along, whatever else there was to tell.
        let lost = home.place.as_ref().map(|place| place.guest.why_lost().0);
        settled.notice = lost
            .map(|why| format!("[the sandbox was lost ({why}): variables and files are gone]"))
            .or_else(|| home.notice.take());
        *home = settled;
        let place = home.place.clone().ok_or_else(|| EngineError::Sandbox("no sandbox".into()))?;
        context.moved(&place);
        Ok(place)
    }
}

impl Home {
    fn at(place: Arc<Place>, kernel: proto::KernelId) -> Self {
        Self { place: Some(place), kernel: Some(kernel), last_kernel: kernel, ..Self::default() }
    }
}

/// Waits for a piece of work, but no longer than the caller wants it. The work itself goes on.
async fn unless_cancelled<T: Send + 'static>(
    call: &Call,
    work: impl Future<Output = Result<T, EngineError>> + Send + 'static,
    inner: &Inner,
) -> Result<T, EngineError> {
    let working = inner.tasks.spawn(work);
    tokio::select! {
        result = working => result.unwrap_or_else(|_| given_up()),
        () = call.cancel.cancelled() => Err(EngineError::Cancelled),
    }
}

/// The guest resolves paths; this only keeps nonsense off the wire.
fn check_path(path: &str) -> Result<(), EngineError> {
    if path.len() > MAX_PATH || path.contains('\0') {
        let path: String = path.chars().take(100).collect();
        return Err(EngineError::InvalidPath {
            path,
            why: format!("longer than {MAX_PATH} bytes, or with a zero byte"),
        });
    }
    Ok(())
}

/// A refusal of the guest about a file, in the engine's words.
fn file_error(path: &str, limit: u64, answer: FromGuest, place: &Place) -> EngineError {
    let FromGuest::Failed { failure, message } = answer else {
        return EngineError::Sandbox(place.guest.close("the guest answered something else").0);
    };
    let path = path.to_owned();
    match failure {
        proto::Failure::InvalidPath => EngineError::InvalidPath { path, why: crate::live::one_line(&message) },
        proto::Failure::NotFound => EngineError::FileNotFound(path),
        proto::Failure::TooLarge => EngineError::FileTooLarge { path, limit },
        proto::Failure::NoSpace => EngineError::NoSpace,
        proto::Failure::Kernel | proto::Failure::Busy | proto::Failure::Environment | proto::Failure::Io => {
            EngineError::Sandbox(crate::live::one_line(&message))
        }
    }
}
