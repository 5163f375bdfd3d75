//! This module defines the protocol between the server and its launcher, over one packet socket that no other process
//! holds.
//!
//! A packet is JSON. A message that is too long for a packet is passed in a memfd beside it. Requests carry a number;
//! replies arrive in any order.

use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupSource, Usage};
use crate::disk::KeepFree;
use crate::ids::Mode;
use crate::kept_volumes::KeptVolumeRecord;
use crate::spec::{SandboxSpec, ZygoteSpec, ZygoteStatus};
use crate::survey::Survey;
use crate::zygote::Rotation;

#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherRequest {
    pub id: u64,
    pub call: LauncherCall,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LauncherCall {
    /// Reports what this host offers. The call may come before `Start`, and also when `Start` would fail.
    Survey { mode: Option<Mode>, cgroups: CgroupSource },
    /// Starts the service. It has to precede all calls except `Survey` and `Shutdown`; the guest's program is passed as
    /// a descriptor.
    Start(Start),
    /// Creates a sandbox. The reply is sent when its guest has been executed.
    Create(Box<Create>),
    /// Destroys a sandbox. The reply is sent when nothing of it is left.
    Destroy { sandbox: String },
    /// Reports what a sandbox uses.
    Stats { sandbox: String },
    /// Destroys the orphans of other servers of the same state directory.
    SweepOthers,
    /// Lists the kept volumes.
    Kept,
    /// Removes a kept volume.
    Discard { name: String },
    /// Starts the warm interpreter, which loads the library that is passed as a descriptor. The reply is sent when the
    /// interpreter can be forked.
    Warm { spec: Box<ZygoteSpec>, rotation: Rotation },
    /// Puts a fork of the warm interpreter into a sandbox. The reply is sent when the guest can take the fork.
    Fork { sandbox: String },
    /// Puts a browser driver into a sandbox that has room for one, in place of an earlier one. The reply is sent when
    /// the driver runs and the guest can take it.
    EnterBrowser { sandbox: String },
    /// Reports the state of the warm interpreter.
    ZygoteStatus,
    /// Destroys all sandboxes, replies, and ends the launcher.
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub state_dir: PathBuf,
    /// Directory in which uid slots are locked, shared by all servers of this host (as root) or of this user.
    pub runtime_dir: PathBuf,
    pub label: String,
    /// Whether this server has to be the only one of its state directory. Otherwise each server gets an instance below
    /// it.
    pub exclusive: bool,
    pub mode: Option<Mode>,
    pub cgroups: CgroupSource,
    /// Maximum number of spares of a kind: sandboxes whose root, volume and network are made in advance.
    pub spares: usize,
    /// Space that volumes on disk leave free in their file system.
    pub keep_free: KeepFree,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Create {
    pub sandbox: String,
    pub spec: SandboxSpec,
    /// The step that fails, for tests of the rollback. Used in debug builds only.
    pub fail_at: Option<usize>,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherResponse {
    pub id: u64,
    pub reply: LauncherReply,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LauncherReply {
    /// What this host offers.
    Survey(Box<Survey>),
    /// The service has started, with this directory and these layers.
    Started { instance: PathBuf, survey: Box<Survey> },
    /// The call has succeeded and has no other result.
    Done,
    /// The sandbox runs. The notes name the layers that are weaker than in other sandboxes; `is_owner` says whether its
    /// code is the server's user on the host. The egress socket is passed as a descriptor.
    Created { notes: Vec<String>, is_owner: bool },
    /// The kept volumes.
    Kept(Vec<KeptVolumeRecord>),
    /// A sandbox has the kept volume.
    InUse,
    /// The disk is full. The message is worded for callers.
    NoSpace { message: String },
    /// What the sandbox uses.
    Stats(Usage),
    /// Nothing of the sandbox is left. Contains its memory before the end, and all the processor time that it used.
    Destroyed(Usage),
    /// The state of the warm interpreter.
    ZygoteStatus(ZygoteStatus),
    /// There is no such sandbox.
    Gone,
    /// This host cannot do what was requested; the hint says what would help.
    Unavailable { why: String, hint: String },
    /// The call has failed.
    Failed { message: String },
}

const MAX_PACKET: usize = 64 << 10;
/// Maximum number of descriptors in a packet: a memfd, a channel, a process and a cgroup in each hierarchy.
const MAX_DESCRIPTORS: usize = 8;
const MAX_MESSAGE: usize = 64 << 20;

/// The first byte of a packet, which says where the message is.
const INLINE: u8 = b'j';
const IN_MEMFD: u8 = b'm';

/// Creates a connection between this process, which watches its end and must not block, and a child.
pub(crate) fn connection() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// Creates the pipe through which a child writes to the log. This process watches the first end and must not block.
pub(crate) fn log_pipe() -> Result<(OwnedFd, OwnedFd), Errno> {
    let (ours, theirs) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
    rustix::io::ioctl_fionbio(&ours, true)?;
    Ok((ours, theirs))
}

/// Sends one message. Returns `WouldBlock` if the other side does not read and the socket is non-blocking.
pub fn send<M: Serialize>(socket: impl AsFd, message: &M, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let body = serde_json::to_vec(message)?;
    if body.len() < MAX_PACKET {
        return send_packet(socket, &[&[INLINE], &body], fds);
    }
    let mut memfd = std::fs::File::from(rustix::fs::memfd_create("sandpool-message", MemfdFlags::CLOEXEC)?);
    memfd.write_all(&body)?;
    let all: Vec<BorrowedFd<'_>> = std::iter::once(memfd.as_fd()).chain(fds.iter().copied()).collect();
    send_packet(socket, &[&[IN_MEMFD]], &all)
}

fn send_packet(socket: impl AsFd, parts: &[&[u8]], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors for one message"));
    }
    let slices: Vec<IoSlice<'_>> = parts.iter().map(|p| IoSlice::new(p)).collect();
    sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Receives the next message and its descriptors; returns `None` if the other side has closed the socket.
pub fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_into(&mut vec![0; BUFFER], socket)
}

/// Size of the buffer that [`receive_into`] needs.
pub const BUFFER: usize = MAX_PACKET + 1;

/// Receives like [`receive`] into a buffer of the caller, and overwrites only as many bytes as the message has.
pub fn receive_into<M: DeserializeOwned>(
    buffer: &mut [u8],
    socket: impl AsFd,
) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|m| if let RecvAncillaryMessage::ScmRights(fds) = m { Some(fds) } else { None })
        .flatten()
        .collect();
    let Some((kind, body)) = buffer[..got.bytes].split_first() else { return Ok(None) };
    let message = match *kind {
        INLINE => serde_json::from_slice(body)?,
        IN_MEMFD if !fds.is_empty() => serde_json::from_slice(&read_all(fds.remove(0))?)?,
        other => return Err(io::Error::other(format!("unknown packet `{other}`"))),
    };
    Ok(Some((message, fds)))
}

fn read_all(memfd: OwnedFd) -> io::Result<Vec<u8>> {
    let mut file = std::fs::File::from(memfd);
    file.rewind()?;
    let mut body = Vec::new();
    file.take(MAX_MESSAGE as u64).read_to_end(&mut body)?;
    Ok(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_and_long_messages_and_descriptors_arrive() {
        let (a, b) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        for length in [0, 10, MAX_PACKET - 3, MAX_PACKET, 1 << 20] {
            let text = "x".repeat(length);
            send(&a, &text, &[a.as_fd()]).unwrap();
            let (got, fds): (String, _) = receive(&b).unwrap().unwrap();
            assert!(got == text);
            assert_eq!(fds.len(), 1);
        }
        drop(a);
        assert!(receive::<String>(&b).unwrap().is_none());
    }
}
