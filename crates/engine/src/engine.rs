//! The engine itself: readiness, dispatch, upkeep, the end.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use sandbox::Backend;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::{EngineConfig, Runtimes};
use crate::context::Tenants;
use crate::live::{Failure, Live};
use crate::op::{Call, EngineError, Health, Op, Outcome};
use crate::ops;
use crate::pool::{Maker, Pool};

/// Target of the lines that tell how the start goes, in the words and the order of the `agentrun` document.
pub const STARTUP_LOG: &str = "sandpool::startup";

/// How long calls have to give their answer after their sandboxes were destroyed.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// How often what could not be destroyed is tried again, and idle contexts are looked for at least.
const UPKEEP: Duration = Duration::from_secs(10);

/// Cheap to clone; all clones are one engine.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    pub(crate) config: Arc<EngineConfig>,
    pub(crate) tenants: Tenants,
    pub(crate) live: Live,
    /// Set when the engine becomes ready.
    started: OnceLock<Started>,
    state: watch::Sender<State>,
    born: Instant,
    /// No new calls; those that wait give up.
    pub(crate) closing: CancellationToken,
    begun_closing: AtomicBool,
    /// The grace time of a shutdown is cut short.
    now: CancellationToken,
    closed: watch::Sender<bool>,
    calls: TaskTracker,
    pub(crate) tasks: TaskTracker,
}

struct Started {
    maker: Arc<Maker>,
    pool: Pool,
    took: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// What is being prepared, and how far.
    Preparing(String),
    Ready,
    Failed(String),
}

impl Engine {
    /// An engine that is not ready: operations wait a while, then are told the status. [`Engine::start_pool`] makes it ready.
    pub fn new(config: EngineConfig, backend: Arc<dyn Backend>) -> Self {
        let tasks = TaskTracker::new();
        let inner = Inner {
            live: Live::new(backend, tasks.clone(), config.start_timeout),
            config: Arc::new(config),
            tenants: Tenants::default(),
            started: OnceLock::new(),
            state: watch::Sender::new(State::Preparing("starting".into())),
            born: Instant::now(),
            closing: CancellationToken::new(),
            begun_closing: AtomicBool::new(false),
            now: CancellationToken::new(),
            closed: watch::Sender::new(false),
            calls: TaskTracker::new(),
            tasks,
        };
        Self { inner: Arc::new(inner) }
    }

    /// A ready engine, or the reason why there is none; then nothing is left behind.
    pub async fn start(
        config: EngineConfig,
        runtimes: Runtimes,
        backend: Arc<dyn Backend>,
    ) -> Result<Self, EngineError> {
        let engine = Self::new(config, backend);
        if let Err(error) = engine.start_pool(runtimes).await {
            engine.shutdown(Duration::ZERO).await;
            return Err(error);
        }
        Ok(engine)
    }

    /// What operations are told that come too early, for example `fetching Python packages, 40 %`.
    pub fn set_status(&self, status: impl Into<String>) {
        let status = status.into();
        self.inner.state.send_if_modified(|state| match state {
            State::Preparing(old) => {
                *old = status;
                true
            }
            State::Ready | State::Failed(_) => false,
        });
    }

    /// The preparation failed for good: operations fail at once with this reason.
    pub fn set_failed(&self, why: impl Into<String>) {
        self.inner.state.send_replace(State::Failed(why.into()));
    }

    pub fn is_ready(&self) -> bool {
        *self.inner.state.borrow() == State::Ready
    }

    pub fn config(&self) -> &EngineConfig {
        &self.inner.config
    }

    /// Sandboxes that exist, of sessions and contexts together.
    pub fn sandboxes(&self) -> usize {
        self.inner.live.count()
    }

    /// Makes the sessions, checks them, and becomes ready. The error is for the operator and may name paths of the host.
    pub async fn start_pool(&self, runtimes: Runtimes) -> Result<(), EngineError> {
        let result = self.inner.start_pool(runtimes).await;
        match &result {
            Ok(()) => self.inner.health().log(),
            Err(error) => {
                tracing::error!(target: STARTUP_LOG, "启动失败: {error}");
                self.set_failed("the session pool could not be started; the server's log says why");
            }
        }
        result
    }

    /// Runs one operation. Exactly one outcome; a dropped future is a cancelled call; a panic is an error.
    pub async fn execute(&self, call: &Call, op: Op) -> Result<Outcome, EngineError> {
        let inner = &self.inner;
        if op == Op::Health {
            return Ok(Outcome::Health(inner.health()));
        }
        if inner.closing.is_cancelled() {
            return Err(EngineError::ShuttingDown);
        }
        inner.wait_until_ready(&call.cancel).await?;
        // The work goes on in a task of its own, so that whatever happens to the caller it is ended in an orderly way.
        let cancel = call.cancel.child_token();
        let dropped = cancel.clone().drop_guard();
        let call = Call { cancel, ..call.clone() };
        let mut work = Box::pin(ops::run(inner.clone(), call, op));
        // Begun here and now: calls made one after the other take their turns in this order, whichever thread goes on with them.
        let begun = poll_fn(|context| {
            Poll::Ready(
                catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))).unwrap_or(Poll::Ready(given_up())),
            )
        });
        let result = match begun.await {
            Poll::Ready(result) => result,
            Poll::Pending => inner.calls.spawn(work).await.unwrap_or_else(|_| given_up()),
        };
        dropped.disarm();
        result
    }

    /// Refuses new calls, lets running ones end within `grace`, destroys everything. A second call cuts the grace short.
    /// Goes on by itself once begun; the future only waits for it.
    pub async fn shutdown(&self, grace: Duration) {
        let inner = &self.inner;
        let mut closed = inner.closed.subscribe();
        if inner.begun_closing.swap(true, Ordering::SeqCst) {
            inner.now.cancel();
        } else {
            inner.closing.cancel();
            tokio::spawn(close(inner.clone(), grace));
        }
        let _ = closed.wait_for(|closed| *closed).await;
    }
}

/// What a panic becomes.
pub(crate) fn given_up<T>() -> Result<T, EngineError> {
    Err(EngineError::Sandbox("internal error; the call was given up".into()))
}

async fn close(inner: Arc<Inner>, grace: Duration) {
    inner.calls.close();
    tokio::select! {
        () = inner.calls.wait() => {}
        () = tokio::time::sleep(grace) => {}
        () = inner.now.cancelled() => {}
    }
    inner.live.shutdown().await;
    let _ = tokio::time::timeout(LAST_ANSWERS, inner.calls.wait()).await;
    inner.tasks.close();
    let _ = tokio::time::timeout(LAST_ANSWERS, inner.tasks.wait()).await;
    inner.closed.send_replace(true);
}

impl Inner {
    async fn start_pool(self: &Arc<Self>, runtimes: Runtimes) -> Result<(), EngineError> {
        let begun = Instant::now();
        tracing::info!(target: STARTUP_LOG, "AgentRun 初始化开始...");
        let interpreter = uuid::Uuid::new_v4().simple().to_string();
        tracing::info!(target: STARTUP_LOG, "创建 Code Interpreter: ci-{}", &interpreter[..12]);
        tracing::info!(target: STARTUP_LOG, "等待 Interpreter 就绪...");
        let maker = Arc::new(Maker { live: self.live.clone(), config: self.config.clone(), runtimes });
        tracing::info!(target: STARTUP_LOG, "Interpreter 状态: READY");

        let size = self.config.pool_size;
        tracing::info!(target: STARTUP_LOG, "初始化 Session 池 (大小: {size})...");
        let group = self.tenants.of(&self.config.pool_tenant, &self.config).group.clone();
        let pool = Pool::new(maker.clone(), group, self.tasks.clone(), self.closing.clone());
        let failed = |failure: Failure| EngineError::Sandbox(failure.log);
        pool.fill(|number, id| tracing::info!(target: STARTUP_LOG, "Session-{number} 创建成功: {id}"))
            .await
            .map_err(failed)?;

        tracing::info!(target: STARTUP_LOG, "执行健康检查...");
        tracing::info!(target: STARTUP_LOG, "✓ Interpreter 就绪");
        pool.check_and_repair().await.map_err(failed)?;
        let count = pool.count();
        tracing::info!(target: STARTUP_LOG, "✓ Session 池健康 ({}/{size} 可用)", count.available);
        tracing::info!(target: STARTUP_LOG, "✓ 所有 Session 验证通过");
        let took = begun.elapsed();
        tracing::info!(target: STARTUP_LOG, "服务器启动完成，耗时: {:.1} 秒", took.as_secs_f64());

        self.tasks.spawn(pool.clone().keep());
        self.tasks.spawn(upkeep(self.clone()));
        if self.started.set(Started { maker, pool, took }).is_err() {
            return Err(EngineError::Sandbox("the engine was started twice".into()));
        }
        self.state.send_replace(State::Ready);
        Ok(())
    }

    async fn wait_until_ready(&self, cancel: &CancellationToken) -> Result<(), EngineError> {
        let mut watching = self.state.subscribe();
        let ready = watching.wait_for(|state| !matches!(state, State::Preparing(_)));
        let state = tokio::select! {
            biased;
            state = ready => state.map(|state| state.clone()).ok(),
            () = cancel.cancelled() => return Err(EngineError::Cancelled),
            () = self.closing.cancelled() => return Err(EngineError::ShuttingDown),
            () = tokio::time::sleep(self.config.ready_wait) => None,
        };
        match state.unwrap_or_else(|| self.state.borrow().clone()) {
            State::Ready => Ok(()),
            State::Preparing(why) | State::Failed(why) => Err(EngineError::NotReady(why)),
        }
    }

    pub(crate) fn maker(&self) -> Result<&Arc<Maker>, EngineError> {
        self.started.get().map(|s| &s.maker).ok_or_else(|| EngineError::NotReady("starting".into()))
    }

    pub(crate) fn pool(&self) -> Result<&Pool, EngineError> {
        self.started.get().map(|s| &s.pool).ok_or_else(|| EngineError::NotReady("starting".into()))
    }

    pub(crate) fn health(&self) -> Health {
        let interpreter_status = match &*self.state.borrow() {
            _ if self.closing.is_cancelled() => "STOPPING",
            State::Preparing(_) => "CREATING",
            State::Ready => "READY",
            State::Failed(_) => "FAILED",
        };
        let started = self.started.get();
        let count = started.map(|s| s.pool.count());
        Health {
            interpreter_ready: interpreter_status == "READY",
            interpreter_status,
            session_pool_size: count.as_ref().map_or(0, |c| c.sessions),
            session_pool_available: count.as_ref().map_or(0, |c| c.available),
            all_sessions_healthy: count.is_some_and(|c| c.healthy),
            startup_time_seconds: started.map_or_else(|| self.born.elapsed(), |s| s.took).as_secs_f64(),
        }
    }
}

/// Stops idle contexts, and tries again to destroy what resisted.
async fn upkeep(inner: Arc<Inner>) {
    let every = inner.config.idle_timeout.map_or(UPKEEP, |idle| (idle / 4).clamp(Duration::from_millis(100), UPKEEP));
    loop {
        tokio::select! {
            () = inner.closing.cancelled() => return,
            () = tokio::time::sleep(every) => {}
        }
        inner.live.retry().await;
        let Some(idle_timeout) = inner.config.idle_timeout else { continue };
        for (_, holdings) in inner.tenants.all() {
            for removed in holdings.remove_idle(idle_timeout) {
                tracing::info!(context = removed.context.id, "an idle context is stopped");
                inner.tasks.spawn(async move {
                    let _ = ops::stop_context::finish(removed).await;
                });
            }
        }
    }
}
