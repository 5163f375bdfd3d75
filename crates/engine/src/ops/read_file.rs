//! A file out of the sandbox, at most as large as allowed, whatever the guest announces.

use proto::{FromGuest, Kind, Root, ToGuest};

use super::{FILE_WAIT, World, check_path, file_error, unless_cancelled};
use crate::guest::Answer;
use crate::live::Place;
use crate::op::{Call, EngineError, Outcome};

impl World {
    pub(super) async fn read_file(&self, call: &Call, wanted: &str, path: String) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        let context = self.holdings.find(wanted)?;
        check_path(&path)?;
        let in_use = context.file_use();
        let place = self.place_for_files(&context).await?;
        let reading = async move {
            let _in_use = in_use;
            let read = tokio::time::timeout(FILE_WAIT, read(&place, &path, limit)).await;
            let content =
                read.unwrap_or_else(|_| Err(EngineError::Sandbox(format!("no answer within {FILE_WAIT:?}"))))?;
            let size = content.len() as u64;
            Ok(Outcome::File { path, content, size, key: String::new() })
        };
        unless_cancelled(call, reading, &self.inner).await
    }
}

async fn read(place: &Place, path: &str, limit: u64) -> Result<Vec<u8>, EngineError> {
    let lost = |lost: crate::guest::Lost| EngineError::Sandbox(lost.0);
    let nonsense = || EngineError::Sandbox(place.guest.close("the guest sent a file that is not what it announced").0);
    let request =
        ToGuest::ReadFile { root: Root::Workspace, path: path.into(), offset: 0, length: limit, max_size: Some(limit) };
    let mut pending = place.guest.call(&request).await.map_err(lost)?;
    let size = match pending.next().await.map_err(lost)? {
        Answer::Message(FromGuest::FileStart { size, .. }) if size <= limit => size,
        Answer::Message(FromGuest::FileStart { .. }) => {
            return Err(EngineError::FileTooLarge { path: path.into(), limit });
        }
        Answer::Message(other) => return Err(file_error(path, limit, other, place)),
        Answer::Data(..) => return Err(nonsense()),
    };
    let mut content = Vec::new();
    loop {
        match pending.next().await.map_err(lost)? {
            Answer::Data(Kind::File, bytes) if (content.len() + bytes.len()) as u64 <= limit => content.extend(bytes),
            // A file that shrank or grew meanwhile is given as it was read.
            Answer::Message(FromGuest::Done) => {
                tracing::trace!(announced = size, read = content.len(), "file read");
                return Ok(content);
            }
            Answer::Message(failed @ FromGuest::Failed { .. }) => return Err(file_error(path, limit, failed, place)),
            _ => return Err(nonsense()),
        }
    }
}
