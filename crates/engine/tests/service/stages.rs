//! The stages of a call, for a caller that records them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use engine::op::{PassedStage, RecordStages, Stage, Stages};
use engine::{Call, EngineError};
use testkit::fake::FakeBackend;

use crate::network::{everywhere, pages};
use crate::support::*;

#[derive(Debug, Default)]
struct Recorder {
    ids: AtomicU64,
    passed: Mutex<Vec<PassedStage>>,
}

impl RecordStages for Recorder {
    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    fn variable(&self, id: u64) -> (&'static str, String) {
        ("STAGE", format!("number {id}"))
    }

    fn passed(&self, stage: PassedStage) {
        assert!(stage.began <= stage.ended, "{stage:?}");
        self.passed.lock().unwrap().push(stage);
    }
}

impl Recorder {
    fn take(&self) -> Vec<PassedStage> {
        std::mem::take(&mut self.passed.lock().unwrap())
    }

    fn stages(&self) -> Vec<Stage> {
        self.take().iter().map(|passed| passed.stage).collect()
    }
}

fn recorded() -> (Call, Arc<Recorder>) {
    let recorder = Arc::<Recorder>::default();
    (Call { stages: Stages(Some(recorder.clone())), ..call() }, recorder)
}

#[tokio::test(start_paused = true)]
async fn each_stage_of_a_call_is_recorded_when_it_ends() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let (caller, recorder) = recorded();
    let id = created(engine.execute(&caller, create_op("a")).await).id;
    assert_eq!(recorder.stages(), [Stage::Create]);

    // The code learns to which stage it belongs, unless it is told something else.
    let told = ran(engine.execute(&caller, command_op(&id, "env STAGE")).await);
    let passed = recorder.take();
    assert_eq!(passed.iter().map(|passed| passed.stage).collect::<Vec<_>>(), [Stage::Run]);
    assert_eq!(text(&told.stdout), format!("number {}\n", passed[0].id));

    // A second cell waits for the first.
    let first = spawn_run(&engine, call(), &id, "hang on");
    begun(&backend, "hang on").await;
    let second = spawn_run(&engine, caller.clone(), &id, "print 2");
    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    assert_eq!(recorder.stages(), [], "it waits");
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
    assert_eq!(recorder.stages(), [Stage::Queue, Stage::Run]);
}

#[tokio::test]
async fn a_connection_is_a_stage_of_its_run() {
    let (backend, at) = (FakeBackend::new(), pages().await);
    let engine = engine_with(&backend, everywhere(at)).await;
    let id = create(&engine, "c").await;
    let (caller, recorder) = recorded();
    let code = format!("fetch pages.test:{}", at.port());
    assert_eq!(text(&ran(engine.execute(&caller, run_op(&id, &code)).await).stdout), "200\n");
    eventually("the connection ends", || recorder.passed.lock().unwrap().len() == 2).await;
    let passed = recorder.take();
    let of = |stage| passed.iter().find(|passed| passed.stage == stage).unwrap_or_else(|| panic!("{passed:?}"));
    let (run, egress) = (of(Stage::Run), of(Stage::Egress));
    assert_eq!((egress.within, &egress.target), (Some(run.id), &Some(("pages.test".into(), at.port()))));

    // However many connections a run makes, only the first ones are recorded.
    let flood = vec!["fetch evil.test"; 40].join("\n");
    engine.execute(&caller, run_op(&id, &flood)).await.unwrap();
    eventually("all have ended", || recorder.passed.lock().unwrap().len() >= 33).await;
    assert_eq!(recorder.take().iter().filter(|passed| passed.stage == Stage::Egress).count(), 32);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_fails_says_which_context_it_concerned() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let caller = call();
    let missing = engine::Op::ReadFile { owner: files_of("a"), path: "missing".into() };
    assert!(matches!(engine.execute(&caller, missing).await, Err(EngineError::FileNotFound(_))));
    assert_eq!(caller.found.get(), Some(id.as_str()));
    let caller = call();
    assert!(engine.execute(&caller, run_op("nowhere", "print 1")).await.is_err());
    assert_eq!(caller.found.get(), None);
}
