//! Puts the parts together: configuration to engine, the native back end and its guest.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use engine::op::Quota;
use engine::{Engine, EngineConfig, Op, RealmConfig};
use sandbox::Backend;
use sandbox::native::{self, GuestBinary, Launcher, NativeConfig, spawn_launcher};

use sha2::{Digest, Sha256};

use super::Failed;
use crate::config::{Config, DialectLimits, Dialects, Secret};
use crate::mcp::{Execute, Executing};

/// The native back end's launcher: a process of its own, started while this one still has a single thread.
pub struct Native {
    launcher: Launcher,
    config: NativeConfig,
}

impl Native {
    pub fn launch(config: &Config) -> Result<Self, Failed> {
        let guest = guest()?;
        let launcher = spawn_launcher().map_err(|error| Failed(format!("cannot start the launcher: {error}")))?;
        let config = NativeConfig {
            state_dir: config.state_dir.clone(),
            runtime_dir: None,
            guest,
            label: "sandpool".into(),
            // A client starts a server of its own, so several share the directory.
            exclusive: false,
            mode: None,
            floor: config.floor,
        };
        Ok(Self { launcher, config })
    }

    /// What holds less than it could is said once, here.
    pub async fn start(self) -> Result<Arc<dyn Backend>, Failed> {
        let (native, isolation) = native::Native::start(self.launcher, self.config).await?;
        if !isolation.missing.is_empty() {
            let names: Vec<&str> = isolation.missing.iter().filter_map(|missing| missing.split(':').next()).collect();
            let level = format!("{:?}", isolation.level).to_lowercase();
            tracing::warn!(
                "isolation level `{level}`, without: {}; `sandpool doctor` says what to do",
                names.join(", ")
            );
        }
        Ok(Arc::new(native))
    }
}

/// The guest's program: built in, or next to ours in a development tree.
#[cfg(embedded_guest)]
fn guest() -> Result<GuestBinary, Failed> {
    Ok(GuestBinary::Bytes(include_bytes!(concat!(env!("OUT_DIR"), "/guest"))))
}

#[cfg(not(embedded_guest))]
fn guest() -> Result<GuestBinary, Failed> {
    let own = std::env::current_exe().map_err(|error| Failed(format!("cannot find the own executable: {error}")))?;
    Ok(GuestBinary::Path(own.with_file_name("sandpool-guest")))
}

impl Execute for Engine {
    fn execute<'a>(&'a self, call: &'a engine::Call, op: Op) -> Executing<'a> {
        Box::pin(self.execute(call, op))
    }
}

/// What the settings mean for the engine: a realm for each dialect. The pool is that of the dialect served by default.
pub fn engine_config(config: &Config) -> EngineConfig {
    let Dialects { sandpool, agentrun, microsandbox, workbench, conversation, sessions, .. } = &config.dialects;
    let realms = vec![
        realm(RealmConfig::sandpool(), sandpool),
        realm(RealmConfig::agentrun(), agentrun),
        RealmConfig {
            evict_idle: sessions.evict,
            max_total_memory_bytes: sessions.max_total_memory_mb.map(|mb| mb << 20),
            sweep_interval: sessions.cleanup_interval,
            volumes: sessions.volumes.clone(),
            runs_at_once: microsandbox.max_contexts,
            ..realm(RealmConfig::microsandbox(), microsandbox)
        },
        realm(RealmConfig::workbench(), workbench),
        realm(RealmConfig::conversation(), conversation),
    ];
    let usual = EngineConfig::default();
    let served = realms.iter().find(|realm| realm.realm.0 == config.dialect).map(|realm| realm.realm);
    let quota = Quota {
        contexts: config.quota.contexts,
        runs: config.quota.runs,
        memory_bytes: config.quota.memory_mb.map(|mb| mb << 20),
    };
    let shutdown_grace = agentrun.shutdown_grace;
    EngineConfig { realms, quota, shutdown_grace, pool_realm: served.unwrap_or(usual.pool_realm), ..usual }
}

fn realm(usual: RealmConfig, limits: &DialectLimits) -> RealmConfig {
    let memory_bytes = limits.memory_mb << 20;
    // Within the bounds of the settings this is exact enough and fits.
    let cpu_millis = (limits.cpus * 1000.0).round() as u32;
    let disk_bytes = limits.disk_mb << 20;
    RealmConfig {
        timeout: limits.timeout,
        limits: sandbox::Limits { memory_bytes, cpu_millis, pids: limits.pids, disk_bytes, ..usual.limits },
        // Where the document means one budget for all contexts.
        group_memory_bytes: usual.group_memory_bytes.map(|_| memory_bytes),
        group_cpu_millis: usual.group_cpu_millis.map(|_| cpu_millis),
        kept: usual.kept.map(|kept| engine::KeptConfig { bytes: disk_bytes, ..kept }),
        pool_size: limits.pool_size,
        session_ttl: limits.session_ttl,
        idle_timeout: limits.idle_timeout,
        max_contexts: limits.max_contexts,
        text_budget: limits.text_budget,
        ..usual
    }
}

/// What the addresses of files are made with: the operator's, or one that is made once and kept.
pub fn file_secret(config: &Config) -> Result<[u8; 32], Failed> {
    if let Some(Secret(text)) = &config.files.secret {
        return Ok(Sha256::digest(text.as_bytes()).into());
    }
    let path = config.state_dir.join("file-secret");
    let failed = |error: io::Error| Failed(format!("`{}`: {error}", path.display()));
    if let Some(secret) = read_secret(&path).map_err(failed)? {
        return Ok(secret);
    }
    let mut secret = [0; 32];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty()).map_err(|e| failed(e.into()))?;
    std::fs::create_dir_all(&config.state_dir).map_err(failed)?;
    // Complete or absent: it appears by a link, and of two servers that start at once one is first.
    let half = config.state_dir.join(format!(".file-secret-{}", uuid::Uuid::new_v4().simple()));
    let made = write_private(&half, &secret).and_then(|()| std::fs::hard_link(&half, &path));
    let _ = std::fs::remove_file(&half);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => read_secret(&path).map_err(failed)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into())),
    }
}

fn read_secret(path: &Path) -> io::Result<Option<[u8; 32]>> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let wrong = || io::Error::other("is not a secret of 32 bytes; remove it, and a new one is made");
            bytes.try_into().map(Some).map_err(|_| wrong())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
