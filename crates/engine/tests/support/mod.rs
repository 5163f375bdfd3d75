//! What every test of the engine needs: a small engine, calls, and waiting for a condition.
#![allow(dead_code, reason = "each test file uses its part")]

use std::sync::Arc;
use std::time::Duration;

use engine::op::{
    Captured, Command, ContextInfo, ContextSelector, Environment, FileOwner, NewContext, Ran, Realm, RunCode,
    RunCommand, RunOutcome, Target,
};
use engine::{
    Call, Engine, EngineConfig, EngineError, Event, EventSink, KernelCommand, Op, Outcome, RealmConfig, Runtimes,
    Tenant,
};
use proto::Language;
use testkit::fake::FakeBackend;
use tokio_util::sync::CancellationToken;

pub fn runtimes() -> Runtimes {
    let command = |name: &str| KernelCommand { argv: vec![name.into()], ..KernelCommand::default() };
    Runtimes {
        python: command("python"),
        node: Some(command("node")),
        browser: None,
        files: Vec::new(),
        links: Vec::new(),
        unpinned: Vec::new(),
    }
}

/// The usual configuration with the realms of all dialects.
pub fn usual() -> EngineConfig {
    let pool_realm = dialects::agentrun::REALM;
    EngineConfig { realms: dialects::realms(), pool_realm, ..EngineConfig::default() }
}

/// Only the ordered sessions wait ready: what tests count is not to depend on demand.
pub fn config() -> EngineConfig {
    EngineConfig { ready_max: 0, ..usual() }
}

pub async fn engine(backend: &FakeBackend) -> Engine {
    engine_with(backend, config()).await
}

pub async fn engine_with(backend: &FakeBackend, config: EngineConfig) -> Engine {
    Engine::start(config, runtimes(), Arc::new(backend.clone())).await.expect("the engine starts")
}

pub fn call() -> Call {
    call_of(&Tenant::local())
}

pub fn call_of(tenant: &Tenant) -> Call {
    Call {
        tenant: tenant.clone(),
        realm: dialects::agentrun::REALM,
        connection: None,
        cancel: CancellationToken::new(),
        events: EventSink::default(),
        memory: Default::default(),
        stages: Default::default(),
        found: Default::default(),
    }
}

/// The local tenant in this realm.
pub fn call_in(realm: Realm) -> Call {
    Call { realm, ..call() }
}

/// With something changed in the realm of `agentrun`.
pub fn agentrun(change: impl FnOnce(&mut RealmConfig)) -> EngineConfig {
    with_realm(dialects::agentrun::REALM, change)
}

pub fn with_realm(realm: Realm, change: impl FnOnce(&mut RealmConfig)) -> EngineConfig {
    let mut config = config();
    change(config.realm_mut(realm).expect("a realm"));
    config
}

pub fn followed() -> (Call, tokio::sync::mpsc::Receiver<Event>) {
    let (sender, receiver) = tokio::sync::mpsc::channel(1000);
    (Call { events: EventSink(Some(sender)), ..call() }, receiver)
}

pub fn create_op(name: &str) -> Op {
    Op::CreateContext(NewContext::named(name, Language::Python))
}

pub fn run_op(context: &str, code: &str) -> Op {
    Op::RunCode(RunCode::new(existing(context), code))
}

pub fn stop_op(context: &str) -> Op {
    Op::StopContext { which: ContextSelector::Named(context.into()) }
}

pub fn existing(context: &str) -> Target {
    Target::existing(ContextSelector::Named(context.into()))
}

pub fn files_of(context: &str) -> FileOwner {
    FileOwner::workspace(existing(context))
}

pub fn command_op(context: &str, line: &str) -> Op {
    Op::RunCommand(shell(existing(context), line))
}

pub fn shell(target: Target, line: &str) -> RunCommand {
    RunCommand {
        target,
        language: None,
        command: Command::Shell(line.into()),
        timeout: None,
        env: Environment::default(),
        network: engine::op::Network::Usual,
        background: false,
    }
}

/// A new context's id.
pub async fn create(engine: &Engine, name: &str) -> String {
    created(engine.execute(&call(), create_op(name)).await).id
}

pub fn created(result: Result<Outcome, EngineError>) -> ContextInfo {
    match result {
        Ok(Outcome::Created(info)) => info,
        other => panic!("not created: {other:?}"),
    }
}

pub async fn run(engine: &Engine, context: &str, code: &str) -> Ran {
    ran(engine.execute(&call(), run_op(context, code)).await)
}

pub fn ran(result: Result<Outcome, EngineError>) -> Ran {
    match result {
        Ok(Outcome::Ran(ran)) => *ran,
        other => panic!("did not run: {other:?}"),
    }
}

/// A run in the background, once its code has begun.
pub fn spawn_run(
    engine: &Engine,
    call: Call,
    context: &str,
    code: &str,
) -> tokio::task::JoinHandle<Result<Outcome, EngineError>> {
    let (engine, op) = (engine.clone(), run_op(context, code));
    tokio::spawn(async move { engine.execute(&call, op).await })
}

pub fn spawn_op(engine: &Engine, call: &Call, op: Op) -> tokio::task::JoinHandle<Result<Outcome, EngineError>> {
    let (engine, call) = (engine.clone(), call.clone());
    tokio::spawn(async move { engine.execute(&call, op).await })
}

pub async fn begun(backend: &FakeBackend, code: &str) {
    eventually("the run begins", || backend.runs().iter().any(|run| run == code)).await;
}

pub async fn names(engine: &Engine) -> Vec<String> {
    match engine.execute(&call(), Op::ListContexts).await {
        Ok(Outcome::Contexts(contexts)) => contexts.into_iter().map(|c| c.name).collect(),
        other => panic!("no list: {other:?}"),
    }
}

pub async fn health(engine: &Engine) -> engine::op::Health {
    match engine.execute(&call(), Op::Health).await {
        Ok(Outcome::Health(health)) => health,
        other => panic!("no health: {other:?}"),
    }
}

pub fn text(captured: &Captured) -> &str {
    &captured.text
}

pub fn lost(ran: &Ran) -> &str {
    match &ran.end {
        RunOutcome::SandboxLost { why } => why,
        other => panic!("the sandbox was not lost: {other:?}"),
    }
}

/// Waits for a condition; under paused time this costs nothing.
pub async fn eventually(what: &str, condition: impl Fn() -> bool) {
    for _ in 0..20_000 {
        if condition() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    panic!("never: {what}");
}
