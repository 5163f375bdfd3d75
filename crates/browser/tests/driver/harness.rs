//! A driver in a thread, and the guest's end of its channel.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use proto::browser::{BrowseResult, BrowserReply, FromDriver, MouseButton, PageEvent, ToDriver};
use proto::{BrowseError, BrowseFailure, BrowserAction, BrowserSpec, Decoder};
pub use testkit::pages::Pages;

/// Where Debian has it.
const CHROMIUM: &str = "/usr/lib/chromium/chromium-headless-shell";
/// For a request that is not about its time, in seconds: on a machine with much else to do.
const PLENTY: f32 = 60.0;
/// More than any request here has.
const PATIENCE: Duration = Duration::from_secs(90);

pub struct Browser {
    channel: UnixStream,
    decoder: Decoder,
    call: u64,
    driver: Option<JoinHandle<std::io::Result<()>>>,
    pub version: String,
    pub home: PathBuf,
}

impl Browser {
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    pub fn start_with(change: impl FnOnce(&mut BrowserSpec)) -> Self {
        let home = directory();
        std::fs::create_dir_all(home.join("downloads")).unwrap();
        assert!(Path::new(CHROMIUM).exists(), "`{CHROMIUM}` is needed: install Debian's chromium-headless-shell");
        let mut spec = BrowserSpec {
            program: CHROMIUM.into(),
            shell: true,
            proxy: None,
            home: home.join("home").display().to_string(),
            workspace: home.display().to_string(),
            downloads: home.join("downloads").display().to_string(),
            nssdb: None,
            fontconfig: None,
        };
        change(&mut spec);
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        let driver = Some(std::thread::spawn(|| browser::serve(theirs)));
        let mut browser =
            Self { channel: ours, decoder: Decoder::default(), call: 0, driver, version: String::new(), home };
        let call = browser.send(&ToDriver::Start { spec });
        browser.version = match browser.receive(call) {
            FromDriver::Ready { version } => version,
            other => panic!("{other:?}"),
        };
        browser
    }

    /// With frames of other sites in processes of their own, which the headless shell does not do by itself.
    pub fn start_isolating() -> Self {
        Self::start_with(|spec| {
            let script = Path::new(&spec.downloads).with_file_name("isolating");
            std::fs::write(&script, format!("#!/bin/sh\nexec {} --site-per-process \"$@\"\n", spec.program)).unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o700)).unwrap();
            spec.program = script.display().to_string();
        })
    }

    /// Sends one message; its number.
    pub fn send(&mut self, message: &ToDriver) -> u64 {
        self.call += 1;
        self.send_as(self.call, message);
        self.call
    }

    pub fn send_as(&mut self, call: u64, message: &ToDriver) {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, call, message).unwrap();
        self.channel.write_all(&bytes).unwrap();
    }

    pub fn receive(&mut self, call: u64) -> FromDriver {
        let mut buffer = vec![0; 64 << 10];
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                assert_eq!(frame.call, call);
                return frame.message().unwrap();
            }
            let read = self.channel.read(&mut buffer).unwrap();
            assert_ne!(read, 0, "the driver has ended");
            self.decoder.push(&buffer[..read]);
        }
    }

    pub fn browse_within(&mut self, ask: BrowserAction, seconds: f32) -> BrowserReply {
        self.browse_with(ask, seconds, None)
    }

    pub fn browse_with(&mut self, ask: BrowserAction, seconds: f32, uploads: Option<&Path>) -> BrowserReply {
        let uploads = uploads.map(|path| path.display().to_string());
        let after_ms = (seconds * 1000.0) as u64;
        let call = self.send(&ToDriver::Browse { ask, after_ms, uploads, changes: 0 });
        self.browsed(call)
    }

    /// What an action changes on the page, in at most so many characters.
    pub fn changed(&mut self, ask: BrowserAction, changes: u32) -> Option<String> {
        let after_ms = (PLENTY * 1000.0) as u64;
        let call = self.send(&ToDriver::Browse { ask, after_ms, uploads: None, changes });
        let browsed = self.browsed(call);
        assert!(browsed.result.is_ok(), "{browsed:?}");
        browsed.extras.changed
    }

    pub fn browsed(&mut self, call: u64) -> BrowserReply {
        match self.receive(call) {
            FromDriver::Browsed { browsed } => *browsed,
            other => panic!("{other:?}"),
        }
    }

    pub fn browse(&mut self, ask: BrowserAction) -> BrowserReply {
        self.browse_within(ask, PLENTY)
    }

    /// One that must go well.
    pub fn ok(&mut self, ask: BrowserAction) -> BrowseResult {
        let browsed = self.browse(ask.clone());
        browsed.result.unwrap_or_else(|error| panic!("{ask:?}: {error:?}"))
    }

    /// One that must not.
    pub fn error(&mut self, ask: BrowserAction) -> BrowseError {
        let browsed = self.browse(ask.clone());
        browsed.result.map(|result| panic!("{ask:?}: {result:?}")).unwrap_err()
    }

    pub fn open(&mut self, url: &str) -> BrowserReply {
        let browsed = self.browse(BrowserAction::Open { url: url.into() });
        assert!(browsed.result.is_ok(), "{browsed:?}");
        browsed
    }

    pub fn click(&mut self, at: &str) -> BrowserReply {
        let browsed = self.browse(click(at));
        assert!(browsed.result.is_ok(), "{at}: {browsed:?}");
        browsed
    }

    pub fn type_text(&mut self, at: &str, text: &str) {
        self.ok(BrowserAction::Type { at: at.into(), text: text.into(), append: false, submit: false, keys: false });
    }

    /// What an expression comes to, as JSON.
    pub fn value(&mut self, expression: &str) -> String {
        match self.ok(BrowserAction::Evaluate { expression: expression.into() }) {
            BrowseResult::Value { json, .. } => json,
            other => panic!("{other:?}"),
        }
    }

    /// The text of an element.
    pub fn text(&mut self, selector: &str) -> String {
        let json = self.value(&format!("document.querySelector({selector:?}).textContent"));
        serde_json::from_str(&json).unwrap()
    }

    pub fn downloads(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.home.join("downloads")).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// The files of downloads once there are so many. Chromium reports that a download ended before it has removed the
    /// part of the file that it has.
    pub fn downloads_left(&self, count: usize) -> Vec<String> {
        let until = Instant::now() + Duration::from_secs(30);
        while self.downloads().len() != count && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(20));
        }
        self.downloads()
    }

    /// What the driver ended with, once it has.
    pub fn end(&mut self) -> std::io::Result<()> {
        let _ = self.channel.shutdown(std::net::Shutdown::Write);
        self.driver.take().unwrap().join().unwrap()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if self.driver.is_some() && !std::thread::panicking() {
            let _ = self.end();
        }
        let _ = std::fs::remove_dir_all(&self.home);
    }
}

pub fn click(at: &str) -> BrowserAction {
    BrowserAction::Click { at: at.into(), button: MouseButton::Left, double: false }
}

pub fn dialogs(happened: &[PageEvent]) -> Vec<String> {
    let dialog = |what: &PageEvent| match what {
        PageEvent::Dialog { kind, message } => Some(format!("{kind}: {message}")),
        _ => None,
    };
    happened.iter().filter_map(dialog).collect()
}

pub fn failed(browsed: BrowserReply, why: BrowseFailure) -> String {
    match browsed.result {
        Err(error) if error.why == why => error.message,
        other => panic!("{other:?}"),
    }
}

fn directory() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sandpool-browser-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let directory = std::env::temp_dir().join(name);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}
