//! This module receives processes that the launcher puts into the sandbox: kernels, which the guest takes and equips,
//! and the browser driver.
//!
//! Such a process is a child of the guest, has given up all privileges and waits. It has nothing open but a channel to
//! the guest and, if it is a driver, its leash.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;

use crate::process::ChildFds;

use jail::zygote::Arrival;

pub(crate) use jail::zygote::Fork;

/// Processes that have arrived and have not been taken. Nothing waits for an arrival: the launcher sends the process
/// before the host asks the guest for it.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    /// Socket on which the launcher hands processes over, if it does.
    channel: Option<OwnedFd>,
    kernels: VecDeque<Fork>,
    driver: Option<Driver>,
}

/// The browser driver: a child of the guest, connected by a stream of frames.
#[derive(Debug)]
pub(crate) struct Driver {
    pub pid: u32,
    /// Pidfd of the process, which becomes readable when the process has ended.
    pub process: OwnedFd,
    pub channel: UnixStream,
    /// Ends the process when it is closed. The guest cannot signal the process, because it belongs to another user.
    pub leash: OwnedFd,
}

impl Arrivals {
    /// Creates an empty queue for the processes that arrive on `channel`.
    pub(crate) fn new(channel: Option<OwnedFd>) -> Self {
        Self { channel, ..Self::default() }
    }

    /// Takes the oldest kernel.
    pub(crate) fn take_kernel(&mut self) -> io::Result<Fork> {
        let refused = self.receive();
        self.kernels.pop_front().ok_or_else(|| refused.err().unwrap_or_else(|| absent("kernel")))
    }

    /// Takes the newest driver. A driver that arrived before it has ended, or ends because its channel closes.
    pub(crate) fn take_driver(&mut self) -> io::Result<Driver> {
        let refused = self.receive();
        self.driver.take().ok_or_else(|| refused.err().unwrap_or_else(|| absent("browser driver")))
    }

    fn receive(&mut self) -> io::Result<()> {
        let channel = self.channel.as_ref().ok_or_else(|| io::Error::other("this guest has no launcher"))?;
        loop {
            match Arrival::receive(channel) {
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

/// First packet that a forked kernel reads. It carries the descriptors for 1, 2, 3 and 4.
#[derive(Serialize)]
struct Equipment<'a> {
    env: &'a BTreeMap<String, String>,
    cwd: &'a str,
}

/// Gives the forked kernel at the other end the environment, directory and descriptors of an executed kernel.
pub(crate) fn equip(channel: &OwnedFd, env: &BTreeMap<String, String>, cwd: &str, fds: &ChildFds) -> io::Result<()> {
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
        Err(error) => Err(failure_reason(channel).map_or(error.into(), io::Error::other)),
    }
}

/// Returns the reason why the kernel could not be confined, if it sent one.
pub(crate) fn failure_reason(channel: &OwnedFd) -> Option<String> {
    let mut text = [0; 1024];
    let (got, _) = rustix::net::recv(channel, &mut text, RecvFlags::DONTWAIT).ok()?;
    (got > 0).then(|| String::from_utf8_lossy(&text[..got]).into_owned())
}
