//! The native back end against the kernel it runs on: real sandboxes, probed from inside by a guest that runs shell lines, and the
//! host counted before and after.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use sandbox::native::{Mode, Native, NativeConfig, spawn_launcher_from};
use sandbox::{Backend, BackendError, Group, KeptVolume, Limits, Sandbox, SandboxSpec};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

#[path = "native/browser.rs"]
mod browser;
#[path = "native/disk.rs"]
mod disk;
#[path = "native/egress.rs"]
mod egress;
#[path = "native/harness.rs"]
mod harness;
#[path = "native/inodes.rs"]
mod inodes;
#[path = "native/uncharged.rs"]
mod uncharged;
#[path = "native/users.rs"]
mod users;
#[path = "native/volumes.rs"]
mod volumes;
#[path = "native/warm.rs"]
mod warm;

use harness::*;

#[tokio::test]
async fn a_sandbox_is_what_it_says_and_leaves_nothing() {
    if !root() {
        return;
    }
    let place = Place::new("whole");
    let native = started_with_a_spare(&place.0, &spec()).await;
    assert_eq!(native.mode(), Mode::Root);
    let before = Left::count(&place.0);

    let sandbox = native.create(&spec()).await.unwrap();
    assert_eq!(
        sh(&*sandbox, "ls -A /").await.split_whitespace().collect::<Vec<_>>(),
        [".empty", "bin", "data", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "tmp", "usr", "workspace"]
            .into_iter()
            .filter(|n| Path::new("/").join(n).exists() || [".empty", "data", "workspace"].contains(n))
            .collect::<Vec<_>>()
    );
    let seen = sh(
        &*sandbox,
        "id -u; id -g; hostname; cat /opt/sandpool/driver.py; grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status",
    )
    .await;
    assert_eq!(seen, "1000\n1000\nsandbox\nprint(1)\nCapEff:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n");
    for refused in [
        "touch /usr/x",
        "touch /x",
        "touch /etc/x",
        "touch /opt/sandpool/x",
        "cat /proc/1/environ",
        "ls /proc/1/fd",
        "echo x > /proc/sys/kernel/core_pattern",
        "ls /sys",
        "mount -t tmpfs x /tmp",
        "unshare -U true",
        "cat /etc/shadow",
    ] {
        let said = sh(&*sandbox, &format!("{refused} 2>/dev/null && echo DONE")).await;
        assert!(!said.contains("DONE"), "`{refused}` worked");
    }
    for masked in ["kallsyms", "keys", "kmsg", "timer_list", "slabinfo", "config.gz"] {
        assert_eq!(sh(&*sandbox, &format!("cat /proc/{masked} 2>/dev/null | wc -c")).await, "0\n", "{masked}");
    }
    // Of the host's descriptors only the connection's own.
    assert_eq!(sh(&*sandbox, "ls /proc/self/fd | wc -l").await, "4\n");
    assert!(!sh(&*sandbox, "cat /proc/self/mountinfo /proc/self/cgroup").await.contains("sandpool-test"));
    // Pseudo-terminals of its own.
    assert!(sh(&*sandbox, "script -qc 'tty' /dev/null < /dev/null").await.contains("/dev/pts/0"));

    // All processes belong to a uid of the sandbox's own, none to root.
    let inner: Vec<u32> = descendants().into_keys().collect();
    let uids: BTreeSet<u32> = inner.iter().filter_map(|p| uid_of(*p)).collect();
    assert!(uids.iter().any(|uid| *uid >= jail::ids::ROOT_BASE), "{uids:?}");

    // The limits are in the kernel's files.
    let limits = cgroup_files(sandbox.id());
    assert_eq!(limits.get("memory.limit_in_bytes").or(limits.get("memory.max")).map(|s| &**s), Some("134217728"));
    assert_eq!(limits.get("pids.max").map(|s| &**s), Some("40"));
    assert!(limits.get("cpu.cfs_quota_us").or(limits.get("cpu.max")).is_some_and(|s| s.starts_with("150000")));
    let stats = sandbox.stats().await.unwrap();
    assert!(stats.memory_bytes.unwrap() > 0 && (1..=LIMITS.pids).contains(&stats.pids.unwrap()), "{stats:?}");

    sandbox.destroy().await.unwrap();
    sandbox.destroy().await.unwrap();
    assert!(matches!(sandbox.connect().await, Err(BackendError::Gone(_))));
    assert_left(&place.0, &before, "after a sandbox");
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
    assert_eq!(loops_in(&place.0), 0, "the spare goes too");
}

#[tokio::test]
async fn a_creation_that_fails_at_any_step_leaves_nothing() {
    if !root() {
        return;
    }
    let place = Place::new("steps");
    let native = start(&place.0).await;
    let shared = owned(&place, "shared", 4321);
    let spec = SandboxSpec {
        groups: vec![group("tenant", None), group("set", None)],
        volumes: vec![share(&shared, "/shared", false)],
        kept: Some(kept('a')),
        egress: true,
        browser: Some(browser::ROOM),
        ..spec()
    };
    native.create(&spec).await.unwrap().destroy().await.unwrap();
    native.discard(&kept('a').name).await.unwrap();
    wait_for("a spare", || loops_in(&place.0) == 1 && descendants().len() == 1);
    let before = Left::count(&place.0);
    let mut step = 0;
    let made = loop {
        match native.create_failing(&spec, Some(step)).await {
            Ok(sandbox) => break sandbox,
            Err(BackendError::Create(message)) => {
                assert!(message.contains("a failure was asked for"), "{step}: {message}")
            }
            Err(other) => panic!("step {step}: {other}"),
        }
        assert_left(&place.0, &before, &format!("after step {step}"));
        step += 1;
    };
    assert!(step > 60, "only {step} steps");
    made.destroy().await.unwrap();
    // The same with a volume that is still mounted, at some of the steps.
    for step in (0..step - 4).step_by(7) {
        native.create(&spec).await.unwrap().destroy().await.unwrap();
        let failed = native.create_failing(&spec, Some(step)).await.err();
        assert!(matches!(failed, Some(BackendError::Create(_))), "{step}: {failed:?}");
    }
    native.discard(&kept('a').name).await.unwrap();
    assert_left(&place.0, &before, "in the end");
    native.shutdown().await;
}

#[tokio::test]
async fn a_full_disk_and_a_fork_bomb_and_a_memory_bomb_stay_inside() {
    if !root() {
        return;
    }
    let place = Place::new("limits");
    let native = start(&place.0).await;
    // A group with less processor than a sandbox asks for is no reason to have none.
    let group = Group { cpu_millis: Some(LIMITS.cpu_millis / 2), ..spec().groups[0].clone() };
    let spec = SandboxSpec { groups: vec![group], ..spec() };
    let (one, other) = tokio::join!(native.create(&spec), native.create(&spec));
    let (one, other) = (one.unwrap(), other.unwrap());
    let full =
        sh(&*one, "dd if=/dev/zero of=/workspace/big bs=1M 2>&1; stat -c %s /workspace/big; rm /workspace/big").await;
    assert!(full.contains("No space left"), "{full}");
    let inodes = sh(&*one, "i=0; while true > /data/f$i; do i=$((i+1)); done 2>/dev/null; echo made $i").await;
    let made: u64 = inodes.split_whitespace().last().unwrap().parse().unwrap_or_else(|_| panic!("{inodes}"));
    assert!((900..=LIMITS.disk_inodes).contains(&made), "{inodes}");
    assert_eq!(sh(&*other, "echo fine > /workspace/x; cat /workspace/x").await, "fine\n");

    let forks = sh(&*one, "i=0; while [ $i -lt 100 ]; do sleep 30 & i=$((i+1)); done 2>&1 | tail -1; wait").await;
    assert!(forks.contains("fork") || forks.contains("Resource temporarily unavailable"), "{forks}");
    assert!(one.stats().await.unwrap().pids.unwrap() <= LIMITS.pids);

    sh(&*other, "python3 -c 'x = bytearray(400 << 20)' || tail -c 400m /dev/zero | tail > /dev/null").await;
    assert!(other.stats().await.unwrap().oom_kills >= 1);
    assert_eq!(sh(&*other, "echo alive").await, "alive\n");

    // Sixty processes, and gone at once.
    let began = Instant::now();
    one.destroy().await.unwrap();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    drop(other); // without destroy: taken back all the same
    wait_for("the end of a dropped sandbox", || descendants().len() == 1);
    native.shutdown().await;
}

#[tokio::test]
async fn a_group_within_a_group_is_held_by_both_and_goes_with_its_last_sandbox() {
    if !root() {
        return;
    }
    let place = Place::new("nested");
    let native = start_without_spares(&place.0).await;
    let before = Left::count(&place.0);
    let names = ["outer-nest", "inner-nest-a", "inner-nest-b"];
    let within = |inner: &str| SandboxSpec {
        groups: vec![group(names[0], Some(80 << 20)), group(inner, Some(LIMITS.memory_bytes))],
        ..spec()
    };
    let one = native.create(&within(names[1])).await.unwrap();
    let other = native.create(&within(names[2])).await.unwrap();
    assert!(names.iter().all(|name| groups_called(name) > 0));
    // Neither its own limit nor the inner group's is reached.
    sh(&*one, "python3 -c 'x = bytearray(100 << 20)'").await;
    assert!(one.stats().await.unwrap().oom_kills >= 1);
    assert_eq!(sh(&*one, "echo alive").await, "alive\n");
    assert_eq!(sh(&*other, "echo alive").await, "alive\n");
    let forks = sh(&*other, "i=0; while [ $i -lt 100 ]; do sleep 1 & i=$((i+1)); done 2>&1 | tail -1").await;
    assert!(forks.contains("fork") || forks.contains("Resource temporarily unavailable"), "{forks}");
    one.destroy().await.unwrap();
    assert_eq!(groups_called(names[1]), 0);
    assert!(groups_called(names[0]) > 0 && groups_called(names[2]) > 0);
    other.destroy().await.unwrap();
    assert_eq!(names.map(groups_called), [0, 0, 0]);
    assert_eq!(Left::count(&place.0), before);

    for groups in [vec![], vec![group("x", None); 4], vec![group("a/b", None)], vec![group("A", None)]] {
        let made = native.create(&SandboxSpec { groups, ..spec() }).await.err();
        assert!(matches!(made, Some(BackendError::Create(_))), "{made:?}");
    }
    assert_eq!(Left::count(&place.0), before);
    native.shutdown().await;
}

#[tokio::test]
async fn what_the_kernel_counts_per_user_is_not_taken_from_root_or_the_server() {
    if !root() {
        return;
    }
    let place = Place::new("counted");
    // An operator may favour the server; that is not for sandboxes.
    let favoured = rustix::process::setpriority_process(None, -5).is_ok();
    let native = start(&place.0).await;
    let _ = rustix::process::setpriority_process(None, 0);
    let sandbox = native.create(&spec()).await.unwrap();
    assert!(favoured && sh(&*sandbox, "nice").await == "0\n");

    // inotify instances: root has 128 of them by default.
    let took = taken(&*sandbox, "c.inotify_init() >= 0").await;
    assert!((16..=32).contains(&took), "{took}");
    rustix::fs::inotify::init(rustix::fs::inotify::CreateFlags::CLOEXEC).unwrap();
    // Pending signals, which limit timers too.
    let pending = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("SigQ:\t")).unwrap();
        line.split('/').next().unwrap().parse::<usize>().unwrap()
    };
    let before = pending();
    let blocked = "(n or c.sigprocmask(0, (ctypes.c_ulong * 16)(1 << 39), None) == 0)";
    let took = taken(&*sandbox, &format!("{blocked} and c.sigqueue(c.getpid(), 40, 0) == 0")).await;
    assert!(took >= 1000 && pending() < before + 1000, "{took}, {before} to {}", pending());

    // A session and a process group of its own: both are reached across pid namespaces.
    assert_eq!(sh(&*sandbox, "cut -d' ' -f5,6 /proc/1/stat").await, "1 1\n");
    // Behind the system-call filter, the kernel has no namespaces for this one either.
    assert_eq!(
        sh(&*sandbox, "cat /proc/sys/user/max_user_namespaces /proc/sys/user/max_net_namespaces").await,
        "0\n0\n"
    );
    // At 0 a crash would start the host's core_pattern helper; it cannot be lowered to that.
    let core = sh(&*sandbox, "ulimit -c 0; grep core /proc/self/limits | tr -s ' '").await;
    assert!(core.contains("Max core file size 1 1 bytes"), "{core}");
    native.shutdown().await;
}

#[tokio::test]
async fn a_second_server_on_one_state_directory_is_refused() {
    if !root() {
        return;
    }
    let place = Place::new("second");
    let native = start(&place.0).await;
    let second = Native::start(spawn_launcher_from(&helper()).unwrap(), config(&place.0)).await;
    let Err(BackendError::Launcher(message)) = second else { panic!("{second:?}") };
    assert!(message.contains("another server uses the state directory"), "{message}");
    native.shutdown().await;
}

#[test]
fn whoever_dies_the_sandboxes_go_too() {
    if !root() {
        return;
    }
    let place = Place::new("killed");
    let before = cgroups();
    for kill_launcher in [false, true] {
        let mut child = server(&place.0, "sleep 1000").spawn().unwrap();
        wait_for("a running sandbox", || descendants().values().any(|name| name == "sleep"));
        wait_for("a spare beside it", || loops_in(&place.0) > 1);
        let all: Vec<u32> = descendants().into_keys().collect();
        let launcher = launcher_below(child.id()).unwrap();
        if kill_launcher {
            kill(launcher);
        }
        child.kill().unwrap();
        child.wait().unwrap();
        wait_for("the end of all processes", || all.iter().all(|pid| !alive(*pid)));
        if kill_launcher {
            // Nobody was left to clean up: the next server does.
            assert!(!fs::read_dir(place.0.join("state/instances")).unwrap().flatten().collect::<Vec<_>>().is_empty());
            assert!(server(&place.0, "true").status().unwrap().success());
        }
        wait_for("an empty state directory", || {
            fs::read_dir(place.0.join("state/instances")).unwrap().next().is_none()
        });
        wait_for("the end of all cgroups", || cgroups() == before);
        wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
    }
}

#[tokio::test]
async fn a_spare_is_used_once_and_is_as_good_as_a_volume_of_ones_own() {
    if !root() {
        return;
    }
    let place = Place::new("spare");
    let native = started_with_a_spare(&place.0, &spec()).await;
    let mut used = BTreeSet::new();
    let mut alive = Vec::new();
    while used.len() < 4 {
        wait_for("a spare", || images_of_spares(&place.0).iter().any(|image| !used.contains(image)));
        let sandbox = native.create(&spec()).await.unwrap();
        let image = image_of(&*sandbox).await;
        if !image.contains("/spare/") {
            // The spare was still in the making.
            sandbox.destroy().await.unwrap();
            continue;
        }
        // Nothing of anybody else's, whoever else is alive or dead.
        let seen = "ls -A /workspace /data /tmp | tr -d '\\n'; stat -c '%u %g %a' /workspace /data /tmp; echo x > /workspace/x";
        let empty = "/data:/tmp:/workspace:1000 1000 755\n1000 1000 755\n1000 1000 1777\n";
        assert_eq!(sh(&*sandbox, seen).await, empty);
        assert!(used.insert(image.clone()), "{image} was used twice");
        if used.len() % 2 == 1 {
            alive.push(sandbox);
        } else {
            sandbox.destroy().await.unwrap();
            wait_for("the end of its volume", || !images_of_spares(&place.0).contains(&image));
        }
    }
    // The quota is that of any volume.
    let inside = &*alive[0];
    let full = sh(inside, "dd if=/dev/zero of=/tmp/big bs=64k 2>&1; stat -c %s /tmp/big; rm /tmp/big").await;
    let bytes: u64 = full.lines().last().unwrap().parse().unwrap_or_else(|_| panic!("{full}"));
    assert!(full.contains("No space left") && (LIMITS.disk_bytes / 2..LIMITS.disk_bytes).contains(&bytes), "{full}");
    let made = sh(inside, "i=0; while true > /data/f$i; do i=$((i+1)); done 2>/dev/null; echo $i").await;
    assert!((900..=LIMITS.disk_inodes).contains(&made.trim().parse().unwrap()), "{made}");
    assert_eq!(sh(&*alive[1], "cat /workspace/x; ls /data").await, "x\n");
    // No other interface than its own loopback, and that one up.
    assert_eq!(sh(inside, "cat /sys/class/net/lo/operstate 2>/dev/null; grep -c : /proc/net/dev").await, "1\n");
    drop(alive);
    native.shutdown().await;
    assert_eq!(loops_in(&place.0), 0);
}

#[tokio::test]
async fn a_parked_volume_and_a_spare_go_with_a_killed_launcher_and_the_data_stays() {
    if !root() {
        return;
    }
    let place = Place::new("parked");
    let spec = SandboxSpec { kept: Some(kept('a')), ..spec() };
    for round in 0..3 {
        let native = start(&place.0).await;
        let sandbox = native.create(&spec).await.unwrap();
        sh(&*sandbox, &format!("echo {round} >> /data/f")).await;
        sandbox.destroy().await.unwrap();
        wait_for("a parked volume and a spare", || loops_in(&place.0) == 2);
        let (launcher, _) = descendants().into_iter().find(|(_, name)| name.starts_with("native_helper")).unwrap();
        kill(launcher);
        wait_for("the end of the launcher", || !alive(launcher));
        drop(native);
    }
    wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
    let native = start(&place.0).await;
    let sandbox = native.create(&spec).await.unwrap();
    assert_eq!(sh(&*sandbox, "cat /data/f").await, "0\n1\n2\n");
    sandbox.destroy().await.unwrap();
    native.shutdown().await;
    wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
}

#[test]
fn kept_data_survives_a_launcher_that_is_killed_and_blocks_nobody() {
    if !root() {
        return;
    }
    let place = Place::new("survives");
    for round in 0..3 {
        let mut child = server_that("keep", &place.0, &format!("echo {round} >> /data/f; sleep 1000")).spawn().unwrap();
        wait_for("a running sandbox", || descendants().values().any(|name| name == "sleep"));
        kill(launcher_below(child.id()).unwrap());
        // The next one starts at once, while the kernel is still taking the dead one's mounts down.
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let output = server_that("keep", &place.0, "cat /data/f; ls /data").stderr(Stdio::piped()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "0\n1\n2\nf\n");
    assert!(output.status.success());
    wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the server under test")]
fn without_loop_devices_root_keeps_data_in_memory_and_mounts_nothing_on_the_host() {
    if !root() {
        return;
    }
    let place = Place::new("no-loop");
    let before = mounts_of(&place.0);
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", "mount --bind /dev/null /dev/loop-control; exec \"$@\"", "sh"])
        .arg(helper())
        .args(["keep", "root", place.0.join("state").to_str().unwrap()])
        .args([
            "cd /data; ls -A; echo one > f; chmod 600 f",
            "cd /data; stat -c '%u %n' f; cat f; df -T . | grep -o tmpfs",
        ])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "1000 f\none\ntmpfs\n");
    assert!(output.status.success());
    assert_eq!(mounts_of(&place.0), before);
    assert!(fs::read_dir(place.0.join("state/instances")).unwrap().next().is_none());
}

#[test]
fn a_launcher_that_dies_at_any_moment_of_a_creation_leaves_no_process_and_no_server_that_waits() {
    if !root() {
        return;
    }
    let place = Place::new("moments");
    for moment in 0..32 {
        let mut child = server_that("keep", &place.0, "true").spawn().unwrap();
        let mut launcher = None;
        wait_for("a launcher", || {
            launcher = launcher.or_else(|| launcher_below(child.id()));
            // Until it has a child, which is on its way to be a guest; then some steps on.
            launcher.is_some_and(|pid| launcher_below(pid).is_some()) || child.try_wait().unwrap().is_some()
        });
        std::thread::sleep(Duration::from_micros(1500 * moment));
        let below: Vec<u32> = descendants().into_keys().filter(|pid| *pid != child.id()).collect();
        launcher.iter().for_each(|pid| kill(*pid));
        wait_for("the end of the server", || child.try_wait().unwrap().is_some());
        wait_for("the end of all processes", || below.iter().all(|pid| !alive(*pid)));
    }
    let output = server(&place.0, "true").stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    wait_for("an empty state directory", || fs::read_dir(place.0.join("state/instances")).unwrap().next().is_none());
    wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
}
