//! Kernels that were forked into the sandbox instead of started by us: the launcher puts them there, we take and equip them.
//!
//! Such a process is our child, has given up everything and waits, with nothing open but a channel to us.

use std::collections::BTreeMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;

use crate::process::ChildFds;

pub use jail::warm::Fork;

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
