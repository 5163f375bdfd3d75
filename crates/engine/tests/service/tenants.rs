//! Nothing of one tenant exists for another, whatever is asked.

use std::time::Duration;

use engine::op::{ContextSelector, FileOwner, NewContext, Realm, RunCode, Target};
use engine::{Call, EngineError, Op, Outcome, Tenant};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

const REALMS: [Realm; 4] =
    [dialects::sandpool::REALM, dialects::agentrun::REALM, dialects::microsandbox::REALM, dialects::workbench::REALM];

#[tokio::test(start_paused = true)]
async fn ids_names_keys_and_runs_of_others_are_as_if_absent() {
    for realm in REALMS {
        let backend = FakeBackend::new();
        let engine = engine(&backend).await;
        let owner = Call { connection: Some("c".into()), ..call_in(realm) };
        let strangers = [
            Call { tenant: Tenant("stranger".into()), ..owner.clone() },
            Call { realm: if realm == REALMS[0] { REALMS[1] } else { REALMS[0] }, ..owner.clone() },
        ];
        let chosen = format!("chosen-{}", realm.0);
        let name = format!("name-{}", realm.0);
        let new = NewContext { id: Some(chosen.clone()), ..NewContext::named(&name, Language::Python) };
        let info = created(engine.execute(&owner, Op::CreateContext(new)).await);
        let write = Op::WriteFile { owner: files_of(&chosen), path: "f".into(), content: b"x".to_vec() };
        engine.execute(&owner, write).await.unwrap();
        let started = RunCode { background: true, ..RunCode::new(existing(&chosen), "hang") };
        let Ok(Outcome::Started(run)) = engine.execute(&owner, Op::RunCode(started)).await else { panic!() };
        for stranger in &strangers {
            for wanted in [&chosen, &name] {
                for which in [ContextSelector::Named(wanted.clone()), ContextSelector::Id(wanted.clone())] {
                    let target = Target::existing(which.clone());
                    for op in [
                        Op::StopContext { which },
                        Op::RunCode(RunCode::new(target.clone(), "print 1")),
                        Op::RunCommand(shell(target.clone(), "print 1")),
                        Op::ReadFile { owner: FileOwner::workspace(target.clone()), path: "f".into() },
                        Op::ListFiles { owner: FileOwner::workspace(target.clone()), path: ".".into(), depth: None },
                        Op::WriteFile { owner: FileOwner::workspace(target), path: "f".into(), content: vec![] },
                    ] {
                        let absent = Err(EngineError::ContextNotFound(wanted.clone()));
                        assert_eq!(engine.execute(stranger, op.clone()).await, absent, "{op:?}");
                    }
                }
            }
            let run = run.run.clone();
            let absent = Err(EngineError::RunNotFound(run.clone()));
            let wait = Op::WaitRun { run: run.clone(), cursor: None, wait: Duration::ZERO };
            assert_eq!(engine.execute(stranger, wait).await, absent);
            assert_eq!(engine.execute(stranger, Op::CancelRun { run }).await, absent);
            let current = Op::RunCode(RunCode::new(Target::existing(ContextSelector::Current), "print 1"));
            let result = engine.execute(stranger, current).await;
            let theirs = match &result {
                Err(EngineError::NoCurrent { ids }) => ids.clone(),
                Ok(Outcome::Ran(ran)) => vec![ran.context.id.clone()],
                other => panic!("{other:?}"),
            };
            assert!(!theirs.contains(&chosen));
            let Ok(Outcome::Contexts(all)) = engine.execute(stranger, Op::ListContexts).await else { panic!() };
            assert!(all.iter().all(|context| context.id != chosen));
        }
        let read = Op::ReadLink { key: info.key, path: "f".into(), max_bytes: 10 };
        assert_eq!(engine.execute(&strangers[0], read.clone()).await, Err(EngineError::FileNotFound("f".into())));
        assert!(engine.execute(&owner, read).await.is_ok());
        // The same id of another tenant is another context.
        let make = Some(NewContext::named("", Language::Python));
        let target = Target { which: ContextSelector::Id(chosen.clone()), make };
        let theirs = ran(engine.execute(&strangers[0], Op::RunCode(RunCode::new(target, "read f"))).await);
        assert!(theirs.created && theirs.context.id == chosen);
        assert_eq!(theirs.end, engine::op::RunOutcome::Error, "its files are its own");
        engine.execute(&strangers[0], Op::StopContext { which: ContextSelector::Id(chosen.clone()) }).await.unwrap();
        assert_eq!(engine.counts_of(&strangers[0].tenant, realm), (0, 0));
        assert_eq!(engine.counts_of(&Tenant::local(), realm), (1, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_realm_that_is_not_configured_is_refused() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let refused = engine.execute(&call_in(Realm("nosuch")), Op::ListContexts).await;
    assert!(matches!(refused, Err(EngineError::NotReady(_))), "{refused:?}");
}
