//! What the host and the guest say to each other, and nothing else: frames, messages, limits, version.
//!
//! Linked into the server and into PID 1 of each sandbox. No I/O, no clock, no allocation driven by a length the other side
//! merely claims: a payload's buffer grows only as its bytes arrive.

pub mod browser;
mod environment;
pub mod frame;
pub mod message;

pub use browser::{BrowseError, BrowseFailure, BrowseResult, BrowserAction, BrowserReply, BrowserSpec};
pub use environment::{EnvironmentError, MAX_ENVIRONMENT, MAX_VARIABLES, check_environment};
pub use frame::{Decoder, Frame, FrameError, FrameKind, encode, encode_message};
pub use message::*;

/// Raised when a message changes its meaning. Both sides say theirs in `Hello`; they must be equal.
pub const VERSION: u32 = 4;

/// The largest payload of a `Message` frame: a cell's picture in base64, or a cell's code.
pub const MAX_MESSAGE: usize = 16 << 20;

/// JSON values in a cell's mime bundle. Each costs many times its length once it is decoded: the guest passes on no more, and a
/// message with many more ends the connection.
pub const MAX_VALUES: usize = 100_000;

/// The largest payload of a data frame (`Stdout`, `Stderr`, `File`).
pub const MAX_CHUNK: usize = 256 << 10;

/// Of one stream of one call, at most this much is kept as a file of [`Root::Outputs`].
pub const MAX_KEPT: u64 = 64 << 20;

/// Commands that run in one sandbox at the same time.
pub const MAX_COMMANDS: usize = 16;
