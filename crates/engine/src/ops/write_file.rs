//! A file into the sandbox. The guest writes it; the host never touches a path the guest can change.

use proto::{FromGuest, MAX_CHUNK, ToGuest};

use super::site::Site;
use super::{FILE_WAIT, World, check_path, file_error, unless_cancelled};
use crate::guest::Answer;
use crate::holdings::UPLOADS;
use crate::op::{Call, EngineError, Holder, Outcome};

impl World {
    pub(super) async fn write_file(
        &self,
        call: &Call,
        holder: Holder,
        path: String,
        content: Vec<u8>,
    ) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        check_path(&path)?;
        if content.len() as u64 > limit {
            self.exists(call, &holder)?;
            return Err(EngineError::FileTooLarge { path, limit });
        }
        // Cancelled or not, the content stays in memory until the guest has it.
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        let uploads = self.holdings.tenant.uploads.clone();
        let full = |_| EngineError::OverLimit { what: "bytes_uploaded_at_once", limit: UPLOADS.to_string() };
        let room = uploads.try_acquire_many_owned(size).map_err(full)?;
        let site = self.site(call, holder).await?;
        let writing = async move {
            let written = tokio::time::timeout(FILE_WAIT, write(&site, &path, &content, limit)).await;
            written.unwrap_or_else(|_| Err(EngineError::Sandbox(format!("no answer within {FILE_WAIT:?}"))))?;
            drop(room);
            Ok(Outcome::Written { path, size: content.len() as u64, key: site.key.clone() })
        };
        unless_cancelled(call, writing, &self.inner).await
    }
}

async fn write(site: &Site, path: &str, content: &[u8], limit: u64) -> Result<(), EngineError> {
    let lost = |lost: crate::guest::Lost| EngineError::Sandbox(lost.0);
    let place = &site.place;
    let request = ToGuest::WriteFile { root: site.root, path: path.into(), size: content.len() as u64 };
    let mut pending = place.guest.call(&request).await.map_err(lost)?;
    let mut chunks = content.chunks(MAX_CHUNK);
    // A refusal may come before everything is sent.
    let answer = loop {
        let Some(chunk) = chunks.next() else { break pending.next().await };
        if let Some(early) = pending.try_next() {
            break early;
        }
        pending.send_file(chunk).await.map_err(lost)?;
    };
    match answer.map_err(lost)? {
        Answer::Message(FromGuest::Written { size }) if size == content.len() as u64 => Ok(()),
        Answer::Message(other) => Err(file_error(path, limit, other, place)),
        Answer::Data(..) => {
            Err(EngineError::Sandbox(place.guest.close("the guest sent data where an answer was due").0))
        }
    }
}
