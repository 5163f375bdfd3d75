//! This module is the guest's side of the browser driver: it forwards requests and checks replies.
//!
//! A page may have taken over the driver, so the guest never waits for it: each reply has a deadline, and a driver that
//! misses it is killed.

use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, Instant};

use jail::beneath::Root;
use proto::browser::{FromDriver, MAX_HAPPENED, ReplyExtras, TabAsk, ToDriver};
use proto::{
    BrowseError, BrowseFailure, BrowserAction, BrowserReply, BrowserSpec, Decoder, Ended, Frame, FrameKind, FromGuest,
    GuestFailure,
};

use crate::arrivals::Driver;
use crate::files::FileFailure;
use crate::host::{Host, NOBODY};
use crate::process::Process;
use crate::uploads::{Copy, Uploads};

/// Time from the start of the browser to its blank page. The driver itself gives up earlier.
const START: Duration = Duration::from_secs(35);
/// Time after the deadline of an action within which the driver has to reply.
const LATE: Duration = Duration::from_secs(2);
/// Time that the driver gets to end after its channel has closed.
const ENDING: Duration = Duration::from_secs(2);
const READ: usize = 64 << 10;
/// Maximum number of reads per turn of the loop.
const READS: usize = 16;

pub(crate) struct BrowserDriver {
    /// Leash of the driver, until the driver is killed. The driver has another uid, so it ignores signals of the guest.
    /// This field is dropped first, because dropping `process` waits for the end of the driver.
    leash: Option<OwnedFd>,
    process: Process,
    /// Channel to the driver; `None` once the driver has closed it or sent something invalid.
    channel: Option<UnixStream>,
    decoder: Decoder,
    out: Vec<u8>,
    sent: usize,
    /// Number of the last request to the driver. The guest chooses these numbers, because calls of two hosts may have
    /// the same number.
    number: u64,
    open: Option<OpenAction>,
    /// Time at which the driver is killed.
    until: Option<Instant>,
    /// Whether the end of the driver was reported to the host.
    reported: bool,
    workspace: PathBuf,
    /// Directory below the workspace whose files the driver may read: that of the file that the host opened last, until
    /// a reply names a page that is no file.
    served: Option<PathBuf>,
    /// End, in `out`, of the last part of a file. The driver may ask for the next part when it has got this one.
    part_end: usize,
}

/// A call that is not answered yet.
struct OpenAction {
    call: u64,
    stage: Stage,
}

enum Stage {
    /// The browser starts.
    Starting,
    /// The files of the call are still being copied.
    Copying { copy: Box<Copy>, request: Request },
    /// The driver performs the action.
    Browsing,
}

/// A browser action as the host asks for it.
pub(crate) struct Request {
    pub ask: BrowserAction,
    pub after: Duration,
    /// Maximum number of characters about what the action changed.
    pub changes: u32,
}

impl BrowserDriver {
    pub(crate) fn start(
        driver: Driver,
        call: u64,
        spec: BrowserSpec,
        workspace: PathBuf,
        now: Instant,
    ) -> io::Result<Self> {
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
            reported: false,
            workspace,
            served: None,
            part_end: 0,
        };
        browser.send_request(&ToDriver::Start { spec });
        Ok(browser)
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    pub(crate) fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        self.sent < self.out.len()
    }

    /// Returns whether files are being copied.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(&self.open, Some(OpenAction { stage: Stage::Copying { .. }, .. }))
    }

    pub(crate) fn wake_at(&self) -> Option<Instant> {
        self.until
    }

    /// Checks that a file of the workspace can be shown.
    pub(crate) fn check_page(&self, ask: &BrowserAction) -> Result<(), FileFailure> {
        if let BrowserAction::OpenFile { path } = ask {
            Root::open(&self.workspace)?.read_file(path)?;
        }
        Ok(())
    }

    /// Sends the driver a part of a file. Returns false if the driver has not got the part before.
    fn send_part(&mut self, number: u64, path: &str, offset: u64) -> bool {
        if self.sent < self.part_end {
            return false;
        }
        let part = self.read_part(path, offset);
        let message = match &part {
            Some((size, _)) => ToDriver::File { size: *size },
            None => ToDriver::NoFile,
        };
        let encoded = proto::encode_message(&mut self.out, number, &message);
        debug_assert!(encoded.is_ok());
        if let Some((_, bytes)) = part {
            proto::encode(&mut self.out, FrameKind::File, number, &bytes);
        }
        self.part_end = self.out.len();
        self.write();
        true
    }

    /// Reads a part of a file in the directory of the page. No name and no link leads out of the workspace.
    fn read_part(&self, path: &str, offset: u64) -> Option<(u64, Vec<u8>)> {
        let directory = self.served.as_ref()?;
        if !Path::new(path).components().all(|part| matches!(part, Component::Normal(_))) {
            return None;
        }
        let file = Root::open(&self.workspace).ok()?.read_file(directory.join(path)).ok()?;
        let size = file.metadata().ok()?.len();
        let length = size.saturating_sub(offset).min(proto::MAX_CHUNK as u64);
        let mut bytes = vec![0; length as usize];
        let read = file.read_at(&mut bytes, offset).ok()?;
        bytes.truncate(read);
        Some((size, bytes))
    }

    /// Returns whether the address of a page, as a reply names it, is a file of the workspace.
    fn is_file(&self, url: &str) -> bool {
        let path = url.strip_prefix("file://").map(Path::new);
        path.is_some_and(|path| path.starts_with(&self.workspace))
    }

    /// Begins a browser action. Returns the reason if it cannot begin.
    pub(crate) fn browse(&mut self, call: u64, request: Request, copy: Option<Copy>, now: Instant) -> Option<&str> {
        if self.open.is_some() {
            return Some("an earlier call of the browser is not answered yet");
        }
        if self.channel.is_none() {
            return Some("the browser is ending");
        }
        match &request.ask {
            BrowserAction::OpenFile { path } => {
                self.served = Some(Path::new(path).parent().unwrap_or(Path::new("")).to_owned());
            }
            // What is opened now may be hostile, and must not get the files.
            BrowserAction::Open { .. } | BrowserAction::Tab { tab: TabAsk::New { url: Some(_) } } => self.served = None,
            _ => {}
        }
        match copy {
            Some(copy) => {
                self.open = Some(OpenAction { call, stage: Stage::Copying { copy: Box::new(copy), request } })
            }
            None => self.submit(call, request, None, now),
        }
        None
    }

    fn submit(&mut self, call: u64, request: Request, uploads: Option<String>, now: Instant) {
        let Request { ask, after, changes } = request;
        self.open = Some(OpenAction { call, stage: Stage::Browsing });
        self.until = Some(now + after + LATE);
        self.send_request(&ToDriver::Browse { ask, after_ms: after.as_millis() as u64, uploads, changes });
    }

    /// Continues copying for a call that needs files.
    pub(crate) fn advance(&mut self, uploads: &mut Uploads, now: Instant, host: &mut Host) {
        let Some(OpenAction { call, stage: Stage::Copying { copy, .. } }) = &mut self.open else { return };
        let (call, copied) = (*call, copy.advance());
        match copied {
            Ok(false) => {}
            Ok(true) => {
                if let Some(OpenAction { stage: Stage::Copying { copy, request }, .. }) = self.open.take() {
                    let directory = uploads.keep(copy.directory);
                    let request = Request { ask: with_names(request.ask, &copy.names), ..request };
                    self.submit(call, request, Some(directory), now);
                }
            }
            Err(failure) => {
                self.open = None;
                failure.send(call, host);
            }
        }
    }

    /// Cancels the call with this number if it is the open one.
    pub(crate) fn interrupt(&mut self, call: u64, now: Instant, host: &mut Host) {
        match &self.open {
            Some(open) if open.call != call => {}
            Some(OpenAction { stage: Stage::Copying { .. }, .. }) => {
                self.open = None;
                let error = BrowseError { why: BrowseFailure::Cancelled, message: "the request was cancelled".into() };
                let (result, extras) = (Err(error), ReplyExtras::default());
                let browsed = BrowserReply { page: None, happened: Vec::new(), result, extras };
                host.send(call, &FromGuest::Browsed { browsed: Box::new(browsed) });
            }
            _ => self.cancel(now),
        }
    }

    /// Cancels the open call because its host is gone.
    pub(crate) fn abandon(&mut self, now: Instant) {
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

    fn send_request(&mut self, message: &ToDriver) {
        self.number += 1;
        self.encode(self.number, message);
    }

    fn encode(&mut self, number: u64, message: &ToDriver) {
        // The content came in a frame, so it fits into one.
        let encoded = proto::encode_message(&mut self.out, number, message);
        debug_assert!(encoded.is_ok());
        self.write();
    }

    pub(crate) fn write(&mut self) {
        let Some(channel) = &mut self.channel else { return };
        while self.sent < self.out.len() {
            match rustix::net::send(&*channel, &self.out[self.sent..], rustix::net::SendFlags::NOSIGNAL) {
                Ok(written) => self.sent += written,
                Err(rustix::io::Errno::INTR) => {}
                // A driver that is gone is noticed when its process ends.
                Err(_) => return,
            }
        }
        self.out = Vec::new();
        (self.sent, self.part_end) = (0, 0);
    }

    pub(crate) fn read(&mut self, now: Instant, host: &mut Host) {
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
                    // A frame that is not a reply to the open request shows that the browser is no longer controlled by
                    // our driver.
                    Ok(Some(frame)) if !self.forward(&frame, host) => return self.distrust(now, host),
                    Ok(Some(_)) => {}
                    Err(_) => return self.distrust(now, host),
                    Ok(None) => break,
                }
            }
        }
    }

    /// Forwards a reply to the host. Returns whether the frame was a reply to the open request.
    fn forward(&mut self, frame: &Frame, host: &mut Host) -> bool {
        if frame.kind != FrameKind::Message {
            return false;
        }
        let Ok(message) = frame.message::<FromDriver>() else { return false };
        if let FromDriver::ReadFile { path, offset } = &message {
            return self.send_part(frame.call, path, *offset);
        }
        if frame.call != self.number {
            return false;
        }
        let Some(open) = self.open.take() else { return false };
        let answer = match (message, &open.stage) {
            (FromDriver::Ready { version }, Stage::Starting) => {
                FromGuest::BrowserReady { version: version.chars().take(200).collect() }
            }
            (FromDriver::Failed { message }, Stage::Starting) => failed(message.chars().take(1000).collect()),
            (FromDriver::Browsed { mut browsed }, Stage::Browsing) => {
                browsed.happened.truncate(MAX_HAPPENED);
                if browsed.page.as_ref().is_some_and(|page| !self.is_file(&page.url)) {
                    self.served = None;
                }
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

    /// Kills the driver and answers the open call at once. A driver that has escaped its leash does not end before the
    /// launcher ends it.
    fn kill(&mut self, why: &str, host: &mut Host) {
        self.channel = None;
        self.until = None;
        self.leash = None;
        self.process.kill();
        match self.open.take() {
            Some(OpenAction { call, .. }) => host.send(call, &failed(why.into())),
            None if !self.reported => host.send(0, &FromGuest::BrowserExited),
            None => {}
        }
        self.reported = true;
    }

    pub(crate) fn tick(&mut self, now: Instant, host: &mut Host) {
        if self.until.is_some_and(|until| now >= until) {
            self.kill("the browser did not answer in time, and was ended", host);
        }
    }

    /// Handles the end of the driver, which is also the end of the browser.
    pub(crate) fn ended(&mut self, how: Ended, now: Instant, host: &mut Host) {
        // The driver's last messages may still be in the channel.
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

/// Returns the action with the names of the copied files.
fn with_names(ask: BrowserAction, names: &[String]) -> BrowserAction {
    match ask {
        BrowserAction::Upload { at, .. } => BrowserAction::Upload { at, files: names.to_vec() },
        other => other,
    }
}
