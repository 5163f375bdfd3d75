//! The typed configuration. A flag overrides a variable, and a variable overrides the file; each value keeps its
//! source.
//!
//! `settings` is the table of all settings, `environment` is the only reader of the environment, and `resolve` merges
//! the sources. Nothing else in the program reads a file, a variable or a flag to decide how to behave.

pub mod environment;
mod mounts;
mod network;
mod otel;
mod resolve;
pub mod settings;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use engine::op::{SharedVolume, Size};
pub(crate) use environment::Environment;
use mounts::PrivateFiles;
pub(crate) use mounts::{ALL_TENANTS, MountConfig};
pub(crate) use network::{Network, Policies, SecretConfig, SecretSource, UpstreamSource};
pub(crate) use otel::Telemetry;
pub(crate) use resolve::{ConfigError, Effective, Sources};
use runtimes::{BrowserChoice, NodeChoice, Preset, RuntimeConfig};
use sandbox::Level;

#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// Log filter; `None` selects a default that suits the command.
    pub log: Option<String>,
    pub log_json: bool,
    pub dialect: String,
    pub lang: Option<String>,
    pub floor: Level,
    /// Whether systemd may be asked for a cgroup.
    pub systemd_scope: bool,
    /// Maximum number of ready sandboxes of all tenants and dialects together; those of `pool_size` are always kept.
    pub ready_max: usize,
    pub ready_memory_mb: u64,
    pub state_dir: PathBuf,
    /// Disk space that sandboxes leave free; `None` means 5 % of the file system, at least 1 GB and at most 8 GB.
    pub keep_free_mb: Option<u64>,
    pub runtimes: RuntimeConfig,
    pub browser: BrowserChoice,
    pub network: Network,
    pub dialects: Dialects,
    pub mounts: Vec<MountConfig>,
    pub serve: Serve,
    pub auth: Auth,
    pub quota: QuotaConfig,
    pub files: FilesConfig,
    pub journal: Journal,
    pub metrics: MetricsConfig,
    pub telemetry: Telemetry,
    /// The same values untyped, for `sandpool config`.
    pub effective: Effective,
}

/// Settings of `[serve]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Serve {
    /// Host and port of the listener.
    pub listen: String,
    pub public_url: Option<String>,
    pub allowed_hosts: Vec<String>,
    pub allowed_origins: Vec<String>,
    pub cors: bool,
    pub max_connections: usize,
    pub max_sessions: usize,
    pub session_idle: Duration,
    pub max_body_bytes: usize,
    /// Memory for the calls of all tenants; `None` means a quarter of the machine's memory, at most 1 GB.
    pub call_memory_mb: Option<usize>,
    pub header_timeout: Duration,
    pub body_timeout: Duration,
    pub idle_timeout: Duration,
    pub write_timeout: Duration,
}

/// Settings of `[auth]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Auth {
    pub token: Option<Secret>,
    pub token_file: Option<PathBuf>,
    pub tenants: Option<PathBuf>,
    pub none: bool,
    pub jwks: Option<String>,
    pub jwks_max_age: Duration,
    pub audience: Option<String>,
    pub issuer: Option<String>,
    pub tenant_claim: String,
    pub servers: Vec<String>,
}

/// Settings of `[quota]`, which apply to a tenant whose entry sets no other quotas.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct QuotaConfig {
    pub contexts: Option<usize>,
    pub runs: Option<usize>,
    pub memory_mb: Option<u64>,
    /// Memory that the calls of a tenant may occupy in the server.
    pub call_memory_mb: usize,
    pub calls_per_second: Option<f64>,
}

/// Settings of `[files]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct FilesConfig {
    pub secret: Option<Secret>,
    pub link_ttl: Option<Duration>,
}

/// Settings of `[journal]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Journal {
    pub enabled: bool,
    pub contents: bool,
    pub days: u32,
}

/// Settings of `[metrics]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MetricsConfig {
    pub token: Option<Secret>,
    pub token_file: Option<PathBuf>,
    /// Host and port of a listener for the metrics alone.
    pub listen: Option<String>,
    /// Maximum number of tenants that are labels.
    pub tenants: usize,
}

/// A value that is never printed.
#[derive(Clone, PartialEq, Eq, serde::Deserialize)]
#[serde(transparent)]
pub(crate) struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("(set)")
    }
}

/// Settings of the dialects.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Dialects {
    /// Settings of `[dialect.<id>]` for every dialect.
    limits: BTreeMap<&'static str, DialectLimits>,
    /// The setting `agentrun.default_context`.
    pub default_context: bool,
    /// The setting `conversation.underscores`.
    pub underscores: bool,
    pub microsandbox: MicrosandboxConfig,
}

/// Settings of `[microsandbox]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MicrosandboxConfig {
    pub default_flavor: Size,
    pub max_total_memory_mb: Option<u64>,
    pub evict: bool,
    pub cleanup_interval: Duration,
    pub orphan_interval: Duration,
    pub start_timeout: Duration,
    pub volumes: Vec<VolumeConfig>,
    pub show_host_paths: bool,
}

/// One of `microsandbox.volumes`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VolumeConfig {
    /// Path on this machine as the operator wrote it, which `get_volume_path` shows.
    pub written: String,
    pub volume: SharedVolume,
}

/// Settings of `[dialect.<id>]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct DialectLimits {
    pub timeout: Duration,
    /// Maximum timeouts that a call and a background run may ask for; `None` in a dialect whose document sets them.
    pub longest: Option<(Duration, Duration)>,
    pub memory_mb: u64,
    pub cpus: f64,
    pub pids: u32,
    pub disk_mb: u64,
    /// Number of ready sandboxes, and the age at which one is replaced; `None` in a dialect that keeps none ready.
    pub pool: Option<(usize, Duration)>,
    pub idle_timeout: Option<Duration>,
    pub max_contexts: usize,
    pub text_budget: usize,
    pub shutdown_grace: Duration,
    /// Part of the memory that the browser may use; `None` in a dialect without a browser.
    pub browser_memory_mb: Option<u64>,
    /// Time after which the workspace of a named context is deleted, and space of all of a tenant's in MB; `None` if
    /// workspaces end with their contexts.
    pub persist: Option<(Duration, u64)>,
}

impl Config {
    /// Reads the configuration file that the sources name, and merges all sources.
    pub(crate) fn load(sources: &Sources) -> Result<Self, ConfigError> {
        Self::typed(resolve::resolve(sources)?, sources)
    }

    fn typed(effective: Effective, sources: &Sources) -> Result<Self, ConfigError> {
        let backends: Vec<String> = effective.get("backend")?;
        if backends != ["native"] {
            return Err(effective.error("backend", "`native` is the only back end of this version"));
        }
        let private = private_files(&effective, &sources.environment)?;
        Ok(Self {
            log: effective.get("log")?,
            log_json: effective.get::<String>("log_format")? == "json",
            dialect: effective.get("dialect.default")?,
            lang: effective.get("lang")?,
            floor: effective.get("floor")?,
            systemd_scope: effective.get("systemd_scope")?,
            ready_max: effective.get("ready_max")?,
            ready_memory_mb: effective.get("ready_memory_mb")?,
            state_dir: effective.absolute("state_dir")?,
            keep_free_mb: effective.get("keep_free_mb")?,
            runtimes: RuntimeConfig {
                dir: effective.absolute("runtimes.dir")?,
                python: effective.get("runtimes.python")?,
                preset: preset(&effective)?,
                packages: effective.get("runtimes.packages")?,
                node: match effective.get::<String>("runtimes.node")?.as_str() {
                    "auto" => NodeChoice::Auto,
                    "pinned" => NodeChoice::Pinned,
                    path => NodeChoice::Path(path.into()),
                },
                threads: effective.get("runtimes.threads")?,
                warm: effective.get("runtimes.warm")?,
                preload: preload(&effective)?,
            },
            browser: match effective.get::<String>("browser")?.as_str() {
                "auto" => BrowserChoice::Auto,
                "off" => BrowserChoice::Off,
                path if path.starts_with('/') => BrowserChoice::Path(path.into()),
                _ => return Err(effective.error("browser", "expected `auto`, `off` or an absolute path")),
            },
            mounts: mounts::typed(&effective, sources.is_root, &private)?,
            network: Network::typed(&effective)?,
            dialects: Dialects::typed(&effective, &private)?,
            serve: Serve::typed(&effective)?,
            auth: Auth {
                token: effective.get("auth.token")?,
                token_file: effective.get("auth.token_file")?,
                tenants: effective.get("auth.tenants")?,
                none: effective.get("auth.none")?,
                jwks: effective.get("auth.jwks")?,
                jwks_max_age: effective.time("auth.jwks_max_age")?,
                audience: effective.get("auth.audience")?,
                issuer: effective.get("auth.issuer")?,
                tenant_claim: effective.get("auth.tenant_claim")?,
                servers: effective.get("auth.servers")?,
            },
            quota: QuotaConfig {
                contexts: effective.get("quota.contexts")?,
                runs: effective.get("quota.runs")?,
                memory_mb: effective.get("quota.memory_mb")?,
                call_memory_mb: effective.get("quota.call_memory_mb")?,
                calls_per_second: effective.get("quota.calls_per_second")?,
            },
            files: FilesConfig {
                secret: effective.get("files.secret")?,
                link_ttl: effective.optional_time("files.link_ttl"),
            },
            journal: Journal {
                enabled: effective.get("journal.enabled")?,
                contents: effective.get("journal.contents")?,
                days: effective.get("journal.days")?,
            },
            metrics: MetricsConfig {
                token: effective.get("metrics.token")?,
                token_file: effective.get("metrics.token_file")?,
                listen: effective.get("metrics.listen")?,
                tenants: effective.get("metrics.tenants")?,
            },
            telemetry: Telemetry::typed(&effective)?,
            effective,
        })
    }
}

/// Returns the files that no mount may show or change.
fn private_files(effective: &Effective, environment: &Environment) -> Result<PrivateFiles, ConfigError> {
    let network = Network::typed(effective)?;
    let mut secret = vec![("state_dir".to_owned(), effective.absolute("state_dir")?)];
    for setting in ["auth.tenants", "auth.token_file", "metrics.token_file"] {
        let path: Option<PathBuf> = effective.get(setting)?;
        secret.extend(path.map(|path| (setting.to_owned(), path)));
    }
    secret.extend(network.upstream_credentials.map(|path| ("network.upstream_credentials".to_owned(), path)));
    secret.extend(network.secrets.into_iter().filter_map(|secret| match secret.from {
        SecretSource::File(path) => Some((format!("network.secret.{}", secret.name), path)),
        SecretSource::Variable(_) => None,
    }));
    let mut trusted = vec![("runtimes.dir".to_owned(), effective.absolute("runtimes.dir")?)];
    let config: Option<PathBuf> = effective.get("config")?;
    // Also a file that does not exist yet: the next start would read what code wrote.
    let configs = config.into_iter().chain(resolve::usual_files(environment));
    trusted.extend(configs.map(|path| ("config".to_owned(), path)));
    for setting in ["auth.jwks", "runtimes.python", "runtimes.node", "browser"] {
        let text: Option<String> = effective.get(setting)?;
        // Other texts are addresses and words such as `auto`.
        let is_path = |text: &String| !text.contains("://") && (setting == "auth.jwks" || text.contains('/'));
        let Some(path) = text.filter(is_path).map(PathBuf::from) else { continue };
        let libraries = if setting == "auth.jwks" { Vec::new() } else { runtimes::libraries(&path) };
        trusted.extend(std::iter::once(path).chain(libraries).map(|path| (setting.to_owned(), path)));
    }
    trusted.extend(std::env::current_exe().ok().map(|path| ("this program".to_owned(), path)));
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    Ok(PrivateFiles { secret, trusted, homes: mounts::homes(&users, environment.home()) })
}

impl Serve {
    fn typed(effective: &Effective) -> Result<Self, ConfigError> {
        let max_body_mb: usize = effective.get("serve.max_body_mb")?;
        Ok(Self {
            listen: listen(effective)?,
            public_url: public_url(effective)?,
            allowed_hosts: effective.get("serve.allowed_hosts")?,
            allowed_origins: effective.get("serve.allowed_origins")?,
            cors: effective.get("serve.cors")?,
            max_connections: effective.get("serve.max_connections")?,
            max_sessions: effective.get("serve.max_sessions")?,
            session_idle: effective.time("serve.session_idle")?,
            max_body_bytes: max_body_mb << 20,
            call_memory_mb: effective.get("serve.call_memory_mb")?,
            header_timeout: effective.time("serve.header_timeout")?,
            body_timeout: effective.time("serve.body_timeout")?,
            idle_timeout: effective.time("serve.idle_timeout")?,
            write_timeout: effective.time("serve.write_timeout")?,
        })
    }
}

/// Returns the known name that is most similar to an unknown one.
pub(crate) fn nearest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let likeness = |known: &&str| strsim::normalized_damerau_levenshtein(known, name);
    known.max_by(|a, b| likeness(a).total_cmp(&likeness(b)))
}

fn preset(effective: &Effective) -> Result<Option<Preset>, ConfigError> {
    let Some(name) = effective.get::<Option<String>>("runtimes.preset")? else { return Ok(None) };
    match Preset::named(&name) {
        Some(preset) => Ok(Some(preset)),
        None => Err(effective.error("runtimes.preset", "expected `data` or `slim`")),
    }
}

/// Returns the modules to preload. They become arguments of the interpreter's driver, so only module names are allowed.
fn preload(effective: &Effective) -> Result<Vec<String>, ConfigError> {
    let modules: Vec<String> = effective.get("runtimes.preload")?;
    let is_name = |part: &str| {
        !part.is_empty()
            && !part.starts_with(|c: char| c.is_ascii_digit())
            && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    match modules.iter().find(|module| !module.split('.').all(is_name)) {
        Some(wrong) => {
            Err(effective.error("runtimes.preload", &format!("`{wrong}` is not the name of a Python module")))
        }
        None => Ok(modules),
    }
}

/// Returns the address to listen on. A separately set host or port replaces that part of `serve.listen` only if it
/// comes from a stronger source.
fn listen(effective: &Effective) -> Result<String, ConfigError> {
    let whole: String = effective.get("serve.listen")?;
    let Some((host, port)) = whole.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok()) else {
        return Err(effective.error("serve.listen", "expected a host and a port, such as `127.0.0.1:8775`"));
    };
    let part = |key: &str, whole: &str| -> Result<String, ConfigError> {
        let given: Option<toml::Value> = effective.get(key)?;
        Ok(match given {
            Some(value) if effective.strength(key) > effective.strength("serve.listen") => match value {
                toml::Value::String(text) => text,
                other => other.to_string(),
            },
            _ => whole.to_owned(),
        })
    };
    let host = part("serve.host", host)?;
    // An IPv6 address needs brackets before a port.
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
    Ok(format!("{host}:{}", part("serve.port", port)?))
}

fn public_url(effective: &Effective) -> Result<Option<String>, ConfigError> {
    let Some(url) = effective.get::<Option<String>>("serve.public_url")? else { return Ok(None) };
    let rest = url.strip_prefix("https://").or_else(|| url.strip_prefix("http://"));
    if rest.is_none_or(|rest| rest.is_empty() || rest.contains(['?', '#', ' ', '@'])) {
        return Err(effective.error("serve.public_url", "expected an address such as `https://sandbox.example.com`"));
    }
    Ok(Some(url.trim_end_matches('/').to_owned()))
}

impl Dialects {
    /// Returns the settings of the dialect with this id.
    pub(crate) fn of(&self, id: &str) -> &DialectLimits {
        &self.limits[id]
    }

    fn typed(effective: &Effective, private: &PrivateFiles) -> Result<Self, ConfigError> {
        let limits = |id: &&'static str| Ok((*id, DialectLimits::typed(effective, id)?));
        let volumes: Vec<String> = effective.get("microsandbox.volumes")?;
        let base = if effective.is_from_file("microsandbox.volumes") { beside(effective) } else { None };
        let volume = |text: &String| volume(text, base.as_deref(), private);
        let volumes = volumes.iter().map(volume).collect::<Result<_, String>>();
        Ok(Self {
            limits: dialects::IDS.iter().map(limits).collect::<Result<_, ConfigError>>()?,
            default_context: effective.get("agentrun.default_context")?,
            underscores: effective.get("conversation.underscores")?,
            microsandbox: MicrosandboxConfig {
                default_flavor: effective.get("microsandbox.default_flavor")?,
                max_total_memory_mb: effective.get("microsandbox.max_total_memory_mb")?,
                evict: effective.get("microsandbox.evict")?,
                cleanup_interval: effective.time("microsandbox.cleanup_interval")?,
                orphan_interval: effective.time("microsandbox.orphan_interval")?,
                start_timeout: effective.time("microsandbox.start_timeout")?,
                volumes: volumes.map_err(|why| effective.error("microsandbox.volumes", &why))?,
                show_host_paths: effective.get("microsandbox.show_host_paths")?,
            },
        })
    }
}

/// Returns the directory of the configuration file. Relative paths in the file start there.
fn beside(effective: &Effective) -> Option<PathBuf> {
    let file = effective.value("config").and_then(toml::Value::as_str)?;
    std::path::absolute(file).ok()?.parent().map(Path::to_owned)
}

/// Parses `host:container` or `host:container:ro`. A relative `host` starts in `base`, else in the working directory.
fn volume(text: &str, base: Option<&Path>, private: &PrivateFiles) -> Result<VolumeConfig, String> {
    let (paths, read_only) = match text.strip_suffix(":ro") {
        Some(paths) => (paths, true),
        None => (text.strip_suffix(":rw").unwrap_or(text), false),
    };
    let wrong =
        || format!("`{text}` is not `host:container` or `host:container:ro`, where `container` is an absolute path");
    let (written, inside) = paths.split_once(':').ok_or_else(wrong)?;
    if written.is_empty() || !inside.starts_with('/') || inside.contains(':') {
        return Err(wrong());
    }
    let host = base.map_or_else(|| written.into(), |base| base.join(written));
    let host = std::path::absolute(host).map_err(|error| format!("`{text}`: {error}"))?;
    let real = runtimes::Resolved::of(&host).real;
    mounts::check_place(&real, !read_only, private).map_err(|why| format!("`{text}`: {why}"))?;
    let volume = SharedVolume { host, inside: inside.into(), read_only };
    Ok(VolumeConfig { written: written.to_owned(), volume })
}

impl DialectLimits {
    fn typed(effective: &Effective, dialect: &str) -> Result<Self, ConfigError> {
        let key = |name: &str| format!("dialect.{dialect}.{name}");
        let memory_mb = effective.get(&key("memory_mb"))?;
        let timeout = effective.time(&key("timeout"))?;
        // A longest time that the operator did not set is at least the time of a run that asks for none.
        let longest = |key: &str| match effective.strength(key) {
            0 => effective.time(key).map(|time| time.max(timeout)),
            _ => effective.time(key),
        };
        let longest = match settings::find(&key("max_timeout")) {
            Some(_) => Some((longest(&key("max_timeout"))?, longest(&key("max_background"))?)),
            None => None,
        };
        if longest.is_some_and(|(longest, _)| longest < timeout) {
            let why = format!("is less than `{}`, the time of a run that asks for none; set that too", key("timeout"));
            return Err(effective.error(&key("max_timeout"), &why));
        }
        Ok(Self {
            timeout,
            longest,
            memory_mb,
            browser_memory_mb: browser_memory(effective, &key("browser_memory_mb"), memory_mb)?,
            cpus: effective.number(&key("cpus"))?,
            pids: effective.get(&key("pids"))?,
            disk_mb: effective.get(&key("disk_mb"))?,
            pool: match settings::find(&key("pool_size")) {
                Some(_) => Some((effective.get(&key("pool_size"))?, effective.time(&key("session_ttl"))?)),
                None => None,
            },
            idle_timeout: effective.optional_time(&key("idle_timeout")),
            max_contexts: effective.get(&key("max_contexts"))?,
            text_budget: effective.get(&key("text_budget"))?,
            shutdown_grace: effective.time(&key("shutdown_grace"))?,
            persist: match settings::find(&key("persist")) {
                Some(_) if effective.get(&key("persist"))? => {
                    let days: u64 = effective.get(&key("persist_days"))?;
                    Some((Duration::from_secs(days * 86_400), effective.get(&key("persist_mb"))?))
                }
                _ => None,
            },
        })
    }
}

/// Returns the memory of the browser, which is half of the context's memory unless the operator sets it. Returns `None`
/// for a dialect without a browser.
fn browser_memory(effective: &Effective, key: &str, memory_mb: u64) -> Result<Option<u64>, ConfigError> {
    if settings::find(key).is_none() {
        return Ok(None);
    }
    match effective.get(key)? {
        Some(given) if given >= memory_mb => Err(effective.error(key, "has to be less than `memory_mb`")),
        Some(given) => Ok(Some(given)),
        None => Ok(Some(memory_mb / 2)),
    }
}
