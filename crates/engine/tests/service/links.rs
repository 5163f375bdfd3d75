//! Links: keys that are permissions, files read in pieces.

use std::time::Duration;

use engine::op::{Captured, Environment, FileOwner, Realm, RunOnce};
use engine::{Engine, EngineError, Op, Outcome, Tenant};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

async fn put(engine: &Engine, owner: FileOwner, realm: Realm, path: &str, content: &[u8]) -> String {
    let op = Op::WriteFile { owner, path: path.into(), content: content.to_vec() };
    match engine.execute(&call_in(realm), op).await {
        Ok(Outcome::Written { key, .. }) => key,
        other => panic!("{other:?}"),
    }
}

fn missing<T>(path: &str) -> Result<T, EngineError> {
    Err(EngineError::FileNotFound(path.into()))
}

fn opened(result: Result<engine::LinkedFile, EngineError>) -> Result<u64, EngineError> {
    result.map(|file| file.size)
}

#[tokio::test(start_paused = true)]
async fn a_file_is_read_in_pieces_of_at_most_a_mebibyte() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let content: Vec<u8> = (0..3_000_000u32).map(|n| (n / 7) as u8).collect();
    let key = put(&engine, files_of(&id), dialects::agentrun::REALM, "d/f", &content).await;
    let file = engine.open_file(&key, "d/f").await.unwrap();
    assert_eq!(file.size, 3_000_000);
    let mut whole = Vec::new();
    while whole.len() < content.len() {
        let piece = file.read(whole.len() as u64, u64::MAX).await.unwrap();
        assert!(!piece.is_empty() && piece.len() <= 1 << 20);
        whole.extend(piece);
    }
    assert_eq!(whole, content);
    assert_eq!(file.read(10, 5).await.unwrap(), content[10..15]);
    assert!(file.read(3_000_000, 5).await.unwrap().is_empty());
    put(&engine, files_of(&id), dialects::agentrun::REALM, "d/f", &content).await;
    let changed = file.read(0, 5).await.unwrap_err().to_string();
    assert!(changed.contains("changed while it was read"), "{changed}");
}

#[tokio::test(start_paused = true)]
async fn an_unknown_key_a_missing_file_and_a_removed_context_are_all_the_same() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let key = put(&engine, files_of(&id), dialects::agentrun::REALM, "f", b"x").await;
    for odd in ["", "x", &"0".repeat(64), &key.to_uppercase(), &format!("{key} "), &key[..63]] {
        assert_eq!(opened(engine.open_file(odd, "f").await), missing("f"), "{odd:?}");
    }
    assert_eq!(opened(engine.open_file(&key, "g").await), missing("g"));
    assert_eq!(opened(engine.open_file(&key, "f").await), Ok(1));
    let open = engine.open_file(&key, "f").await.unwrap();
    engine.execute(&call(), stop_op(&id)).await.unwrap();
    assert_eq!(opened(engine.open_file(&key, "f").await), missing("f"));
    assert_eq!(open.read(0, 1).await, missing("f"));
}

#[tokio::test(start_paused = true)]
async fn a_file_beyond_the_limit_of_links_is_refused() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, engine::EngineConfig { max_link_bytes: 3, ..config() }).await;
    let id = create(&engine, "a").await;
    let key = put(&engine, files_of(&id), dialects::agentrun::REALM, "f", b"four").await;
    assert_eq!(
        opened(engine.open_file(&key, "f").await),
        Err(EngineError::FileTooLarge { path: "f".into(), limit: 3 })
    );
}

#[tokio::test(start_paused = true)]
async fn while_a_link_is_read_its_context_is_not_idle() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.idle_timeout = Some(Duration::from_secs(60)))).await;
    let id = create(&engine, "a").await;
    let key = put(&engine, files_of(&id), dialects::agentrun::REALM, "f", b"x").await;
    let file = engine.open_file(&key, "f").await.unwrap();
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(file.read(0, 1).await.unwrap(), b"x");
    drop(file);
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert_eq!(engine.counts().contexts[&dialects::agentrun::REALM], 0, "then it is");
}

#[tokio::test(start_paused = true)]
async fn links_of_conversations_work_without_a_sandbox_and_after_a_restart() {
    let backend = FakeBackend::new();
    let config = engine::EngineConfig { file_secret: [3; 32], ..config() };
    let first = engine_with(&backend, config.clone()).await;
    let op = Op::RunOnce(RunOnce {
        conversation: "c".into(),
        language: Language::Python,
        code: "write /data/f from c".into(),
        env: Environment::default(),
        network: engine::op::Network::Usual,
    });
    let key = ran(first.execute(&call_in(dialects::conversation::REALM), op.clone()).await).context.key;
    eventually("its sandbox is gone", || backend.living() == 3).await;
    let file = first.open_file(&key, "f").await.unwrap();
    assert_eq!(file.read(0, 100).await.unwrap(), b"from c");
    // Code changes the sandbox under the link, not the file.
    let Op::RunOnce(again) = op else { panic!() };
    let again = Op::RunOnce(RunOnce { code: "print".into(), ..again });
    ran(first.execute(&call_in(dialects::conversation::REALM), again).await);
    assert_eq!(file.read(0, 100).await.unwrap(), b"from c");
    first.shutdown(Duration::ZERO).await;

    let second = engine_with(&backend, config).await;
    let file = second.open_file(&key, "f").await.unwrap();
    assert_eq!(file.read(5, 1).await.unwrap(), b"c");
    let read = Op::ReadLink { key: key.clone(), path: "f".into(), max_bytes: 100 };
    let unknown = second.execute(&call_in(dialects::conversation::REALM), read.clone()).await;
    assert_eq!(unknown, missing("f"), "whose it is shows when it is used again");
    let list = Op::ListFiles { owner: FileOwner::Conversation("c".into()), path: String::new(), depth: None };
    second.execute(&call_in(dialects::conversation::REALM), list).await.unwrap();
    assert!(second.execute(&call_in(dialects::conversation::REALM), read).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn links_into_many_conversations_at_once_make_a_bounded_number_of_sandboxes() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let mut keys = Vec::new();
    for n in 0..40 {
        let owner = FileOwner::Conversation(format!("c{n}"));
        keys.push(put(&engine, owner, dialects::conversation::REALM, "f", b"x").await);
    }
    assert!(backend.living() <= 3 + 16, "{}", backend.living());
    let reading: Vec<_> = keys
        .into_iter()
        .map(|key| {
            let engine = engine.clone();
            tokio::spawn(async move { engine.open_file(&key, "f").await.unwrap().read(0, 1).await })
        })
        .collect();
    for read in reading {
        assert_eq!(read.await.unwrap(), Ok(b"x".to_vec()));
    }
    eventually("they go after a while", || backend.living() == 3).await;
}

#[tokio::test(start_paused = true)]
async fn long_output_is_kept_whole_behind_a_key_of_its_own() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let flooded = run(&engine, &id, "flood 1048576").await;
    let Captured { kept: Some(kept), truncated: true, .. } = flooded.stdout else { panic!("{:?}", flooded.stdout) };
    assert_ne!(kept.key, flooded.context.key);
    assert_eq!(opened(engine.open_file(&kept.key, &kept.name).await), Ok(1_048_576));
    assert_eq!(opened(engine.open_file(&flooded.context.key, &kept.name).await), missing(&kept.name));
    assert_eq!(run(&engine, &id, "print short").await.stdout.kept, None);
}

#[tokio::test(start_paused = true)]
async fn what_a_tenant_reads_by_key_is_its_own() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let key = put(&engine, files_of(&id), dialects::agentrun::REALM, "f", b"0123456789").await;
    let read = |max_bytes| Op::ReadLink { key: key.clone(), path: "f".into(), max_bytes };
    let whole = engine.execute(&call(), read(100)).await;
    assert_eq!(
        whole,
        Ok(Outcome::File { path: "f".into(), content: b"0123456789".to_vec(), size: 10, key: key.clone() })
    );
    let part = engine.execute(&call(), read(4)).await;
    assert_eq!(part, Ok(Outcome::File { path: "f".into(), content: b"0123".to_vec(), size: 10, key: key.clone() }));
    assert_eq!(engine.execute(&call_of(&Tenant("stranger".into())), read(100)).await, missing("f"));
}

#[tokio::test(start_paused = true)]
async fn what_is_new_is_listed_newest_first_without_making_a_sandbox() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let (a, b) = (create(&engine, "a").await, create(&engine, "b").await);
    for (context, path) in [(&a, "one"), (&b, "two"), (&a, "three")] {
        put(&engine, files_of(context), dialects::agentrun::REALM, path, b"x").await;
    }
    let recent = async |call: &engine::Call| match engine.execute(call, Op::RecentFiles).await {
        Ok(Outcome::Recent(files)) => files.into_iter().map(|file| (file.context_id, file.path)).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    let expected = [(a.clone(), "three"), (b, "two"), (a, "one")].map(|(id, path)| (id, path.to_owned()));
    assert_eq!(recent(&call()).await, expected);
    assert!(recent(&call_of(&Tenant("stranger".into()))).await.is_empty());
    assert!(recent(&call_in(dialects::sandpool::REALM)).await.is_empty());
    backend.kill(0);
    backend.kill(1);
    eventually("their sandboxes are gone", || backend.living() <= 4).await;
    let before = backend.created();
    recent(&call()).await;
    assert_eq!(backend.created(), before);
}
