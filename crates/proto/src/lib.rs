//! This crate defines the protocol between host and guest: frames, messages, limits and the version.
//!
//! It is linked into the server and into PID 1 of each sandbox. It performs no I/O, reads no clock, and never allocates
//! memory because of a length that the other side claims: the buffer of a payload grows only as its bytes arrive.
#![warn(unreachable_pub)]

pub mod browser;
mod environment;
pub mod frame;
mod message;

pub use browser::{BrowseError, BrowseFailure, BrowseResult, BrowserAction, BrowserReply, BrowserSpec};
pub use environment::{EnvironmentError, check_environment};
pub use frame::{Decoder, Frame, FrameError, FrameKind, encode, encode_message};
pub use message::*;

/// Protocol version, incremented when a message changes its meaning. Both sides send their version in `Hello`, and the
/// two must be equal.
pub const VERSION: u32 = 6;

/// Maximum payload of a `Message` frame. It has room for a picture of a cell in base64, or for the code of a cell.
pub const MAX_MESSAGE: usize = 16 << 20;

/// Maximum number of JSON values in the MIME bundle of a cell. A decoded value takes many times its encoded length, so
/// the guest forwards no larger bundle, and the host closes the connection on a message with many more values.
pub const MAX_VALUES: usize = 100_000;

/// Maximum payload of a data frame (`Stdout`, `Stderr`, `File`).
pub const MAX_CHUNK: usize = 256 << 10;

/// Maximum number of bytes of one stream of one call that are kept as a file of [`Root::Outputs`].
pub const MAX_KEPT: u64 = 64 << 20;

/// Maximum number of commands that run in one sandbox at the same time.
pub const MAX_COMMANDS: usize = 32;
/// Maximum number of searches at once in a sandbox. Each of them remembers the entries that it has not visited.
pub const MAX_SEARCHES: usize = 8;
