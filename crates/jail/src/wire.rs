//! What the server and its launcher say to each other, over one packet socket that nobody else holds.
//!
//! A packet is JSON. What is too long for a packet travels in a memfd beside it. Requests carry a number; answers come in any order.

use std::collections::BTreeMap;
use std::io::{self, IoSlice, IoSliceMut, Read, Seek, Write};
use std::mem::MaybeUninit;
use std::net::SocketAddrV4;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::MemfdFlags;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::cgroup::{CgroupLimits, CgroupSource, Group, Usage};
use crate::disk::KeepFree;
use crate::ids::Mode;
use crate::kept_volumes::{KeptVolumeRecord, KeptVolumeRequest};
use crate::spec::{FileSpec, SharedVolumeSpec};
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
    /// What this host offers; may come before `Start`, and when `Start` would fail.
    Survey {
        mode: Option<Mode>,
        cgroups: CgroupSource,
    },
    /// First of all; the guest's program comes as a descriptor.
    Start(Start),
    Create(Box<Create>),
    Destroy {
        sandbox: String,
    },
    Stats {
        sandbox: String,
    },
    List,
    /// Destroys what other servers of the same state directory left when they died.
    SweepOthers,
    /// The kept volumes.
    Kept,
    Discard {
        name: String,
    },
    /// Starts the warm interpreter, which loads the library that comes as a descriptor; answered when it can be forked.
    Warm(Box<StartZygote>),
    /// Puts a fork of the warm interpreter into a sandbox; answered when its guest can take it.
    Fork {
        sandbox: String,
    },
    /// Puts the driver of a browser into a sandbox that has room for one, in place of an earlier one; answered when it runs and the
    /// guest can take it.
    EnterBrowser {
        sandbox: String,
    },
    Warmth,
    /// Destroys everything, answers, ends.
    Shutdown,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub state_dir: PathBuf,
    /// Shared by all servers of this host (root) or user: where uid slots are locked.
    pub runtime_dir: PathBuf,
    pub label: String,
    /// One server a state directory; without it every server gets its own instance below.
    pub exclusive: bool,
    pub mode: Option<Mode>,
    pub cgroups: CgroupSource,
    /// The most sandboxes of a kind whose root, volume and network are made before they are asked for.
    pub spares: usize,
    /// What volumes on disk leave free of their file system.
    pub keep_free: KeepFree,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Create {
    pub sandbox: String,
    /// From the outermost on.
    pub groups: Vec<Group>,
    pub limits: CgroupLimits,
    pub disk_bytes: u64,
    pub disk_inodes: u64,
    pub runtime: Vec<PathBuf>,
    pub files: Vec<FileSpec>,
    pub shared: Vec<SharedVolumeSpec>,
    pub kept: Option<KeptVolumeRequest>,
    /// What of it a browser may have.
    pub browser: Option<CgroupLimits>,
    /// Where a socket listens inside, which comes with the answer.
    pub egress: Option<SocketAddrV4>,
    /// Tests of the rollback: the step that is to fail. Debug builds only.
    pub fail_at: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartZygote {
    pub argv: Vec<String>,
    pub env: BTreeMap<String, String>,
    pub runtime: Vec<PathBuf>,
    pub files: Vec<FileSpec>,
    pub rotation: Rotation,
}

#[derive(Debug, Serialize, Deserialize)]
pub struct LauncherResponse {
    pub id: u64,
    pub reply: LauncherReply,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LauncherReply {
    Survey(Box<Survey>),
    Started {
        instance: PathBuf,
        survey: Box<Survey>,
    },
    Done,
    /// The sandbox runs; what is weaker about it than about others. The socket of its way out comes as a descriptor.
    Created {
        notes: Vec<String>,
    },
    Kept(Vec<KeptVolumeRecord>),
    /// A sandbox has the kept volume.
    InUse,
    /// The disk is full; in words for callers.
    NoSpace {
        message: String,
    },
    Stats(Usage),
    Warmth {
        ready: bool,
        forks: u64,
        restarts: u64,
        not_imported: BTreeMap<String, String>,
    },
    List(Vec<String>),
    Gone,
    /// This host cannot do it, and what would help.
    Unavailable {
        why: String,
        hint: String,
    },
    Failed {
        message: String,
    },
}

const MAX_PACKET: usize = 64 << 10;
/// A memfd, a channel, a process and a cgroup in each hierarchy.
const MAX_DESCRIPTORS: usize = 8;
const MAX_MESSAGE: usize = 64 << 20;

/// The first byte of a packet.
const INLINE: u8 = b'j';
const IN_MEMFD: u8 = b'm';

/// Sends one message; `WouldBlock` when the other side does not read and the socket does not wait.
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

/// The next message and the descriptors that came with it; `None` when the other side has closed.
pub fn receive<M: DeserializeOwned>(socket: impl AsFd) -> io::Result<Option<(M, Vec<OwnedFd>)>> {
    receive_into(&mut vec![0; BUFFER], socket)
}

/// What [`receive_into`] needs.
pub const BUFFER: usize = MAX_PACKET + 1;

/// The same with memory of the caller's, which is written no further than the message is long.
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
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

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
