//! Typed configuration of the engine. This module reads no environment variable and no file. The engine knows no
//! dialect: each one brings the rules of its realm.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::{KernelSpec, Language};
use sandbox::{BrowserRoom, FileSpec, SharedVolume, ZygoteSpec};

use crate::op::{Quota, Realm, RuntimeInfo, Size, Tenant};

pub use sandbox::{DATA, WORKSPACE};

/// Directory for packages that code installs. It is on the volume of the sandbox and is removed with it, unless the
/// workspace lasts. `/tmp` is on that volume, but outside of the user's files.
pub const PACKAGES: &str = "/tmp/.packages";

const MB: u64 = 1 << 20;
const HOUR: Duration = Duration::from_secs(60 * 60);
/// Number of processes added to a sandbox's limit for the browser. Threads count: Chromium has about fifty with one
/// page, and about ten more for each further site.
const BROWSER_PIDS: u32 = 256;

/// Configuration of one engine. It does not implement `Debug` because it contains the secret of the links.
#[derive(Clone, PartialEq)]
pub struct EngineConfig {
    pub realms: Vec<RealmConfig>,
    /// Quota of every tenant without an entry in `quotas`.
    pub quota: Quota,
    pub quotas: BTreeMap<Tenant, Quota>,
    pub mounts: Vec<Mount>,
    /// Secret that makes the keys of links unguessable.
    pub file_secret: [u8; 32],
    /// Maximum size of a file read through a link.
    pub max_link_bytes: u64,
    /// Time between the interrupt of a run and its kill.
    pub grace: Duration,
    /// Maximum size of a file that an operation reads or writes.
    pub max_file_bytes: u64,
    /// Maximum number of entries in one listing.
    pub max_files_listed: u32,
    /// Maximum size of the code of one run.
    pub max_code_bytes: usize,
    pub health_interval: Duration,
    /// Interval between searches for orphans that dead servers left behind.
    pub orphan_interval: Duration,
    /// Maximum time that a run waits for a permit.
    pub queue_wait: Duration,
    /// Maximum number of runs of one tenant in one realm that may wait at the same time.
    pub queue_length: usize,
    pub shutdown_grace: Duration,
    /// Maximum time for a sandbox to start, and again for a kernel to start in it.
    pub start_timeout: Duration,
    /// Maximum number of ready sandboxes of all tenants and realms together. The sandboxes that `pool_size` orders
    /// count towards it, but are created even if they exceed it.
    pub ready_max: usize,
    /// Maximum memory of all ready sandboxes together.
    pub ready_memory_bytes: u64,
    /// Maximum number of refills at the same time. Sandboxes that a caller waits for do not count.
    pub refills_at_once: usize,
    /// Tenant whose ready sandboxes `pool_size` orders. Other tenants get ready sandboxes according to their demand.
    pub pool_tenant: Tenant,
    pub pool_realm: Realm,
    /// Directory in which kernels start; `/workspace` in every real sandbox.
    pub cwd: String,
    /// Egress of sandboxes, required if a realm has a network.
    pub egress: Option<egress::Egress>,
}

/// The defaults contain the usual values and no realm.
impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            realms: Vec::new(),
            quota: Quota::default(),
            quotas: BTreeMap::new(),
            mounts: Vec::new(),
            file_secret: random_secret(),
            max_link_bytes: 2048 * MB,
            grace: Duration::from_secs(2),
            max_file_bytes: 16 * MB,
            max_files_listed: 10_000,
            max_code_bytes: 8 << 20,
            health_interval: Duration::from_secs(300),
            orphan_interval: Duration::from_secs(600),
            queue_wait: Duration::from_secs(30),
            queue_length: 100,
            shutdown_grace: Duration::from_secs(30),
            start_timeout: Duration::from_secs(60),
            ready_max: 64,
            ready_memory_bytes: 512 * MB,
            refills_at_once: std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).clamp(1, 4)),
            pool_tenant: Tenant::local(),
            pool_realm: Realm(""),
            cwd: WORKSPACE.into(),
            egress: None,
        }
    }
}

impl EngineConfig {
    pub fn realm(&self, realm: Realm) -> Option<&RealmConfig> {
        self.realms.iter().find(|config| config.realm == realm)
    }

    pub fn realm_mut(&mut self, realm: Realm) -> Option<&mut RealmConfig> {
        self.realms.iter_mut().find(|config| config.realm == realm)
    }
}

/// Returns a random secret for an engine whose configuration sets none. Links do not outlive such an engine.
fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    for half in secret.chunks_exact_mut(16) {
        half.copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    }
    secret
}

/// A directory of the host that the operator shows to the contexts of some tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    pub volume: SharedVolume,
    pub realms: Vec<Realm>,
    /// Tenants that have it; `None` means all of them.
    pub tenants: Option<Vec<Tenant>>,
}

impl Mount {
    pub(crate) fn is_for(&self, tenant: &Tenant) -> bool {
        self.tenants.as_ref().is_none_or(|tenants| tenants.contains(tenant))
    }
}

/// Rules of one realm.
#[derive(Debug, Clone, PartialEq)]
pub struct RealmConfig {
    pub realm: Realm,
    /// Prefix of the ids that the engine generates: `ctx-`, `session-`, `sbx-`.
    pub id_prefix: &'static str,
    /// Whether generated ids are short; otherwise they are UUIDs.
    pub short_ids: bool,
    /// Timeout of a run that asks for none.
    pub timeout: Duration,
    /// Maximum time that an operation waits for the engine to become ready.
    pub ready_wait: Duration,
    /// Maximum timeout that a run may ask for.
    pub max_timeout: Duration,
    /// Maximum timeout that a command may ask for.
    pub max_command_timeout: Duration,
    /// Maximum timeout that a background run may ask for.
    pub max_background: Duration,
    /// If true, all runs of a context take turns; otherwise only cells of one language do.
    pub one_run_at_a_time: bool,
    /// If true, the time that a run waits for others counts towards its timeout.
    pub waiting_counts: bool,
    /// If true, a stop of a context ends its running code; otherwise the stop waits for it.
    pub stop_ends_runs: bool,
    /// Limits of one sandbox. A sandbox without a size has exactly these, and no size exceeds them.
    pub limits: sandbox::Limits,
    /// Size of contexts that do not choose one, and of the ready sandboxes of the pool.
    pub default_size: Option<Size>,
    /// Memory limit for all sandboxes of one tenant in this realm together.
    pub group_memory_bytes: Option<u64>,
    pub group_cpu_millis: Option<u32>,
    /// Maximum number of runs of one tenant that execute at the same time.
    pub runs_at_once: usize,
    /// Number of sandboxes with a started Python kernel that are always ready, for the pool's tenant in the pool's
    /// realm.
    pub pool_size: usize,
    pub session_ttl: Duration,
    /// Maximum number of contexts, or conversations, of one tenant.
    pub max_contexts: usize,
    /// If true, a new context beyond `max_contexts` evicts the idle context that was unused for the longest time.
    pub evict_idle: bool,
    /// Maximum sum of the memory limits of all live contexts of all tenants.
    pub max_total_memory_bytes: Option<u64>,
    /// If true, no two contexts of a tenant have the same name.
    pub unique_names: bool,
    /// If true, a context runs only the language that it was created with.
    pub one_language: bool,
    /// Maximum number of characters kept of each stream, value and error.
    pub text_budget: usize,
    /// Time after which an unused context is stopped.
    pub idle_timeout: Option<Duration>,
    /// Interval between searches for idle contexts.
    pub sweep_interval: Duration,
    /// Size and lifetime of a conversation's `/data`; only a realm with conversations has it.
    pub kept: Option<KeptConfig>,
    /// Size and lifetime of the workspaces of named contexts, if they outlive their sandboxes.
    pub persist: Option<KeptConfig>,
    /// Space of such workspaces of one tenant at which no new one is created.
    pub persist_bytes: u64,
    pub volumes: Vec<SharedVolume>,
    /// Policy for the network of sandboxes. Without one a sandbox reaches only itself.
    pub network: Option<egress::Policy>,
    /// Policies that apply in addition to `network` to sandboxes of a size.
    pub network_of: BTreeMap<Size, egress::Policy>,
    /// If true, sandboxes have a network only in calls that ask for it.
    pub network_on_call: bool,
    /// Memory and processes of a context's browser; `None` if contexts have no browser. The memory is a part of the
    /// sandbox's limit, and smaller sizes have proportionally less of it. The processes are added to the sandbox's
    /// limit.
    pub browser: Option<BrowserRoom>,
    /// Maximum number of ready sandboxes with a started browser for one tenant that uses them.
    pub browsers_ready: usize,
    /// If true, contexts are created mainly for their browser, so one ready sandbox with a browser exists from the
    /// start.
    pub browser_first: bool,
    /// Environment variables for code of a conversation; `{key}` is replaced by the key of its files.
    pub env: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptConfig {
    pub bytes: u64,
    pub inodes: u64,
    /// Time that the files are kept after their last use.
    pub stays: Duration,
}

impl RealmConfig {
    /// Returns the usual rules, which each dialect changes where it needs others.
    pub fn usual(realm: Realm) -> Self {
        Self {
            realm,
            id_prefix: "ctx-",
            short_ids: false,
            timeout: Duration::from_secs(60),
            ready_wait: Duration::from_secs(30),
            max_timeout: Duration::from_secs(300),
            max_command_timeout: Duration::from_secs(1800),
            max_background: Duration::from_secs(1800),
            one_run_at_a_time: true,
            waiting_counts: false,
            stop_ends_runs: false,
            unique_names: false,
            limits: limits(2048 * MB, 2000, 1024 * MB),
            default_size: None,
            group_memory_bytes: None,
            group_cpu_millis: None,
            runs_at_once: 32,
            pool_size: 3,
            session_ttl: HOUR,
            max_contexts: 1000,
            evict_idle: false,
            max_total_memory_bytes: None,
            one_language: false,
            text_budget: 20_000,
            idle_timeout: Some(24 * HOUR),
            sweep_interval: Duration::from_secs(60),
            kept: None,
            persist: None,
            persist_bytes: u64::MAX,
            volumes: Vec::new(),
            network: None,
            network_of: BTreeMap::new(),
            network_on_call: false,
            browser: Some(BrowserRoom { memory_bytes: 1024 * MB, pids: BROWSER_PIDS }),
            browsers_ready: 1,
            browser_first: false,
            env: BTreeMap::new(),
        }
    }

    /// Returns the same rules with other limits of a sandbox, in megabytes and thousandths of a core.
    pub fn limited(self, memory_mb: u64, cpu_millis: u32, disk_mb: u64) -> Self {
        Self { limits: limits(memory_mb * MB, cpu_millis, disk_mb * MB), ..self }
    }

    /// Returns the limits of a context of this size, which never exceed what the operator allows.
    pub(crate) fn limits_of(&self, size: Option<Size>) -> sandbox::Limits {
        let Some(size) = size.or(self.default_size) else { return self.limits };
        sandbox::Limits {
            memory_bytes: self.limits.memory_bytes.min(size.memory_mb() * MB),
            cpu_millis: self.limits.cpu_millis.min(size.cpus() * 1000),
            ..self.limits
        }
    }

    /// Returns the part of a sandbox's limits that its browser may use.
    pub(crate) fn browser_room(&self, limits: &sandbox::Limits) -> Option<BrowserRoom> {
        let room = self.browser?;
        let share = u128::from(room.memory_bytes) * u128::from(limits.memory_bytes);
        let memory = share / u128::from(self.limits.memory_bytes.max(1));
        Some(BrowserRoom { memory_bytes: u64::try_from(memory).unwrap_or(u64::MAX), ..room })
    }

    /// Returns the number of ready sandboxes that the operator ordered. It is zero in a realm with conversations: a
    /// sandbox of a conversation is created with its files, so no ready sandbox could serve it.
    pub(crate) fn ordered_sandboxes(&self) -> usize {
        if self.kept.is_some() { 0 } else { self.pool_size }
    }
}

fn limits(memory_bytes: u64, cpu_millis: u32, disk_bytes: u64) -> sandbox::Limits {
    sandbox::Limits { memory_bytes, cpu_millis, pids: 256, disk_bytes, disk_inodes: 100_000 }
}

/// Everything needed to start kernels and browsers. It is separate from the configuration because it is known only once
/// the runtimes are installed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtimes {
    pub python: KernelCommand,
    /// Runtime of JavaScript and TypeScript. Without it, contexts in these languages are refused.
    pub node: Option<KernelCommand>,
    /// Browser of this machine. Without it, operations that need a browser are refused.
    pub browser: Option<BrowserCommand>,
    /// Files of the drivers: absolute path inside the sandbox, and content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
    /// Symbolic links: absolute path inside the sandbox, and the path inside to which it leads.
    pub links: Vec<(PathBuf, PathBuf)>,
    /// Paths, inside or of the host, of packages that nothing pins. Only confined processes get them, so the zygote gets
    /// no variable, no link and no bind that leads there.
    pub unpinned: Vec<PathBuf>,
}

/// Chromium as it is installed on this machine. Sandboxes see it at the same path.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrowserCommand {
    /// Name and version shown to users, for example `chromium-156`.
    pub label: String,
    pub program: PathBuf,
    /// True for the headless shell, false for the whole browser.
    pub shell: bool,
    /// Configuration of fontconfig that the browser uses instead of the system's.
    pub fontconfig: Option<PathBuf>,
    /// Paths that the browser needs in addition to the directories of the system.
    pub binds: Vec<PathBuf>,
}

/// The command that starts one interpreter. Paths are those inside the sandbox; `binds` have the same path on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelCommand {
    /// Name and version shown to users who ask what runs their code, for example `python-3.11`.
    pub label: String,
    /// Path of the interpreter, its flags and the driver file.
    pub argv: Vec<String>,
    /// The complete environment of the interpreter.
    pub env: BTreeMap<String, String>,
    /// Host directories and files that the interpreter needs, shown read-only.
    pub binds: Vec<PathBuf>,
    /// Command line of the zygote from which kernels are forked instead of started (`sandbox::ZygoteSpec`); empty if
    /// there is none.
    pub warm: Vec<String>,
}

impl Runtimes {
    /// Returns the specification of the zygote from which kernels are forked.
    pub fn warm(&self) -> Option<ZygoteSpec> {
        let KernelCommand { warm, env, binds, .. } = &self.python;
        let is_pinned = |path: &Path| !self.unpinned.iter().any(|unpinned| path.starts_with(unpinned));
        (!warm.is_empty()).then(|| ZygoteSpec {
            argv: warm.clone(),
            env: env.clone().into_iter().filter(|(_, value)| is_pinned(Path::new(value))).collect(),
            runtime: binds.iter().filter(|path| is_pinned(path)).cloned().collect(),
            files: self.files().into_iter().filter(|file| is_pinned(&file.path)).collect(),
        })
    }

    /// Returns the files and links that every sandbox has.
    pub(crate) fn files(&self) -> Vec<FileSpec> {
        let links = self.links.iter().cloned().map(|(path, to)| FileSpec::link(path, to));
        self.files.iter().cloned().map(FileSpec::from).chain(links).collect()
    }

    fn command(&self, language: Language) -> Option<&KernelCommand> {
        match language {
            Language::Python => Some(&self.python),
            Language::Javascript | Language::Typescript => self.node.as_ref(),
        }
    }

    pub(crate) fn runs(&self, language: Language) -> bool {
        self.command(language).is_some()
    }

    pub(crate) fn kernel(&self, language: Language, cwd: &str) -> Option<KernelSpec> {
        let command = self.command(language)?;
        Some(KernelSpec {
            language,
            argv: command.argv.clone(),
            env: command.env.clone(),
            cwd: cwd.into(),
            merge_output: false,
        })
    }

    /// Returns the environment of commands: that of Python, with the directories of the interpreters before those of
    /// the system in `PATH`.
    pub(crate) fn command_env(&self) -> BTreeMap<String, String> {
        let mut env = self.python.env.clone();
        let system = env.remove("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
        let programs = [Some(&self.python), self.node.as_ref()];
        let bins = programs.into_iter().flatten().filter_map(|command| Path::new(command.argv.first()?).parent());
        let mut path: Vec<String> = Vec::new();
        let all = bins.map(|bin| bin.to_string_lossy().into_owned()).chain(system.split(':').map(String::from));
        for dir in all.filter(|dir| dir.starts_with('/')) {
            if !path.contains(&dir) {
                path.push(dir);
            }
        }
        env.insert("PATH".into(), path.join(":"));
        env.entry("HOME".into()).or_insert_with(|| WORKSPACE.into());
        env.entry("LANG".into()).or_insert_with(|| "C.UTF-8".into());
        env
    }

    pub(crate) fn list(&self, backend: &str) -> Vec<RuntimeInfo> {
        let info = |language: Language| {
            let label = &self.command(language)?.label;
            let label = if label.is_empty() { language.name() } else { label };
            Some(RuntimeInfo { language, name: format!("{backend}/{label}") })
        };
        [Language::Python, Language::Javascript, Language::Typescript].into_iter().filter_map(info).collect()
    }

    pub(crate) fn binds(&self, browser: bool) -> Vec<PathBuf> {
        let mut binds = self.python.binds.clone();
        binds.extend(self.node.iter().flat_map(|node| node.binds.clone()));
        binds.extend(self.browser.iter().filter(|_| browser).flat_map(|browser| browser.binds.clone()));
        binds.sort();
        binds.dedup();
        binds
    }
}
