//! A file into the sandbox. The guest writes it; the host never touches a path the guest can change.

use proto::{FromGuest, MAX_CHUNK, Root, ToGuest};

use super::{FILE_WAIT, World, check_path, file_error, unless_cancelled};
use crate::guest::Answer;
use crate::live::Place;
use crate::op::{Call, EngineError, Outcome};

impl World {
    pub(super) async fn write_file(
        &self,
        call: &Call,
        wanted: &str,
        path: String,
        content: Vec<u8>,
    ) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        let context = self.holdings.find(wanted)?;
        check_path(&path)?;
        if content.len() as u64 > limit {
            return Err(EngineError::FileTooLarge { path, limit });
        }
        let in_use = context.file_use();
        let place = self.place_for_files(&context).await?;
        let writing = async move {
            let _in_use = in_use;
            let written = tokio::time::timeout(FILE_WAIT, write(&place, &path, &content, limit)).await;
            written.unwrap_or_else(|_| Err(EngineError::Sandbox(format!("no answer within {FILE_WAIT:?}"))))?;
            Ok(Outcome::Written { path, size: content.len() as u64, key: String::new() })
        };
        unless_cancelled(call, writing, &self.inner).await
    }
}

async fn write(place: &Place, path: &str, content: &[u8], limit: u64) -> Result<(), EngineError> {
    let lost = |lost: crate::guest::Lost| EngineError::Sandbox(lost.0);
    let request = ToGuest::WriteFile { root: Root::Workspace, path: path.into(), size: content.len() as u64 };
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
