//! This module is the main loop of the guest: one thread and one `poll` for everything the guest waits for.
//!
//! It knows which call belongs to what, but not how the work is done. No step blocks: a kernel, a command or a host
//! that does not read can delay only itself.

mod calls;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Instant;

use proto::{KernelId, Stream};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, WaitStatus};

use crate::arrivals::Arrivals;
use crate::browser::BrowserDriver;
use crate::command::Job;
use crate::config::GuestConfig;
use crate::files::FileOperations;
use crate::host::{Broken, Host};
use crate::kernel::Kernel;
use crate::outputs::Outputs;
use crate::process::{Process, reap_any};
use crate::transpiler::{Client, Transpiler};
use crate::uploads::Uploads;

/// Number of a command. It is unique across hosts, because each host numbers its calls independently.
type JobId = u64;

/// Identifies what a polled descriptor belongs to.
#[derive(Debug, Clone, Copy)]
enum PollSource {
    Listener,
    Signals,
    Host,
    /// The pidfd of any child.
    Child,
    KernelOutput(KernelId, Stream),
    KernelEvents(KernelId),
    KernelRequests(KernelId),
    JobOutput(JobId, Stream),
    Browser,
    SearchReply(u64),
    /// The replies of the transpiler. They are handled in each turn of the loop; this source only wakes it up.
    TranspilerReplies,
    TranspilerRequests,
}

/// The decision whether the loop continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    End,
}

pub(crate) struct Server {
    config: GuestConfig,
    host: Host,
    listener: Option<UnixListener>,
    signals: Option<OwnedFd>,
    arrivals: Arrivals,
    kernels: BTreeMap<KernelId, Kernel>,
    jobs: BTreeMap<JobId, Job>,
    next_job: JobId,
    browser: Option<BrowserDriver>,
    uploads: Uploads,
    outputs: Outputs,
    files: FileOperations,
    transpiler: Transpiler,
    alone_since: Option<Instant>,
    /// Whether the guest is PID 1, which inherits orphaned processes and reaps them.
    is_init: bool,
}

impl Server {
    /// Creates a server for one connection. The server ends with it.
    pub(crate) fn on_stream(stream: UnixStream, config: GuestConfig) -> io::Result<Self> {
        let mut server = Self::new(config);
        server.host.connect(stream)?;
        Ok(server)
    }

    /// Creates a server that serves one connection after the other. `signals` delivers SIGCHLD and SIGTERM.
    pub(crate) fn on_listener(
        listener: UnixListener,
        signals: OwnedFd,
        forks: Option<OwnedFd>,
        config: GuestConfig,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let mut server = Self::new(config);
        server.listener = Some(listener);
        server.signals = Some(signals);
        server.arrivals = Arrivals::new(forks);
        server.alone_since = Some(Instant::now());
        server.is_init = std::process::id() == 1;
        Ok(server)
    }

    fn new(config: GuestConfig) -> Self {
        let outputs = Outputs::new(config.outputs.clone());
        Self {
            files: FileOperations::new(&config, outputs.clone()),
            uploads: Uploads::new(config.workspace.clone(), config.uploads.clone()),
            browser: None,
            outputs,
            transpiler: Transpiler::new(config.transpiler.clone()),
            config,
            host: Host::default(),
            listener: None,
            signals: None,
            arrivals: Arrivals::default(),
            kernels: BTreeMap::new(),
            jobs: BTreeMap::new(),
            next_job: 0,
            alone_since: None,
            is_init: false,
        }
    }

    pub(crate) fn run(mut self) -> io::Result<()> {
        loop {
            let ready = self.wait()?;
            if self.serve(&ready) == Flow::End {
                return Ok(());
            }
            if self.host.flush().is_err() && self.lose_host() == Flow::End {
                return Ok(());
            }
        }
    }

    fn wait(&self) -> io::Result<Vec<PollSource>> {
        let now = Instant::now();
        let mut sources = Vec::new();
        let mut fds = Vec::new();
        let mut watch = |source, fd, flags| {
            sources.push(source);
            fds.push(PollFd::from_borrowed_fd(fd, flags));
        };
        if let Some(listener) = &self.listener {
            watch(PollSource::Listener, listener.as_fd(), PollFlags::IN);
        }
        if let Some(signals) = &self.signals {
            watch(PollSource::Signals, signals.as_fd(), PollFlags::IN);
        }
        if let Some(fd) = self.host.fd() {
            let write = if self.host.wants_to_write() { PollFlags::OUT } else { PollFlags::empty() };
            watch(PollSource::Host, fd, PollFlags::IN | write);
        }
        let read = !self.host.is_full();
        for (&id, kernel) in &self.kernels {
            watch(PollSource::Child, kernel.process().fd(), PollFlags::IN);
            if let Some(fd) = kernel.requests().fd() {
                watch(PollSource::KernelRequests(id), fd, PollFlags::OUT);
            }
            for (stream, fd) in kernel.streams.fds(now).filter(|_| read) {
                watch(PollSource::KernelOutput(id, stream), fd, PollFlags::IN);
            }
            if let Some(fd) = kernel.events().fd().filter(|_| read) {
                watch(PollSource::KernelEvents(id), fd, PollFlags::IN);
            }
        }
        for (&id, job) in &self.jobs {
            watch(PollSource::Child, job.process().fd(), PollFlags::IN);
            for (stream, fd) in job.streams.fds(now).filter(|_| read) {
                watch(PollSource::JobOutput(id, stream), fd, PollFlags::IN);
            }
        }
        if let Some(browser) = &self.browser {
            watch(PollSource::Child, browser.process().fd(), PollFlags::IN);
            if let Some(fd) = browser.fd() {
                let write = if browser.wants_to_write() { PollFlags::OUT } else { PollFlags::empty() };
                watch(PollSource::Browser, fd, if read { PollFlags::IN | write } else { write });
            }
        }
        for (call, fd) in self.files.searches.fds().filter(|_| read) {
            watch(PollSource::SearchReply(call), fd, PollFlags::IN);
        }
        if let Some(fd) = self.transpiler.replies_fd() {
            watch(PollSource::TranspilerReplies, fd, PollFlags::IN);
        }
        if let Some(fd) = self.transpiler.requests_fd() {
            watch(PollSource::TranspilerRequests, fd, PollFlags::OUT);
        }
        let copying = self.browser.as_ref().is_some_and(BrowserDriver::is_busy);
        let at_once = (read && self.files.is_busy() || copying).then_some(now);
        let timeout = self.wake_at().into_iter().chain(at_once).min().map(|at| timespec_until(now, at));
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        let ready = fds.iter().zip(&sources).filter(|(fd, _)| !fd.revents().is_empty());
        Ok(ready.map(|(_, &source)| source).collect())
    }

    fn wake_at(&self) -> Option<Instant> {
        let kernels = self.kernels.values().filter_map(Kernel::wake_at);
        let jobs = self.jobs.values().filter_map(Job::wake_at);
        let alone = self.alone_since.map(|since| since + self.config.adoption_grace);
        let browser = self.browser.as_ref().and_then(BrowserDriver::wake_at);
        let others = [alone, browser, self.transpiler.wake_at(), self.files.searches.wake_at(), self.outputs.wake_at()];
        kernels.chain(jobs).chain(others.into_iter().flatten()).min()
    }

    fn serve(&mut self, ready: &[PollSource]) -> Flow {
        let mut children = false;
        for &source in ready {
            match source {
                PollSource::Listener => self.accept(),
                PollSource::Signals => {
                    if self.read_signals() == Flow::End {
                        return Flow::End;
                    }
                    children = true;
                }
                PollSource::Host => {
                    if self.read_host().is_err() && self.lose_host() == Flow::End {
                        return Flow::End;
                    }
                }
                PollSource::Child => children = true,
                PollSource::KernelOutput(id, stream) => {
                    if let Some(kernel) = self.kernels.get_mut(&id) {
                        kernel.streams.read(stream, Instant::now(), &mut self.host);
                    }
                }
                PollSource::KernelEvents(id) => {
                    if let Some(kernel) = self.kernels.get_mut(&id) {
                        kernel.read_events(&mut self.host);
                    }
                }
                PollSource::KernelRequests(id) => {
                    if let Some(kernel) = self.kernels.get_mut(&id) {
                        kernel.write_requests();
                    }
                }
                PollSource::JobOutput(id, stream) => {
                    if let Some(job) = self.jobs.get_mut(&id) {
                        job.streams.read(stream, Instant::now(), &mut self.host);
                    }
                }
                PollSource::Browser => {
                    if let Some(browser) = &mut self.browser {
                        browser.write();
                        if !self.host.is_full() {
                            browser.read(Instant::now(), &mut self.host);
                        }
                    }
                }
                PollSource::SearchReply(call) => self.files.searches.read(call, &mut self.host),
                PollSource::TranspilerReplies => self.transpiler.note_reply(),
                PollSource::TranspilerRequests => self.transpiler.write_requests(),
            }
        }
        self.transpile();
        self.files.advance(&mut self.host);
        if let Some(browser) = &mut self.browser {
            browser.advance(&mut self.uploads, Instant::now(), &mut self.host);
        }
        if children {
            self.reap();
        }
        self.tick()
    }

    fn tick(&mut self) -> Flow {
        let now = Instant::now();
        for kernel in self.kernels.values_mut() {
            let preparing = kernel.preparing();
            kernel.tick(now, &mut self.host);
            if let (Some(number), None) = (preparing, kernel.preparing()) {
                self.transpiler.forget(Client { kernel: kernel.id(), number });
            }
        }
        for job in self.jobs.values_mut() {
            job.tick(now, &mut self.host);
        }
        if let Some(browser) = &mut self.browser {
            browser.tick(now, &mut self.host);
        }
        self.files.searches.tick(now, &mut self.host);
        self.outputs.tick(now);
        let abandoned = self.alone_since.is_some_and(|since| now >= since + self.config.adoption_grace);
        if abandoned { Flow::End } else { Flow::On }
    }

    // ---- children

    fn reap(&mut self) {
        // The guest's own children come first, through their pidfds. Then, as PID 1, it reaps processes that were left
        // behind.
        self.collect_ended();
        if !self.is_init {
            return;
        }
        let mut raced = false;
        while let Some((pid, status)) = reap_any() {
            raced |= self.note_reaped(pid, status);
        }
        if raced {
            self.collect_ended();
        }
    }

    fn note_reaped(&mut self, pid: Pid, status: WaitStatus) -> bool {
        let kernels = self.kernels.values_mut().map(Kernel::process_mut);
        let jobs = self.jobs.values_mut().map(Job::process_mut);
        let browser = self.browser.as_mut().map(BrowserDriver::process_mut);
        let searches = self.files.searches.processes_mut();
        let mut children = kernels.chain(jobs).chain(browser).chain(searches).chain(self.transpiler.process_mut());
        children.find(|child| child.pid() == pid).map(|child| child.reaped(status)).is_some()
    }

    fn collect_ended(&mut self) {
        let host = &mut self.host;
        self.kernels.retain(|_, kernel| kernel.process_mut().try_wait().map(|how| kernel.ended(how, host)).is_none());
        self.jobs.retain(|_, job| job.process_mut().try_wait().map(|how| job.ended(how, host)).is_none());
        let ended = self.browser.as_mut().and_then(|browser| browser.process_mut().try_wait());
        if let (Some(how), Some(mut browser)) = (ended, self.browser.take_if(|_| ended.is_some())) {
            browser.ended(how, Instant::now(), host);
            self.uploads.forget();
        }
    }

    /// Reads the pending signals. SIGTERM ends the guest and, as the guest is PID 1, everything in the sandbox; SIGCHLD
    /// only wakes the loop.
    fn read_signals(&mut self) -> Flow {
        let Some(signals) = &self.signals else { return Flow::On };
        let mut info = [0u8; 128 * 4];
        let mut flow = Flow::On;
        while let Ok(read) = rustix::io::read(signals, &mut info) {
            if info[..read].chunks_exact(128).any(|one| self.ends_guest(one)) {
                flow = Flow::End;
            }
        }
        flow
    }

    /// Returns whether the signal (`signalfd_siginfo`: signal at 0, code at 8, sender's pid at 12) is a SIGTERM that
    /// may end the guest. Code in the sandbox has the guest's uid and must not end its PID 1. A sender outside the pid
    /// namespace has no pid in it. The pid alone proves nothing, because a sender can write any pid (`rt_sigqueueinfo`)
    /// and signals of the Linux kernel have none (`F_SETOWN`, `F_SETSIG`). But with `SI_USER` the Linux kernel asserts
    /// that the signal came from kill(2): no process can claim it in a signal to another process.
    fn ends_guest(&self, info: &[u8]) -> bool {
        const SI_USER: u32 = 0;
        let word = |at: usize| info.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes));
        let from_outside = word(8) == Some(SI_USER) && word(12) == Some(0);
        word(0) == Some(rustix::process::Signal::TERM.as_raw() as u32) && (!self.is_init || from_outside)
    }

    // ---- the host

    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        let Ok((stream, _)) = listener.accept() else { return };
        if self.host.fd().is_some() {
            // Only the owner of the socket's directory can connect, so a new server has come before the end of the old
            // one was noticed.
            self.drop_calls();
        }
        if self.host.connect(stream).is_ok() {
            self.alone_since = None;
        }
    }

    fn lose_host(&mut self) -> Flow {
        self.host.disconnect();
        self.drop_calls();
        if self.listener.is_none() {
            return Flow::End;
        }
        self.alone_since = Some(Instant::now());
        Flow::On
    }

    /// Abandons all calls, because nobody waits for them any more. The kernels stay.
    fn drop_calls(&mut self) {
        let now = Instant::now();
        self.files.forget();
        self.kernels.values_mut().for_each(|kernel| kernel.abandon(now));
        self.jobs.values_mut().for_each(|job| job.abandon(now));
        self.browser.iter_mut().for_each(|browser| browser.abandon(now));
    }

    fn read_host(&mut self) -> Result<(), Broken> {
        self.host.flush()?;
        self.host.receive()?;
        while let Some(frame) = self.host.next_frame()? {
            self.handle(frame)?;
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Kill all processes at once; the drops of the fields then wait for each of them.
        let kernels = self.kernels.values().map(Kernel::process);
        let browser = self.browser.as_ref().map(BrowserDriver::process);
        kernels.chain(self.jobs.values().map(Job::process)).chain(browser).for_each(Process::kill);
    }
}

fn timespec_until(now: Instant, at: Instant) -> Timespec {
    let left = at.saturating_duration_since(now);
    Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) }
}
