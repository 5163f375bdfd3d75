//! Reads a file out of a sandbox, bounded by the allowed size whatever the guest announces.

use proto::{FrameKind, FromGuest, Root, ToGuest};

use super::{FILE_WAIT, OpContext, check_path, file_error, unless_cancelled};
use crate::guest::GuestReply;
use crate::memory::Hold;
use crate::op::{Call, EngineError, FileOwner, Outcome};
use crate::registry::LiveSandbox;

impl OpContext {
    pub(super) async fn read_file(&self, call: &Call, owner: FileOwner, path: String) -> Result<Outcome, EngineError> {
        let (limit, max_link) = (self.inner.config.max_file_bytes, self.inner.config.max_link_bytes);
        check_path(&path)?;
        let access = self.file_access(call, owner).await?;
        let memory = call.memory.clone();
        let reading = async move {
            let range = Range { offset: 0, length: limit, max_size: limit };
            let key = access.key.clone();
            match read(&access.sandbox, access.root, &path, range, &memory).await {
                Ok((_, content)) => Ok(Outcome::File { path, size: content.len() as u64, content, key }),
                // The file is too large for an answer, but a link can serve it.
                Err(EngineError::FileTooLarge { .. }) => {
                    let range = Range { offset: 0, length: 0, max_size: max_link };
                    let (identity, content) = read(&access.sandbox, access.root, &path, range, &memory).await?;
                    Ok(Outcome::File { path, size: identity.size, content, key })
                }
                Err(error) => Err(error),
            }
        };
        unless_cancelled(call, reading, &self.inner).await
    }
}

pub(crate) struct Range {
    pub(crate) offset: u64,
    pub(crate) length: u64,
    /// Maximum size of the whole file.
    pub(crate) max_size: u64,
}

/// Metadata that shows whether a file is still the same one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) size: u64,
    pub(crate) modified_ns: i64,
    pub(crate) inode: u64,
}

/// Reads a part of a file. It collects no more than was requested, and adds the bytes to `memory`.
pub(crate) async fn read(
    sandbox: &LiveSandbox,
    root: Root,
    path: &str,
    range: Range,
    memory: &Hold,
) -> Result<(Identity, Vec<u8>), EngineError> {
    let reading = tokio::time::timeout(FILE_WAIT, read_all(sandbox, root, path, range, memory)).await;
    reading.unwrap_or_else(|_| Err(EngineError::Sandbox(format!("no answer within {FILE_WAIT:?}"))))
}

async fn read_all(
    sandbox: &LiveSandbox,
    root: Root,
    path: &str,
    range: Range,
    memory: &Hold,
) -> Result<(Identity, Vec<u8>), EngineError> {
    let lost = |lost: crate::guest::GuestLost| EngineError::Sandbox(lost.0);
    let nonsense =
        || EngineError::Sandbox(sandbox.guest.close("the guest sent a file that is not what it announced").0);
    let Range { offset, length, max_size: limit } = range;
    let request = ToGuest::ReadFile { root, path: path.into(), offset, length, max_size: Some(limit) };
    let mut pending = sandbox.guest.call(&request).await.map_err(lost)?;
    let identity = match pending.next().await.map_err(lost)? {
        GuestReply::Message(FromGuest::FileStart { size, modified_ns, inode }) if size <= limit => {
            Identity { size, modified_ns, inode }
        }
        GuestReply::Message(FromGuest::FileStart { .. }) => {
            return Err(EngineError::FileTooLarge { path: path.into(), limit });
        }
        GuestReply::Message(other) => return Err(file_error(path, limit, other, sandbox)),
        GuestReply::Data(..) => return Err(nonsense()),
    };
    let mut content = Vec::new();
    loop {
        match pending.next().await.map_err(lost)? {
            GuestReply::Data(FrameKind::File, bytes) if (content.len() + bytes.len()) as u64 <= length => {
                memory.add(bytes.len())?;
                content.extend(bytes);
            }
            // A file that shrank or grew meanwhile is returned as it was read.
            GuestReply::Message(FromGuest::Done) => {
                tracing::trace!(announced = identity.size, read = content.len(), "file read");
                return Ok((identity, content));
            }
            GuestReply::Message(failed @ FromGuest::Failed { .. }) => {
                return Err(file_error(path, limit, failed, sandbox));
            }
            _ => return Err(nonsense()),
        }
    }
}
