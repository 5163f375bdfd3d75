//! Prepares a started server to run code: first the language runtimes, then the pool.

use std::sync::Arc;

use engine::op::{Op, Outcome, RuntimeInfo, Tenant};
use engine::{Engine, StartupStep};
use runtimes::{Progress, browser};
use telemetry::logging::lines;
use telemetry::observe::Observer;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::{CommandEnv, Failed, wiring};

/// Makes the engine ready. If that fails, it stops the server, because a server that can run nothing is of no use.
pub(crate) async fn prepare(
    engine: Engine,
    context: CommandEnv,
    stop: CancellationToken,
    observer: Arc<Observer>,
) -> Result<(), Failed> {
    let (progress, mut watch) = Progress::new();
    let reporter = engine.clone();
    let reporting = tokio::spawn(async move {
        while watch.changed().await.is_ok() {
            let status = watch.borrow_and_update().clone();
            reporter.set_status(format!("preparing the language runtimes: {status}"));
        }
    });
    let config = &context.config.runtimes;
    let work = async {
        let prepared = runtimes::prepare(config, &context.environment, &progress);
        let browser = browser::find(&context.config.browser, &context.environment);
        let (prepared, browser) = tokio::join!(prepared, browser);
        let prepared = prepared.inspect_err(|_| {
            // The error contains paths of this machine, which the client must not see.
            engine.set_failed(
                "the language runtimes could not be prepared; run `sandpool setup` on the server's machine",
            );
        })?;
        if let Err(why) = &prepared.node {
            tracing::warn!("JavaScript and TypeScript are not available: {why}");
        }
        if let Err(why) = &prepared.node_packages {
            tracing::info!("the packages for JavaScript are not available: {why}");
        }
        let browser = browser.unwrap_or_else(|why| {
            tracing::info!("the browser is not available: {why}");
            None
        });
        drop(progress); // This ends the reporting task, so that no progress follows the next message.
        let _ = reporting.await;
        engine.set_status("starting the session pool");
        let dialect = wiring::dialect(&context.config);
        let report = |step: StartupStep<'_>| lines::log_startup(dialect, &step);
        engine.start_pool(prepared.kernels(config, browser.as_ref()), &report).await?;
        observer.set_runtimes(runtimes_of(&engine).await);
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

/// Stops the server when its back end has given up, so that the supervisor can start another server.
pub(crate) async fn end_when_useless(engine: Engine, stop: CancellationToken) -> Failed {
    let why = engine.given_up().await;
    stop.cancel();
    Failed(why)
}

/// Returns the reason why the server stopped itself, or `otherwise` if it did not.
pub(crate) async fn useless_or(useless: JoinHandle<Failed>, otherwise: Result<(), Failed>) -> Result<(), Failed> {
    if useless.is_finished() {
        return Err(useless.await?);
    }
    useless.abort();
    otherwise
}

async fn runtimes_of(engine: &Engine) -> Vec<RuntimeInfo> {
    let call = wiring::call_of(Tenant::local(), dialects::conversation::REALM);
    match engine.execute(&call, Op::ListRuntimes).await {
        Ok(Outcome::Runtimes(runtimes)) => runtimes,
        _ => Vec::new(),
    }
}
