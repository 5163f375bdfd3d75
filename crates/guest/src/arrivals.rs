//! What was put into the sandbox instead of started by us: kernels, which we take and equip, and the driver of a browser.
//!
//! Such a process is our child, has given up everything and waits, with nothing open but a channel to us.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;

use crate::process::ChildFds;

use jail::zygote::Arrival;

pub use jail::zygote::Fork;

/// What has come and was not asked for yet. Nothing waits for it: the launcher says that it is there before anybody asks.
#[derive(Debug, Default)]
pub struct Arrivals {
    way: Option<OwnedFd>,
    kernels: VecDeque<Fork>,
    driver: Option<Driver>,
}

/// The process that drives the sandbox's browser: our child, with a stream of frames to it.
#[derive(Debug)]
pub struct Driver {
    pub pid: u32,
    /// A pidfd: ready to be read when the process has ended.
    pub process: OwnedFd,
    pub channel: UnixStream,
    /// Ends the process when it is closed: it is another user's, whom we cannot signal.
    pub leash: OwnedFd,
}

impl Arrivals {
    /// `way`: where the launcher hands them over, if it does.
    pub fn new(way: Option<OwnedFd>) -> Self {
        Self { way, ..Self::default() }
    }

    /// The oldest kernel.
    pub fn take_kernel(&mut self) -> io::Result<Fork> {
        let refused = self.receive();
        self.kernels.pop_front().ok_or_else(|| refused.err().unwrap_or_else(|| absent("kernel")))
    }

    /// The newest driver; one that came before it has ended, or ends with its channel.
    pub fn take_driver(&mut self) -> io::Result<Driver> {
        let refused = self.receive();
        self.driver.take().ok_or_else(|| refused.err().unwrap_or_else(|| absent("driver of a browser")))
    }

    fn receive(&mut self) -> io::Result<()> {
        let way = self.way.as_ref().ok_or_else(|| io::Error::other("nothing is put into this sandbox"))?;
        loop {
            match Arrival::receive(way) {
                Ok(Arrival::Kernel(fork)) => self.kernels.push_back(fork),
                Ok(Arrival::Driver(Fork { pid, process, channel }, leash)) => {
                    self.driver = Some(Driver { pid, process, channel: channel.into(), leash });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }
}

fn absent(what: &str) -> io::Error {
    io::Error::other(format!("no {what} was put into this sandbox"))
}

/// What the kernel reads first, with the descriptors for 1, 2, 3 and 4.
#[derive(Serialize)]
struct Equipment<'a> {
    env: &'a BTreeMap<String, String>,
    cwd: &'a str,
}

/// Gives the kernel on the other end what a started one would have had from the beginning.
pub fn equip(channel: &OwnedFd, env: &BTreeMap<String, String>, cwd: &str, fds: &ChildFds) -> io::Result<()> {
    let packet = serde_json::to_vec(&Equipment { env, cwd })?;
    let rights: Vec<BorrowedFd<'_>> = fds.iter().map(|(_, fd)| fd.as_fd()).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(&rights)) {
        return Err(io::Error::other("too many descriptors for a kernel"));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    match rustix::net::sendmsg(channel, &[IoSlice::new(&packet)], &mut control, flags) {
        Ok(_) => Ok(()),
        Err(error) => Err(last_words(channel).map_or(error.into(), io::Error::other)),
    }
}

/// Why the kernel could not be held, if that was so.
pub fn last_words(channel: &OwnedFd) -> Option<String> {
    let mut text = [0; 1024];
    let (got, _) = rustix::net::recv(channel, &mut text, RecvFlags::DONTWAIT).ok()?;
    (got > 0).then(|| String::from_utf8_lossy(&text[..got]).into_owned())
}
