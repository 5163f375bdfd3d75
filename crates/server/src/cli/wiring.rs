//! Connects the parts of the server: the configuration, the engine, the native back end and its guest.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use dialects::links::{Expiring, Signer};
use dialects::{Dialect, Links, Options};
use egress::Egress;
use engine::config::PACKAGES;
use engine::op::{FoundContext, Quota, SharedVolume, Stages};
use engine::{
    Call, Engine, EngineConfig, EventSink, Hold, KeptConfig, Mount, Op, Realm, RealmConfig, Tenant, WORKSPACE,
};
use sandbox::native::{self, Cgroups, GuestBinary, KeepFree, Launcher, Mode, NativeConfig, spawn_launcher};
use sandbox::{Backend, Isolation, Level, SHARED_PACKAGES};
use tokio_util::sync::CancellationToken;

use super::{Failed, network};
use crate::config::{ALL_TENANTS, Config, DialectLimits, MountConfig, VolumeConfig};
use crate::handler::{Execute, Executing};

/// Checks the shared volumes at the start, so that the operator, and not the first client, learns of volumes with which
/// no session could be created.
fn check_volumes(config: &Config) -> Result<(), Failed> {
    for VolumeConfig { volume, .. } in &config.dialects.microsandbox.volumes {
        let wrong = |why: &str| Failed(format!("`microsandbox.volumes`: `{}` {why}", volume.host.display()));
        let found = std::fs::symlink_metadata(&volume.host).map_err(|error| wrong(&error.to_string()))?;
        if !found.is_dir() {
            return Err(wrong("is not a directory"));
        }
        if !volume.read_only && (found.uid() == 0 || found.gid() == 0) {
            return Err(wrong(
                "belongs to root, and files that code writes there would, too; give it to another user and group, or share it read-only with `:ro`",
            ));
        }
    }
    Ok(())
}

/// The launcher of the native back end, with the configuration for the back end. It is a separate process, which is
/// started while this one has a single thread.
pub(crate) struct Native {
    launcher: Launcher,
    config: NativeConfig,
    /// Whether workspaces of contexts have to outlive the server.
    persists: bool,
}

impl Native {
    pub(crate) fn launch(config: &Config, transport: TransportKind) -> Result<Self, Failed> {
        Self::launch_with(config, transport, cgroups(config), config.floor)
    }

    /// Starts a launcher for a trial, which leaves the machine's cgroups as they are.
    pub(crate) fn launch_trial(config: &Config) -> Result<Self, Failed> {
        let trial = Self::launch_with(config, TransportKind::Stdio, Cgroups::Nothing, Level::Basic)?;
        Ok(Self { persists: false, ..trial })
    }

    fn launch_with(config: &Config, transport: TransportKind, cgroups: Cgroups, floor: Level) -> Result<Self, Failed> {
        check_volumes(config)?;
        let persists = dialects::IDS.iter().any(|id| config.dialects.of(id).persist.is_some());
        let guest = guest()?;
        let launcher = spawn_launcher().map_err(|error| Failed(format!("cannot start the launcher: {error}")))?;
        let config = NativeConfig {
            state_dir: config.state_dir.clone(),
            runtime_dir: None,
            guest,
            zygote: zygote()?,
            label: "sandpool".into(),
            // Each client on stdio starts a separate server, so several servers share the directory.
            exclusive: transport == TransportKind::Http,
            mode: None,
            cgroups,
            floor,
            spares: sandbox::native::SPARES,
            restarts: true,
            keep_free: keep_free(config),
        };
        Ok(Self { launcher, config, persists })
    }

    /// Starts the back end without a warning about missing isolation layers.
    pub(crate) async fn start_quietly(self) -> Result<(Arc<dyn Backend>, Isolation), Failed> {
        let (native, isolation) = native::Native::start(self.launcher, self.config).await?;
        if self.persists && !native.has_volumes_on_disk() {
            let why = match native.mode() {
                Mode::Root => {
                    "volumes on disk, and here they are in memory (`sandpool doctor` says why at `disk quota`)"
                }
                _ => "a server of root: only root can have volumes on disk",
            };
            native.shutdown().await;
            return Err(Failed(format!("`persist` needs {why}; use `--workspace DIR` instead")));
        }
        Ok((Arc::new(native), isolation))
    }

    /// Starts the back end and warns once about missing isolation layers.
    pub(crate) async fn start(self) -> Result<(Arc<dyn Backend>, Isolation), Failed> {
        let (native, isolation) = self.start_quietly().await?;
        if !isolation.missing.is_empty() {
            let names: Vec<&str> = isolation.missing.iter().filter_map(|missing| missing.split(':').next()).collect();
            tracing::warn!(
                "isolation level `{}`, without: {}; `sandpool doctor` says what to do",
                level(&isolation),
                names.join(", ")
            );
        }
        Ok((native, isolation))
    }
}

/// Returns how much disk space volumes leave free.
pub(crate) fn keep_free(config: &Config) -> KeepFree {
    KeepFree(config.keep_free_mb.map(|mb| mb << 20))
}

pub(crate) fn cgroups(config: &Config) -> Cgroups {
    if config.systemd_scope { Cgroups::Systemd } else { Cgroups::Given }
}

pub(crate) fn level(isolation: &Isolation) -> String {
    format!("{:?}", isolation.level).to_lowercase()
}

/// Returns the guest program, which is embedded, or next to this executable in a development tree.
#[cfg(embedded_guest)]
fn guest() -> Result<GuestBinary, Failed> {
    Ok(GuestBinary::Bytes(include_bytes!(concat!(env!("OUT_DIR"), "/guest"))))
}

#[cfg(not(embedded_guest))]
fn guest() -> Result<GuestBinary, Failed> {
    let own = std::env::current_exe().map_err(|error| Failed(format!("cannot find this executable: {error}")))?;
    Ok(GuestBinary::Path(own.with_file_name("sandpool-guest")))
}

/// Returns the library that the zygote loads. It is embedded, or next to this executable in a development tree.
#[cfg(embedded_zygote)]
fn zygote() -> Result<GuestBinary, Failed> {
    Ok(GuestBinary::Bytes(include_bytes!(concat!(env!("OUT_DIR"), "/zygote"))))
}

#[cfg(not(embedded_zygote))]
fn zygote() -> Result<GuestBinary, Failed> {
    let own = std::env::current_exe().map_err(|error| Failed(format!("cannot find this executable: {error}")))?;
    Ok(GuestBinary::Path(own.with_file_name("libsandpool_zygote.so")))
}

impl Execute for Engine {
    fn execute<'a>(&'a self, call: &'a engine::Call, op: Op) -> Executing<'a> {
        Box::pin(self.execute(call, op))
    }
}

/// How clients reach the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TransportKind {
    /// There is one client, and the server ends with it.
    Stdio,
    Http,
}

/// Converts the settings to the configuration of the engine: the rules of the dialects, with the operator's values.
pub(crate) fn engine_config(
    config: &Config,
    transport: TransportKind,
    file_secret: [u8; 32],
    egress: Option<Egress>,
) -> EngineConfig {
    let microsandbox = &config.dialects.microsandbox;
    let realms: Vec<RealmConfig> =
        dialects::realms().into_iter().map(|usual| realm(config, usual, transport)).collect();
    let usual = EngineConfig::default();
    let quota = Quota {
        contexts: config.quota.contexts,
        runs: config.quota.runs,
        memory_bytes: config.quota.memory_mb.map(|mb| mb << 20),
        network: None,
    };
    EngineConfig {
        egress,
        realms,
        quota,
        mounts: mounts(config),
        file_secret,
        shutdown_grace: shutdown_grace(config),
        start_timeout: microsandbox.start_timeout,
        orphan_interval: microsandbox.orphan_interval,
        pool_realm: (dialect(config).realm)().realm,
        ready_max: config.ready_max,
        ready_memory_bytes: config.ready_memory_mb << 20,
        ..usual
    }
}

/// Returns the mounts of the engine. One that replaces the workspace of one tenant is followed by one for the packages
/// that code installs, so that they last as long as the files. The launcher creates the directory.
fn mounts(config: &Config) -> Vec<Mount> {
    let mut all: Vec<Mount> = config.mounts.iter().map(mount).collect();
    if config.mounts.iter().any(|mount| mount.volume.inside.starts_with(PACKAGES)) {
        return all;
    }
    for mount in config.mounts.iter().filter(|mount| mount.volume.inside == Path::new(WORKSPACE)) {
        if !mount.volume.read_only && is_of_one_tenant(config, mount) {
            let host = mount.volume.host.join(SHARED_PACKAGES);
            let volume = SharedVolume { host, inside: PACKAGES.into(), read_only: false };
            all.push(self::mount(&MountConfig { volume, ..mount.clone() }));
        }
    }
    all
}

/// Returns whether no second tenant can write to the packages in this workspace. A kernel executes code from there when
/// it starts, before the first cell.
fn is_of_one_tenant(config: &Config, workspace: &MountConfig) -> bool {
    let (packages, tenants) = (workspace.volume.host.join(SHARED_PACKAGES), mount(workspace).tenants);
    let reaches = |volume: &SharedVolume| {
        !volume.read_only && (packages.starts_with(&volume.host) || volume.host.starts_with(&packages))
    };
    let mut mounts = config.mounts.iter().filter(|mount| reaches(&mount.volume));
    tenants.as_ref().is_some_and(|tenants| tenants.len() == 1)
        && mounts.all(|other| mount(other).tenants == tenants)
        && !config.dialects.microsandbox.volumes.iter().any(|shared| reaches(&resolved(shared)))
}

fn mount(mount: &MountConfig) -> Mount {
    let tenants = match mount.tenants.as_slice() {
        [] => Some(vec![Tenant::local()]),
        names if names.iter().any(|name| name == ALL_TENANTS) => None,
        names => Some(names.iter().cloned().map(Tenant).collect()),
    };
    Mount { volume: mount.volume.clone(), realms: mount.dialects.iter().map(|id| Realm(id)).collect(), tenants }
}

/// Returns the default dialect.
pub(crate) fn dialect(config: &Config) -> &'static Dialect {
    dialects::find(&config.dialect, &options(config)).expect("the setting allows only ids of dialects")
}

/// Returns the rules of the default dialect's realm over HTTP.
pub(crate) fn default_realm(config: &Config) -> RealmConfig {
    realm(config, (dialect(config).realm)(), TransportKind::Http)
}

/// Returns the grace period of the default dialect, because a server shuts down only once.
pub(crate) fn shutdown_grace(config: &Config) -> Duration {
    config.dialects.of(&config.dialect).shutdown_grace
}

/// Returns the rules of a dialect's realm with the operator's settings.
fn realm(config: &Config, usual: RealmConfig, transport: TransportKind) -> RealmConfig {
    let limits = config.dialects.of(usual.realm.0);
    let general = general(config, usual, limits);
    let microsandbox = &config.dialects.microsandbox;
    match general.realm {
        dialects::agentrun::REALM => RealmConfig {
            runs_at_once: general.pool_size,
            idle_timeout: match transport {
                TransportKind::Stdio => limits.idle_timeout,
                TransportKind::Http => limits.idle_timeout.or(dialects::agentrun::realm().idle_timeout),
            },
            ..general
        },
        dialects::microsandbox::REALM => RealmConfig {
            default_size: Some(microsandbox.default_flavor),
            evict_idle: microsandbox.evict,
            max_total_memory_bytes: microsandbox.max_total_memory_mb.map(|mb| mb << 20),
            sweep_interval: microsandbox.cleanup_interval,
            ready_wait: microsandbox.start_timeout,
            volumes: microsandbox.volumes.iter().map(resolved).collect(),
            ..general
        },
        _ => general,
    }
}

/// Returns the volume with the path that its directory has without symlinks, because the launcher follows none.
fn resolved(VolumeConfig { volume, .. }: &VolumeConfig) -> SharedVolume {
    let host = volume.host.canonicalize().unwrap_or_else(|_| volume.host.clone());
    SharedVolume { host, ..volume.clone() }
}

fn general(config: &Config, usual: RealmConfig, limits: &DialectLimits) -> RealmConfig {
    let memory_bytes = limits.memory_mb << 20;
    // Within the bounds of the settings the conversion is exact enough and cannot overflow.
    let cpu_millis = (limits.cpus * 1000.0).round() as u32;
    let disk_bytes = limits.disk_mb << 20;
    let (max_timeout, max_background) = limits.longest.unzip();
    let stays = |kept: KeptConfig| limits.idle_timeout.unwrap_or(kept.stays);
    RealmConfig {
        timeout: limits.timeout,
        // Only a dialect without the setting `max_timeout` raises its longest time to the usual one.
        max_timeout: max_timeout.unwrap_or_else(|| usual.max_timeout.max(limits.timeout)),
        max_command_timeout: max_timeout.unwrap_or_else(|| usual.max_command_timeout.max(limits.timeout)),
        max_background: max_background.unwrap_or_else(|| usual.max_background.max(limits.timeout)),
        limits: sandbox::Limits { memory_bytes, cpu_millis, pids: limits.pids, disk_bytes, ..usual.limits },
        // Group limits apply only in a dialect whose document has one budget for all contexts.
        group_memory_bytes: usual.group_memory_bytes.map(|_| memory_bytes),
        group_cpu_millis: usual.group_cpu_millis.map(|_| cpu_millis),
        persist: limits.persist.map(|(stays, _)| KeptConfig {
            bytes: disk_bytes,
            inodes: usual.limits.disk_inodes,
            stays,
        }),
        persist_bytes: limits.persist.map_or(usual.persist_bytes, |(_, mb)| mb << 20),
        kept: usual.kept.map(|kept| KeptConfig { bytes: disk_bytes, stays: stays(kept), ..kept }),
        pool_size: limits.pool.map_or(0, |(size, _)| size),
        session_ttl: limits.pool.map_or(usual.session_ttl, |(_, age)| age),
        idle_timeout: limits.idle_timeout,
        max_contexts: limits.max_contexts,
        text_budget: limits.text_budget,
        network: config.network.dialects.get(usual.realm.0).cloned(),
        network_of: config.network.sizes.clone(),
        browser: network::browser(config, limits),
        ..usual
    }
}

/// Returns the choices of the operator for one dialect, which include the timeouts that its realm allows.
pub(crate) fn options_of(config: &Config, dialect: &Dialect) -> Options {
    let limits = config.dialects.of(dialect.id);
    let RealmConfig { max_timeout, max_command_timeout, max_background, text_budget, browser, .. } =
        general(config, (dialect.realm)(), limits);
    Options {
        text_budget,
        browser: browser.is_some(),
        max_timeout: max_timeout.as_secs(),
        max_command_timeout: max_command_timeout.as_secs(),
        max_background: max_background.as_secs(),
        ..options(config)
    }
}

/// Returns the choices of the operator that concern all dialects.
pub(crate) fn options(config: &Config) -> Options {
    Options {
        default_context: config.dialects.default_context,
        default_size: config.dialects.microsandbox.default_flavor,
        underscores: config.dialects.underscores,
        volume_paths: config.dialects.microsandbox.volumes.iter().map(|volume| volume.written.clone()).collect(),
        ..Options::default()
    }
}

/// Tells the code of a conversation the address under which its files will be available.
pub(crate) fn set_file_base(engine: &mut EngineConfig, base: &str) {
    if let Some(realm) = engine.realms.iter_mut().find(|realm| realm.realm == dialects::conversation::REALM) {
        realm.env.insert("FILE_BASE_URL".into(), format!("{base}/files/{{key}}"));
    }
}

/// Returns a call of the server itself on behalf of a tenant.
pub(crate) fn call_of(tenant: Tenant, realm: Realm) -> Call {
    Call {
        tenant,
        realm,
        connection: None,
        cancel: CancellationToken::new(),
        events: EventSink::default(),
        memory: Hold::default(),
        stages: Stages::default(),
        found: FoundContext::default(),
    }
}

/// Returns how links to files are written, and how their signatures are checked.
pub(crate) fn links(config: &Config, base: String, file_secret: &[u8; 32]) -> (Links, Option<Signer>) {
    let signer = config.files.link_ttl.map(|_| Signer::new(file_secret));
    let expiring = signer.clone().zip(config.files.link_ttl).map(|(signer, ttl)| Expiring { signer, ttl, now: 0 });
    (Links { base: Some(base), expiring }, signer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, Sources};
    use testkit::scratch::Scratch;

    fn config(text: &str) -> Config {
        let dir = Scratch::new();
        let file = dir.write("sandpool.toml", text);
        let flags = vec![("config", file.display().to_string())];
        let environment = Environment::of(&[("HOME", "/home/u")]);
        Config::load(&Sources { environment, flags, is_root: false }).unwrap()
    }

    /// A call may ask for the time that the operator allows a run that asks for none, and a task gets that time.
    #[test]
    fn the_longest_timeout_is_the_same_for_calls_tasks_and_runs() {
        for (settings, most, background) in [
            ("timeout = 600", 1800, 14_400),
            ("timeout = 7200", 7200, 14_400),
            ("timeout = 60\nmax_timeout = \"2h\"\nmax_background = \"24h\"", 7200, 86_400),
            ("max_timeout = 90\nmax_background = 70", 90, 70),
            ("timeout = 20\nmax_timeout = 30\nmax_background = 10", 30, 10),
        ] {
            let config = config(&format!("[dialect.sandpool]\n{settings}"));
            let options = options_of(&config, dialect(&config));
            let of_options = [options.max_timeout, options.max_command_timeout, options.max_background];
            assert_eq!(of_options, [most, most, background], "{settings}");
            let engine = engine_config(&config, TransportKind::Http, [0; 32], None);
            let realm = engine.realm(dialects::sandpool::REALM).unwrap();
            let of_realm = [realm.max_timeout, realm.max_command_timeout, realm.max_background];
            assert_eq!(of_realm.map(|time| time.as_secs()), of_options, "{settings}");
        }
    }

    #[test]
    fn w67_tenants_that_can_write_to_the_same_workspace_share_no_packages() {
        let dir = Scratch::new();
        let (project, below) = (dir.0.join("project"), dir.0.join("project/below"));
        std::fs::create_dir_all(&below).unwrap();
        let mount = |host: &Path, guest: &str, rest: &str| {
            format!("[[mount]]\nhost = '{}'\nguest = '{guest}'\naccess = 'rw'\n{rest}\n", host.display())
        };
        let workspace = |tenants: &str| mount(&project, "/workspace", tenants);
        let of = |text: &str| {
            let mounts = mounts(&config(text));
            mounts.into_iter().filter(|mount| mount.volume.inside == Path::new(PACKAGES)).collect::<Vec<_>>()
        };
        let blue = workspace("tenants = ['blue']");
        let [packages] = &of(&blue)[..] else { panic!("one tenant has packages") };
        assert_eq!(packages.volume.host, project.join(".sandpool/packages"));
        assert_eq!(packages.tenants, Some(vec![Tenant("blue".into())]));
        assert_eq!(of(&workspace("")).len(), 1, "the local tenant");
        let own = mount(&dir.0, "/mnt/all", "tenants = ['blue']");
        assert_eq!(of(&format!("{blue}{own}")).len(), 1, "the same tenant may write there by another path");
        let beside = mount(&below, "/data", "tenants = ['red']");
        assert_eq!(of(&format!("{blue}{beside}")).len(), 1, "another directory");

        assert_eq!(of(&workspace("tenants = ['blue', 'red']")), []);
        assert_eq!(of(&workspace("tenants = ['*']")), []);
        assert_eq!(of(&format!("{blue}{}", workspace("tenants = ['red']"))), []);
        assert_eq!(of(&format!("{blue}{}", mount(&dir.0, "/data", "tenants = ['red']"))), []);
        assert_eq!(of(&format!("{blue}{}", mount(&project, "/data", "tenants = ['*']"))), []);
        let volumes = format!("[microsandbox]\nvolumes = ['{}:/shared/x:rw']\n", dir.0.display());
        assert_eq!(of(&format!("{blue}{volumes}")), []);
    }

    /// Each dialect's rules stand in one place; without settings the engine gets exactly these.
    #[test]
    fn without_settings_the_rules_are_those_of_the_dialects() {
        let engine = engine_config(&config(""), TransportKind::Http, [0; 32], None);
        for (made, mut usual) in engine.realms.into_iter().zip(dialects::realms()) {
            // Half of the memory is the browser's in every dialect that has one, and policies come from the settings.
            (usual.browser, usual.network) = (made.browser, made.network.clone());
            usual.network_of.clone_from(&made.network_of);
            assert_eq!(made, usual);
        }
    }
}
