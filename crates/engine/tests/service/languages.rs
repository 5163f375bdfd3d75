//! Several languages in one context.

use engine::op::{NewContext, Ran, RunCode, RunOutcome};
use engine::{Engine, EngineError, Op};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

async fn run_as(engine: &Engine, context: &str, language: Language, code: &str) -> Ran {
    let run = RunCode { language: Some(language), ..RunCode::new(existing(context), code) };
    ran(engine.execute(&call_in(dialects::sandpool::REALM), Op::RunCode(run)).await)
}

async fn context(engine: &Engine, language: Language) -> String {
    let op = Op::CreateContext(NewContext::named("a", language));
    created(engine.execute(&call_in(dialects::sandpool::REALM), op).await).id
}

#[tokio::test(start_paused = true)]
async fn each_language_has_an_interpreter_of_its_own_started_when_first_needed() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let before = backend.kernels().len();
    let id = context(&engine, Language::Python).await;
    assert_eq!(backend.kernels().len(), before, "nothing has been run");
    run_as(&engine, &id, Language::Python, "set x py").await;
    run_as(&engine, &id, Language::Javascript, "set x js").await;
    run_as(&engine, &id, Language::Typescript, "set x ts").await;
    for (language, x) in [(Language::Python, "py\n"), (Language::Javascript, "js\n"), (Language::Typescript, "ts\n")] {
        assert_eq!(text(&run_as(&engine, &id, language, "get x").await.stdout), x);
    }
    let run = RunCode::new(existing(&id), "get x");
    let unnamed = ran(engine.execute(&call_in(dialects::sandpool::REALM), Op::RunCode(run)).await);
    assert_eq!(text(&unnamed.stdout), "py\n", "the context's own");
    assert_eq!((backend.kernels().len() - before, backend.created()), (3, 4), "in one sandbox");
}

#[tokio::test(start_paused = true)]
async fn a_crash_of_one_interpreter_costs_its_own_variables_only() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = context(&engine, Language::Python).await;
    run_as(&engine, &id, Language::Python, "set x 1").await;
    run_as(&engine, &id, Language::Javascript, "set x 2").await;
    assert!(matches!(run_as(&engine, &id, Language::Javascript, "die 11").await.end, RunOutcome::Ended { .. }));
    assert_eq!(text(&run_as(&engine, &id, Language::Python, "get x").await.stdout), "1\n");
    assert_eq!(run_as(&engine, &id, Language::Javascript, "get x").await.end, RunOutcome::Error);
}

#[tokio::test(start_paused = true)]
async fn an_interpreter_that_does_not_start_leaves_the_others_alone() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = context(&engine, Language::Python).await;
    run_as(&engine, &id, Language::Python, "set x 1").await;
    backend.fail_next_kernels(1);
    let run = RunCode { language: Some(Language::Javascript), ..RunCode::new(existing(&id), "print 1") };
    let failed = engine.execute(&call_in(dialects::sandpool::REALM), Op::RunCode(run)).await;
    assert!(matches!(failed, Err(EngineError::Sandbox(_))), "{failed:?}");
    assert_eq!(text(&run_as(&engine, &id, Language::Python, "get x").await.stdout), "1\n");
    assert_eq!(text(&run_as(&engine, &id, Language::Javascript, "print 1").await.stdout), "1\n");
}

#[tokio::test(start_paused = true)]
async fn where_a_context_has_one_language_another_is_refused() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let run = RunCode { language: Some(Language::Javascript), ..RunCode::new(existing(&id), "print 1") };
    let refused = engine.execute(&call(), Op::RunCode(run.clone())).await;
    let (is, asked) = (Language::Python, Language::Javascript);
    assert_eq!(refused, Err(EngineError::OtherLanguage { context: id.clone(), is, asked }));
    let same = RunCode { language: Some(Language::Python), ..run };
    assert_eq!(ran(engine.execute(&call(), Op::RunCode(same)).await).end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn a_lost_sandbox_is_told_once_whatever_language_hears_it() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = context(&engine, Language::Python).await;
    run_as(&engine, &id, Language::Python, "set x 1").await;
    run_as(&engine, &id, Language::Javascript, "set x 1").await;
    backend.kill(3);
    eventually("the sandbox is gone", || engine.sandboxes() == 3).await;
    let notice = run_as(&engine, &id, Language::Javascript, "print 1").await.notice.unwrap();
    assert!(notice.contains("variables and files are gone"), "{notice}");
    assert_eq!(run_as(&engine, &id, Language::Python, "print 1").await.notice, None);
}

#[tokio::test(start_paused = true)]
async fn variables_for_one_run_are_checked_and_reach_it_alone() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let mut run = RunCode::new(existing(&id), "env SECRET");
    run.env.0.insert("SECRET".into(), "s3cret".into());
    assert_eq!(text(&ran(engine.execute(&call(), Op::RunCode(run.clone())).await).stdout), "s3cret\n");
    assert!(!format!("{run:?}").contains("s3cret"));
    assert_eq!(text(&crate::support::run(&engine, &id, "env SECRET").await.stdout), "(none)\n");
    run.env.0.insert("NOT A NAME".into(), String::new());
    let refused = engine.execute(&call(), Op::RunCode(run.clone())).await;
    assert!(matches!(refused, Err(EngineError::InvalidEnvironment(_))), "{refused:?}");
    let online = RunCode { network: engine::op::Network::On, ..RunCode::new(existing(&id), "print 1") };
    let refused = engine.execute(&call(), Op::RunCode(online)).await.unwrap_err().to_string();
    assert!(refused.contains("`network.default`"), "{refused}");
}
