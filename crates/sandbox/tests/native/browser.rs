//! Room for a browser, and the process that is put into it: the helper's driver, which runs shell lines as the browser would.

use sandbox::BrowserRoom;

use super::*;

/// As a browser is given it.
const LARGE: Limits =
    Limits { memory_bytes: 1 << 30, cpu_millis: 2000, pids: 600, disk_bytes: 256 << 20, disk_inodes: 10_000 };

/// Where Debian has it, small and whole.
const CHROMIUM: [&str; 2] = ["/usr/lib/chromium/chromium-headless-shell", "/usr/lib/chromium/chromium"];

const ROOM: BrowserRoom = BrowserRoom { memory_bytes: 64 << 20, pids: 20 };

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

#[tokio::test]
async fn a_browser_is_somebody_else_with_a_home_and_nothing_of_the_codes() {
    if !root() {
        return;
    }
    let place = Place::new("browser");
    let native = start(&place.0).await;
    let sandbox = native.create(&with_room()).await.unwrap();
    sh(&*sandbox, "echo secret > /workspace/secret; echo secret > /data/secret; echo secret > /tmp/secret; mkdir /uploads/1; echo up > /uploads/1/up").await;
    let driver = Driver::new(&*sandbox).await;
    let seen = driver
        .sh("id -u; id -g; id -G; id -un; pwd; echo $PPID; \
             grep -E '^(CapEff|CapBnd|NoNewPrivs|Seccomp):' /proc/self/status; ls /proc/self/fd | wc -l")
        .await;
    assert_eq!(
        seen,
        format!(
            "1001\n1001\n1001\nbrowser\n/browser\n{}\nCapBnd:\t0000000000000000\nCapEff:\t0000000000000000\n\
             NoNewPrivs:\t1\nSeccomp:\t2\n4\n",
            driver.pid
        )
        .replace(
            "CapBnd:\t0000000000000000\nCapEff:\t0000000000000000",
            "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000"
        )
    );
    native.shutdown().await;
}

#[tokio::test]
async fn chromium_runs_as_the_browser() {
    if !root() {
        return;
    }
    let place = Place::new("chromium");
    let native = start(&place.0).await;
    let mut spec = SandboxSpec {
        limits: LARGE,
        browser: Some(BrowserRoom { memory_bytes: 768 << 20, pids: 500 }),
        groups: vec![group("tenant", None)],
        ..spec()
    };
    spec.files.push(("/opt/sandpool/page.html".into(), include_bytes!("page.html").to_vec()));
    for program in CHROMIUM.iter().filter(|program| Path::new(program).exists()) {
        let sandbox = native.create(&spec).await.unwrap();
        let driver = Driver::new(&*sandbox).await;
        let line = chromium(program, "--dump-dom");
        let said = driver.sh(&format!("{line} 2>/browser/log || cat /browser/log")).await;
        assert!(said.contains("worker 42 wasm 5 picture true"), "{program}: {said}");
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

fn chromium(program: &str, how: &str) -> String {
    format!(
        "HOME=/browser TMPDIR=/browser {program} --headless --no-sandbox --disable-gpu --user-data-dir=/browser/profile \
         --virtual-time-budget=5000 {how} file:///opt/sandpool/page.html"
    )
}
