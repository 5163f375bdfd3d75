//! Other quotas, networks and tenants while the engine runs.

use std::time::Duration;

use egress::{Egress, EgressConfig, Secret, Value};
use engine::op::{LimitKind, Quota};
use engine::{Call, EngineConfig, EngineError, Op, Outcome, Tenant};
use testkit::fake::FakeBackend;

use crate::network::{everywhere, pages};
use crate::support::*;

fn blue() -> Tenant {
    Tenant("blue".into())
}

fn of_blue() -> Call {
    Call { realm: dialects::sandpool::REALM, ..call_of(&blue()) }
}

fn with_quota(quota: Quota) -> EngineConfig {
    EngineConfig { quotas: [(blue(), quota)].into(), ..config() }
}

#[tokio::test(start_paused = true)]
async fn quotas_apply_to_what_begins_after_the_reload() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_quota(Quota { contexts: Some(1), ..Quota::default() })).await;
    let first = created(engine.execute(&of_blue(), create_op("first")).await).id;
    assert!(engine.execute(&of_blue(), create_op("second")).await.is_err());
    engine.reload(&with_quota(Quota { contexts: Some(2), memory_bytes: Some(1 << 30), ..Quota::default() }));
    created(engine.execute(&of_blue(), create_op("second")).await);
    let specs = backend.specs();
    let group = |at: usize| specs[specs.len() - at].groups[0].clone();
    assert_eq!((group(2).memory_bytes, group(1).memory_bytes), (None, Some(1 << 30)));
    assert_ne!(group(2).name, group(1).name, "the first one is not limited after the fact");
    engine.reload(&with_quota(Quota { contexts: Some(1), ..Quota::default() }));
    let refused = engine.execute(&of_blue(), create_op("third")).await;
    assert_eq!(refused, Err(EngineError::OverLimit { what: LimitKind::Contexts, limit: "1".into() }));
    ran(engine.execute(&of_blue(), run_op(&first, "print")).await);
}

#[tokio::test(start_paused = true)]
async fn the_number_of_runs_grows_and_shrinks_with_runs_in_progress() {
    let backend = FakeBackend::new();
    let runs = |runs| with_quota(Quota { runs, ..Quota::default() });
    let engine = engine_with(&backend, runs(Some(1))).await;
    let mut contexts = Vec::new();
    for name in ["a", "b", "c", "d"] {
        contexts.push(created(engine.execute(&of_blue(), create_op(name)).await).id);
    }
    let begin = |at: usize| spawn_run(&engine, of_blue(), &contexts[at], &format!("print {at}\nsleep 5000"));
    let executing = || engine.counts().runs;
    let first = [begin(0), begin(1), begin(2)];
    eventually("one runs", || executing() == 1).await;
    engine.reload(&runs(Some(2)));
    eventually("a second one begins", || executing() == 2).await;
    engine.reload(&runs(None));
    eventually("all run", || executing() == 3).await;
    engine.reload(&runs(Some(2)));
    engine.reload(&runs(Some(1)));
    for run in first {
        ran(run.await.unwrap());
    }
    let second = [begin(0), begin(1), begin(3)];
    eventually("one runs again", || executing() == 1).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(executing(), 1);
    for run in second {
        ran(run.await.unwrap());
    }
}

#[tokio::test(start_paused = true)]
async fn a_removed_tenant_leaves_nothing_and_can_come_back() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_quota(Quota::default())).await;
    let other = create(&engine, "other").await;
    let before = engine.sandboxes();
    let id = created(engine.execute(&of_blue(), create_op("c")).await).id;
    created(engine.execute(&of_blue(), create_op("d")).await);
    let hanging = spawn_run(&engine, of_blue(), &id, "hang");
    begun(&backend, "hang").await;
    assert_eq!(engine.remove_tenant(&blue()), 2);
    let ended = hanging.await.unwrap();
    assert!(!matches!(&ended, Ok(Outcome::Ran(ran)) if ran.end == engine::op::RunOutcome::Ok), "{ended:?}");
    let refused = engine.execute(&of_blue(), create_op("late")).await;
    assert_eq!(refused, Err(EngineError::NotReady("the operator removed this tenant".into())));
    eventually("its sandboxes are gone", || engine.sandboxes() == before).await;
    ran(engine.execute(&call(), run_op(&other, "print")).await);

    engine.reload(&with_quota(Quota { contexts: Some(1), ..Quota::default() }));
    created(engine.execute(&of_blue(), create_op("again")).await);
    assert!(engine.execute(&of_blue(), create_op("more")).await.is_err());
    assert_eq!(engine.execute(&of_blue(), run_op(&id, "print")).await, Err(EngineError::ContextNotFound(id)));
}

/// Sandboxes keep the secrets and the policy with which they were created, and ready ones are replaced.
#[tokio::test]
async fn another_network_is_for_new_sandboxes() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let secret = |value: &str| Secret {
        name: "KEY".into(),
        hosts: vec!["api.test".into()],
        header: "Authorization".into(),
        format: None,
        tenants: Vec::new(),
        value: Value::parse(value.into()).unwrap(),
    };
    let egress_config = |value| EgressConfig { secrets: vec![secret(value)], ..EgressConfig::default() };
    let egress = Egress::new(egress_config("the-first-value")).unwrap();
    let with = |egress: &Egress| EngineConfig { ready_max: 64, egress: Some(egress.clone()), ..everywhere(at) };
    let engine = engine_with(&backend, with(&egress)).await;
    let old = created(engine.execute(&of_blue(), create_op("old")).await).id;
    // Of the last command; the cells that warm ready sandboxes have no variables.
    let environment = || backend.environments().into_iter().rfind(|env| env.contains_key("PATH")).unwrap();
    let key = || environment()["KEY"].clone();
    ran(engine.execute(&of_blue(), command_op(&old, "print")).await);
    let first = key();
    eventually("some are ready", || engine.counts().ready.available >= engine.counts().ready.wanted).await;

    let (same, changes) = egress.reload(egress_config("the-first-value")).unwrap();
    assert!(same == egress && changes.is_empty());
    let made = backend.created();
    engine.reload(&with(&same));
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(backend.created(), made, "nothing has changed, so nothing is made anew");

    let (new, changes) = egress.reload(egress_config("the-second-value")).unwrap();
    assert_eq!(changes, ["secrets"]);
    engine.reload(&with(&new));
    ran(engine.execute(&of_blue(), command_op(&old, "print")).await);
    assert_eq!(key(), first, "an existing sandbox has its own");
    let fresh = created(engine.execute(&of_blue(), create_op("fresh")).await).id;
    ran(engine.execute(&of_blue(), command_op(&fresh, "print")).await);
    assert_ne!(key(), first);

    let offline = EngineConfig { egress: Some(new), ..config() };
    engine.reload(&offline);
    let none = created(engine.execute(&of_blue(), create_op("none")).await).id;
    ran(engine.execute(&of_blue(), command_op(&none, "print")).await);
    assert!(!environment().contains_key("HTTP_PROXY"));
    ran(engine.execute(&of_blue(), command_op(&old, "print")).await);
    assert_eq!(key(), first);
}

/// What is not counted is absent. What a context used last is counted when it ends.
#[tokio::test(start_paused = true)]
async fn the_use_of_sandboxes_is_metered_by_tenant() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    assert!(engine.take_usage().await.is_empty(), "ready sandboxes are nobody's");
    let id = created(engine.execute(&of_blue(), create_op("c")).await).id;
    tokio::time::sleep(Duration::from_secs(10)).await;
    let used = engine.take_usage().await[&blue()];
    assert_eq!(used.cpu_usec, None);
    let megabytes = used.memory_byte_seconds.unwrap() / f64::from(1 << 20);
    assert!((80.0..81.0).contains(&megabytes), "8 MB for 10 s: {megabytes}");
    backend.set_cpu_usec(700);
    assert_eq!(engine.take_usage().await[&blue()].cpu_usec, Some(700));
    assert_eq!(engine.take_usage().await[&blue()].cpu_usec, Some(0));
    backend.set_cpu_usec(1000);
    engine.execute(&of_blue(), stop_op(&id)).await.unwrap();
    eventually("its end", || engine.sandboxes() == 3).await;
    assert_eq!(engine.take_usage().await[&blue()].cpu_usec, Some(300));
    assert!(engine.take_usage().await.is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_operator_sees_and_stops_the_contexts_of_all_and_drains() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = created(engine.execute(&of_blue(), create_op("c")).await).id;
    create(&engine, "local").await;
    let hanging = spawn_run(&engine, of_blue(), &id, "sleep 3000");
    begun(&backend, "sleep 3000").await;
    let all = engine.contexts().await;
    let shown: Vec<_> = all.iter().map(|view| (view.tenant.0.as_str(), view.runs, view.expires_in.is_some())).collect();
    assert_eq!((shown.len(), shown.contains(&("blue", 1, false))), (2, true), "{shown:?}");
    assert_eq!(engine.work(), (1, 0));
    engine.set_draining(true);
    assert!(!engine.is_ready());
    let refused = engine.execute(&of_blue(), create_op("no")).await;
    assert!(matches!(refused, Err(EngineError::NotReady(_))), "{refused:?}");
    engine.execute(&of_blue(), Op::ListContexts).await.unwrap();
    ran(hanging.await.unwrap());
    assert_eq!(engine.work(), (0, 0));
    engine.set_draining(false);
    engine.stop_context(&blue(), dialects::sandpool::REALM, &id).unwrap();
    let missing = Err(EngineError::ContextNotFound(id.clone()));
    assert_eq!(engine.stop_context(&blue(), dialects::sandpool::REALM, &id), missing);
    assert_eq!(engine.contexts().await.len(), 1);
}
