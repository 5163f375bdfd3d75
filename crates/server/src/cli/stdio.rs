//! `sandpool stdio`: an MCP server on standard input and output.

use std::process::ExitCode;
use std::sync::Arc;

use engine::Engine;
use tokio_util::sync::CancellationToken;

use super::signals::Signals;
use super::wiring::{self, Native};
use super::{Context, Done, Failed, block_on};
use crate::dialect::{Dialect, Links, Options, agentrun};
use crate::mcp::Surface;
use crate::mcp::stdio::{StdioOptions, serve_stdio};
use crate::runtimes::{self, Progress};

/// Serve MCP on standard input and output
///
/// For clients that start their servers themselves. Answers at once; while the languages are still being prepared, calls are told so.
#[derive(Debug, clap::Args)]
pub struct Args {}

pub fn main(_: Args, context: Context) -> Done {
    let native = Native::launch(&context.config)?;
    block_on(serve(context, native))
}

async fn serve(context: Context, native: Native) -> Done {
    let signals = Signals::listen()?;
    let config = &context.config;
    let limits = &config.dialects.agentrun;
    let engine = Engine::new(wiring::engine_config(config), native.start().await?);
    let lang = config.lang.as_deref().map(str::parse).transpose().map_err(Failed)?;
    let options = StdioOptions { grace: limits.shutdown_grace };
    let dialect: &'static Dialect =
        if config.dialects.default_context { &agentrun::WITH_DEFAULT_CONTEXT } else { &agentrun::DIALECT };

    let stop = signals.first.child_token();
    let preparing = tokio::spawn(prepare(engine.clone(), context.clone(), stop.clone()));
    let second = signals.second.clone();
    let surface = Arc::new(Surface::new(dialect, lang, Options::default(), Links::default()));
    let serving = serve_stdio(Arc::new(engine.clone()), surface, options, stop.clone());
    let served = tokio::select! {
        served = serving => served.map(drop).map_err(Failed::from),
        () = second.cancelled() => Ok(()),
    };
    stop.cancel();
    tokio::select! {
        () = engine.shutdown(limits.shutdown_grace) => {}
        () = async { second.cancelled().await; engine.shutdown(std::time::Duration::ZERO).await } => {}
    }
    let prepared = preparing.await.map_err(Failed::from);
    prepared.and_then(|prepared| prepared).and(served).map(|()| ExitCode::SUCCESS)
}

/// Makes the engine ready, or stops the server: one that can run nothing is of no use to a client.
async fn prepare(engine: Engine, context: Context, stop: CancellationToken) -> Result<(), Failed> {
    let (progress, mut watch) = Progress::new();
    let teller = engine.clone();
    let telling = tokio::spawn(async move {
        while watch.changed().await.is_ok() {
            let status = watch.borrow_and_update().clone();
            teller.set_status(format!("preparing the language runtimes: {status}"));
        }
    });
    let config = &context.config.runtimes;
    let work = async {
        let prepared = runtimes::prepare(config, &context.environment, &progress, false).await.inspect_err(|_| {
            // The error names paths of this machine; the client need not know them.
            engine.set_failed(
                "the language runtimes could not be prepared; run `sandpool setup` on the server's machine",
            );
        })?;
        if let Err(why) = &prepared.node {
            tracing::warn!("no JavaScript and TypeScript: {why}");
        }
        drop(progress); // ends the telling, so that it does not come after the next word
        let _ = telling.await;
        engine.set_status("starting the session pool");
        engine.start_pool(prepared.kernels(config.threads)).await?;
        tracing::info!(target: engine::STARTUP_LOG, "MCP Server 就绪，等待请求...");
        Ok(())
    };
    let result = tokio::select! {
        result = work => result,
        () = stop.cancelled() => Ok(()),
    };
    if result.is_err() {
        stop.cancel();
    }
    result
}
