//! Limits of realms and tenants, eviction, idle contexts, and what is told about them.

use std::time::Duration;

use engine::op::{
    ContextSelector, LimitKind, NewContext, Notice, NoticeKind, Quota, RunCode, RunOutcome, Size, StoppedContext,
    Target,
};
use engine::{Call, EngineError, Op, Outcome, Tenant};
use proto::Language;
use testkit::fake::FakeBackend;

use crate::support::*;

fn session(id: &str, code: &str) -> Op {
    let make = Some(NewContext::named("", Language::Python));
    Op::RunCode(RunCode::new(Target { which: ContextSelector::Id(id.into()), make }, code))
}

async fn ids(engine: &engine::Engine, call: &Call) -> Vec<String> {
    match engine.execute(call, Op::ListContexts).await {
        Ok(Outcome::Contexts(all)) => all.into_iter().map(|context| context.id).collect(),
        other => panic!("{other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn at_the_limit_the_idle_one_not_used_for_the_longest_time_makes_room() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_realm(dialects::microsandbox::REALM, |realm| realm.max_contexts = 3)).await;
    let caller = call_in(dialects::microsandbox::REALM);
    let mut notices = engine.notices();
    for id in ["a", "b", "c"] {
        ran(engine.execute(&caller, session(id, "set x 1")).await);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    ran(engine.execute(&caller, session("a", "get x")).await);
    let busy = spawn_op(&engine, &caller, session("b", "sleep 60000"));
    begun(&backend, "sleep 60000").await;
    let fourth = ran(engine.execute(&caller, session("d", "print 1")).await);
    assert!(fourth.created);
    assert_eq!(ids(&engine, &caller).await, ["d", "b", "a"], "`b` is busy, `a` was used after `c`");
    let told: Vec<(String, NoticeKind)> =
        std::iter::from_fn(|| notices.try_recv().ok()).map(|n| (n.id, n.what)).collect();
    assert!(told.contains(&("c".into(), NoticeKind::Evicted)), "{told:?}");
    assert_eq!(ran(busy.await.unwrap()).end, RunOutcome::Ok);
    assert!(!ran(engine.execute(&caller, session("b", "get x")).await).created);
    assert!(ran(engine.execute(&caller, session("c", "print 1")).await).created, "its state is gone, and it says so");
}

#[tokio::test(start_paused = true)]
async fn when_all_are_busy_nobody_makes_room() {
    let backend = FakeBackend::new();
    let engine = engine_with(&backend, with_realm(dialects::microsandbox::REALM, |realm| realm.max_contexts = 2)).await;
    let caller = call_in(dialects::microsandbox::REALM);
    for id in ["a", "b"] {
        let code = format!("hang {id}");
        spawn_op(&engine, &caller, session(id, &code));
        begun(&backend, &code).await;
    }
    assert_eq!(engine.execute(&caller, session("c", "print")).await, Err(EngineError::ContextLimit(2)));
    assert_eq!(ids(&engine, &caller).await, ["b", "a"]);
}

/// Whoever runs is never the one that makes room, however many come at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn under_a_storm_of_sessions_every_run_ends_well_and_the_limit_holds() {
    let backend = FakeBackend::new();
    let config = with_realm(dialects::microsandbox::REALM, |realm| (realm.max_contexts, realm.runs_at_once) = (4, 100));
    let engine = engine_with(&backend, config).await;
    let tries: Vec<_> = (0..200)
        .map(|n| {
            spawn_op(
                &engine,
                &call_in(dialects::microsandbox::REALM),
                session(&format!("s{}", n % 13), "sleep 1\nprint on"),
            )
        })
        .collect();
    let mut well = 0;
    for attempt in tries {
        match attempt.await.unwrap() {
            Ok(Outcome::Ran(ran)) => {
                assert_eq!((ran.end.clone(), text(&ran.stdout)), (RunOutcome::Ok, "on\n"));
                well += 1;
            }
            Err(EngineError::ContextLimit(4)) => {}
            other => panic!("{other:?}"),
        }
        assert!(engine.counts().contexts[&dialects::microsandbox::REALM] <= 4);
    }
    assert!(well >= 4, "{well}");
    eventually("what was evicted is gone", || engine.sandboxes() <= 3 + 4).await;
}

#[tokio::test(start_paused = true)]
async fn the_memory_of_all_sessions_together_is_limited() {
    let backend = FakeBackend::new();
    let config = with_realm(dialects::microsandbox::REALM, |realm| {
        realm.max_total_memory_bytes = Some(2048 << 20);
        realm.evict_idle = false;
    });
    let engine = engine_with(&backend, config).await;
    let stranger = Call { tenant: Tenant("stranger".into()), ..call_in(dialects::microsandbox::REALM) };
    ran(engine.execute(&call_in(dialects::microsandbox::REALM), session("a", "print")).await);
    ran(engine.execute(&stranger, session("b", "print")).await);
    let over = engine.execute(&stranger, session("c", "print")).await;
    assert_eq!(over, Err(EngineError::OverLimit { what: LimitKind::TotalMemory, limit: "2048".into() }));
    engine.execute(&stranger, Op::StopContext { which: ContextSelector::Id("b".into()) }).await.unwrap();
    ran(engine.execute(&stranger, session("c", "print")).await);
}

/// What others hold cannot be made room in by giving up one's own.
#[tokio::test(start_paused = true)]
async fn nobody_makes_room_in_vain() {
    let backend = FakeBackend::new();
    let config = with_realm(dialects::microsandbox::REALM, |realm| realm.max_total_memory_bytes = Some(3072 << 20));
    let engine = engine_with(&backend, config).await;
    let stranger = Call { tenant: Tenant("stranger".into()), ..call_in(dialects::microsandbox::REALM) };
    let caller = call_in(dialects::microsandbox::REALM);
    ran(engine.execute(&stranger, session("theirs", "print")).await);
    ran(engine.execute(&caller, session("mine", "print")).await);
    let large = NewContext { size: Some(Size::Large), ..NewContext::named("", Language::Python) };
    let over = engine.execute(&caller, Op::CreateContext(large)).await;
    assert!(matches!(over, Err(EngineError::OverLimit { what: LimitKind::TotalMemory, .. })), "{over:?}");
    assert_eq!(ids(&engine, &caller).await, ["mine"]);
    let medium = NewContext { size: Some(Size::Medium), ..NewContext::named("", Language::Python) };
    let fits = created(engine.execute(&caller, Op::CreateContext(medium)).await);
    assert_eq!(ids(&engine, &caller).await, [fits.id], "`mine` made room");
}

#[tokio::test(start_paused = true)]
async fn a_tenant_that_has_nothing_is_forgotten_and_one_that_has_something_is_not() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let tenant = |n: usize| call_of(&Tenant(format!("t{n}")));
    let kept = created(engine.execute(&tenant(0), create_op("a")).await).id;
    ran(engine.execute(&tenant(0), run_op(&kept, "set x 1")).await);
    for n in 1..50 {
        engine.execute(&tenant(n), Op::ListContexts).await.unwrap();
    }
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!(text(&ran(engine.execute(&tenant(0), run_op(&kept, "get x")).await).stdout), "1\n");
    let groups: Vec<String> = backend.specs().into_iter().map(|spec| spec.groups[0].name.clone()).collect();
    let again = created(engine.execute(&tenant(0), create_op("b")).await);
    assert_eq!(backend.specs().last().unwrap().groups[0].name, groups[3], "the same budget: {}", again.id);
    assert_eq!(engine.counts().runs, 0);
}

#[tokio::test(start_paused = true)]
async fn a_tenants_quota_reaches_over_all_realms() {
    let backend = FakeBackend::new();
    let mut config = config();
    let small = Tenant("small".into());
    let quota = Quota { contexts: Some(2), runs: Some(1), memory_bytes: Some(512 << 20), network: None };
    config.quotas.insert(small.clone(), quota);
    let engine = engine_with(&backend, config).await;
    let of = |realm| Call { realm, ..call_of(&small) };
    let a = created(engine.execute(&of(dialects::agentrun::REALM), create_op("a")).await).id;
    let b = created(engine.execute(&of(dialects::sandpool::REALM), create_op("b")).await).id;
    let over = engine.execute(&of(dialects::workbench::REALM), create_op("c")).await;
    assert_eq!(over, Err(EngineError::OverLimit { what: LimitKind::Contexts, limit: "2".into() }));
    assert!(engine.execute(&call(), create_op("of another")).await.is_ok());
    let groups = backend.specs().into_iter().filter(|spec| spec.groups[0].name != "local").map(|spec| spec.groups);
    let memory: Vec<Option<u64>> = groups.map(|groups| groups[0].memory_bytes).collect();
    assert_eq!(memory, [Some(512 << 20); 2], "one group around those of all realms");

    let first = spawn_op(&engine, &of(dialects::agentrun::REALM), run_op(&a, "sleep 2000"));
    begun(&backend, "sleep 2000").await;
    let second = spawn_op(&engine, &of(dialects::sandpool::REALM), run_op(&b, "print 2"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!backend.runs().contains(&"print 2".to_owned()), "one run at once");
    assert_eq!((ran(first.await.unwrap()).end, ran(second.await.unwrap()).end), (RunOutcome::Ok, RunOutcome::Ok));
    backend.set_oom_kills(1);
    let killed = ran(engine.execute(&of(dialects::agentrun::REALM), run_op(&a, "die 9")).await).end;
    assert_eq!(killed, RunOutcome::OutOfMemory { limit_bytes: Some(512 << 20) }, "the least of what is around it");
}

#[tokio::test(start_paused = true)]
async fn what_happens_to_contexts_is_told() {
    let backend = FakeBackend::new();
    let config = agentrun(|realm| realm.idle_timeout = Some(Duration::from_secs(100)));
    let engine = engine_with(&backend, config).await;
    let mut notices = engine.notices();
    let id = create(&engine, "a").await;
    run(&engine, &id, "hang").await;
    run(&engine, &id, "die 11").await;
    run(&engine, &id, "deaf").await;
    run(&engine, &id, "print on").await;
    tokio::time::sleep(Duration::from_secs(150)).await;
    let second = create(&engine, "b").await;
    engine.execute(&call(), stop_op(&second)).await.unwrap();
    let told: Vec<Notice> = std::iter::from_fn(|| notices.try_recv().ok()).collect();
    assert!(told.iter().all(|notice| notice.realm == dialects::agentrun::REALM && notice.tenant == Tenant::local()));
    let of = |wanted: &str| told.iter().filter(|n| n.id == wanted).map(|n| n.what).collect::<Vec<_>>();
    let expected =
        [NoticeKind::Created, NoticeKind::TimedOut, NoticeKind::Crashed, NoticeKind::Lost, NoticeKind::Expired];
    assert_eq!(
        (of(&id).as_slice(), of(&second).as_slice()),
        (&expected[..], &[NoticeKind::Created, NoticeKind::Stopped][..])
    );
}

/// Content that is on its way counts until the guest has it, whether somebody still waits or not.
#[tokio::test(start_paused = true)]
async fn uploads_under_way_are_bounded_per_tenant() {
    let backend = FakeBackend::scripted(|_, request, _| match request {
        proto::ToGuest::WriteFile { path, .. } if path.starts_with("slow") => Some(Box::pin(std::future::pending())),
        _ => None,
    });
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    let write =
        |path: &str, size: usize| Op::WriteFile { owner: files_of(&id), path: path.into(), content: vec![0; size] };
    for n in 0..4 {
        let caller = call();
        let running = spawn_op(&engine, &caller, write(&format!("slow{n}"), 16 << 20));
        tokio::time::sleep(Duration::from_millis(10)).await;
        caller.cancel.cancel();
        assert_eq!(running.await.unwrap(), Err(EngineError::Cancelled));
    }
    let over = engine.execute(&call(), write("one more", 1)).await;
    assert_eq!(over, Err(EngineError::OverLimit { what: LimitKind::UploadBytes, limit: (64 << 20).to_string() }));
    tokio::time::sleep(Duration::from_secs(31)).await;
    assert!(engine.execute(&call(), write("later", 1)).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_back_end_that_never_ends_a_sandbox_holds_nobody_up_for_ever() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let id = create(&engine, "a").await;
    backend.hang_destroys(true);
    let stopped = engine.execute(&call(), stop_op(&id)).await;
    assert_eq!(
        stopped,
        Ok(Outcome::Stopped(StoppedContext { context_id: id, ..StoppedContext::default() })),
        "nobody reaches it any more"
    );
    eventually("another is ready in its place", || backend.living() == 4).await;
    backend.hang_destroys(false);
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert_eq!((backend.living(), engine.counts().ending), (3, 0), "it is tried again");
}

#[tokio::test(start_paused = true)]
async fn volumes_and_runtimes_are_listed() {
    let backend = FakeBackend::new();
    let volume = engine::op::SharedVolume { host: "/srv/x".into(), inside: "/mnt/x".into(), read_only: true };
    let engine =
        engine_with(&backend, with_realm(dialects::microsandbox::REALM, |realm| realm.volumes = vec![volume.clone()]))
            .await;
    let volumes = engine.execute(&call_in(dialects::microsandbox::REALM), Op::ListVolumes).await;
    assert_eq!(volumes, Ok(Outcome::Volumes(vec![volume.clone()])));
    assert_eq!(engine.execute(&call(), Op::ListVolumes).await, Ok(Outcome::Volumes(vec![])));
    ran(engine.execute(&call_in(dialects::microsandbox::REALM), session("a", "print")).await);
    assert_eq!(backend.specs().pop().unwrap().volumes, [volume]);
    let Ok(Outcome::Runtimes(all)) = engine.execute(&call(), Op::ListRuntimes).await else { panic!() };
    let names: Vec<&str> = all.iter().map(|runtime| runtime.name.as_str()).collect();
    assert_eq!(names, ["fake/python", "fake/javascript", "fake/typescript"]);
}

#[tokio::test(start_paused = true)]
async fn a_mount_is_in_the_contexts_of_its_tenants_and_realms() {
    let backend = FakeBackend::new();
    let volume = |name: &str| engine::op::SharedVolume {
        host: format!("/srv/{name}").into(),
        inside: format!("/workspace/{name}").into(),
        read_only: true,
    };
    let mount = |name: &str, realms: &[engine::Realm], tenants: Option<&[&str]>| engine::Mount {
        volume: volume(name),
        realms: realms.to_vec(),
        tenants: tenants.map(|names| names.iter().map(|name| engine::Tenant((*name).into())).collect()),
    };
    let (agentrun, microsandbox) = (dialects::agentrun::REALM, dialects::microsandbox::REALM);
    let mounts = vec![
        mount("blues", &[agentrun], Some(&["blue"])),
        mount("everybodys", &[agentrun, microsandbox], None),
        mount("elsewhere", &[microsandbox], Some(&["blue"])),
    ];
    let engine = engine_with(&backend, engine::EngineConfig { mounts, ..config() }).await;
    for (tenant, realm, names) in [
        ("blue", agentrun, vec!["blues", "everybodys"]),
        ("green", agentrun, vec!["everybodys"]),
        ("blue", microsandbox, vec!["everybodys", "elsewhere"]),
    ] {
        let call = engine::Call { realm, ..call_of(&engine::Tenant(tenant.into())) };
        let new = engine::op::NewContext::named("one", proto::Language::Python);
        let made = created(engine.execute(&call, Op::CreateContext(new)).await);
        let volumes: Vec<_> = names.into_iter().map(volume).collect();
        assert_eq!((&backend.specs().pop().unwrap().volumes, &made.mounts), (&volumes, &volumes), "{tenant}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_named_context_has_its_workspace_again_and_tenants_have_their_own() {
    let backend = FakeBackend::new();
    let kept = engine::KeptConfig { bytes: 1 << 30, inodes: 1000, stays: Duration::from_secs(3600) };
    let realm = dialects::sandpool::REALM;
    let engine = engine_with(&backend, with_realm(realm, |realm| realm.persist = Some(kept))).await;
    let call = |tenant: &str| Call { realm, ..call_of(&Tenant(tenant.into())) };
    let volume = async |tenant: &str, name: &str| {
        let made =
            created(engine.execute(&call(tenant), Op::CreateContext(NewContext::named(name, Language::Python))).await);
        let volume = backend.specs().pop().unwrap().kept.map(|kept| kept.name);
        let code = RunCode::new(Target::existing(ContextSelector::Id(made.id.clone())), "print");
        let notice = ran(engine.execute(&call(tenant), Op::RunCode(code)).await).notice;
        let stop = Op::StopContext { which: ContextSelector::Id(made.id) };
        assert!(engine.execute(&call(tenant), stop).await.is_ok());
        (volume, notice.is_some())
    };
    let (blue, opened_again) = volume("blue", "notes").await;
    assert!(blue.as_ref().is_some_and(|name| name.starts_with("w-") && name.len() == 66) && !opened_again, "{blue:?}");
    assert_eq!(volume("blue", "notes").await, (blue.clone(), true));
    let (other, _) = volume("blue", "other").await;
    let (green, opened_again) = volume("green", "notes").await;
    assert!(other != blue && green != blue && !opened_again, "{other:?} {green:?}");
    assert_eq!(volume("blue", "").await, (None, false), "without a name there is nothing to find it by");
}

#[tokio::test(start_paused = true)]
async fn kept_workspaces_have_a_limit_of_number_and_of_space_and_a_clear_error() {
    let kept = engine::KeptConfig { bytes: 1000 << 20, inodes: 1000, stays: Duration::from_secs(3600) };
    let realm = dialects::sandpool::REALM;
    // Each takes a tenth of its quota.
    let by_space = |realm: &mut engine::RealmConfig| realm.persist_bytes = 200 << 20;
    let by_number = |realm: &mut engine::RealmConfig| realm.max_contexts = 2;
    let limits: [(fn(&mut engine::RealmConfig), _, _); 3] = [
        (by_number, None, "2 workspaces are kept, which is the most: use the name of an earlier context"),
        (|_| {}, Some(2), "2 workspaces are kept, which is the most: use the name of an earlier context"),
        (by_space, None, "the workspaces that are kept take 200 MB, which is the most: use the name"),
    ];
    for (limit, contexts, why) in limits {
        let backend = FakeBackend::new();
        let mut config = with_realm(realm, |realm| {
            realm.persist = Some(kept);
            limit(realm);
        });
        config.quota.contexts = contexts;
        let engine = engine_with(&backend, config).await;
        let make = async |tenant: &str, name: &str| {
            let call = Call { realm, ..call_of(&Tenant(tenant.into())) };
            let made = engine.execute(&call, Op::CreateContext(NewContext::named(name, Language::Python))).await;
            let Ok(Outcome::Created(context)) = made else { return made.map(drop) };
            let stop = Op::StopContext { which: ContextSelector::Id(context.id) };
            engine.execute(&call, stop).await.map(drop)
        };
        for name in ["a", "b"] {
            assert_eq!(make("blue", name).await, Ok(()), "{name}");
        }
        let refused = make("blue", "c").await;
        assert!(matches!(&refused, Err(EngineError::CreateFailed(said)) if said.starts_with(why)), "{refused:?}");
        assert_eq!(make("blue", "a").await, Ok(()), "one that exists is opened all the same");
        assert_eq!(make("green", "c").await, Ok(()), "another tenant has its own limit");
    }
}

#[tokio::test(start_paused = true)]
async fn a_workspace_that_was_unused_for_too_long_is_deleted_at_the_start_and_later() {
    use sandbox::Backend as _;
    let backend = FakeBackend::new();
    let stays = Duration::from_secs(30 * 86_400);
    let kept = engine::KeptConfig { bytes: 1 << 30, inodes: 1000, stays };
    let realm = dialects::sandpool::REALM;
    let old = |name: &str| format!("w-{}", name.repeat(64));
    backend.set_last_used(&old("0"), 1);
    let engine = engine_with(&backend, with_realm(realm, |realm| realm.persist = Some(kept))).await;
    assert!(backend.kept().await.unwrap().is_empty(), "before the first call");
    let call = Call { realm, ..call() };
    let make = |name: &str| Op::CreateContext(NewContext::named(name, Language::Python));
    let last = || backend.specs().into_iter().filter_map(|spec| spec.kept).next_back().unwrap().name;
    created(engine.execute(&call, make("open")).await);
    let open = last();
    let id = created(engine.execute(&call, make("closed")).await).id;
    let closed = last();
    assert!(engine.execute(&call, Op::StopContext { which: ContextSelector::Id(id) }).await.is_ok());
    eventually("its sandbox is gone", || engine.counts().ending == 0).await;
    for volume in [&open, &closed] {
        backend.set_last_used(volume, 1);
    }
    tokio::time::sleep(Duration::from_secs(3 * 3600)).await;
    let left: Vec<String> = backend.kept().await.unwrap().into_iter().map(|kept| kept.name).collect();
    assert_eq!(left, [open], "one that is open stays");
}

#[tokio::test(start_paused = true)]
async fn the_first_run_that_misses_something_in_a_context_that_a_call_made_is_marked() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let run = async |code: &str| ran(engine.execute(&call(), session("a", code)).await);
    let marks = async |code: &str| {
        let ran = run(code).await;
        (ran.created, ran.misses_earlier)
    };
    assert_eq!(marks("print").await, (true, false));
    assert_eq!(marks("raise ValueError").await, (false, false), "that is no loss");
    assert_eq!(marks("raise NameError").await, (false, true));
    assert_eq!(marks("raise NameError").await, (false, false), "once is enough");
}
