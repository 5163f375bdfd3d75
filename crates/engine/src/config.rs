//! Everything the engine can be told, typed. Reads no environment and no file; the defaults are those of the documents.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proto::{KernelSpec, Language};
use sandbox::{BrowserRoom, SharedVolume, ZygoteSpec};

use crate::op::{Quota, Realm, RuntimeInfo, Size, Tenant};

/// Where code starts, and what paths of files are relative to.
pub const WORKSPACE: &str = "/workspace";
/// The files of a conversation, and where its code starts.
pub const DATA: &str = "/data";

const MB: u64 = 1 << 20;
const HOUR: Duration = Duration::from_secs(60 * 60);
/// Threads count: Chromium has some fifty with one page, and about ten more with each other site.
const BROWSER_PIDS: u32 = 256;

/// Not printable: it has the secret of the links.
#[derive(Clone, PartialEq)]
pub struct EngineConfig {
    pub realms: Vec<RealmConfig>,
    /// Of a tenant that has none of its own.
    pub quota: Quota,
    pub quotas: BTreeMap<Tenant, Quota>,
    /// What makes the keys of links unguessable.
    pub file_secret: [u8; 32],
    /// Of one file read through a link.
    pub max_link_bytes: u64,
    /// Between the interrupt of a run and the kill.
    pub grace: Duration,
    /// Of one file read or written by an operation.
    pub max_file_bytes: u64,
    /// Entries of one listing.
    pub max_files_listed: u32,
    /// Of the code of one run.
    pub max_code_bytes: usize,
    pub health_interval: Duration,
    /// How often what dead servers left behind is looked for.
    pub orphan_interval: Duration,
    /// How long a run waits for a permit.
    pub queue_wait: Duration,
    /// Runs of one tenant in one realm that may wait at once.
    pub queue_length: usize,
    pub shutdown_grace: Duration,
    /// How long an operation waits for the engine to become ready.
    pub ready_wait: Duration,
    /// How long a sandbox, and then an interpreter, may take to start.
    pub start_timeout: Duration,
    /// Sandboxes that wait ready, of all tenants and realms together. The sessions of the pool are counted, and always there.
    pub ready_max: usize,
    /// The memory they may take.
    pub ready_memory_bytes: u64,
    /// How many of them are made at once, behind those somebody waits for.
    pub refills_at_once: usize,
    /// Whose the sessions of the pool are. Others have sandboxes ready as they need them.
    pub pool_tenant: Tenant,
    pub pool_realm: Realm,
    /// Where interpreters start. `/workspace` in every real sandbox.
    pub cwd: String,
    /// The way out of sandboxes; needed where a realm has a network.
    pub egress: Option<egress::Egress>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            realms: vec![
                RealmConfig::sandpool(),
                RealmConfig::agentrun(),
                RealmConfig::microsandbox(),
                RealmConfig::workbench(),
                RealmConfig::conversation(),
            ],
            quota: Quota::default(),
            quotas: BTreeMap::new(),
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
            ready_wait: Duration::from_secs(10),
            start_timeout: Duration::from_secs(60),
            ready_max: 64,
            ready_memory_bytes: 512 * MB,
            refills_at_once: std::thread::available_parallelism().map_or(1, |cores| (cores.get() / 2).clamp(1, 4)),
            pool_tenant: Tenant::local(),
            pool_realm: Realm::AGENTRUN,
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

    pub(crate) fn quota_of(&self, tenant: &Tenant) -> &Quota {
        self.quotas.get(tenant).unwrap_or(&self.quota)
    }
}

/// For as long as this engine lives.
fn random_secret() -> [u8; 32] {
    let mut secret = [0; 32];
    for half in secret.chunks_exact_mut(16) {
        half.copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    }
    secret
}

/// Rules of one realm: those of one tool set.
#[derive(Debug, Clone, PartialEq)]
pub struct RealmConfig {
    pub realm: Realm,
    /// Of the ids that the engine makes: `ctx-`, `session-`, `sbx-`.
    pub id_prefix: &'static str,
    /// Of one run, unless the run asks for less or more.
    pub timeout: Duration,
    /// The most a run may ask for.
    pub max_timeout: Duration,
    /// The most a command or a background run may ask for.
    pub max_command_timeout: Duration,
    /// Of one sandbox: what one without a size has, and no size goes beyond.
    pub limits: sandbox::Limits,
    /// Of a context that names none, and of the sessions of the pool.
    pub default_size: Option<Size>,
    /// Of all sandboxes of one tenant in this realm together.
    pub group_memory_bytes: Option<u64>,
    pub group_cpu_millis: Option<u32>,
    /// Runs that execute at once, per tenant.
    pub runs_at_once: usize,
    /// Sessions with a started Python that are always kept ready, for the pool's tenant in the pool's realm.
    pub pool_size: usize,
    pub session_ttl: Duration,
    /// Contexts, or conversations, a tenant may have.
    pub max_contexts: usize,
    /// At `max_contexts` the idle context that was not used for the longest time makes room.
    pub evict_idle: bool,
    /// The sum of the memory limits of all live contexts of all tenants.
    pub max_total_memory_bytes: Option<u64>,
    /// A context runs the one language it was made with.
    pub one_language: bool,
    /// Characters kept of each stream, value and error.
    pub text_budget: usize,
    /// Contexts nobody used for so long are stopped.
    pub idle_timeout: Option<Duration>,
    /// How often they are looked for.
    pub sweep_interval: Duration,
    /// Of the `/data` of a conversation.
    pub kept: Option<KeptConfig>,
    pub volumes: Vec<SharedVolume>,
    /// What its sandboxes may reach; none: nothing but themselves.
    pub network: Option<egress::Policy>,
    /// Of a sandbox of this size, besides.
    pub network_of: BTreeMap<Size, egress::Policy>,
    /// Only in a call that asks for it.
    pub network_on_call: bool,
    /// Its contexts may have a browser, with this much of their memory, and so many processes besides. Those of a smaller size have
    /// less memory for it.
    pub browser: Option<BrowserRoom>,
    /// The most sandboxes with a started browser that wait ready for one tenant, once it uses them.
    pub browsers_ready: usize,
    /// Its contexts are made for their browser: one waits from the start.
    pub browser_first: bool,
    /// For code of a conversation; `{key}` becomes the key of its files.
    pub env: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptConfig {
    pub bytes: u64,
    pub inodes: u64,
    /// After the last use.
    pub stays: Duration,
}

impl RealmConfig {
    pub fn sandpool() -> Self {
        Self {
            realm: Realm::SANDPOOL,
            id_prefix: "ctx-",
            timeout: Duration::from_secs(60),
            max_timeout: Duration::from_secs(300),
            max_command_timeout: Duration::from_secs(1800),
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

    /// Memory and processors are one budget for all contexts of a tenant: the document's interpreter.
    pub fn agentrun() -> Self {
        let limits = limits(2048 * MB, 2000, 1024 * MB);
        Self {
            realm: Realm::AGENTRUN,
            timeout: Duration::from_secs(30),
            limits,
            group_memory_bytes: Some(limits.memory_bytes),
            group_cpu_millis: Some(limits.cpu_millis),
            runs_at_once: 3,
            max_contexts: 50,
            one_language: true,
            browser: None,
            ..Self::sandpool()
        }
    }

    pub fn microsandbox() -> Self {
        Self {
            realm: Realm::MICROSANDBOX,
            id_prefix: "session-",
            timeout: Duration::from_secs(300),
            limits: limits(4096 * MB, 4000, 1024 * MB),
            default_size: Some(Size::Small),
            runs_at_once: 10,
            max_contexts: 10,
            evict_idle: true,
            one_language: true,
            idle_timeout: Some(Duration::from_secs(1800)),
            browser: None,
            ..Self::sandpool()
        }
    }

    pub fn workbench() -> Self {
        Self {
            realm: Realm::WORKBENCH,
            id_prefix: "sbx-",
            timeout: Duration::from_secs(30),
            max_timeout: Duration::from_secs(60),
            runs_at_once: 10,
            max_contexts: 50,
            idle_timeout: Some(HOUR),
            browser_first: true,
            ..Self::sandpool()
        }
    }

    pub fn conversation() -> Self {
        let disk = 512 * MB;
        Self {
            realm: Realm::CONVERSATION,
            id_prefix: "conv-",
            timeout: Duration::from_secs(30),
            limits: limits(256 * MB, 500, disk),
            runs_at_once: 10,
            pool_size: 0,
            max_contexts: 10_000,
            network_on_call: true,
            browser: None,
            kept: Some(KeptConfig { bytes: disk, inodes: 100_000, stays: 7 * 24 * HOUR }),
            ..Self::sandpool()
        }
    }
}

impl RealmConfig {
    /// What a context of this size has; never more than the operator allows.
    pub(crate) fn limits_of(&self, size: Option<Size>) -> sandbox::Limits {
        let Some(size) = size.or(self.default_size) else { return self.limits };
        sandbox::Limits {
            memory_bytes: self.limits.memory_bytes.min(size.memory_mb() * MB),
            cpu_millis: self.limits.cpu_millis.min(size.cpus() * 1000),
            ..self.limits
        }
    }

    /// What its browser may have of a sandbox's limits.
    pub(crate) fn browser_room(&self, limits: &sandbox::Limits) -> Option<BrowserRoom> {
        let room = self.browser?;
        let share = u128::from(room.memory_bytes) * u128::from(limits.memory_bytes);
        let memory = share / u128::from(self.limits.memory_bytes.max(1));
        Some(BrowserRoom { memory_bytes: u64::try_from(memory).unwrap_or(u64::MAX), ..room })
    }

    /// A conversation's sandbox is made with its files: none that is kept ready could serve it.
    pub(crate) fn sessions(&self) -> usize {
        if self.kept.is_some() { 0 } else { self.pool_size }
    }
}

fn limits(memory_bytes: u64, cpu_millis: u32, disk_bytes: u64) -> sandbox::Limits {
    sandbox::Limits { memory_bytes, cpu_millis, pids: 256, disk_bytes, disk_inodes: 100_000 }
}

/// What is needed to start interpreters. Known only once they are installed, hence apart from the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtimes {
    pub python: KernelCommand,
    /// JavaScript and TypeScript; contexts in them are refused without it.
    pub node: Option<KernelCommand>,
    /// Without it there are no browsers.
    pub browser: Option<BrowserCommand>,
    /// The drivers: absolute path inside the sandbox, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

/// Chromium on this machine. Shown at the same path in sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BrowserCommand {
    /// `chromium-156`, for whoever asks.
    pub label: String,
    pub program: PathBuf,
    /// The headless shell, not the whole browser.
    pub shell: bool,
    /// What it needs besides the system's directories.
    pub binds: Vec<PathBuf>,
}

/// How to start one interpreter. Paths are those inside the sandbox; `binds` lie at the same path on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelCommand {
    /// `python-3.11`, for whoever asks what code is run with.
    pub label: String,
    /// Interpreter, its flags and the driver file.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Host directories and files it needs, shown read-only.
    pub binds: Vec<PathBuf>,
    /// The same interpreter as one that is forked instead of started (`sandbox::WarmSpec`); empty where there is none.
    pub warm: Vec<String>,
}

impl Runtimes {
    /// The interpreter that kernels are forked from.
    pub fn warm(&self) -> Option<ZygoteSpec> {
        let KernelCommand { warm, env, binds, .. } = &self.python;
        (!warm.is_empty()).then(|| ZygoteSpec {
            argv: warm.clone(),
            env: env.clone(),
            runtime: binds.clone(),
            files: self.files.clone(),
        })
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

    /// Of commands: that of Python, with the directories of the interpreters before those of the system.
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
