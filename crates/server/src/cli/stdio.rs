//! `sandpool stdio` serves MCP on standard input and output.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dialects::links::Signer;
use engine::{Engine, Hold};
use http::request::Parts;
use mcp::Caller;
use mcp::http::{self as transport, App, Authenticator, Counters, Denied, HttpOptions};
use mcp::stdio::{StdioOptions, serve_stdio};
use telemetry::logging::lines;
use telemetry::observe::Observer;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::file_secret::file_secret;
use super::otel;
use super::prepare::{end_when_useless, prepare, useless_or};
use super::signals::Signals;
use super::wiring::{self, Native, TransportKind};
use super::{CommandEnv, CommandResult, Failed, block_on_here, network};
use crate::handler::{Handlers, Surface};

/// Serve MCP on standard input and output
///
/// For clients that start the server themselves. It answers at once; while the languages are being prepared, the answer to a call
/// says so.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

pub(crate) fn main(_: Args, context: CommandEnv) -> CommandResult {
    let native = Native::launch(&context.config, TransportKind::Stdio)?;
    block_on_here(serve(context, native))
}

async fn serve(context: CommandEnv, native: Native) -> CommandResult {
    let signals = Signals::listen()?;
    let config = &context.config;
    let grace = wiring::shutdown_grace(config);
    let secret = file_secret(config)?;
    let (backend, _) = native.start().await?;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let base = format!("http://{}", listener.local_addr()?);
    let mut engine_config = wiring::engine_config(config, TransportKind::Stdio, secret, network::egress(config)?);
    wiring::set_file_base(&mut engine_config, &base);
    let engine = Engine::new(engine_config, backend);
    otel::start(&context)?;
    let observer = Arc::new(Observer::default().with_otel(context.otel.clone()));

    let lang = config.lang.as_deref().map(str::parse).transpose().map_err(Failed)?;
    let dialect = wiring::dialect(config);
    let options = wiring::options_of(config, dialect);
    let (links, signer) = wiring::links(config, base, &secret);
    let surface = Arc::new(Surface::new(dialect, lang, options, links).watched_by(observer.clone()));

    let stop = signals.first.child_token();
    let no_more_files = CancellationToken::new();
    let serving_files = tokio::spawn(serve_files(listener, engine.clone(), signer, no_more_files.clone()));
    let preparing = tokio::spawn(prepare(engine.clone(), context.clone(), stop.clone(), observer));
    let useless = tokio::spawn(end_when_useless(engine.clone(), stop.clone()));
    let second = signals.second.clone();
    let executor = Arc::new(engine.clone());
    let errors = surface.error_style();
    let serving = serve_stdio(
        move |caller| Handlers::new(executor, surface).of(caller, Hold::default()),
        StdioOptions { grace, errors },
        stop.clone(),
    );
    let served = tokio::select! {
        served = serving => served.map(drop).map_err(Failed::from),
        () = second.cancelled() => Ok(()),
    };
    stop.cancel();
    no_more_files.cancel();
    tokio::select! {
        () = engine.shutdown(grace) => {}
        () = async { second.cancelled().await; engine.shutdown(Duration::ZERO).await } => {}
    }
    serving_files.abort();
    let prepared = preparing.await.map_err(Failed::from).and_then(|prepared| prepared);
    let ended = useless_or(useless, prepared.and(served)).await.map(|()| ExitCode::SUCCESS);
    otel::finish(&context);
    ended
}

/// Serves the files behind the links in answers, and nothing else, to this machine while the process lives.
async fn serve_files(listener: TcpListener, engine: Engine, signer: Option<Signer>, stop: CancellationToken) {
    let settings = files::Settings { signer, ..files::Settings::default() };
    let app = App {
        options: HttpOptions { open: true, grace: Duration::ZERO, ..HttpOptions::default() },
        counters: Counters::default(),
        log: lines::log_http,
        authenticator: Arc::new(NoService),
        endpoints: BTreeMap::new(),
        default: String::new(),
        routes: files::router(engine, settings),
    };
    transport::serve(listener, app, stop.clone(), stop).await;
}

/// The authenticator of a listener that has no endpoints.
pub(super) struct NoService;

impl Authenticator for NoService {
    fn admit(&self, _: &Parts, _: std::net::SocketAddr) -> Result<Caller, Denied> {
        Ok(Caller::local(None))
    }
}
