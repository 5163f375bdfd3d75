//! The server's end of the socket. It accepts only root and its own user, limits the length of their requests, and
//! carries out their commands.

use std::fs::{DirBuilder, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use engine::{ContextView, Engine};
use serde_json::{Value, json};
use telemetry::journal::JournalEntry;
use telemetry::observe::Observer;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::{AdminCommand, AdminReply, AdminRequest, DIRECTORY, SOCKET, VERSION};
use crate::auth::Auth;
use crate::cli::Reloader;

/// Maximum length of a request.
const LONGEST_REQUEST: u64 = 16 << 10;
/// Maximum time for a request to arrive, and for a client to take a line of the answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum number of connections at once.
const CONNECTIONS: usize = 16;
/// Interval between the reports of a drain.
const REPORT: Duration = Duration::from_secs(1);

/// The listening socket. Dropping it removes it from the state directory.
pub(crate) struct AdminSocket {
    listener: UnixListener,
    path: PathBuf,
}

impl AdminSocket {
    /// Binds the socket. No other server may use the state directory, because this replaces the socket of an earlier one.
    pub(crate) fn bind(state_dir: &Path) -> io::Result<Self> {
        let dir = state_dir.join(DIRECTORY);
        DirBuilder::new().recursive(true).mode(0o700).create(&dir)?;
        std::fs::set_permissions(&dir, Permissions::from_mode(0o700))?;
        let path = dir.join(SOCKET);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // The whole path may be too long for a socket address.
        let dir = File::open(&dir)?;
        let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()))?;
        std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
        Ok(Self { listener, path })
    }
}

impl Drop for AdminSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// The parts of the server that the operator's commands need.
pub(crate) struct AdminServer {
    pub engine: Engine,
    pub auth: Arc<Auth>,
    pub observer: Arc<Observer>,
    pub reloader: Arc<Reloader>,
    /// Token that ends the server in an orderly way.
    pub stop: CancellationToken,
}

impl AdminServer {
    /// Serves commands until `end` is cancelled.
    pub(crate) async fn serve(self, socket: AdminSocket, end: CancellationToken) {
        let (server, connections) = (Arc::new(self), Arc::new(Semaphore::new(CONNECTIONS)));
        while let Some(accepted) = end.run_until_cancelled(socket.listener.accept()).await {
            let stream = match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!("the socket for `sandpool admin`: {error}");
                    tokio::time::sleep(REPORT).await;
                    continue;
                }
            };
            let Ok(permit) = connections.clone().try_acquire_owned() else { continue };
            let (server, end) = (server.clone(), end.clone());
            tokio::spawn(async move {
                let answered = end.run_until_cancelled(server.answer(stream)).await;
                if let Some(Err(error)) = answered {
                    tracing::debug!(%error, "a client of `sandpool admin` went away");
                }
                drop(permit);
            });
        }
    }

    async fn answer(&self, stream: UnixStream) -> io::Result<()> {
        let peer = stream.peer_cred()?.uid();
        let (read, mut client) = stream.into_split();
        let own = rustix::process::geteuid().as_raw();
        if peer != own && peer != 0 {
            tracing::warn!("user {peer} may not use `sandpool admin`; the server runs as user {own}");
            return send(&mut client, &AdminReply::Failed("only root and the user of the server may do this".into()))
                .await;
        }
        let mut line = Vec::new();
        let mut request = BufReader::new(read.take(LONGEST_REQUEST));
        tokio::time::timeout(PATIENCE, request.read_until(b'\n', &mut line)).await??;
        let reply = match parse(&line) {
            Ok(command) => self.perform(command, &mut client).await?,
            Err(why) => Err(why),
        };
        let reply = match reply {
            Ok(value) => AdminReply::Done(value),
            Err(why) => AdminReply::Failed(why),
        };
        send(&mut client, &reply).await
    }

    /// Carries out a command. The outer error means that the client is gone.
    async fn perform(&self, command: AdminCommand, client: &mut OwnedWriteHalf) -> io::Result<Result<Value, String>> {
        Ok(match command {
            AdminCommand::Contexts { id, tenant, dialect } => {
                let all = self.engine.contexts().await;
                let is_meant = |view: &&ContextView| is_meant(view, id.as_deref(), [&tenant, &dialect]);
                Ok(all.iter().filter(is_meant).map(shown).collect())
            }
            AdminCommand::Stop { id, tenant, dialect } => self.stop_context(&id, [&tenant, &dialect]).await,
            AdminCommand::Drain { exit } => {
                self.drain(client).await?;
                if exit {
                    self.record("drained", "the server ends");
                    self.stop.cancel();
                }
                Ok(Value::Null)
            }
            AdminCommand::Undrain => {
                self.engine.set_draining(false);
                tracing::info!("the server accepts new work again");
                self.record("undrain", "");
                Ok(Value::Null)
            }
            AdminCommand::Reload => {
                self.reloader.reload("sandpool admin").await.map(|done| Value::String(done.to_string()))
            }
            AdminCommand::Tenants => Ok(self.tenants().await),
            AdminCommand::WriteUsage => {
                self.observer.record_usage(self.engine.take_usage().await);
                match self.observer.journal() {
                    Some(journal) => {
                        let journal = journal.clone();
                        let _ = tokio::task::spawn_blocking(move || journal.flush()).await;
                        Ok(Value::Null)
                    }
                    None => {
                        Err("this server writes no journal (`journal.enabled`), so it does not record its use".into())
                    }
                }
            }
        })
    }

    async fn stop_context(&self, id: &str, of: [&Option<String>; 2]) -> Result<Value, String> {
        let all = self.engine.contexts().await;
        let found: Vec<&ContextView> = all.iter().filter(|view| is_meant(view, Some(id), of)).collect();
        let [view] = found[..] else {
            let owners: Vec<String> =
                found.iter().map(|view| format!("--tenant {} --of-dialect {}", view.tenant.0, view.realm.0)).collect();
            return Err(match owners.is_empty() {
                true => format!("there is no context `{id}`"),
                false => format!("several contexts have the id `{id}`; say which one: {}", owners.join(", or ")),
            });
        };
        self.engine.stop_context(&view.tenant, view.realm, id).map_err(|error| error.to_string())?;
        tracing::info!(context = id, tenant = view.tenant.0, "the operator stopped a context");
        self.record("stop", &format!("context {id} of tenant {}", view.tenant.0));
        Ok(shown(view))
    }

    /// Refuses new work, and reports to the client how much work is still in progress until it has ended.
    async fn drain(&self, client: &mut OwnedWriteHalf) -> io::Result<()> {
        self.engine.set_draining(true);
        tracing::info!("draining: the server accepts no new work");
        self.record("drain", "");
        loop {
            let (calls, background) = self.engine.work();
            if calls + background == 0 {
                tracing::info!("drained: no call and no background run is in progress");
                return Ok(());
            }
            let left = format!("waiting for {calls} calls and {background} background runs");
            send(client, &AdminReply::Progress(left)).await?;
            tokio::time::sleep(REPORT).await;
        }
    }

    async fn tenants(&self) -> Value {
        let contexts = self.engine.contexts().await;
        let tenant = |(tenant, quotas): (engine::Tenant, crate::auth::Quotas)| {
            let contexts = contexts.iter().filter(|view| view.tenant == tenant).count();
            let tokens = self.auth.tokens_of(&tenant);
            let policies = quotas.network.iter().flat_map(|policy| &policy.tables).map(|table| &table.name);
            json!({
                "name": tenant.0,
                "tokens": tokens,
                "contexts": contexts,
                "quotas": {
                    "contexts": quotas.contexts,
                    "runs": quotas.runs,
                    "memory_mb": quotas.memory_mb,
                    "calls_per_second": quotas.calls_per_second,
                },
                "network": policies.collect::<Vec<_>>(),
            })
        };
        let tenants: Vec<Value> = self.auth.tenants().into_iter().map(tenant).collect();
        json!({ "file": self.reloader.tenants_file().await, "tenants": tenants })
    }

    fn record(&self, did: &str, why: &str) {
        if let Some(journal) = self.observer.journal() {
            let why = Some(why.to_owned()).filter(|why| !why.is_empty());
            journal.record_own(JournalEntry { did: Some(did.into()), why, ..JournalEntry::event("admin") });
        }
    }
}

fn parse(line: &[u8]) -> Result<AdminCommand, String> {
    if line.last() != Some(&b'\n') {
        return Err(format!("a request is one line of at most {LONGEST_REQUEST} bytes"));
    }
    let version = serde_json::from_slice::<Value>(line).ok().and_then(|request| request.get("version")?.as_u64());
    match version {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => {
            return Err(format!(
                "the server speaks version {VERSION} of this protocol, and the request has version {version}"
            ));
        }
        None => return Err("a request is a JSON object with `version` and `command`".into()),
    }
    serde_json::from_slice::<AdminRequest>(line).map(|request| request.command).map_err(|error| error.to_string())
}

async fn send(client: &mut OwnedWriteHalf, reply: &AdminReply) -> io::Result<()> {
    let mut line = serde_json::to_vec(reply)?;
    line.push(b'\n');
    tokio::time::timeout(PATIENCE, client.write_all(&line)).await?
}

fn is_meant(view: &ContextView, id: Option<&str>, [tenant, dialect]: [&Option<String>; 2]) -> bool {
    id.is_none_or(|id| view.info.id == id)
        && tenant.as_ref().is_none_or(|tenant| view.tenant.0 == *tenant)
        && dialect.as_ref().is_none_or(|dialect| view.realm.0 == dialect)
}

/// Returns a context as `sandpool admin` shows it. Figures that are not known, and limits that nothing enforces, are
/// absent. The key of its files is left out, because it is the permission to read them.
fn shown(view: &ContextView) -> Value {
    let info = &view.info;
    let state = match (view.runs, view.has_sandbox) {
        (1.., _) => "running",
        (0, true) => "idle",
        (0, false) => "lost",
    };
    let mut shown = json!({
        "id": info.id,
        "name": info.name,
        "tenant": view.tenant.0,
        "dialect": view.realm.0,
        "state": state,
        "runs": view.runs,
        "language": info.language.name(),
        "created": text::iso8601(info.created_at.try_into().unwrap_or(i64::MAX)),
        "last_used": text::iso8601(info.last_used.try_into().unwrap_or(i64::MAX)),
        "age_seconds": text::unix_now().saturating_sub(info.created_at),
        "network": view.policies,
        "network_bytes": view.network_bytes,
        "mounts": info.mounts.iter().map(|mount| mount.inside.display().to_string()).collect::<Vec<_>>(),
        "isolation": format!("{:?}", info.isolation.level).to_lowercase(),
        "limits": { "memory_bytes": info.limits.memory_bytes, "disk_bytes": info.limits.disk_bytes },
    });
    if !info.isolation.unheld.cpu {
        shown["limits"]["cpus"] = (f64::from(info.limits.cpu_millis) / 1000.0).into();
    }
    if !info.isolation.unheld.processes {
        shown["limits"]["pids"] = info.limits.pids.into();
    }
    let stats = view.stats.unwrap_or_default();
    let known = [
        ("memory_bytes", stats.memory_bytes.map(Value::from)),
        ("cpu_seconds", stats.cpu_usec.map(|micros| Value::from(micros as f64 / 1e6))),
        ("processes", stats.pids.map(Value::from)),
        ("expires_in_seconds", view.expires_in.map(|time| Value::from(time.as_secs()))),
    ];
    for (name, value) in known {
        if let Some(value) = value {
            shown[name] = value;
        }
    }
    shown
}
