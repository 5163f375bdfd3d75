//! `sandpool serve` serves MCP over HTTP, with every dialect and for any number of tenants.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use dialects::{Dialect, Lang, Links, Options};
use engine::op::Health;
use engine::{Engine, Memory, Op, Outcome, Realm, Tenant};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use mcp::Caller;
use mcp::http::{self as transport, App, Authenticator, Counters, Endpoint, HttpOptions, Peer};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde_json::{Value, json};
use telemetry::journal::{Journal, JournalConfig, JournalEntry};
use telemetry::logging::lines;
use telemetry::metrics::{self, Gauges, Metrics};
use telemetry::observe::Observer;
use telemetry::otel::Otel;
use text::unix_now;
use tokio::net::TcpListener;
use tokio::sync::broadcast::error::RecvError;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::file_secret::file_secret;
use super::otel;
use super::prepare::{end_when_useless, prepare, useless_or};
use super::reload::{self, Reloader};
use super::signals::Signals;
use super::stdio::NoService;
use super::wiring::{self, Native, TransportKind};
use super::{CommandEnv, CommandResult, Failed, block_on, network};
use crate::admin::{AdminServer, AdminSocket};
use crate::auth::{self, Auth, AuthConfig, Quotas};
use crate::config::{self, ALL_TENANTS, Config};
use crate::handler::{Handlers, Surface};

/// Serve MCP over HTTP
///
/// `/mcp` serves the default dialect, and `/mcp/<dialect>` serves each dialect. Without a token, only this machine can connect.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_: Args, context: CommandEnv) -> CommandResult {
    let auth = Auth::open(AuthConfig::of(&context.config)?)?;
    let readers = AuthConfig::of_metrics(&context.config)?.map(Auth::open).transpose()?;
    check_mounts(&context.config, auth.is_required(), &auth.tenants())?;
    let native = Native::launch(&context.config, TransportKind::Http)?;
    sandbox::native::return_large_blocks();
    block_on(serve(context, Arc::new(auth), readers.map(Arc::new), native))
}

/// Serves until it is told to stop. `readers` identifies those who may read the metrics, if these have their own token.
async fn serve(context: CommandEnv, auth: Arc<Auth>, readers: Option<Arc<Auth>>, native: Native) -> CommandResult {
    let (signals, reloads) = Signals::listen_for_reloads()?;
    let config = &context.config;
    auth.start();
    let options = http_options(config, &auth);
    options.check().map_err(Failed)?;
    let allowed = |address| auth::bind_allowed(address, auth.is_required(), config.auth.none);
    let (listener, address) = listen(&config.serve.listen, allowed).await?;
    let for_metrics = match &config.metrics.listen {
        Some(wanted) => Some(listen(wanted, |address| metrics_allowed(address, readers.is_some())).await?),
        None => None,
    };
    let secret = file_secret(config)?;
    let (backend, isolation) = native.start().await?;
    let back_end = json!({ "name": backend.name(), "level": wiring::level(&isolation) });
    let egress = network::egress(config)?;
    let mut engine_config = wiring::engine_config(config, TransportKind::Http, secret, egress.clone());
    engine_config.quotas = reload::quotas(auth.tenants());
    let base = public_url(config, address);
    wiring::set_file_base(&mut engine_config, &base);
    let engine = Engine::new(engine_config, backend);
    otel::start(&context)?;
    let observer = Arc::new(observer(config, &engine)?.with_otel(context.otel.clone()));
    observer.metrics.configure_tenants(auth.tenants().into_iter().map(|(tenant, _)| tenant.0));
    let no_more_notices = CancellationToken::new();
    let watching = tokio::spawn(watch(engine.clone(), observer.clone(), no_more_notices.clone()));

    let (links, signer) = wiring::links(config, base.clone(), &secret);
    let counters = Counters::default();
    let otel = context.otel.clone();
    let server =
        Server { engine: engine.clone(), observer: observer.clone(), counters, back_end, otel, started: unix_now() };
    let watched = |auth: Arc<Auth>| Arc::new(auth::Watched { auth, observer: observer.clone() });
    let (authenticator, watched_readers) = (watched(auth.clone()), readers.clone().map(watched));
    let lang = config.lang.as_deref().map(str::parse).transpose().map_err(Failed)?;
    let routes = match &for_metrics {
        Some(_) => server.routes(auth.clone(), signer),
        None => {
            let readers: Arc<dyn Authenticator> = watched_readers.clone().unwrap_or_else(|| authenticator.clone());
            server.routes(auth.clone(), signer).merge(server.metrics_route(Some(readers)))
        }
    };
    let app = App {
        options: options.clone(),
        counters: server.counters.clone(),
        log: lines::log_http,
        authenticator,
        endpoints: server.endpoints(config, lang, &links),
        default: config.dialect.clone(),
        routes,
    };

    let stop = signals.first.child_token();
    let preparing = tokio::spawn(prepare(engine.clone(), context.clone(), stop.clone(), observer.clone()));
    let reloader = Reloader::new(&context, (auth.clone(), readers), engine.clone(), observer.clone(), egress);
    let reloader = Arc::new(reloader);
    tokio::spawn(reload::keep_current(reloader.clone(), reloads, stop.clone()));
    let admin = AdminServer {
        engine: engine.clone(),
        auth: auth.clone(),
        observer: observer.clone(),
        reloader,
        stop: stop.clone(),
    };
    let administering = administer(admin, &config.state_dir, no_more_notices.clone());
    tokio::spawn(meter(engine.clone(), observer.clone(), stop.clone()));
    welcome(config, &auth, address, &base);
    let reading = for_metrics.map(|(listener, address)| {
        tracing::info!("metrics: http://{address}/metrics");
        let options = metrics_options(options, watched_readers.is_none());
        tokio::spawn(server.clone().serve_metrics(listener, options, watched_readers, stop.clone()))
    });
    tokio::spawn(server.clone().export_metrics(stop.clone()));
    let now = signals.second.clone();
    let grace = wiring::shutdown_grace(config);
    let stop_requested = tokio::spawn(announce_stop(engine.clone(), stop.clone(), grace));
    tokio::spawn(return_memory(stop.clone()));
    let useless = tokio::spawn(end_when_useless(engine.clone(), stop.clone()));
    transport::serve(listener, app, stop.clone(), now.clone()).await;
    // Calls and the work behind them share one grace period.
    let left = stop_requested.await.map_or(Duration::ZERO, |at| grace.saturating_sub(at.elapsed()));
    tokio::select! {
        () = engine.shutdown(left) => {}
        () = async { now.cancelled().await; engine.shutdown(Duration::ZERO).await } => {}
    }
    if let Some(reading) = reading {
        let _ = reading.await;
    }
    let prepared = preparing.await.map_err(Failed::from).and_then(|prepared| prepared);
    let prepared = useless_or(useless, prepared).await;
    no_more_notices.cancel();
    let _ = watching.await;
    if let Some(administering) = administering {
        let _ = administering.await;
    }
    observer.record_usage(engine.take_usage().await);
    if let Some(journal) = observer.journal() {
        journal.record_own(JournalEntry::event("server_stopped"));
        journal.close();
    }
    tracing::info!("stopped");
    otel::finish(&context);
    prepared.map(|()| ExitCode::SUCCESS)
}

/// Starts to serve the operator's commands, until `end` is cancelled. Without a socket the server works all the same.
fn administer(admin: AdminServer, state_dir: &Path, end: CancellationToken) -> Option<JoinHandle<()>> {
    match AdminSocket::bind(state_dir) {
        Ok(socket) => Some(tokio::spawn(admin.serve(socket, end))),
        Err(error) => {
            tracing::warn!("`sandpool admin` does not work, because its socket cannot be made: {error}");
            None
        }
    }
}

/// Waits until the server is told to stop, and logs what that ends. Returns the time at which it was told.
async fn announce_stop(engine: Engine, stop: CancellationToken, grace: Duration) -> Instant {
    stop.cancelled().await;
    let contexts: usize = engine.counts().contexts.values().sum();
    tracing::info!("stopping: {contexts} contexts end; calls in progress have up to {grace:?}");
    Instant::now()
}

/// Refuses mounts that name no tenant on a server with several tenants, and mounts for tenants that do not exist. A tenant
/// gets only directories that the configuration names for it.
pub(crate) fn check_mounts(config: &Config, needs_token: bool, known: &[(Tenant, Quotas)]) -> Result<(), Failed> {
    let config::Auth { tenants, jwks, none, .. } = &config.auth;
    let everybody = *none && !needs_token;
    for mount in &config.mounts {
        let wrong = |why: &str| Err(Failed(format!("`mount`: `{}`: {why}", mount.volume.host.display())));
        if mount.tenants.is_empty() && (tenants.is_some() || jwks.is_some() || everybody) {
            return wrong(
                "it does not say which tenants may use it; write it as `[[mount]]` with `tenants = [\"NAME\"]` (`local` is \
                 the tenant of `auth.token` and of `--no-auth`, `*` stands for all)",
            );
        }
        let exists = |name: &str| {
            jwks.is_some()
                || [ALL_TENANTS, &Tenant::local().0].contains(&name)
                || known.iter().any(|(tenant, _)| tenant.0 == name)
        };
        if let Some(name) = mount.tenants.iter().find(|name| !exists(name)) {
            return wrong(&format!("`tenants`: there is no tenant `{name}` in `auth.tenants`"));
        }
    }
    if !needs_token && config.mounts.iter().any(|mount| !mount.volume.read_only) {
        tracing::warn!("everybody who can connect can change the files of writable mounts: the server has no token");
    }
    Ok(())
}

/// Returns the requested number of connections, or fewer if this process may not have enough descriptors, of which each
/// sandbox needs one, too. It raises the limit of descriptors. The launcher must not inherit that limit, so it has to
/// be started before.
fn connection_limit(wanted: usize) -> usize {
    const FOR_THE_REST: u64 = 256;
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
    let descriptors = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let room = usize::try_from(descriptors.saturating_sub(FOR_THE_REST) / 4 * 3).unwrap_or(usize::MAX).max(16);
    if room < wanted {
        tracing::warn!(
            "at most {room} connections at once: this process may have {descriptors} descriptors (ulimit -n)"
        );
    }
    room.min(wanted)
}

/// Binds the listener if that is allowed. Without authentication a server must not be reachable from other machines.
async fn listen(
    wanted: &str,
    allowed: impl Fn(SocketAddr) -> Result<(), String>,
) -> Result<(TcpListener, SocketAddr), Failed> {
    let failed = |error: std::io::Error| Failed(format!("cannot listen on `{wanted}`: {error}"));
    let addresses: Vec<SocketAddr> = tokio::net::lookup_host(wanted).await.map_err(failed)?.collect();
    for address in &addresses {
        allowed(*address).map_err(Failed)?;
    }
    let listener = TcpListener::bind(&addresses[..]).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Returns an error if metrics must not be served on an address. Without a token they are for this machine only.
fn metrics_allowed(address: SocketAddr, has_token: bool) -> Result<(), String> {
    let why = format!("refusing to serve metrics on `{address}` without a token; set `metrics.token_file`");
    auth::bind_allowed(address, has_token, false).map_err(|_| why)
}

/// Returns the base address under which clients fetch files.
fn public_url(config: &Config, address: SocketAddr) -> String {
    let own = match address.ip().is_unspecified() {
        true => format!("http://localhost:{}", address.port()),
        false => format!("http://{address}"),
    };
    config.serve.public_url.clone().unwrap_or(own)
}

fn observer(config: &Config, engine: &Engine) -> Result<Observer, Failed> {
    let journal = config.journal.enabled.then(|| {
        let settings = JournalConfig {
            contents: config.journal.contents,
            keep_days: config.journal.days,
            ..JournalConfig::new(config.state_dir.join("journal"))
        };
        Journal::open(settings)
    });
    let journal = journal.transpose()?;
    if let Some(journal) = &journal {
        journal.record_own(JournalEntry::event("server_started"));
    }
    let engine = engine.clone();
    let owners = engine.clone();
    Ok(Observer::new(journal)
        .with_metrics(Metrics::with_tenants(config.metrics.tenants))
        .with_link_owners(move |key| owners.context_of_link(key))
        .with_conversation_keys(move |tenant, id| engine.conversation_key(tenant, id)))
}

/// Passes the notices of the engine to the journal and the metrics. After `no_more` is cancelled it still handles the
/// notices that were sent before.
async fn watch(engine: Engine, observer: Arc<Observer>, no_more: CancellationToken) {
    let mut notices = engine.notices();
    loop {
        let notice = tokio::select! {
            biased;
            notice = notices.recv() => notice,
            () = no_more.cancelled() => return,
        };
        match notice {
            Ok(notice) => {
                observer.metrics.notice(&notice);
                if let Some(journal) = observer.journal() {
                    journal.record(JournalEntry::notice(&notice));
                }
            }
            Err(RecvError::Lagged(missed)) => {
                tracing::warn!(missed, "the journal missed events of the engine, which came too fast");
                if let Some(journal) = observer.journal() {
                    journal.lose(missed);
                }
            }
            Err(RecvError::Closed) => return,
        }
    }
}

/// Writes into the journal what each tenant used, once a minute.
async fn meter(engine: Engine, observer: Arc<Observer>, stop: CancellationToken) {
    const EVERY: Duration = Duration::from_secs(60);
    while stop.run_until_cancelled(tokio::time::sleep(EVERY)).await.is_some() {
        observer.record_usage(engine.take_usage().await);
    }
}

fn http_options(config: &Config, auth: &Auth) -> HttpOptions {
    let serve = &config.serve;
    let public_host = serve.public_url.as_deref().and_then(|url| url.split("://").nth(1)?.split('/').next());
    let max_connections = connection_limit(serve.max_connections);
    HttpOptions {
        max_connections,
        // Only four greedy tenants together can keep others out.
        max_requests_per_tenant: (max_connections / 4).max(1),
        allowed_hosts: serve.allowed_hosts.iter().cloned().chain(public_host.map(str::to_owned)).collect(),
        allowed_origins: serve.allowed_origins.clone(),
        cors: serve.cors,
        open: !auth.is_required(),
        max_body: serve.max_body_bytes,
        memory: memory(config),
        header_deadline: serve.header_timeout,
        body_deadline: serve.body_timeout,
        idle_deadline: serve.idle_timeout,
        write_deadline: serve.write_timeout,
        max_sessions: serve.max_sessions,
        session_idle: serve.session_idle,
        grace: wiring::shutdown_grace(config),
        ..HttpOptions::default()
    }
}

/// Returns the options of the metrics' own listener. Without a token it is for this machine alone: no page may reach it
/// under a name that leads to the loopback, whatever names the server has otherwise. It has few connections, because the
/// limit of the server's connections does not count them.
fn metrics_options(of_server: HttpOptions, open: bool) -> HttpOptions {
    const CONNECTIONS: usize = 64;
    let options = HttpOptions { open, grace: Duration::ZERO, max_connections: CONNECTIONS, ..of_server };
    match open {
        true => HttpOptions { allowed_hosts: Vec::new(), allowed_origins: Vec::new(), cors: false, ..options },
        false => options,
    }
}

/// Gives free memory back to the Linux kernel after bursts of calls, as long as the server occupies much memory. The
/// allocator does not do so itself, because the free memory lies in pieces between memory that is still in use.
async fn return_memory(stop: CancellationToken) {
    // This is less than the memory of a server at rest plus the 64 MB that it may keep after a burst (row W22).
    const MUCH: u64 = 96 << 20;
    const GAIN: u64 = 8 << 20;
    const PAUSES: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(60)];
    let mut pause = PAUSES[0];
    while stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some() {
        let before = resident();
        if before < MUCH {
            continue;
        }
        let _ = tokio::task::spawn_blocking(sandbox::native::return_free_pages).await;
        let gained = before.saturating_sub(resident());
        pause = if gained < GAIN { (pause * 2).min(PAUSES[1]) } else { PAUSES[0] };
    }
}

/// Returns the number of bytes of this process that are in memory.
fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| text.split(' ').nth(1)?.parse().ok());
    pages.unwrap_or(0) * rustix::param::page_size() as u64
}

/// Returns the memory budgets of calls, for each tenant and for all tenants together.
fn memory(config: &Config) -> Memory {
    const MOST: usize = 1024;
    let machine = || {
        let info = rustix::system::sysinfo();
        let bytes = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
        usize::try_from(bytes >> 22).unwrap_or(MOST).clamp(16, MOST)
    };
    let total = config.serve.call_memory_mb.unwrap_or_else(machine);
    // On a small machine, too, one tenant must leave some memory to the others.
    Memory::new(config.quota.call_memory_mb.min(total / 2) << 20, total << 20)
}

/// State that the parts of the server share.
#[derive(Clone)]
struct Server {
    engine: Engine,
    observer: Arc<Observer>,
    counters: Counters,
    back_end: Value,
    otel: Option<Otel>,
    /// When the server started, in seconds since 1970.
    started: u64,
}

impl Server {
    fn endpoints(&self, config: &Config, lang: Option<Lang>, links: &Links) -> BTreeMap<String, Endpoint> {
        dialects::all(&wiring::options(config))
            .map(|dialect| {
                let options = wiring::options_of(config, dialect);
                (dialect.id.to_owned(), self.endpoint(dialect, lang, &options, links))
            })
            .collect()
    }

    fn endpoint(&self, dialect: &'static Dialect, lang: Option<Lang>, options: &Options, links: &Links) -> Endpoint {
        let surface = Surface::new(dialect, lang, options.clone(), links.clone()).watched_by(self.observer.clone());
        let (errors, tools) = (surface.error_style(), dialect.offered(options).count());
        let handlers = Handlers::new(Arc::new(self.engine.clone()), Arc::new(surface));
        let server = self.clone();
        Endpoint::new(
            move |caller, memory| handlers.of(caller, memory),
            move |caller| {
                let server = server.clone();
                Box::pin(async move { server.status(dialect, tools, &caller).await })
            },
        )
        .direct()
        .with_errors(errors)
        .with_open_stream(dialect.open_stream)
    }

    /// Returns the status that a plain GET of an endpoint shows: the server, and the contexts of the caller.
    async fn status(&self, dialect: &'static Dialect, tools: usize, caller: &Caller) -> Value {
        let realm = Realm(dialect.id);
        let call = wiring::call_of(caller.tenant.clone(), realm);
        let health = match self.engine.execute(&call, Op::Health).await {
            Ok(Outcome::Health(health)) => health_document(&health),
            _ => Value::Null,
        };
        let (contexts, busy) = self.engine.counts_of(&caller.tenant, realm);
        json!({
            "status": if self.engine.is_up() { "healthy" } else { "unhealthy" },
            "tools_count": tools,
            "name": dialect.server_name,
            "version": env!("CARGO_PKG_VERSION"),
            "dialect": dialect.id,
            "ready": self.engine.is_ready(),
            "health": health,
            "contexts": contexts,
            "sessions": contexts,
            "busy": busy,
            "backend": self.back_end,
        })
    }

    fn routes(&self, auth: Arc<Auth>, signer: Option<dialects::links::Signer>) -> Router {
        let settings = files::Settings { signer, observer: self.observer.clone(), ..files::Settings::default() };
        self.health_routes().merge(auth::routes(auth)).merge(files::router(self.engine.clone(), settings))
    }

    fn health_routes(&self) -> Router {
        let (healthy, ready) = (self.engine.clone(), self.engine.clone());
        Router::new()
            .route("/healthz", get(async move || health(healthy.is_up(), "ok\n", "no sandbox can be made\n")))
            .route("/readyz", get(async move || health(ready.is_ready(), "ready\n", "not ready\n")))
    }

    /// Returns the route of the metrics. Without `readers`, everybody who can connect may read them.
    fn metrics_route(&self, readers: Option<Arc<dyn Authenticator>>) -> Router {
        let server = self.clone();
        let answer = async move |request: Request| server.metrics(readers.as_deref(), request).await;
        Router::new().route("/metrics", get(answer))
    }

    /// Serves the metrics and the health checks on a separate listener, and nothing else.
    async fn serve_metrics(
        self,
        listener: TcpListener,
        options: HttpOptions,
        readers: Option<Arc<auth::Watched>>,
        stop: CancellationToken,
    ) {
        let readers = readers.map(|readers| readers as Arc<dyn Authenticator>);
        let app = App {
            options,
            counters: Counters::default(),
            log: lines::log_http,
            authenticator: Arc::new(NoService),
            endpoints: BTreeMap::new(),
            default: String::new(),
            routes: self.health_routes().merge(self.metrics_route(readers)),
        };
        transport::serve(listener, app, stop.clone(), stop).await;
    }

    /// Hands the metrics over to the export, if there is one, at the interval of its settings and once at the end.
    async fn export_metrics(self, stop: CancellationToken) {
        let Some((otel, every)) = self.otel.as_ref().and_then(|otel| Some((otel, otel.metric_interval()?))) else {
            return;
        };
        while stop.run_until_cancelled(tokio::time::sleep(every)).await.is_some() {
            otel.export_metrics(&self.observer.metrics, &self.gauges().await);
        }
        otel.export_metrics(&self.observer.metrics, &self.gauges().await);
    }

    /// Answers with the metrics. Like every endpoint that reveals something, it demands a token, unless it has a
    /// listener of its own.
    async fn metrics(&self, readers: Option<&dyn Authenticator>, request: Request) -> Response {
        let (parts, _) = request.into_parts();
        let peer = parts.extensions.get::<Peer>().map_or(([0, 0, 0, 0], 0).into(), |peer| peer.0);
        if let Some(Err(denied)) = readers.map(|readers| readers.admit(&parts, peer)) {
            return (denied.status, *denied.headers, denied.body.to_string()).into_response();
        }
        let gauges = self.gauges().await;
        ([(CONTENT_TYPE, metrics::CONTENT_TYPE)], self.observer.metrics.text(&gauges)).into_response()
    }

    async fn gauges(&self) -> Gauges {
        let counts = self.engine.counts();
        Gauges {
            started: self.started,
            contexts: counts.contexts.values().sum(),
            ready: counts.ready,
            sandboxes: counts.sandboxes,
            ending: counts.ending,
            runs: counts.busy,
            journal_lost: self.observer.journal().map_or(0, Journal::lost),
            zygote: self.engine.zygote_status().await.unwrap_or_default(),
            browsers: counts.browsers,
            network_denials: counts.denials,
            traffic: counts.traffic,
            http: self.counters.totals(),
            otel_dropped: self.otel.as_ref().map(Otel::dropped),
        }
    }
}

fn health(is_ok: bool, yes: &'static str, no: &'static str) -> Response {
    if is_ok { yes.into_response() } else { (StatusCode::SERVICE_UNAVAILABLE, no).into_response() }
}

fn health_document(health: &Health) -> Value {
    json!({
        "interpreter_ready": health.ready,
        "interpreter_status": health.state,
        "session_pool_size": health.pool_size,
        "session_pool_available": health.pool_available,
        "all_sessions_healthy": health.pool_is_healthy,
        "startup_time_seconds": health.startup.as_secs_f64(),
    })
}

/// Returns the warning of a server without a token that other machines can reach, or whose dialect demands a token.
fn token_warning(dialect: &Dialect, has_token: bool, address: SocketAddr) -> Option<String> {
    let is_safe = has_token || (address.ip().is_loopback() && !dialect.wants_token);
    (!is_safe).then(|| {
        format!(
            "THERE IS NO TOKEN: everybody who can connect to {address} can run code and read the files of all \
             conversations and contexts; set `SANDPOOL_API_TOKEN` or `--token-file`"
        )
    })
}

/// Logs the addresses of the server, and a command with which the operator can connect a client.
fn welcome(config: &Config, auth: &Auth, address: SocketAddr, base: &str) {
    let dialect = &config.dialect;
    if let Some(warning) = token_warning(wiring::dialect(config), auth.is_required(), address) {
        tracing::warn!("{warning}");
    }
    tracing::info!("listening: http://{address}/mcp ({dialect}), and http://{address}/mcp/<dialect>");
    if config.serve.public_url.is_some() {
        tracing::info!("clients reach it at {base}/mcp");
    }
    if let Some(path) = &config.auth.tenants {
        let tenants = auth.tenants().len();
        tracing::info!("tenants: {tenants}; SIGHUP or a change of `{}` loads them again", path.display());
    }
    let token = if auth.is_required() { " --header \"Authorization: Bearer $SANDPOOL_API_TOKEN\"" } else { "" };
    tracing::info!("try: claude mcp add --transport http sandpool {base}/mcp{token}");
    if config.serve.cors && !auth.is_required() {
        tracing::info!("web pages: only those of this machine may call, because there is no token");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_should_have_a_token_warns_without_one() {
        let options = Options::default();
        let warns = |id: &str, has_token, address: &str| {
            token_warning(dialects::find(id, &options).unwrap(), has_token, address.parse().unwrap()).is_some()
        };
        assert!(warns("conversation", false, "127.0.0.1:8775"));
        assert!(warns("sandpool", false, "192.0.2.7:8775"));
        for (id, has_token, address) in [
            ("conversation", true, "127.0.0.1:8775"),
            ("sandpool", true, "192.0.2.7:8775"),
            ("sandpool", false, "127.0.0.1:8775"),
            ("sandpool", false, "[::1]:8775"),
        ] {
            assert!(!warns(id, has_token, address), "{id} {address}");
        }
    }
}
