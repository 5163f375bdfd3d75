//! This module defines the sources of the launcher's events and the numbers by which epoll identifies them.

use std::os::fd::{AsFd, OwnedFd};

use rustix::event::epoll;
use rustix::io::Errno;

/// A source of events in the launcher's loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// The connection to the server has a request, or is closed.
    Server,
    /// The process that makes a spare has sent something or has ended.
    Spare,
    /// A short-lived child has ended.
    Chore,
    /// Another process has opened the image of a kept volume.
    VolumeImages,
    /// The process that starts a browser driver has sent something.
    Driver,
    /// SIGCHLD has arrived.
    Child,
    /// The sandbox with this key has sent something or has ended.
    Sandbox(WatchedFd, u64),
    /// The warm interpreter with this key has sent something.
    Zygote(WatchedFd, u64),
}

/// The descriptor of a sandbox or of a warm interpreter that an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchedFd {
    Control,
    Process,
    Log,
}

/// Number of bits below the key.
const KIND_BITS: u32 = 4;

impl Token {
    /// Has epoll report, as events with this token, that `fd` is readable or closed at its other end.
    pub(crate) fn watch(self, epoll: &OwnedFd, fd: impl AsFd) -> Result<(), Errno> {
        epoll::add(epoll, fd, epoll::EventData::new_u64(self.number()), epoll::EventFlags::IN)
    }

    /// Returns the token of an event that [`Token::watch`] requested.
    pub(crate) fn of(event: &epoll::Event) -> Option<Self> {
        Self::from_number(event.data.u64())
    }

    /// Returns whether the event can mean that a process has ended.
    pub(crate) fn may_mean_exit(self) -> bool {
        match self {
            Self::Spare | Self::Chore | Self::Child | Self::Sandbox(WatchedFd::Process, _) | Self::Zygote(..) => true,
            Self::Server | Self::VolumeImages | Self::Driver | Self::Sandbox(..) => false,
        }
    }

    fn number(self) -> u64 {
        let (kind, key) = match self {
            Self::Server => (0, 0),
            Self::Spare => (1, 0),
            Self::Chore => (2, 0),
            Self::VolumeImages => (3, 0),
            Self::Driver => (4, 0),
            Self::Child => (5, 0),
            Self::Sandbox(WatchedFd::Control, key) => (6, key),
            Self::Sandbox(WatchedFd::Process, key) => (7, key),
            Self::Sandbox(WatchedFd::Log, key) => (8, key),
            Self::Zygote(WatchedFd::Control, key) => (9, key),
            Self::Zygote(WatchedFd::Process, key) => (10, key),
            Self::Zygote(WatchedFd::Log, key) => (11, key),
        };
        key << KIND_BITS | kind
    }

    fn from_number(number: u64) -> Option<Self> {
        let key = number >> KIND_BITS;
        Some(match number & ((1 << KIND_BITS) - 1) {
            0 => Self::Server,
            1 => Self::Spare,
            2 => Self::Chore,
            3 => Self::VolumeImages,
            4 => Self::Driver,
            5 => Self::Child,
            6 => Self::Sandbox(WatchedFd::Control, key),
            7 => Self::Sandbox(WatchedFd::Process, key),
            8 => Self::Sandbox(WatchedFd::Log, key),
            9 => Self::Zygote(WatchedFd::Control, key),
            10 => Self::Zygote(WatchedFd::Process, key),
            11 => Self::Zygote(WatchedFd::Log, key),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_token_has_its_own_number() {
        let fds = [WatchedFd::Control, WatchedFd::Process, WatchedFd::Log];
        let keyed = |key| fds.map(|fd| [Token::Sandbox(fd, key), Token::Zygote(fd, key)]).concat();
        let others = [Token::Server, Token::Spare, Token::Chore, Token::VolumeImages, Token::Driver, Token::Child];
        for token in [&others[..], &keyed(1), &keyed(u64::MAX >> KIND_BITS)].concat() {
            assert_eq!(Token::from_number(token.number()), Some(token));
        }
        assert_eq!(Token::from_number(15), None);
    }
}
