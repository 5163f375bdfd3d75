//! A server without its launcher, and what the two leave when both are killed (W08, W20, W34).

use std::os::unix::process::ExitStatusExt;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, setrlimit};
use serde_json::json;

use crate::support::{Service, children, eventually};

fn kill(pid: u32) {
    // It may be gone already.
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
}

fn status(service: &Service, path: &str) -> u16 {
    service.account("nobody").ask("GET", path, &[], b"").map_or(0, |answer| answer.status)
}

/// W08: the contexts are lost, which is said; everything else is there again.
#[test]
fn w08_a_launcher_that_dies_is_started_again_and_its_contexts_are_told_as_lost() {
    let mut service = Service::start("launcher");
    let mut blue = service.client("blue", "sandpool");
    let made = blue.good("create_context", json!({}));
    let old = made["context"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned();
    let run = |context: &str, code: &str| json!({ "context": context, "code": code });
    blue.good("run_code", run(&old, "x = 1"));
    let [first] = service.launcher[..] else { panic!("{:?}", service.launcher) };
    kill(first);
    eventually("another launcher", || {
        service.look_again();
        service.launcher.iter().any(|pid| *pid != first) && service.log().contains("the launcher has ended")
    });
    eventually("readiness", || status(&service, "/readyz") == 200 && status(&service, "/healthz") == 200);
    let lost = blue.call("run_code", run(&old, "print(x)"));
    assert!(lost["result"]["isError"] == true || lost.get("error").is_some(), "{lost}");
    // What waited ready for it is gone, too, and made anew.
    let mut new = String::new();
    eventually("a new context", || {
        let made = blue.call("create_context", json!({}));
        new = made["result"]["structuredContent"]["context"].as_str().unwrap_or_default().to_owned();
        !new.is_empty()
    });
    let ran = blue.good("run_code", run(&new, "print(6 * 7)"));
    assert!(ran.to_string().contains("42"), "{ran}");
    eventually("a warm interpreter", || {
        let metrics = service.account("blue").ask("GET", "/metrics", &[], b"").unwrap();
        String::from_utf8_lossy(&metrics.body).contains("sandpool_warm_ready 1")
    });
    service.finish();
}

/// W08: health tells the truth meanwhile, and a server that cannot have a launcher ends.
#[test]
fn w08_a_server_whose_launchers_keep_dying_says_so_and_ends() {
    let mut service = Service::start("no-launcher");
    let (mut unhealthy, mut unready) = (false, false);
    eventually("the end of the server", || {
        children(service.pid()).into_iter().for_each(kill);
        unhealthy |= status(&service, "/healthz") == 503;
        unready |= status(&service, "/readyz") == 503;
        service.log().contains("times in a row; it is not started again")
    });
    assert!(unhealthy && unready, "{unhealthy} {unready}");
    let ended = service.wait();
    assert_eq!(ended.code(), Some(1), "{}", service.log());
    assert!(service.log().contains("error: the launcher has ended 5 times in a row"), "{}", service.log());
}

/// W20: nothing of them may be asked to clean up.
#[test]
fn w20_nothing_runs_on_when_server_and_launcher_are_killed_together() {
    let mut service = Service::start("both");
    let mut blue = service.client("blue", "sandpool");
    for _ in 0..8 {
        let made = blue.good("create_context", json!({}));
        // Busy ones: whoever has used up its share of the processor ends no later.
        let code =
            "import subprocess; [subprocess.Popen(['sh', '-c', 'while :; do :; done']) for _ in range(3)]; print(1)";
        blue.good("run_code", json!({ "context": made["context"], "code": code }));
    }
    let instance = service.state().instances();
    let running = || {
        let ours = |pid: &u32| {
            let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
            let dead = read("stat").rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['Z', 'X']));
            !dead && instance.iter().any(|name| read("cgroup").contains(name.as_str()))
        };
        let pids = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok());
        pids.filter(ours).count()
    };
    assert!(running() > 30, "{}", running());
    let launcher = service.launcher.clone();
    service.signal(Signal::KILL);
    launcher.into_iter().for_each(kill);
    let since = std::time::Instant::now();
    eventually("nothing runs", || running() == 0);
    crate::support::report("W20", &format!("all processes gone after {:.1} s", since.elapsed().as_secs_f64()));
    assert!(!service.wait().success());
    // What is on disk the next server removes.
    let next = Service::with("both", crate::support::Setup { state: Some(service.state()), ..Default::default() });
    next.finish();
    service.nothing_left();
}

/// W34: although whoever started it allows core files.
#[test]
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn w34_the_server_and_its_launcher_leave_no_core() {
    let allowed = Rlimit { current: None, maximum: None };
    if setrlimit(Resource::Core, allowed).is_err() {
        assert!(std::env::var_os("CI").is_none(), "core files cannot be allowed here");
        eprintln!("SKIP: core files cannot be allowed here");
        return;
    }
    let mut service = Service::start("core");
    for pid in service.launcher.iter().copied().chain([service.pid()]) {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
        assert_eq!(core.split_whitespace().skip(4).take(2).collect::<Vec<_>>(), ["1", "1"], "{core}");
    }
    service.signal(Signal::ABORT);
    let ended = service.wait();
    assert_eq!((ended.signal(), ended.core_dumped()), (Some(6), false));
    eventually("the launcher's end", || {
        service.launcher.iter().all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
    });
}
