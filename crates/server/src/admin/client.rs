//! Sends a command to the server that uses a state directory.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use super::{AdminCommand, AdminReply, AdminRequest, DIRECTORY, SOCKET, VERSION};

/// Maximum length of a line from the server.
const LONGEST_LINE: u64 = 256 << 20;
/// Maximum time without a line from the server.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub(crate) enum AdminError {
    #[error(
        "no server runs with the state directory `{}`; start one with `sandpool serve`, or name the directory of a running one \
         with `--state-dir`", .0.display()
    )]
    NoServer(PathBuf),
    #[error("only root and the user of the server may give it commands: {0}")]
    Forbidden(io::Error),
    #[error("no answer from the server: {0}")]
    Connection(#[from] io::Error),
    #[error("{0}")]
    Refused(String),
}

/// Sends the command and returns the result. `progress` is called with each line that the server sends before it.
pub(crate) fn call(state_dir: &Path, command: AdminCommand, progress: impl Fn(&str)) -> Result<Value, AdminError> {
    let mut stream = connect(state_dir)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut request = serde_json::to_vec(&AdminRequest { version: VERSION, command }).map_err(io::Error::from)?;
    request.push(b'\n');
    stream.write_all(&request)?;
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = String::new();
        lines.by_ref().take(LONGEST_LINE).read_line(&mut line)?;
        if line.is_empty() {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        match serde_json::from_str(&line).map_err(io::Error::from)? {
            AdminReply::Progress(text) => progress(&text),
            AdminReply::Done(value) => return Ok(value),
            AdminReply::Failed(why) => return Err(AdminError::Refused(why)),
        }
    }
}

fn connect(state_dir: &Path) -> Result<UnixStream, AdminError> {
    let opened = File::open(state_dir.join(DIRECTORY)).and_then(|dir| {
        // The whole path may be too long for a socket address.
        UnixStream::connect(format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()))
    });
    opened.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => AdminError::NoServer(state_dir.into()),
        io::ErrorKind::PermissionDenied => AdminError::Forbidden(error),
        _ => AdminError::Connection(error),
    })
}
