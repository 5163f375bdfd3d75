//! Loads tenants, tokens, quotas, policies and certificates again while the server runs: on SIGHUP, on the operator's
//! command, and when the tenants file has changed. A configuration that is not valid changes nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use egress::Egress;
use engine::op::Quota;
use engine::{Engine, EngineConfig, Tenant};
use tokio::sync::{Mutex, mpsc};
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;

use super::serve::check_mounts;
use super::wiring::{self, TransportKind};
use super::{CommandEnv, Failed, network};
use crate::auth::{Auth, AuthConfig, AuthError, Identities, Quotas, TenantChanges};
use crate::config::{Config, Sources};
use telemetry::journal::JournalEntry;
use telemetry::observe::Observer;

/// Interval at which the server checks whether the tenants file has changed. It loads a changed file when the file has
/// stayed the same for this time.
const LOOK: Duration = Duration::from_secs(1);
/// Maximum time for reading all files. A file may be on a file system that hangs, or be a pipe that nobody writes to.
const READING: Duration = Duration::from_secs(20);
const METRICS_TOKEN: &str = "metrics.token";
/// Maximum number of names that a message lists.
const NAMES: usize = 20;

pub(crate) struct Reloader {
    sources: Arc<Sources>,
    /// The configuration with which the server started. It has the settings that only a restart can change.
    started: Config,
    auth: Arc<Auth>,
    /// Identifies those who may read the metrics, if these have their own token.
    readers: Option<Arc<Auth>>,
    engine: Engine,
    observer: Arc<Observer>,
    applied: Mutex<Applied>,
}

/// The configuration that is in force, and the version of the tenants file that was loaded last.
struct Applied {
    config: Config,
    egress: Option<Egress>,
    tenants_file: Option<FileVersion>,
}

/// A version of a file: device, inode, size, and the times of its last changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion(u64, u64, u64, [i64; 4]);

impl FileVersion {
    fn of(path: Option<&Path>) -> Option<Self> {
        let found = std::fs::metadata(path?).ok()?;
        let times = [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()];
        Some(Self(found.dev(), found.ino(), found.size(), times))
    }
}

/// A configuration that was read and checked completely, and is not in force yet.
struct Checked {
    config: Config,
    identities: Identities,
    readers: Option<Identities>,
    egress: Option<Egress>,
    egress_changes: Vec<&'static str>,
    engine: EngineConfig,
}

impl Checked {
    fn read(sources: &Sources, auth: &Auth, readers: Option<&Auth>, egress: Option<&Egress>) -> Result<Self, Failed> {
        let config = Config::load(sources)?;
        let identities = auth.reopen(AuthConfig::of(&config)?)?;
        let readers = match (readers, AuthConfig::of_metrics(&config)?) {
            (Some(readers), Some(new)) => Some(readers.reopen(new)?),
            (None, None) => None,
            _ => {
                let why =
                    "whether the metrics have a token of their own cannot change while the server runs; restart it";
                return Err(AuthError::Setting(why.into()).into());
            }
        };
        let (egress, egress_changes) = network::reload(&config, egress)?;
        // The engine takes only quotas and networks from it, so the secret of the links does not matter.
        let mut engine = wiring::engine_config(&config, TransportKind::Http, [0; 32], egress.clone());
        engine.quotas = quotas(identities.tenants());
        Ok(Self { config, identities, readers, egress, egress_changes, engine })
    }
}

/// Returns the quotas that the engine enforces, by tenant.
pub(crate) fn quotas(tenants: Vec<(Tenant, Quotas)>) -> BTreeMap<Tenant, Quota> {
    tenants.into_iter().map(|(tenant, quotas)| (tenant, quotas.for_engine())).collect()
}

/// The effects of a reload.
#[derive(Debug, Default)]
pub(crate) struct Reloaded {
    tenants: TenantChanges,
    /// Number of contexts that ended because their tenants were removed.
    ended: usize,
    /// Settings whose new values are in force.
    settings: Vec<&'static str>,
    egress: Vec<&'static str>,
    /// Settings whose new values need a restart.
    restart: Vec<&'static str>,
}

impl fmt::Display for Reloaded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let TenantChanges { added, removed, changed, .. } = &self.tenants;
        let changed: Vec<String> = changed.iter().map(|(name, what)| format!("{name} ({})", what.join(", "))).collect();
        let settings = |keys: &[&str]| keys.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>();
        let ended = if removed.is_empty() { String::new() } else { format!(" ({} contexts ended)", self.ended) };
        let egress: Vec<String> = self.egress.iter().map(|part| (*part).to_owned()).collect();
        let parts = [
            ("tenants added: ", added, ""),
            ("tenants removed: ", removed, ended.as_str()),
            ("tenants changed: ", &changed, ""),
            ("settings changed: ", &settings(&self.settings), ""),
            ("new for sandboxes that are created from now on: ", &egress, ""),
            ("only a restart applies: ", &settings(&self.restart), ""),
        ];
        let parts = parts.iter().filter(|(_, names, _)| !names.is_empty());
        let parts: Vec<String> = parts.map(|(what, names, end)| format!("{what}{}{end}", listed(names))).collect();
        f.write_str(if parts.is_empty() { "nothing has changed" } else { "" })?;
        f.write_str(&parts.join("; "))
    }
}

fn listed(names: &[String]) -> String {
    let more = names.len().saturating_sub(NAMES);
    let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
    names[..names.len() - more].join(", ") + &rest
}

impl Reloader {
    pub(super) fn new(
        context: &CommandEnv,
        (auth, readers): (Arc<Auth>, Option<Arc<Auth>>),
        engine: Engine,
        observer: Arc<Observer>,
        egress: Option<Egress>,
    ) -> Self {
        let config = context.config.clone();
        let tenants_file = FileVersion::of(config.auth.tenants.as_deref());
        let (sources, started) = (context.sources.clone(), config.clone());
        let applied = Mutex::new(Applied { config, egress, tenants_file });
        Self { sources, started, auth, readers, engine, observer, applied }
    }

    /// Reads the configuration and all files that it names again, and applies what can change while the server runs.
    /// `cause` is the reason that the log and the journal show. If this fails, nothing changes, and the error says what
    /// is wrong.
    pub(crate) async fn reload(&self, cause: &str) -> Result<Reloaded, String> {
        let mut applied = self.applied.lock().await;
        let result = self.apply(&mut applied).await.map_err(|Failed(why)| why);
        match &result {
            Ok(done) => {
                tracing::info!("reloaded ({cause}): {done}");
                self.record("reloaded", None, format!("{cause}: {done}"));
                self.record_tenants(&done.tenants);
            }
            Err(why) => {
                tracing::error!("not reloaded ({cause}), everything stays as it was: {why}");
                self.record("reload_failed", None, format!("{cause}: {why}"));
            }
        }
        result
    }

    async fn apply(&self, applied: &mut Applied) -> Result<Reloaded, Failed> {
        applied.tenants_file = FileVersion::of(applied.config.auth.tenants.as_deref());
        let (sources, egress) = (self.sources.clone(), applied.egress.clone());
        let (auth, readers) = (self.auth.clone(), self.readers.clone());
        let reading =
            tokio::task::spawn_blocking(move || Checked::read(&sources, &auth, readers.as_deref(), egress.as_ref()));
        let late = |_| Failed(format!("the files of the configuration could not be read within {READING:?}"));
        let Checked { config, identities, readers, egress, egress_changes, engine } =
            tokio::time::timeout(READING, reading).await.map_err(late)???;
        if let Err(Failed(why)) = check_mounts(&config, self.auth.is_required(), &identities.tenants()) {
            tracing::warn!("with these tenants the server would not start again: {why}");
        }
        // From here on nothing can fail. Tokens come first: what a removed tenant begins afterwards would stay.
        let tenants = self.auth.replace(identities);
        self.observer.metrics.configure_tenants(self.auth.tenants().into_iter().map(|(tenant, _)| tenant.0));
        // A subject of the identity provider may have had a name that belongs to a tenant with a token now.
        for name in &tenants.claimed {
            self.engine.remove_tenant(&Tenant(name.clone()));
        }
        let metrics = self.readers.as_ref().zip(readers).map(|(readers, new)| readers.replace(new));
        self.engine.reload(&engine);
        let ended = tenants.removed.iter().map(|name| self.engine.remove_tenant(&Tenant(name.clone()))).sum();
        let keys = |before: &Config, reloaded: bool| {
            let changes = before.effective.changes(&config.effective).into_iter();
            changes.filter(|setting| setting.is_reloaded() == reloaded).map(|setting| setting.key).collect::<Vec<_>>()
        };
        let (mut settings, restart) = (keys(&applied.config, true), keys(&self.started, false));
        // The file of the token may have another token, although its name is the same.
        if metrics.is_some_and(|changes| !changes.changed.is_empty()) && !settings.contains(&METRICS_TOKEN) {
            settings.push(METRICS_TOKEN);
        }
        if config.auth.tenants != applied.config.auth.tenants {
            applied.tenants_file = FileVersion::of(config.auth.tenants.as_deref());
        }
        (applied.config, applied.egress) = (config, egress);
        Ok(Reloaded { tenants, ended, settings, egress: egress_changes, restart })
    }

    fn record_tenants(&self, TenantChanges { added, removed, changed, .. }: &TenantChanges) {
        added.iter().for_each(|name| self.record("tenant_added", Some(name), String::new()));
        removed.iter().for_each(|name| self.record("tenant_removed", Some(name), String::new()));
        changed.iter().for_each(|(name, what)| self.record("tenant_changed", Some(name), what.join(", ")));
    }

    fn record(&self, event: &'static str, tenant: Option<&String>, why: String) {
        if let Some(journal) = self.observer.journal() {
            let (tenant, why) = (tenant.cloned(), Some(why).filter(|why| !why.is_empty()));
            journal.record_own(JournalEntry { tenant, why, ..JournalEntry::event(event) });
        }
    }

    /// Returns the absolute path of the tenants file, if there is one.
    pub(crate) async fn tenants_file(&self) -> Option<PathBuf> {
        let path = self.applied.lock().await.config.auth.tenants.clone()?;
        std::path::absolute(path).ok()
    }

    /// Returns the version of the tenants file if it is not the one that was loaded last.
    async fn new_tenants_file(&self) -> Option<Option<FileVersion>> {
        let applied = self.applied.lock().await;
        let found = FileVersion::of(applied.config.auth.tenants.as_deref());
        (found != applied.tenants_file).then_some(found)
    }
}

/// Reloads on each signal, and when the tenants file has changed, until the server stops.
pub(crate) async fn keep_current(reloader: Arc<Reloader>, mut signals: mpsc::Receiver<()>, stop: CancellationToken) {
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut changed = None;
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            Some(()) = signals.recv() => drop(reloader.reload("SIGHUP").await),
            _ = looks.tick() => {
                // A file that is still being written is left alone.
                let found = reloader.new_tenants_file().await;
                if found.is_some() && found == changed {
                    let _ = reloader.reload("the tenants file has changed").await;
                }
                changed = found;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::find;

    #[test]
    fn the_effects_of_a_reload_are_one_sentence() {
        assert_eq!(Reloaded::default().to_string(), "nothing has changed");
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let many: Vec<String> = (0..25).map(|number| format!("t{number}")).collect();
        let changed = vec![("blue".to_owned(), vec!["token", "network"])];
        let done = Reloaded {
            tenants: TenantChanges { added: many, removed: names(&["green"]), changed, ..TenantChanges::default() },
            ended: 2,
            settings: vec!["quota.runs"],
            egress: vec!["secrets"],
            restart: vec!["serve.listen", "floor"],
        };
        let text = done.to_string();
        assert!(text.starts_with("tenants added: t0, t1, ") && text.contains(", t19 and 5 more; "), "{text}");
        assert!(
            text.ends_with(
                "tenants removed: green (2 contexts ended); tenants changed: blue (token, network); settings changed: \
                 `quota.runs`; new for sandboxes that are created from now on: secrets; only a restart applies: \
                 `serve.listen`, `floor`"
            ),
            "{text}"
        );
    }

    #[test]
    fn it_is_known_of_each_setting_whether_a_reload_applies_it() {
        let is_reloaded = |key: &str| find(key).unwrap_or_else(|| panic!("{key}")).is_reloaded();
        for key in [
            "auth.tenants",
            "auth.token",
            "quota.contexts",
            "network.policy",
            "dialect.sandpool.network",
            METRICS_TOKEN,
        ] {
            assert!(is_reloaded(key), "{key}");
        }
        for key in [
            "auth.none",
            "quota.call_memory_mb",
            "serve.listen",
            "mount",
            "dialect.sandpool.memory_mb",
            "metrics.listen",
        ] {
            assert!(!is_reloaded(key), "{key}");
        }
    }
}
