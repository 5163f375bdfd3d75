//! A browser's driver that was put into the sandbox: the real one with the real Chromium, and ones that do not keep to their part.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use command_fds::{CommandFdExt, FdMapping};
use jail::zygote::{Arrival, Fork, guest_channel};
use proto::browser::{BrowseResult, BrowserReply, FromDriver, PageInfo, ToDriver};
use proto::{BrowseFailure, BrowserAction, BrowserSpec, Decoder, FromGuest, GuestFailure, ToGuest};

use crate::harness::*;

const CHROMIUM: &str = "/usr/lib/chromium/chromium-headless-shell";

struct Sandbox {
    scratch: Scratch,
    way: OwnedFd,
    client: Client,
    drivers: Vec<Child>,
    /// What would bring signals to the guest.
    _signals: std::io::PipeWriter,
}

impl Sandbox {
    fn new() -> Self {
        let scratch = Scratch::new();
        for name in ["workspace/downloads", "uploads", "home"] {
            std::fs::create_dir_all(scratch.path().join(name)).unwrap();
        }
        let listener = UnixListener::bind(scratch.path().join("s")).unwrap();
        let (way, theirs) = guest_channel().unwrap();
        let (signals, _signals) = std::io::pipe().unwrap();
        let (workspace, uploads) = (scratch.path().join("workspace"), scratch.path().join("uploads"));
        let config = guest::GuestConfig { workspace, uploads, ..config() };
        std::thread::spawn(move || guest::serve_listener(listener, signals.into(), Some(theirs), config));
        let mut client = Client::over(UnixStream::connect(scratch.path().join("s")).unwrap());
        client.hello();
        Self { scratch, way, client, drivers: Vec::new(), _signals }
    }

    /// Puts a process into the sandbox; what it is told goes to its descriptor 3, or to whoever holds the other end.
    fn put(&mut self, child: Child, channel: UnixStream) {
        let pid = rustix::process::Pid::from_child(&child);
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        // Of the same uid here, and ended by a signal.
        let (_, leash) = std::io::pipe().unwrap();
        let fork = Fork { pid: child.id(), process, channel: channel.into() };
        Arrival::Driver(fork, leash.into()).send(&self.way).unwrap();
        self.drivers.push(child);
    }

    #[allow(clippy::disallowed_methods, reason = "stands for the launcher")]
    fn put_driver(&mut self) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandpool-guest"));
        command.arg("browser").env_clear().stdin(Stdio::null());
        command.fd_mappings(vec![FdMapping { parent_fd: theirs.into(), child_fd: 3 }]).unwrap();
        let child = command.spawn().unwrap();
        self.put(child, ours);
    }

    /// A process that does nothing, for which the test speaks.
    #[allow(clippy::disallowed_methods, reason = "stands for the launcher")]
    fn put_puppet(&mut self) -> Puppet {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        self.put(Command::new("sleep").arg("1000").spawn().unwrap(), theirs);
        let call = self.start();
        let mut puppet = Puppet { channel: ours, decoder: Decoder::default() };
        let (number, started) = puppet.hear();
        assert!(matches!(started, ToDriver::Start { .. }), "{started:?}");
        puppet.say(number, &FromDriver::Ready { version: "Puppet/1".into() });
        assert_eq!(self.client.answer(call), FromGuest::BrowserReady { version: "Puppet/1".into() });
        puppet
    }

    /// Performs an action to which the driver replies with a page.
    fn act(&mut self, puppet: &mut Puppet, ask: BrowserAction, url: Option<&str>) {
        let call = self.send(ask, &[], 20_000);
        let (number, _) = puppet.hear();
        let page = url.map(|url| PageInfo { url: url.into(), title: String::new(), tab: 1, tabs: 1 });
        let (happened, result) = (Vec::new(), Ok(BrowseResult::Done));
        let browsed = BrowserReply { page, happened, result, extras: Default::default() };
        puppet.say(number, &FromDriver::Browsed { browsed: Box::new(browsed) });
        assert_eq!(self.browsed(call).result, Ok(BrowseResult::Done));
    }

    fn start(&mut self) -> u64 {
        let at = |name: &str| self.scratch.path().join(name).display().to_string();
        let spec = BrowserSpec {
            program: CHROMIUM.into(),
            shell: true,
            proxy: None,
            home: at("home"),
            workspace: at("workspace"),
            downloads: at("workspace/downloads"),
            nssdb: None,
            fontconfig: None,
        };
        self.client.send(&ToGuest::StartBrowser { spec })
    }

    fn send(&mut self, ask: BrowserAction, uploads: &[&str], after_ms: u64) -> u64 {
        let uploads = uploads.iter().map(|&path| path.into()).collect();
        self.client.send(&ToGuest::Browse { ask, uploads, after_ms, changes: 0 })
    }

    fn browse(&mut self, ask: BrowserAction, uploads: &[&str]) -> BrowserReply {
        let call = self.send(ask, uploads, 15_000);
        self.browsed(call)
    }

    fn browsed(&mut self, call: u64) -> BrowserReply {
        match self.client.answer(call) {
            FromGuest::Browsed { browsed } => *browsed,
            other => panic!("{other:?}"),
        }
    }

    fn failure(&mut self, call: u64) -> (GuestFailure, String) {
        match self.client.answer(call) {
            FromGuest::Failed { failure, message } => (failure, message),
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        for driver in &mut self.drivers {
            let _ = driver.kill();
        }
    }
}

struct Puppet {
    channel: UnixStream,
    decoder: Decoder,
}

impl Puppet {
    fn hear(&mut self) -> (u64, ToDriver) {
        let frame = self.frame();
        (frame.call, frame.message().unwrap())
    }

    fn frame(&mut self) -> proto::Frame {
        let mut buffer = [0; 4096];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return frame;
            }
            let read = self.channel.read(&mut buffer).unwrap();
            assert_ne!(read, 0);
            self.decoder.push(&buffer[..read]);
        }
    }

    fn say(&mut self, number: u64, message: &FromDriver) {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, number, message).unwrap();
        self.channel.write_all(&bytes).unwrap();
    }
}

fn evaluate(expression: &str) -> BrowserAction {
    BrowserAction::Evaluate { expression: expression.into() }
}

fn value(browsed: &BrowserReply) -> &str {
    match &browsed.result {
        Ok(BrowseResult::Value { json, .. }) => json,
        other => panic!("{other:?}"),
    }
}

fn names(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn the_browser_is_asked_through_the_guest() {
    assert!(Path::new(CHROMIUM).exists(), "`{CHROMIUM}` is needed: install Debian's chromium-headless-shell");
    let mut sandbox = Sandbox::new();
    let call = sandbox.send(evaluate("1"), &[], 1000);
    assert_eq!(sandbox.failure(call), (GuestFailure::Browser, "there is no browser".into()));
    let call = sandbox.start();
    assert_eq!(
        sandbox.failure(call),
        (GuestFailure::Browser, "cannot start the browser: no browser driver was put into this sandbox".into())
    );
    sandbox.put_driver();
    let call = sandbox.start();
    let ready = sandbox.client.answer(call);
    assert!(
        matches!(&ready, FromGuest::BrowserReady { version } if version.starts_with("HeadlessChrome/")),
        "{ready:?}"
    );
    assert_eq!(value(&sandbox.browse(evaluate("6 * 7"), &[])), "42");

    // A file of the workspace is copied for the browser, and no other.
    let workspace = sandbox.scratch.path().join("workspace");
    std::fs::create_dir(workspace.join("sub")).unwrap();
    std::fs::write(workspace.join("sub/a.txt"), "hello").unwrap();
    std::os::unix::fs::symlink("/etc/passwd", workspace.join("link")).unwrap();
    let page = "data:text/html,<input type=file onchange='this.files[0].text().then(t => document.title = t)'>";
    sandbox.browse(BrowserAction::Open { url: page.into() }, &[]);
    let upload = || BrowserAction::Upload { at: "input".into(), files: vec!["a.txt".into()] };
    let uploaded = sandbox.browse(upload(), &["sub/a.txt"]);
    assert_eq!(uploaded.result, Ok(BrowseResult::Done));
    assert_eq!(value(&sandbox.browse(evaluate("document.querySelector('input').files[0].name"), &[])), "\"a.txt\"");
    for path in ["link", "../s", "/etc/passwd", "none", "sub", ""] {
        let call = sandbox.send(upload(), &[path], 5000);
        let (failure, message) = sandbox.failure(call);
        assert!(matches!(failure, GuestFailure::InvalidPath | GuestFailure::NotFound), "{path}: {failure:?} {message}");
    }
    let uploads = sandbox.scratch.path().join("uploads");
    assert_eq!(names(&uploads).len(), 1);

    // One at a time, and interrupted.
    let call = sandbox.send(evaluate("new Promise(() => 0)"), &[], 60_000);
    let second = sandbox.send(evaluate("1"), &[], 1000);
    assert_eq!(sandbox.failure(second).1, "an earlier call of the browser is not answered yet");
    sandbox.client.send_as(call, &ToGuest::Interrupt);
    assert_eq!(sandbox.browsed(call).result.unwrap_err().why, BrowseFailure::Cancelled);

    // It ends when its driver is killed; what was put there for it goes.
    sandbox.drivers[0].kill().unwrap();
    assert_eq!(sandbox.client.answer(0), FromGuest::BrowserExited);
    assert_eq!(names(&uploads), [""; 0]);
}

#[test]
fn a_driver_that_does_not_answer_is_ended() {
    let mut sandbox = Sandbox::new();
    let mut puppet = sandbox.put_puppet();
    let call = sandbox.send(evaluate("1"), &[], 100);
    let (_, asked) = puppet.hear();
    assert!(matches!(asked, ToDriver::Browse { after_ms: 100, .. }), "{asked:?}");
    let silent = (GuestFailure::Browser, "the browser did not answer in time, and was ended".into());
    assert_eq!(sandbox.failure(call), silent);
    let call = sandbox.send(evaluate("1"), &[], 100);
    let (_, why) = sandbox.failure(call);
    assert!(["the browser is ending", "there is no browser"].contains(&&*why), "{why}");
    // Another one takes its place.
    sandbox.put_puppet();
}

#[test]
#[allow(clippy::disallowed_methods, reason = "stands for the launcher")]
fn a_driver_that_was_dead_and_reaped_before_it_was_taken_is_over() {
    let mut sandbox = Sandbox::new();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
    let pid = rustix::process::Pid::from_child(&child);
    let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let (_, leash) = std::io::pipe().unwrap();
    let fork = Fork { pid: child.id(), process, channel: theirs.into() };
    Arrival::Driver(fork, leash.into()).send(&sandbox.way).unwrap();
    let call = sandbox.start();
    assert_eq!(sandbox.failure(call).1, "the browser ended: its driver was killed by signal 9");
    sandbox.put_puppet();
}

#[test]
fn a_driver_that_speaks_out_of_turn_is_ended() {
    let browsed = |json: &str| BrowserReply {
        page: None,
        happened: Vec::new(),
        result: Ok(BrowseResult::Value { json: json.into(), truncated: false }),
        extras: Default::default(),
    };
    let mut sandbox = Sandbox::new();
    // An answer to nothing.
    let mut puppet = sandbox.put_puppet();
    puppet.say(7, &FromDriver::Browsed { browsed: Box::new(browsed("1")) });
    assert_eq!(sandbox.client.answer(0), FromGuest::BrowserExited);
    // Two answers to one request: the first is one.
    let mut puppet = sandbox.put_puppet();
    let call = sandbox.send(evaluate("1"), &[], 5000);
    let (number, _) = puppet.hear();
    puppet.say(number, &FromDriver::Browsed { browsed: Box::new(browsed("1")) });
    puppet.say(number, &FromDriver::Browsed { browsed: Box::new(browsed("2")) });
    assert_eq!(sandbox.browsed(call), browsed("1"));
    assert_eq!(sandbox.client.answer(0), FromGuest::BrowserExited);
    // Bytes that are no frame, and another message than the one that is due.
    for bytes in [vec![0xff; 64], {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, 2, &FromDriver::Ready { version: "again".into() }).unwrap();
        bytes
    }] {
        let mut puppet = sandbox.put_puppet();
        let call = sandbox.send(evaluate("1"), &[], 20_000);
        puppet.hear();
        puppet.channel.write_all(&bytes).unwrap();
        let out_of_turn = (GuestFailure::Browser, "the browser's driver spoke out of turn, and was ended".into());
        assert_eq!(sandbox.failure(call), out_of_turn);
    }
}

impl Puppet {
    /// Asks for a part of a file; the size of the whole and the bytes, or nothing.
    fn read_file(&mut self, number: u64, path: &str, offset: u64) -> Option<(u64, Vec<u8>)> {
        self.say(number, &FromDriver::ReadFile { path: path.into(), offset });
        match self.hear() {
            (heard, ToDriver::File { size }) => {
                assert_eq!(heard, number);
                let frame = self.frame();
                assert_eq!((frame.kind, frame.call), (proto::FrameKind::File, number));
                Some((size, frame.payload))
            }
            (heard, ToDriver::NoFile) => {
                assert_eq!(heard, number);
                None
            }
            other => panic!("{other:?}"),
        }
    }
}

/// B30: the driver counts as taken over. The guest gives it files of the directory of the page that the host opened last,
/// and of nothing else.
#[test]
fn b30_a_driver_gets_files_of_the_opened_page_s_directory_alone() {
    let mut sandbox = Sandbox::new();
    let workspace = sandbox.scratch.path().join("workspace");
    std::fs::create_dir_all(workspace.join("site/deep")).unwrap();
    std::fs::write(workspace.join("site/index.html"), "<p>page</p>").unwrap();
    std::fs::write(workspace.join("site/deep/a.css"), "p {}").unwrap();
    std::fs::write(workspace.join("site/large"), vec![7; 600_000]).unwrap();
    std::fs::write(workspace.join("secret.txt"), "secret").unwrap();
    for (to, link) in
        [("/etc/passwd", "out"), ("/etc", "etc"), ("../../s", "up"), ("/proc/self/root/etc/passwd", "magic")]
    {
        std::os::unix::fs::symlink(to, workspace.join("site").join(link)).unwrap();
    }
    let mut puppet = sandbox.put_puppet();
    assert_eq!(puppet.read_file(1, "index.html", 0), None, "no page is open");
    sandbox.act(&mut puppet, BrowserAction::OpenFile { path: "site/index.html".into() }, None);
    assert_eq!(puppet.read_file(2, "index.html", 0), Some((11, b"<p>page</p>".to_vec())));
    assert_eq!(puppet.read_file(3, "deep/a.css", 2), Some((4, b"{}".to_vec())));
    assert_eq!(puppet.read_file(3, "deep/a.css", 1 << 60), Some((4, Vec::new())));
    // A large file comes in parts.
    let mut bytes = Vec::new();
    while bytes.len() < 600_000 {
        let (size, part) = puppet.read_file(4, "large", bytes.len() as u64).unwrap();
        assert!(size == 600_000 && !part.is_empty() && part.len() <= proto::MAX_CHUNK);
        bytes.extend(part);
    }
    assert!(bytes.iter().all(|byte| *byte == 7));
    for path in [
        "../secret.txt",
        "deep/../../secret.txt",
        "/etc/passwd",
        "out",
        "etc/passwd",
        "up",
        "magic",
        "none",
        "deep",
        "",
        ".",
        "a\0b",
    ] {
        assert_eq!(puppet.read_file(5, path, 0), None, "{path}");
    }
    // The directory itself may be replaced by a link.
    std::fs::rename(workspace.join("site"), workspace.join("was")).unwrap();
    std::os::unix::fs::symlink("/etc", workspace.join("site")).unwrap();
    assert_eq!(puppet.read_file(6, "passwd", 0), None);
    std::fs::remove_file(workspace.join("site")).unwrap();
    std::fs::rename(workspace.join("was"), workspace.join("site")).unwrap();
    // Looking at the page changes nothing; another address ends it.
    sandbox.act(&mut puppet, BrowserAction::Back, None);
    assert!(puppet.read_file(7, "index.html", 0).is_some());
    sandbox.act(&mut puppet, BrowserAction::Open { url: "http://evil.test/".into() }, None);
    assert_eq!(puppet.read_file(8, "index.html", 0), None);
    // A file that is not there, or is none, is refused before the browser hears of it.
    for path in ["none.html", "site", "site/out", "../s"] {
        let call = sandbox.send(BrowserAction::OpenFile { path: path.into() }, &[], 5000);
        let (failure, message) = sandbox.failure(call);
        assert!(matches!(failure, GuestFailure::InvalidPath | GuestFailure::NotFound), "{path}: {failure:?} {message}");
    }
    assert_eq!(puppet.read_file(9, "index.html", 0), None);
    // A driver that asks again and again without taking the answers is ended.
    sandbox.act(&mut puppet, BrowserAction::OpenFile { path: "site/index.html".into() }, None);
    let mut bytes = Vec::new();
    for _ in 0..64 {
        let ask = FromDriver::ReadFile { path: "large".into(), offset: 0 };
        proto::encode_message(&mut bytes, 10, &ask).unwrap();
    }
    puppet.channel.write_all(&bytes).unwrap();
    assert_eq!(sandbox.client.answer(0), FromGuest::BrowserExited);
}

/// B33: a link, a redirect or `back` may lead from the page of a file to a hostile one.
#[test]
fn b33_a_driver_gets_no_file_after_a_reply_that_names_another_page() {
    let mut sandbox = Sandbox::new();
    let workspace = sandbox.scratch.path().join("workspace");
    std::fs::write(workspace.join("index.html"), "<p>page</p>").unwrap();
    let mut puppet = sandbox.put_puppet();
    let file = format!("file://{}/", workspace.display());
    let beside = format!("file://{}-evil/x.html", workspace.display());
    for other in
        ["http://evil.test/", "about:blank", "chrome-error://chromewebdata/", "", "file:///etc/passwd", &beside]
    {
        sandbox.act(&mut puppet, BrowserAction::OpenFile { path: "index.html".into() }, Some(&file));
        sandbox.act(&mut puppet, BrowserAction::Reload, Some(&format!("{file}sub/next.html")));
        assert!(puppet.read_file(1, "index.html", 0).is_some(), "{other}");
        sandbox.act(&mut puppet, BrowserAction::Back, Some(other));
        assert_eq!(puppet.read_file(2, "index.html", 0), None, "{other}");
        sandbox.act(&mut puppet, BrowserAction::Forward, Some(&file));
        assert_eq!(puppet.read_file(3, "index.html", 0), None, "{other}: only the host opens a file");
    }
}
