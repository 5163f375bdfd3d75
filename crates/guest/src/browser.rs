//! The driver of the sandbox's browser, as its PID 1 sees it: requests passed on, answers checked, uploads put where it may read them.
//!
//! The driver may have been taken over by a page. It is never waited for: it has a time for each answer, and is ended after it.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use jail::beneath::{NewFile, Root};
use proto::browser::{FromDriver, MAX_HAPPENED, ToDriver};
use proto::{
    BrowseError, BrowseFailure, BrowserAction, BrowserReply, BrowserSpec, Decoder, Ended, Frame, FrameKind, FromGuest,
    GuestFailure,
};

use crate::arrivals::Driver;
use crate::files::FileFailure;
use crate::host::{Host, NOBODY};
use crate::process::Process;

/// From the start of the browser to its blank page; the driver itself gives up before.
const START: Duration = Duration::from_secs(35);
/// What an answer may come later than the driver was told to give it.
const LATE: Duration = Duration::from_secs(2);
/// Between the end of its channel and that of the driver.
const ENDING: Duration = Duration::from_secs(2);
const READ: usize = 64 << 10;
/// Per turn of the loop.
const READS: usize = 16;

pub struct BrowserDriver {
    /// Until it is killed: the process has another uid, and heeds no signal of ours. Dropped first, since the next waits for its end.
    leash: Option<OwnedFd>,
    process: Process,
    /// None once the driver has closed it, or said something that it should not.
    channel: Option<UnixStream>,
    decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    /// Requests of the driver are numbered by us: calls of two hosts may have the same number.
    number: u64,
    open: Option<OpenAction>,
    /// When the driver is killed.
    until: Option<Instant>,
    /// Whether the host knows of its end.
    told: bool,
}

/// A call that is not answered yet.
struct OpenAction {
    call: u64,
    stage: Stage,
}

enum Stage {
    Starting,
    /// Files are still being copied for it.
    Copying {
        copy: Box<Copy>,
        ask: BrowserAction,
        after: Duration,
    },
    Browsing,
}

impl BrowserDriver {
    pub fn start(driver: Driver, call: u64, spec: BrowserSpec, now: Instant) -> io::Result<Self> {
        let Driver { pid, process, channel, leash } = driver;
        channel.set_nonblocking(true)?;
        let mut browser = Self {
            process: Process::adopt(pid, process)?,
            channel: Some(channel),
            leash: Some(leash),
            decoder: Decoder::default(),
            out: Vec::new(),
            sent: 0,
            number: 0,
            open: Some(OpenAction { call, stage: Stage::Starting }),
            until: Some(now + START),
            told: false,
        };
        browser.say(&ToDriver::Start { spec });
        Ok(browser)
    }

    pub fn process(&self) -> &Process {
        &self.process
    }

    pub fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    pub fn wants_to_write(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Whether there is a file to be copied on.
    pub fn is_busy(&self) -> bool {
        matches!(&self.open, Some(OpenAction { stage: Stage::Copying { .. }, .. }))
    }

    pub fn wake_at(&self) -> Option<Instant> {
        self.until
    }

    /// Why not, if not.
    pub fn browse(
        &mut self,
        call: u64,
        ask: BrowserAction,
        copy: Option<Copy>,
        after: Duration,
        now: Instant,
    ) -> Option<&str> {
        if self.open.is_some() {
            return Some("an earlier call of the browser is not answered yet");
        }
        if self.channel.is_none() {
            return Some("the browser is ending");
        }
        match copy {
            Some(copy) => {
                self.open = Some(OpenAction { call, stage: Stage::Copying { copy: Box::new(copy), ask, after } })
            }
            None => self.submit(call, ask, after, None, now),
        }
        None
    }

    fn submit(&mut self, call: u64, ask: BrowserAction, after: Duration, uploads: Option<String>, now: Instant) {
        self.open = Some(OpenAction { call, stage: Stage::Browsing });
        self.until = Some(now + after + LATE);
        self.say(&ToDriver::Browse { ask, after_ms: after.as_millis() as u64, uploads });
    }

    /// Copies on, for a call that needs files.
    pub fn advance(&mut self, uploads: &mut Uploads, now: Instant, host: &mut Host) {
        let Some(OpenAction { call, stage: Stage::Copying { copy, .. } }) = &mut self.open else { return };
        let (call, copied) = (*call, copy.advance());
        match copied {
            Ok(false) => {}
            Ok(true) => {
                if let Some(OpenAction { stage: Stage::Copying { copy, ask, after }, .. }) = self.open.take() {
                    let directory = uploads.keep(copy.directory);
                    self.submit(call, named(ask, &copy.names), after, Some(directory), now);
                }
            }
            Err(refused) => {
                self.open = None;
                refused.tell(call, host);
            }
        }
    }

    /// Of the call of this number, if it is the one.
    pub fn interrupt(&mut self, call: u64, now: Instant, host: &mut Host) {
        match &self.open {
            Some(open) if open.call != call => {}
            Some(OpenAction { stage: Stage::Copying { .. }, .. }) => {
                self.open = None;
                let error = BrowseError { why: BrowseFailure::Cancelled, message: "the request was cancelled".into() };
                let browsed = BrowserReply { page: None, happened: Vec::new(), result: Err(error) };
                host.send(call, &FromGuest::Browsed { browsed: Box::new(browsed) });
            }
            _ => self.cancel(now),
        }
    }

    /// Its host is gone.
    pub fn abandon(&mut self, now: Instant) {
        match &mut self.open {
            Some(OpenAction { stage: Stage::Copying { .. }, .. }) => self.open = None,
            Some(open) => {
                open.call = NOBODY;
                self.cancel(now);
            }
            None => {}
        }
    }

    fn cancel(&mut self, now: Instant) {
        if self.open.as_ref().is_some_and(|open| matches!(open.stage, Stage::Browsing)) {
            self.until = self.until.min(Some(now + LATE));
            let number = self.number;
            self.encode(number, &ToDriver::Cancel);
        }
    }

    fn say(&mut self, message: &ToDriver) {
        self.number += 1;
        self.encode(self.number, message);
    }

    fn encode(&mut self, number: u64, message: &ToDriver) {
        // It came in a frame, so it fits into one.
        let encoded = proto::encode_message(&mut self.out, number, message);
        debug_assert!(encoded.is_ok());
        self.write();
    }

    pub fn write(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        while self.sent < self.out.len() {
            match rustix::net::send(&*channel, &self.out[self.sent..], rustix::net::SendFlags::NOSIGNAL) {
                Ok(written) => self.sent += written,
                Err(rustix::io::Errno::INTR) => {}
                // One that is gone is seen at its end.
                Err(_) => return,
            }
        }
        self.out = Vec::new();
        self.sent = 0;
    }

    pub fn read(&mut self, now: Instant, host: &mut Host) {
        let mut buffer = [0; READ];
        for _ in 0..READS {
            let Some(channel) = &mut self.channel else { return };
            match channel.read(&mut buffer) {
                Ok(0) => return self.close(now),
                Ok(read) => self.decoder.push(&buffer[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.close(now),
            }
            loop {
                match self.decoder.next_frame() {
                    // An answer to nothing, or not an answer: whatever drives the browser now is not our driver.
                    Ok(Some(frame)) if !self.pass_on(&frame, host) => return self.distrust(now, host),
                    Ok(Some(_)) => {}
                    Err(_) => return self.distrust(now, host),
                    Ok(None) => break,
                }
            }
        }
    }

    /// Whether it was an answer to what is open.
    fn pass_on(&mut self, frame: &Frame, host: &mut Host) -> bool {
        if frame.kind != FrameKind::Message || frame.call != self.number {
            return false;
        }
        let (Ok(message), Some(open)) = (frame.message::<FromDriver>(), self.open.take()) else { return false };
        let answer = match (message, &open.stage) {
            (FromDriver::Ready { version }, Stage::Starting) => {
                FromGuest::BrowserReady { version: version.chars().take(200).collect() }
            }
            (FromDriver::Failed { message }, Stage::Starting) => failed(message.chars().take(1000).collect()),
            (FromDriver::Browsed { mut browsed }, Stage::Browsing) => {
                browsed.happened.truncate(MAX_HAPPENED);
                FromGuest::Browsed { browsed }
            }
            _ => {
                self.open = Some(open);
                return false;
            }
        };
        self.until = None;
        if host.try_send(open.call, &answer).is_err() {
            host.send(open.call, &failed("the browser's answer is too large".into()));
        }
        true
    }

    fn close(&mut self, now: Instant) {
        self.channel = None;
        self.decoder = Decoder::default();
        self.until = Some(now + ENDING);
    }

    fn distrust(&mut self, now: Instant, host: &mut Host) {
        self.close(now);
        self.kill("the browser's driver spoke out of turn, and was ended", host);
    }

    /// Whoever waits for an answer has it now: one that has slipped its leash does not end before the launcher ends it.
    fn kill(&mut self, why: &str, host: &mut Host) {
        self.channel = None;
        self.until = None;
        self.leash = None;
        self.process.kill();
        match self.open.take() {
            Some(OpenAction { call, .. }) => host.send(call, &failed(why.into())),
            None if !self.told => host.send(0, &FromGuest::BrowserExited),
            None => {}
        }
        self.told = true;
    }

    pub fn tick(&mut self, now: Instant, host: &mut Host) {
        if self.until.is_some_and(|until| now >= until) {
            self.kill("the browser did not answer in time, and was ended", host);
        }
    }

    /// The driver is gone, and the browser with it.
    pub fn ended(&mut self, how: Ended, now: Instant, host: &mut Host) {
        // What it said last is still there.
        self.read(now, host);
        self.kill(
            &match how {
                Ended::Exited { code } => format!("the browser ended: its driver exited with code {code}"),
                Ended::Signaled { signal } => format!("the browser ended: its driver was killed by signal {signal}"),
            },
            host,
        );
    }
}

fn failed(message: String) -> FromGuest {
    FromGuest::Failed { failure: GuestFailure::Browser, message }
}

/// The request with the names that its files have now.
fn named(ask: BrowserAction, names: &[String]) -> BrowserAction {
    match ask {
        BrowserAction::Upload { at, .. } => BrowserAction::Upload { at, files: names.to_vec() },
        other => other,
    }
}

// ---- uploads

/// Calls whose files are kept: a form may be sent long after its file was chosen.
const KEPT: usize = 8;
/// Of all files of one call.
const MAX_BYTES: u64 = 256 << 20;
const CHUNK: usize = 64 << 10;
const CHUNKS_PER_TURN: usize = 16;

/// Where the browser reads the files it is given.
pub struct Uploads {
    from: PathBuf,
    to: PathBuf,
    next: u64,
    kept: VecDeque<Directory>,
}

/// Files of one call. They go with it.
pub struct Directory {
    path: PathBuf,
    names: Vec<String>,
}

/// Files on their way, in pieces.
pub struct Copy {
    pub names: Vec<String>,
    root: Root,
    /// Not begun.
    ahead: VecDeque<(File, PathBuf)>,
    current: Option<(File, NewFile)>,
    left: u64,
    /// Goes last, when nothing half-made is in it any more.
    directory: Directory,
}

impl Uploads {
    pub fn new(from: PathBuf, to: PathBuf) -> Self {
        Self { from, to, next: 0, kept: VecDeque::new() }
    }

    /// Opens all there is to copy; nothing where there is nothing.
    pub fn begin(&mut self, files: &[String]) -> Result<Option<Copy>, FileFailure> {
        if files.is_empty() {
            return Ok(None);
        }
        self.next += 1;
        let directory = PathBuf::from(self.next.to_string());
        let from = Root::open(&self.from)?;
        let mut copy = Copy {
            directory: Directory { path: self.to.join(&directory), names: Vec::new() },
            names: Vec::new(),
            root: Root::open(&self.to)?,
            ahead: VecDeque::new(),
            current: None,
            left: MAX_BYTES,
        };
        for file in files {
            let path = Path::new(file);
            let below = path.strip_prefix(&self.from).unwrap_or(path);
            let name = below.file_name().and_then(|name| name.to_str());
            let name = name.ok_or_else(|| FileFailure::path(format!("`{file}` is not a file's path")))?;
            if copy.names.iter().any(|one| one == name) {
                return Err(FileFailure::path(format!("two of the files are named `{name}`")));
            }
            copy.names.push(name.to_owned());
            copy.ahead.push_back((from.read_file(below)?, directory.join(name)));
        }
        copy.directory.names.clone_from(&copy.names);
        Ok(Some(copy))
    }

    /// Keeps a call's files for a while; where they are.
    fn keep(&mut self, directory: Directory) -> String {
        let path = directory.path.display().to_string();
        self.kept.push_back(directory);
        if self.kept.len() > KEPT {
            self.kept.pop_front();
        }
        path
    }

    /// The browser that had them is gone.
    pub fn forget(&mut self) {
        self.kept.clear();
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        // What we wrote and nothing else: anything may have been put beside it.
        for name in &self.names {
            let _ = std::fs::remove_file(self.path.join(name));
        }
        let _ = std::fs::remove_dir(&self.path);
    }
}

impl Copy {
    /// Whether all is there.
    fn advance(&mut self) -> Result<bool, FileFailure> {
        let mut chunk = vec![0; CHUNK];
        for _ in 0..CHUNKS_PER_TURN {
            if self.current.is_none() {
                let Some((from, to)) = self.ahead.pop_front() else { return Ok(true) };
                self.current = Some((from, self.root.create_file(to)?));
            }
            let Some((from, to)) = &mut self.current else { return Ok(true) };
            let read =
                from.read(&mut chunk).map_err(|error| FileFailure::io(format!("cannot read a file: {error}")))?;
            self.left = self.left.checked_sub(read as u64).ok_or_else(|| FileFailure {
                failure: GuestFailure::TooLarge,
                message: format!("more than {MAX_BYTES} bytes cannot be uploaded at once"),
            })?;
            to.write_all(&chunk[..read]).map_err(|error| to.explain(&error))?;
            if read == 0
                && let Some((_, to)) = self.current.take()
            {
                to.commit()?;
            }
        }
        Ok(false)
    }
}
