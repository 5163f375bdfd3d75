//! One context: its current sandbox, the turns of its runs, and whether it is in use.
//!
//! Cells of one language take turns in order of arrival; cells of other languages and commands run beside them. A cell
//! waits for its turn without a permit, so a busy context never blocks other contexts of its tenant.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use proto::{Ended, KernelId, Language};
use sandbox::{Isolation, KeptVolume, Limits, SharedVolume, WORKSPACE};
use text::unix_now;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::guest::lock;
use crate::links::Keys;
use crate::op::{ContextInfo, EngineError, Ran, Size};
use crate::registry::LiveSandbox;
use crate::tenancy::Charge;

/// The current sandbox and kernels of a context.
#[derive(Default)]
pub(crate) struct ContextState {
    pub(crate) sandbox: Option<Arc<LiveSandbox>>,
    /// Running kernels, at most one for each language. A language has none before its first run, and none between the
    /// death of its kernel and the next run.
    pub(crate) kernels: BTreeMap<Language, KernelId>,
    pub(crate) last_kernel: KernelId,
    /// Number of memory kills in the sandbox that are already accounted for.
    pub(crate) oom_kills: u64,
    /// Number of memory kills that were reported as the end of a run.
    pub(crate) oom_explained: u64,
    /// True while a task is scheduled that reads the number of memory kills.
    pub(crate) oom_query_scheduled: bool,
    /// Message for the next run about variables and files that were lost since the last one.
    pub(crate) notice: Option<String>,
    /// Message for the next run of each language whose variables were lost.
    pub(crate) kernel_notices: BTreeMap<Language, String>,
}

impl ContextState {
    pub(crate) fn at(sandbox: Arc<LiveSandbox>) -> Self {
        Self { sandbox: Some(sandbox), ..Self::default() }
    }

    pub(crate) fn live_sandbox(&self) -> Option<Arc<LiveSandbox>> {
        self.sandbox.clone().filter(|sandbox| !sandbox.guest.is_lost())
    }

    /// Forgets a sandbox that is lost, unless another one has replaced it.
    pub(crate) fn sandbox_lost(&mut self, lost: &Arc<LiveSandbox>) {
        self.sandbox.take_if(|sandbox| Arc::ptr_eq(sandbox, lost));
    }

    /// Forgets a kernel that has ended, unless another one has replaced it. Files still exist.
    pub(crate) fn kernel_ended(&mut self, language: Language, kernel: KernelId) {
        if self.kernels.get(&language) == Some(&kernel) {
            self.kernels.remove(&language);
        }
    }

    pub(crate) fn kernel_ended_between_runs(&mut self, language: Language, how: Ended) {
        self.kernels.remove(&language);
        let how = crate::registry::describe(how);
        let notice = format!("[the interpreter ended between two calls ({how}): variables are lost, files are kept]");
        self.kernel_notices.insert(language, notice);
    }

    /// Takes the message that a run of this language shows besides its result. Each message is shown once.
    pub(crate) fn take_notice(&mut self, language: Option<Language>) -> Option<String> {
        // The message about a lost sandbox makes the one about the kernel redundant.
        let of_kernel = language.and_then(|language| self.kernel_notices.remove(&language));
        self.notice.take().or(of_kernel)
    }
}

/// The browser state that the calls of a context share. Only the call that has the browser's turn may change it.
#[derive(Default)]
pub(crate) struct BrowserUse {
    /// Sandbox in which the browser ran last.
    pub(crate) sandbox: Option<Arc<LiveSandbox>>,
    /// True if a call has used the browser, so that there is something to lose.
    pub(crate) used: bool,
    /// Message for the next call.
    pub(crate) notice: Option<String>,
}

pub(crate) struct Context {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) description: String,
    /// Language of code that does not name one.
    pub(crate) language: Language,
    pub(crate) size: Option<Size>,
    pub(crate) limits: Limits,
    pub(crate) mounts: Vec<SharedVolume>,
    /// Kept volume that is the workspace, if it outlives the sandbox.
    pub(crate) kept: Option<KeptVolume>,
    pub(crate) keys: Keys,
    /// Connection that created the context.
    pub(crate) connection: Option<String>,
    pub(crate) created_at: u64,
    /// Position of the context in the order of creation within its tenancy.
    pub(crate) number: u64,
    /// The lock is held while the sandbox and the kernels are looked up, started or replaced, and not while code runs.
    pub(crate) state: Arc<tokio::sync::Mutex<ContextState>>,
    /// Turns of the kernels.
    cell_turns: Mutex<BTreeMap<Language, CellTurn>>,
    /// Every run has a share of this lock; a stop that waits for the runs takes all of it.
    pub(crate) runs_over: Arc<tokio::sync::RwLock<()>>,
    /// Turn of the browser, which is equally fair. A call that needs both turns takes this one first.
    pub(crate) browser_turn: Arc<tokio::sync::Mutex<BrowserUse>>,
    /// Token that is cancelled when the context is removed, so that calls that wait for a turn give up.
    pub(crate) gone: CancellationToken,
    /// Share of the limits that the context occupies until it is removed.
    pub(crate) charge: Mutex<Option<Charge>>,
    /// True if the context was created for a call that has not reported it to its client.
    unreported: AtomicBool,
    /// True if a call that needed a context created it, and no answer has said yet what it does not have. Its client may
    /// remember an earlier one.
    unexplained: AtomicBool,
    /// Notifies file operations that wait for a sandbox.
    sandbox_changed: Notify,
    activity: Mutex<ContextActivity>,
}

struct ContextActivity {
    /// The same sandbox as in `ContextState`, for file operations, which need no turn.
    sandbox: Option<Arc<LiveSandbox>>,
    isolation: Isolation,
    last_used: u64,
    last_active: Instant,
    /// Number of operations of any kind that use the context.
    uses: usize,
    /// Number of runs among `uses` that execute or wait for their turn.
    runs: usize,
}

/// The turn of one kernel. The lock is fair: first come, first served.
#[derive(Clone, Default)]
pub(crate) struct CellTurn {
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
    occupant: Arc<Mutex<Option<Occupant>>>,
}

/// The run that has a turn, for the answers of calls that wait for it.
#[derive(Clone)]
pub(crate) struct Occupant {
    /// Id of a background run.
    pub(crate) run: Option<String>,
    pub(crate) since: Instant,
}

impl CellTurn {
    pub(crate) fn occupant(&self) -> Option<Occupant> {
        lock(&self.occupant).clone()
    }

    /// Names the run that has the turn until the returned value is dropped.
    pub(crate) fn occupy(&self, run: Option<String>) -> Occupied {
        *lock(&self.occupant) = Some(Occupant { run, since: Instant::now() });
        Occupied(self.occupant.clone())
    }
}

pub(crate) struct Occupied(Arc<Mutex<Option<Occupant>>>);

impl Drop for Occupied {
    fn drop(&mut self) {
        *lock(&self.0) = None;
    }
}

/// Description of a context to be created.
pub(crate) struct Plan {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) language: Language,
    pub(crate) size: Option<Size>,
    pub(crate) limits: Limits,
    pub(crate) mounts: Vec<SharedVolume>,
    /// Kept volume that is the workspace, if it outlives the sandbox.
    pub(crate) kept: Option<KeptVolume>,
    pub(crate) keys: Keys,
    pub(crate) connection: Option<String>,
}

impl Context {
    pub(crate) fn new(plan: Plan, state: ContextState, isolation: Isolation) -> Self {
        let now = unix_now();
        state.sandbox.iter().for_each(|sandbox| sandbox.belongs_to(&plan.id));
        Self {
            id: plan.id,
            name: plan.name,
            description: plan.description,
            language: plan.language,
            size: plan.size,
            limits: plan.limits,
            mounts: plan.mounts,
            kept: plan.kept,
            keys: plan.keys,
            connection: plan.connection,
            created_at: now,
            number: 0,
            gone: CancellationToken::new(),
            charge: Mutex::default(),
            unreported: AtomicBool::new(false),
            unexplained: AtomicBool::new(false),
            sandbox_changed: Notify::new(),
            activity: Mutex::new(ContextActivity {
                sandbox: state.sandbox.clone(),
                isolation,
                last_used: now,
                last_active: Instant::now(),
                uses: 0,
                runs: 0,
            }),
            state: Arc::new(tokio::sync::Mutex::new(state)),
            cell_turns: Mutex::default(),
            runs_over: Arc::default(),
            browser_turn: Arc::default(),
        }
    }

    pub(crate) fn info(&self) -> ContextInfo {
        let activity = lock(&self.activity);
        ContextInfo {
            id: self.id.clone(),
            name: self.name.clone(),
            description: self.description.clone(),
            language: self.language,
            created_at: self.created_at,
            last_used: activity.last_used,
            busy: activity.runs > 0,
            size: self.size,
            limits: self.limits,
            isolation: activity.isolation.clone(),
            mounts: self.mounts.clone(),
            key: self.keys.files.clone(),
        }
    }

    /// Returns the notice for the next run after the sandbox was lost.
    pub(crate) fn lost_notice(&self, why: &str) -> String {
        let mounts = self.mounts.iter().map(|mount| mount.inside.display().to_string());
        let kept: Vec<String> = self.kept.iter().map(|_| WORKSPACE.to_owned()).chain(mounts).collect();
        let except = match kept.is_empty() {
            true => String::new(),
            false => format!(", except those in {}", kept.join(", ")),
        };
        format!("[the sandbox was lost ({why}): variables and files are gone{except}]")
    }

    pub(crate) fn cell_turn(&self, language: Language) -> CellTurn {
        lock(&self.cell_turns).entry(language).or_default().clone()
    }

    /// Returns whether the answer to this run has to say that the context is new. Only one answer does.
    pub(crate) fn is_missing_earlier(&self, ran: &Ran) -> bool {
        const ERRORS: [&str; 4] = ["NameError", "ReferenceError", "ModuleNotFoundError", "FileNotFoundError"];
        let misses = ran.error.as_ref().is_some_and(|error| ERRORS.contains(&error.name.as_str()));
        // A notice says it too.
        let told = ran.notice.is_some();
        let is_first = (misses || told) && self.unexplained.swap(false, Ordering::SeqCst);
        is_first && !told
    }

    pub(crate) fn not_found(&self) -> EngineError {
        EngineError::ContextNotFound(self.id.clone())
    }

    /// Records that a run ended.
    pub(crate) fn used(&self) {
        let mut activity = lock(&self.activity);
        activity.last_used = activity.last_used.max(unix_now());
        activity.last_active = Instant::now();
    }

    /// Replaces the sandbox that file operations use, and wakes those that wait for one.
    pub(crate) fn set_sandbox(&self, sandbox: &Arc<LiveSandbox>) {
        sandbox.belongs_to(&self.id);
        let mut activity = lock(&self.activity);
        activity.isolation = sandbox.isolation().clone();
        activity.sandbox = Some(sandbox.clone());
        drop(activity);
        self.sandbox_changed.notify_waiters();
    }

    pub(crate) fn live_sandbox(&self) -> Option<Arc<LiveSandbox>> {
        lock(&self.activity).sandbox.clone().filter(|sandbox| !sandbox.guest.is_lost())
    }

    /// Waits until the context has a sandbox.
    pub(crate) async fn next_sandbox(&self) -> Arc<LiveSandbox> {
        loop {
            let mut changed = pin!(self.sandbox_changed.notified());
            // Registered before the check, so that no notification in between is missed.
            changed.as_mut().enable();
            if let Some(sandbox) = self.live_sandbox() {
                return sandbox;
            }
            changed.await;
        }
    }

    /// Returns the time of the last use, or `None` while the context is in use.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        let activity = lock(&self.activity);
        (activity.uses == 0).then_some(activity.last_active)
    }

    pub(crate) fn last_used(&self) -> u64 {
        lock(&self.activity).last_used
    }

    /// Returns the number of runs that execute or wait for their turn.
    pub(crate) fn running(&self) -> usize {
        lock(&self.activity).runs
    }

    pub(crate) fn is_running(&self) -> bool {
        self.running() > 0
    }
}

/// Keeps a context from counting as idle. It is taken under the lock of the tenancy, so that the context cannot be
/// removed in between.
pub(crate) struct ContextLease(Arc<Context>);

impl ContextLease {
    pub(crate) fn new(context: &Arc<Context>) -> Self {
        let mut activity = lock(&context.activity);
        activity.uses += 1;
        activity.last_active = Instant::now();
        drop(activity);
        Self(context.clone())
    }

    /// Marks the context as busy until the returned value is dropped.
    pub(crate) fn run(&self) -> Running {
        lock(&self.0.activity).runs += 1;
        Running(self.0.clone())
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.0
    }
}

impl Deref for ContextLease {
    type Target = Context;

    fn deref(&self) -> &Context {
        &self.0
    }
}

impl Drop for ContextLease {
    fn drop(&mut self) {
        let mut activity = lock(&self.0.activity);
        activity.uses -= 1;
        activity.last_active = Instant::now();
    }
}

/// Remembers that a context is new until one call reports it to the client. If that call fails, the next call reports
/// it, so that no client mistakes an empty context for an earlier one with the same name.
pub(crate) struct NewContextNotice {
    context: Arc<Context>,
    is_new: bool,
}

impl NewContextNotice {
    pub(crate) fn created(context: &Arc<Context>) -> Self {
        context.unexplained.store(true, Ordering::SeqCst);
        Self { context: context.clone(), is_new: true }
    }

    /// Takes over the duty to report an existing context, if no call has reported it yet.
    pub(crate) fn found(context: &Arc<Context>) -> Self {
        Self { context: context.clone(), is_new: context.unreported.swap(false, Ordering::SeqCst) }
    }

    pub(crate) fn is_new(&self) -> bool {
        self.is_new
    }

    /// Returns whether the answer has to say that the context is new. Later calls do not say so again.
    pub(crate) fn report(&mut self) -> bool {
        std::mem::take(&mut self.is_new)
    }
}

impl Drop for NewContextNotice {
    fn drop(&mut self) {
        if self.is_new {
            self.context.unreported.store(true, Ordering::SeqCst);
        }
    }
}

/// Marks a context as busy until it is dropped.
pub(crate) struct Running(Arc<Context>);

impl Drop for Running {
    fn drop(&mut self) {
        lock(&self.0.activity).runs -= 1;
    }
}
