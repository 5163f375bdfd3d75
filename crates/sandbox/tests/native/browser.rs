//! Room for a browser, and the process that is put into it: the helper's driver, which runs shell lines as the browser would.

use sandbox::BrowserRoom;

use super::*;

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
