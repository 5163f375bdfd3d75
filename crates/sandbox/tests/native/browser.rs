//! Room for a browser, and the process that is put into it: the helper's driver, which runs shell lines as the browser would.

use sandbox::BrowserRoom;

use super::*;

pub const ROOM: BrowserRoom = BrowserRoom { memory_bytes: 64 << 20, pids: 20 };

fn with_room() -> SandboxSpec {
    SandboxSpec { browser: Some(ROOM), ..egress::with_reach(true) }
}

/// A driver that was put into a sandbox, and its number inside.
struct Driver<'a> {
    sandbox: &'a dyn Sandbox,
    pid: u32,
}

impl<'a> Driver<'a> {
    async fn new(sandbox: &'a dyn Sandbox) -> Self {
        sandbox.enter_browser().await.unwrap();
        let said = sh(sandbox, "@take").await;
        Self { sandbox, pid: said.trim().parse().unwrap_or_else(|_| panic!("{said}")) }
    }

    /// What a shell line prints that runs as the browser.
    async fn sh(&self, line: &str) -> String {
        sh(self.sandbox, &format!("@drive {} {line}", self.pid)).await
    }

    async fn end(&self) -> String {
        sh(self.sandbox, &format!("@end {}", self.pid)).await
    }
}

/// None of them works.
async fn assert_refused(driver: &Driver<'_>, lines: &[&str]) {
    for line in lines {
        let said = driver.sh(&format!("({line}) > /dev/null 2>&1 && echo DONE")).await;
        assert!(!said.contains("DONE"), "`{line}` worked");
    }
}

#[tokio::test]
async fn a_browser_is_somebody_else_with_a_home_and_nothing_of_the_codes() {
    if !root() {
        return;
    }
    let place = Place::new("browser");
    let native = start(&place.0).await;
    let sandbox = native.create(&with_room()).await.unwrap();
    let puts = "for d in /workspace /data /tmp; do echo secret > $d/secret; chmod 777 $d/secret; done; \
                mkdir /uploads/1; echo up > /uploads/1/up; sleep 1000 > /dev/null 2>&1 & echo $!";
    let sleeper = sh(&*sandbox, puts).await;
    let driver = Driver::new(&*sandbox).await;
    let seen = driver
        .sh("id -u; id -g; id -G; id -un; pwd; umask; echo $PPID; ls /proc/self/fd | wc -l; \
             grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status")
        .await;
    let held = "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\n";
    assert_eq!(seen, format!("1001\n1001\n1001\nbrowser\n/browser\n0022\n{}\n4\n{held}", driver.pid));
    // On the host too it is neither root nor the code.
    let uids: BTreeSet<u32> = descendants().into_keys().filter_map(uid_of).filter(|uid| *uid != 0).collect();
    assert!(uids.len() == 2 && uids.iter().all(|uid| *uid >= jail::ids::ROOT_BASE), "{uids:?}");

    let own = "echo x > /browser/x && echo d > /workspace/downloads/d && echo s > /dev/shm/s && cat /uploads/1/up && \
               mv /workspace/downloads/d /workspace/downloads/e && mv /workspace/downloads/e /workspace/downloads/d && cat /opt/sandpool/driver.py";
    assert_eq!(driver.sh(own).await, "up\nprint(1)\n");
    let (kill, environ) = (format!("kill -9 {}", sleeper.trim()), format!("cat /proc/{}/environ", sleeper.trim()));
    let read = "cat /workspace/secret; cat /data/secret; cat /tmp/secret; ls /workspace; ls /data; ls /tmp; ls /";
    assert_eq!(driver.sh(&format!("({read}) 2>/dev/null; true")).await, "");
    assert_refused(
        &driver,
        &[
            "echo x >> /workspace/secret",
            "echo x >> /data/secret",
            "echo x >> /tmp/secret",
            "touch /workspace/x",
            "touch /data/x",
            "touch /tmp/x",
            "touch /uploads/x",
            "rm /uploads/1/up",
            "touch /usr/x",
            "touch /x",
            "cp /bin/true /browser/true; /browser/true",
            "cp /bin/true /workspace/downloads/true; /workspace/downloads/true",
            "cp /bin/true /dev/shm/true; /dev/shm/true",
            "cat /etc/shadow",
            "ls /sys",
            "ls /root",
            "cat /proc/1/environ",
            "ls /proc/1/fd",
            "ls /proc/1/root/",
            "kill -9 1",
            &kill,
            &environ,
            "unshare -U true",
            "mount -t tmpfs x /browser",
            "chown 1000 /browser",
            "ln /workspace/secret /browser/secret",
            "rmdir /workspace/downloads",
            // What the code, or the guest for it, would follow, wait for, or not get rid of.
            "ln -s /workspace/secret /workspace/downloads/link",
            "ln -s /workspace/secret /browser/link && mv -n /browser/link /workspace/downloads/",
            "mkfifo /workspace/downloads/pipe",
            "mkdir /workspace/downloads/dir",
            "mkdir /browser/dir && mv /browser/dir /workspace/downloads/",
            "script -qc true /dev/null",
        ],
    )
    .await;
    // The other way round: the code sees nothing of the browser but what was downloaded, which it can delete.
    let code = "ls /browser 2>/dev/null; cat /browser/x 2>/dev/null; cd /workspace/downloads; cat d; rm d; ls -A; \
                kill -0 $(pidof sleep) && echo alive";
    assert_eq!(sh(&*sandbox, code).await, "d\ntrue\nalive\n");
    assert!(!sh(&*sandbox, &format!("kill -9 {} && echo DONE", driver.pid)).await.contains("DONE"));
    assert_eq!(driver.sh("echo still here").await, "still here\n");
    native.shutdown().await;
}

#[tokio::test]
async fn a_browser_reaches_the_proxy_and_nothing_else() {
    if !root() {
        return;
    }
    let place = Place::new("browser-net");
    let native = start(&place.0).await;
    let sandbox = native.create(&with_room()).await.unwrap();
    let _listener = sandbox.take_egress_listener().unwrap();
    let driver = Driver::new(&*sandbox).await;
    let said = driver.sh(egress::REACH).await;
    let ends: BTreeMap<&str, &str> = said.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!((ends["proxy"], ends["loopback"]), ("DONE", "ECONNREFUSED"), "{said}");
    for name in ["tcp", "tcp6", "metadata", "private", "udp", "udp6", "multicast"] {
        assert_eq!(ends[name], "ENETUNREACH", "{name}");
    }
    for name in ["ping", "raw", "packet", "sctp", "vsock"] {
        assert_ne!(ends[name], "DONE", "{name}");
    }
    native.shutdown().await;
}

/// Built by cargo with the workspace.
fn probe() -> PathBuf {
    helper().parent().unwrap().parent().unwrap().join("probe")
}

#[tokio::test]
async fn whatever_the_probe_tries_as_the_browser_is_refused() {
    if !root() {
        return;
    }
    if !probe().exists() {
        return skip("`cargo build -p sandpool-testkit` has not made the probe");
    }
    let place = Place::new("browser-probe");
    // Not where it lies on the host: what is shown of a runtime's path is seen inside.
    let program = place.0.join("probe");
    fs::copy(probe(), &program).unwrap();
    let native = start(&place.0).await;
    let limits = Limits { pids: 200, memory_bytes: 512 << 20, ..LIMITS };
    let room = BrowserRoom { memory_bytes: 256 << 20, pids: 150 };
    let groups = vec![group("tenant", None)];
    let spec = SandboxSpec { limits, groups, runtime: vec![program.clone()], browser: Some(room), ..spec() };
    let sandbox = native.create(&spec).await.unwrap();
    let driver = Driver::new(&*sandbox).await;
    let list = driver.sh(&format!("{} --list", program.display())).await;
    let expected: BTreeMap<&str, bool> =
        list.lines().filter_map(|line| Some((line.split([' ', ':']).nth(1)?, line.ends_with("(Refused)")))).collect();
    assert!(expected.len() > 50, "{list}");
    for (name, refused) in expected {
        let victim = std::process::id();
        let line = format!("{} --row {name} --target 1 --victim {victim}", program.display());
        let said = driver.sh(&line).await;
        let report: serde_json::Value =
            serde_json::from_str(said.lines().next().unwrap_or_default()).unwrap_or_else(|_| panic!("{name}: {said}"));
        assert!(!refused || report["outcome"] != "allowed", "{report}");
        assert_eq!(sh(&*sandbox, "echo alive").await, "alive\n", "after {name}");
    }
    native.shutdown().await;
}

#[tokio::test]
async fn a_bomb_in_the_browser_is_the_browsers_alone_and_nothing_is_left() {
    if !root() {
        return;
    }
    let place = Place::new("browser-bomb");
    let native = start_without_spares(&place.0).await;
    let before = Left::count(&place.0);
    let sandbox = native.create(&with_room()).await.unwrap();
    let limits = cgroup_files(&format!("{}/browser", sandbox.id()));
    assert_eq!(limits.get("memory.limit_in_bytes").or(limits.get("memory.max")).map(|s| &**s), Some("67108864"));
    assert_eq!(limits.get("pids.max").map(|s| &**s), Some("20"));
    sh(&*sandbox, "sleep 1000 > /dev/null 2>&1 & true").await;
    let driver = Driver::new(&*sandbox).await;
    assert_eq!(
        driver.sh("cat /proc/self/cgroup | grep -c browser").await.trim().parse::<u32>().unwrap_or(0),
        hierarchies()
    );
    // Half of what the sandbox has, and more than the browser may.
    let said = driver.sh("python3 -c 'x = bytearray(100 << 20)'; echo $?").await;
    assert!(said.contains("137"), "{said}");
    let stats = sandbox.stats().await.unwrap();
    assert!(stats.browser_oom_kills >= 1 && stats.oom_kills == 0, "{stats:?}");
    let said =
        driver.sh("i=0; while [ $i -lt 60 ]; do sleep 1000 > /dev/null 2>&1 & i=$((i+1)); done 2>&1 | tail -1").await;
    assert!(said.contains("fork") || said.contains("Resource temporarily unavailable"), "{said}");
    assert_eq!(
        sh(&*sandbox, "python3 -c 'x = bytearray(80 << 20); print(len(x))'; pidof sleep > /dev/null && echo alive")
            .await,
        "83886080\nalive\n"
    );

    // Another driver takes the place of the one before, with everything that one had started.
    let next = Driver::new(&*sandbox).await;
    assert_eq!(driver.end().await, "None Some(9)\n");
    assert_eq!(sh(&*sandbox, "pidof sleep | wc -w").await, "1\n");
    // The dead count as processes until they are reaped, which takes a moment.
    let mut listed = String::new();
    for _ in 0..250 {
        listed = next.sh("echo x > /browser/y; ls /browser").await;
        if !listed.contains("fork") {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(listed, "y\n");
    // It says how it ended. A guest that lets go of it need not ask.
    next.sh("kill -TERM $PPID").await;
    assert_eq!(next.end().await, "None Some(15)\n");
    let last = Driver::new(&*sandbox).await;
    assert_eq!(last.sh("echo x").await, "x\n");
    assert_eq!(sh(&*sandbox, &format!("@let-go {}", last.pid)).await, "");
    assert_eq!(last.end().await, "None Some(9)\n");
    sandbox.destroy().await.unwrap();
    drop(sandbox);
    assert_left(&place.0, &before, "after a browser");
    native.shutdown().await;
}

/// How many hierarchies of cgroups there are for the limits of a sandbox.
fn hierarchies() -> u32 {
    let text = fs::read_to_string("/proc/self/cgroup").unwrap();
    let used = |line: &&str| {
        ["memory", "pids", "cpu", "cpuacct"]
            .iter()
            .any(|c| line.split(':').nth(1).is_some_and(|l| l.split(',').any(|x| x == *c)))
    };
    text.lines().filter(used).count().max(1) as u32
}

#[tokio::test]
async fn a_sandbox_without_room_or_without_life_gets_no_browser() {
    if !root() {
        return;
    }
    let place = Place::new("no-browser");
    let native = start(&place.0).await;
    let plain = native.create(&spec()).await.unwrap();
    let refused = plain.enter_browser().await;
    assert!(matches!(&refused, Err(BackendError::Launcher(why)) if why.contains("without room")), "{refused:?}");
    assert_eq!(
        sh(
            &*plain,
            "ls -d /browser /uploads /workspace/downloads 2>/dev/null; stat -c %a /workspace; grep -c 1001 /etc/passwd"
        )
        .await
        .lines()
        .next(),
        Some("755")
    );
    plain.destroy().await.unwrap();
    let before = Left::count(&place.0).processes;
    let mut refused = 0;
    for round in 0..20 {
        let sandbox = native.create(&with_room()).await.unwrap();
        // Twice at once is once, unless a busy machine has started the first before it sends the second; then while it
        // ends; then when it is gone.
        let (one, other) = tokio::join!(sandbox.enter_browser(), sandbox.enter_browser());
        let said = format!("round {round}: {one:?} {other:?}");
        assert!(one.is_ok() && matches!(other, Ok(()) | Err(BackendError::Launcher(_))), "{said}");
        refused += u32::from(other.is_err());
        let (entered, destroyed) = tokio::join!(sandbox.enter_browser(), sandbox.destroy());
        destroyed.unwrap();
        assert!(matches!(entered, Ok(()) | Err(BackendError::Gone(_))), "round {round}: {entered:?}");
        assert!(matches!(sandbox.enter_browser().await, Err(BackendError::Gone(_))));
    }
    assert!(refused > 0, "two were never started at once");
    wait_for("the end of all processes", || Left::count(&place.0).processes <= before);
    native.shutdown().await;
    wait_for("the end of the launcher", || descendants().is_empty());
}

#[tokio::test]
async fn a_busy_sandbox_holds_up_nobody_elses_browser() {
    if !root() {
        return;
    }
    let place = Place::new("busy-browser");
    let native = start(&place.0).await;
    let limits = Limits { cpu_millis: 100, ..LIMITS };
    let busy = native.create(&SandboxSpec { limits, ..with_room() }).await.unwrap();
    let other = native.create(&with_room()).await.unwrap();
    sh(&*busy, "for i in 1 2 3 4; do while :; do :; done > /dev/null 2>&1 & done; true").await;
    // Asked for first, and still on its way when the other's is there.
    let slow = busy.enter_browser();
    tokio::pin!(slow);
    let quick = async {
        other.enter_browser().await.unwrap();
        native.create(&spec()).await.unwrap()
    };
    tokio::pin!(quick);
    let (mut entered, mut made) = (None, None);
    while made.is_none() {
        tokio::select! {
            biased;
            done = &mut slow, if entered.is_none() => entered = Some(done),
            done = &mut quick => made = Some(done),
        }
    }
    if entered.is_none() {
        slow.await.unwrap();
    }
    native.shutdown().await;
}

#[test]
fn a_launcher_that_dies_while_a_browser_is_put_somewhere_leaves_nothing() {
    if !root() {
        return;
    }
    let place = Place::new("browser-moments");
    let lines: Vec<String> = (0..500).map(|_| "browser:true".to_owned()).collect();
    for moment in 0..8 {
        let mut child = server_that("browse", &place.0, "true").args(&lines).spawn().unwrap();
        wait_for("a sandbox with a browser", || {
            descendants().into_keys().any(|pid| {
                fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| line == b"sandpool-guest\0browser\0")
            })
        });
        std::thread::sleep(Duration::from_micros(3700 * moment));
        let launcher = launcher_below(child.id()).unwrap();
        let below: Vec<u32> = descendants().into_keys().filter(|pid| *pid != child.id()).collect();
        kill(launcher);
        wait_for("the end of the server", || child.try_wait().unwrap().is_some());
        wait_for("the end of all processes", || below.iter().all(|pid| !alive(*pid)));
    }
    let output = server(&place.0, "true").stderr(Stdio::piped()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    wait_for("an empty state directory", || fs::read_dir(place.0.join("state/instances")).unwrap().next().is_none());
    wait_for("the end of all loop devices", || loops_in(&place.0) == 0);
}

/// Where Debian has it, small and whole.
const CHROMIUM: [&str; 2] = ["/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium"];

fn chromium(program: &str, how: &str) -> String {
    format!(
        "HOME=/browser TMPDIR=/browser {program} --headless --no-sandbox --disable-gpu --user-data-dir=/browser/profile \
         {how} file:///opt/sandpool/page.html"
    )
}

const PAGE_SAYS: &str = "worker 42 wasm 5 picture true";

#[tokio::test]
async fn chromium_runs_as_the_browser() {
    if !root() {
        return;
    }
    let place = Place::new("chromium");
    let native = start(&place.0).await;
    let limits =
        Limits { memory_bytes: 1 << 30, cpu_millis: 2000, pids: 600, disk_bytes: 256 << 20, disk_inodes: 10_000 };
    let room = BrowserRoom { memory_bytes: 768 << 20, pids: 500 };
    let mut spec = SandboxSpec { limits, browser: Some(room), groups: vec![group("tenant", None)], ..spec() };
    spec.files.push(("/opt/sandpool/page.html".into(), include_bytes!("page.html").to_vec()).into());
    let installed: Vec<_> = CHROMIUM.iter().filter(|program| Path::new(program).exists()).collect();
    if installed.is_empty() {
        return skip("Chromium is not installed");
    }
    for program in installed {
        let sandbox = native.create(&spec).await.unwrap();
        let driver = Driver::new(&*sandbox).await;
        let line = chromium(program, "--dump-dom");
        let said = driver.sh(&format!("{line} 2>/browser/log || cat /browser/log")).await;
        assert!(said.contains(PAGE_SAYS), "{program}: {said}");
        let line = chromium(program, "--screenshot=/workspace/downloads/page.png");
        let said = driver.sh(&format!("{line} > /browser/log 2>&1 || cat /browser/log")).await;
        assert_eq!(said, "", "{program}");
        // The code's to read and to delete.
        let seen = sh(&*sandbox, "cd /workspace/downloads; head -c 4 page.png | tail -c 3; rm page.png; ls -A").await;
        assert_eq!(seen, "PNG", "{program}");
        sandbox.destroy().await.unwrap();
    }
    native.shutdown().await;
}

#[test]
fn an_ordinary_user_has_browsers_with_and_without_subordinate_ids() {
    if !root() {
        return;
    }
    let place = place_for_all("user-browser");
    let page = chromium(CHROMIUM[0], "--dump-dom");
    let chromium =
        format!("browser:[ ! -e {} ] && echo '{PAGE_SAYS}' || {page} 2>/dev/null | grep -o '{PAGE_SAYS}'", CHROMIUM[0]);
    let lines = [
        "echo secret > /workspace/secret; echo secret > /data/secret; echo secret > /tmp/secret; mkdir /uploads/1; echo up > /uploads/1/up",
        "browser:id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status | cut -f2; cat /uploads/1/up; \
         cat /workspace/secret /data/secret /tmp/secret 2>/dev/null; ls /workspace /data /tmp 2>/dev/null; \
         touch /tmp/x /data/x /workspace/x /uploads/x 2>/dev/null; echo d > /workspace/downloads/d; echo h > /browser/h; \
         cat /proc/1/environ 2>/dev/null; true",
        "(setsid sleep 1003 > /dev/null 2>&1 &); true",
        "browser:(setsid sleep 1002 > /dev/null 2>&1 &); true",
        "browser:all() { cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; }; [ $(id -u) = 1000 ] || \
         for i in $(seq 200); do all | grep -q 'sleep 100[2]' || break; sleep 0.05; done; all | grep -o 'sleep 100[23]' | sort",
        "cat /workspace/downloads/d; rm /workspace/downloads/d; ls -A /workspace/downloads /tmp; cat /browser/h 2>/dev/null; true",
        &chromium,
    ];
    for mode in modes() {
        let state = place.0.join(mode);
        let words = ["browse", mode, state.to_str().unwrap()];
        let Some(output) = as_user(&place, &[&words[..], &lines[..]].concat()) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        // Without cgroups what a browser left behind is known by its uid alone.
        let (id, notes, left) = if mode == "sub" { (1001, 0, "") } else { (1000, 1, "sleep 1002\n") };
        assert_eq!(
            said,
            format!(
                "mode {mode}, {notes} notes\n{id}\n0000000000000000\n0000000000000000\n1\n2\nup\n\
                 {left}sleep 1003\nd\n/tmp:\nsecret\n\n/workspace/downloads:\n{PAGE_SAYS}\n"
            )
        );
        assert!(output.status.success());
        assert!(fs::read_dir(state.join("instances")).unwrap().next().is_none());
    }
    wait_for("the end of the launcher", || descendants().is_empty());
}
