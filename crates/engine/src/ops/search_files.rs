//! Searches names and lines of files in a sandbox. The guest searches; the host bounds what it sends.

use std::time::Duration;

use proto::{FoundLine, FoundLines, FromGuest, SearchBound, SearchQuery, ToGuest};

use super::{FILE_WAIT, OpContext, check_path, file_error, unless_cancelled};
use crate::guest::GuestLost;
use crate::op::{Call, EngineError, FileOwner, Outcome, Search};

/// Time that a search may take in the guest.
const SEARCH_TIME: Duration = Duration::from_secs(10);
/// Maximum number of lines in the result.
const MAX_LINES: u32 = 500;

impl OpContext {
    pub(super) async fn search_files(
        &self,
        call: &Call,
        owner: FileOwner,
        path: String,
        search: Search,
    ) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        check_path(&path)?;
        let access = self.file_access(call, owner).await?;
        let cancel = call.cancel.clone();
        let searching = async move {
            let Search { glob, text, regex, max_bytes } = search;
            let query = SearchQuery {
                glob,
                text,
                regex,
                max_lines: MAX_LINES,
                max_bytes: u32::try_from(max_bytes).unwrap_or(u32::MAX),
                after_ms: SEARCH_TIME.as_millis() as u64,
            };
            let request = ToGuest::SearchFiles { root: access.root, path: path.clone(), query };
            let lost = |lost: GuestLost| EngineError::Sandbox(lost.0);
            let mut pending = access.sandbox.guest.call(&request).await.map_err(lost)?;
            let interrupt = pending.interrupt();
            let reply = tokio::select! {
                reply = pending.only_reply(FILE_WAIT) => reply.map_err(lost)?,
                () = cancel.cancelled() => {
                    interrupt.await.map_err(lost)?;
                    return Err(EngineError::Cancelled);
                }
            };
            match reply {
                FromGuest::Found { found } => Ok(Outcome::Found(bounded(found, max_bytes))),
                other => Err(file_error(&path, limit, other, &access.sandbox)),
            }
        };
        unless_cancelled(call, searching, &self.inner).await
    }
}

/// Enforces the bounds, whatever the guest sends.
fn bounded(mut found: FoundLines, mut room: usize) -> FoundLines {
    let before = found.lines.len();
    let fits = |line: &FoundLine| {
        let length = line.path.len() + line.text.len();
        let fits = length <= room;
        room = room.saturating_sub(length);
        fits
    };
    found.lines = found.lines.into_iter().take(MAX_LINES as usize).take_while(fits).collect();
    if found.lines.len() < before {
        found.stopped = Some(SearchBound::Results);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_sends_more_than_it_may_is_cut() {
        let line = |text: &str| FoundLine { path: "f".into(), line: 1, text: text.into() };
        let found = FoundLines { lines: vec![line("abc"), line(&"x".repeat(100)), line("y")], ..FoundLines::default() };
        let cut = bounded(found.clone(), 50);
        assert_eq!((cut.lines, cut.stopped), (vec![line("abc")], Some(SearchBound::Results)));
        assert_eq!(bounded(found.clone(), 1000), found);
        let many = FoundLines { lines: vec![line(""); 1000], ..FoundLines::default() };
        assert_eq!(bounded(many, 1 << 20).lines.len(), MAX_LINES as usize);
    }
}
