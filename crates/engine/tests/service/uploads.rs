//! Links for uploads: one file, one path, once.

use std::sync::Arc;
use std::time::Duration;

use engine::op::{ContextSelector, LimitKind, Target, UploadLink};
use engine::{Call, Engine, EngineConfig, EngineError, Op, Outcome, Tenant, UploadRefusal};
use testkit::fake::FakeBackend;

use crate::support::*;

async fn link_of(engine: &Engine, call: &Call, context: &str, path: &str) -> Result<UploadLink, EngineError> {
    let target = Target::existing(ContextSelector::Named(context.into()));
    match engine.execute(call, Op::UploadLink { target, path: path.into() }).await? {
        Outcome::UploadLink(link) => Ok(link),
        other => panic!("{other:?}"),
    }
}

async fn content(engine: &Engine, context: &str, path: &str) -> Result<Vec<u8>, EngineError> {
    match engine.execute(&call(), Op::ReadFile { owner: files_of(context), path: path.into() }).await? {
        Outcome::File { content, .. } => Ok(content),
        other => panic!("{other:?}"),
    }
}

fn refusal<T>(result: Result<T, UploadRefusal>) -> UploadRefusal {
    result.err().expect("refused")
}

#[tokio::test(start_paused = true)]
async fn a_link_takes_one_file_and_is_used_then() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let link = link_of(&engine, &call(), &id, "in/f").await.unwrap();
    assert_eq!((link.id.len(), link.path.as_str()), (32, "in/f"));
    let offer = engine.upload_offer(&link.id).unwrap();
    assert_eq!((offer.path.as_str(), offer.max_bytes, offer.owner.as_str()), ("in/f", link.max_bytes, "local"));
    let mut upload = engine.begin_upload(&link.id).await.unwrap();
    upload.send(&[1; 1 << 20]).await.unwrap();
    upload.send(b"end").await.unwrap();
    assert_eq!(
        content(&engine, &id, "in/f").await,
        Err(EngineError::FileNotFound("in/f".into())),
        "not before its end"
    );
    assert_eq!(upload.finish().await, Ok((1 << 20) + 3));
    assert_eq!(content(&engine, &id, "in/f").await.unwrap().len(), (1 << 20) + 3);
    assert_eq!(refusal(engine.upload_offer(&link.id)), UploadRefusal::Used);
    assert_eq!(refusal(engine.begin_upload(&link.id).await), UploadRefusal::Used);
}

#[tokio::test(start_paused = true)]
async fn of_many_uploads_at_once_one_gets_the_link() {
    let backend = FakeBackend::new();
    let engine = Arc::new(engine(&backend).await);
    let id = create(&engine, "a").await;
    let link = link_of(&engine, &call(), &id, "f").await.unwrap();
    let tries = (0..50).map(|n: u8| {
        let (engine, id) = (engine.clone(), link.id.clone());
        tokio::spawn(async move {
            let mut upload = engine.begin_upload(&id).await?;
            upload.send(&[n]).await.unwrap();
            tokio::task::yield_now().await;
            Ok::<_, UploadRefusal>((n, upload.finish().await.unwrap()))
        })
    });
    let mut stored = Vec::new();
    for tried in tries.collect::<Vec<_>>() {
        match tried.await.unwrap() {
            Ok((n, 1)) => stored.push(n),
            Ok(other) => panic!("{other:?}"),
            Err(UploadRefusal::InUse | UploadRefusal::Used) => {}
            Err(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(content(&engine, &id, "f").await.unwrap(), stored, "one was stored");
}

#[tokio::test(start_paused = true)]
async fn an_upload_that_breaks_off_leaves_nothing_and_may_be_repeated() {
    let backend = FakeBackend::new();
    let config = EngineConfig { max_link_bytes: 10, ..config() };
    let engine = engine_with(&backend, config).await;
    let id = create(&engine, "a").await;
    let link = link_of(&engine, &call(), &id, "f").await.unwrap();
    let mut upload = engine.begin_upload(&link.id).await.unwrap();
    upload.send(b"half").await.unwrap();
    assert_eq!(refusal(engine.upload_offer(&link.id)), UploadRefusal::InUse);
    drop(upload);
    assert_eq!(content(&engine, &id, "f").await, Err(EngineError::FileNotFound("f".into())));

    let mut upload = engine.begin_upload(&link.id).await.unwrap();
    upload.send(b"0123456789").await.unwrap();
    let too_large = EngineError::FileTooLarge { path: "f".into(), limit: 10 };
    assert_eq!(upload.send(b"x").await, Err(too_large));
    drop(upload);
    assert_eq!(content(&engine, &id, "f").await, Err(EngineError::FileNotFound("f".into())));

    let mut upload = engine.begin_upload(&link.id).await.unwrap();
    upload.send(b"whole").await.unwrap();
    assert_eq!(upload.finish().await, Ok(5));
    assert_eq!(content(&engine, &id, "f").await.unwrap(), b"whole");

    let full = link_of(&engine, &call(), &id, "full").await.unwrap();
    let upload = engine.begin_upload(&full.id).await.unwrap();
    assert_eq!(upload.finish().await, Err(EngineError::NoSpace { disk_bytes: 1 << 30 }));
    assert!(engine.upload_offer(&full.id).is_ok(), "nothing was stored");
}

#[tokio::test(start_paused = true)]
async fn a_link_ends_with_its_time_and_with_its_context() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let link = link_of(&engine, &call(), &id, "f").await.unwrap();
    tokio::time::sleep(Duration::from_secs(15 * 60 - 1)).await;
    assert!(engine.upload_offer(&link.id).is_ok());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(refusal(engine.upload_offer(&link.id)), UploadRefusal::Expired);
    assert_eq!(refusal(engine.begin_upload(&link.id).await), UploadRefusal::Expired);

    let link = link_of(&engine, &call(), &id, "f").await.unwrap();
    engine.execute(&call(), stop_op(&id)).await.unwrap();
    let gone = UploadRefusal::Failed(EngineError::FileNotFound("f".into()));
    assert_eq!(refusal(engine.upload_offer(&link.id)), gone);
    assert_eq!(refusal(engine.begin_upload(&link.id).await), gone);
    for wrong in ["", "x", &link.id[1..], &link.id.to_uppercase(), &"0".repeat(32)] {
        assert_eq!(refusal(engine.begin_upload(wrong).await), UploadRefusal::Unknown, "{wrong:?}");
    }
}

/// Links are made only for contexts of the tenant, are all different, and those of one tenant leave room for others.
#[tokio::test(start_paused = true)]
async fn a_tenant_gets_links_to_its_own_contexts_and_not_too_many() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let other = Call { tenant: Tenant("other".into()), ..call() };
    assert_eq!(link_of(&engine, &other, &id, "f").await, Err(EngineError::ContextNotFound(id.clone())));
    let mut ids = std::collections::HashSet::new();
    for _ in 0..256 {
        assert!(ids.insert(link_of(&engine, &call(), &id, "f").await.unwrap().id));
    }
    let full = EngineError::OverLimit { what: LimitKind::UploadLinks, limit: "256".into() };
    assert_eq!(link_of(&engine, &call(), &id, "f").await, Err(full));
    // A used one makes room, and so do those that have expired.
    let used = ids.iter().next().unwrap();
    engine.begin_upload(used).await.unwrap().finish().await.unwrap();
    link_of(&engine, &call(), &id, "f").await.unwrap();
    assert_eq!(refusal(engine.begin_upload(used).await), UploadRefusal::Unknown);
    tokio::time::sleep(Duration::from_secs(15 * 60)).await;
    for _ in 0..256 {
        link_of(&engine, &call(), &id, "f").await.unwrap();
    }
    assert!(link_of(&engine, &call(), &id, &"x".repeat(5000)).await.is_err());
}

#[tokio::test(start_paused = true)]
async fn while_a_file_is_uploaded_its_context_is_not_idle() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, agentrun(|realm| realm.idle_timeout = Some(Duration::from_secs(60)))).await;
    let id = create(&engine, "a").await;
    let link = link_of(&engine, &call(), &id, "f").await.unwrap();
    let mut upload = engine.begin_upload(&link.id).await.unwrap();
    tokio::time::sleep(Duration::from_secs(600)).await;
    upload.send(b"x").await.unwrap();
    assert_eq!(upload.finish().await, Ok(1));
    tokio::time::sleep(Duration::from_secs(90)).await;
    assert_eq!(engine.counts().contexts[&dialects::agentrun::REALM], 0, "then it is");
}
