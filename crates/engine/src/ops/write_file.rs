//! Writes a file into a sandbox. The guest writes it; the host never touches a path that the guest can change.

use proto::{FromGuest, MAX_CHUNK, ToGuest};

use super::file_access::FileAccess;
use super::{FILE_WAIT, OpContext, check_path, file_error, unless_cancelled};
use crate::guest::GuestReply;
use crate::op::{Call, EngineError, FileOwner, LimitKind, Outcome};
use crate::tenancy::UPLOADS;

impl OpContext {
    pub(super) async fn write_file(
        &self,
        call: &Call,
        owner: FileOwner,
        path: String,
        content: Vec<u8>,
    ) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        check_path(&path)?;
        if content.len() as u64 > limit {
            self.check_exists(call, &owner)?;
            return Err(EngineError::FileTooLarge { path, limit });
        }
        // Even if the call is cancelled, the content stays in memory until the guest has it.
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let uploads = self.tenancy.tenant.uploads.clone();
        let full = |_| EngineError::OverLimit { what: LimitKind::UploadBytes, limit: UPLOADS.to_string() };
        let room = uploads.try_acquire_many_owned(size).map_err(full)?;
        let access = self.file_access(call, owner).await?;
        let writing = async move {
            let written = tokio::time::timeout(FILE_WAIT, write(&access, &path, &content, limit)).await;
            written.unwrap_or_else(|_| Err(EngineError::Sandbox(format!("no answer within {FILE_WAIT:?}"))))?;
            drop(room);
            Ok(Outcome::Written { path, size: content.len() as u64, key: access.key.clone() })
        };
        unless_cancelled(call, writing, &self.inner).await
    }
}

async fn write(access: &FileAccess, path: &str, content: &[u8], limit: u64) -> Result<(), EngineError> {
    let lost = |lost: crate::guest::GuestLost| EngineError::Sandbox(lost.0);
    let sandbox = &access.sandbox;
    let request = ToGuest::WriteFile { root: access.root, path: path.into(), size: content.len() as u64 };
    let mut pending = sandbox.guest.call(&request).await.map_err(lost)?;
    let mut chunks = content.chunks(MAX_CHUNK);
    // A refusal may arrive before everything is sent.
    let answer = loop {
        let Some(chunk) = chunks.next() else { break pending.next().await };
        if let Some(early) = pending.try_next() {
            break early;
        }
        pending.send_file(chunk).await.map_err(lost)?;
    };
    match answer.map_err(lost)? {
        GuestReply::Message(FromGuest::Written { size }) if size == content.len() as u64 => Ok(()),
        GuestReply::Message(other) => Err(file_error(path, limit, other, sandbox)),
        GuestReply::Data(..) => {
            Err(EngineError::Sandbox(sandbox.guest.close("the guest sent data where an answer was due").0))
        }
    }
}
