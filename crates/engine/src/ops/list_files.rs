//! What is in a directory of the sandbox.

use proto::{FileEntry, FromGuest, Order, Root, ToGuest};

use super::{FILE_WAIT, World, check_path, file_error, unless_cancelled};
use crate::op::{Call, EngineError, Files, Outcome};

/// Of all paths of one listing together.
const MAX_PATHS: usize = 4 << 20;

impl World {
    pub(super) async fn list_files(&self, call: &Call, wanted: &str, path: String) -> Result<Outcome, EngineError> {
        let (limit, max_entries) = (self.inner.config.max_file_bytes, self.inner.config.max_files_listed);
        let context = self.holdings.find(wanted)?;
        check_path(&path)?;
        let in_use = context.file_use();
        let place = self.place_for_files(&context).await?;
        let listing = async move {
            let _in_use = in_use;
            let request =
                ToGuest::ListFiles { root: Root::Workspace, path: path.clone(), max_entries, order: Order::Path };
            match place.guest.ask(&request, FILE_WAIT).await.map_err(|lost| EngineError::Sandbox(lost.0))? {
                FromGuest::Files { entries, total } => {
                    let entries = bounded(entries, max_entries as usize);
                    Ok(Outcome::Files(Files { total: total.max(entries.len() as u64), entries, key: String::new() }))
                }
                other => Err(file_error(&path, limit, other, &place)),
            }
        };
        unless_cancelled(call, listing, &self.inner).await
    }
}

fn bounded(entries: Vec<FileEntry>, limit: usize) -> Vec<FileEntry> {
    let mut room = MAX_PATHS;
    let fits = move |entry: &FileEntry| {
        let fits = entry.path.len() <= room;
        room = room.saturating_sub(entry.path.len());
        fits
    };
    entries.into_iter().take(limit).take_while(fits).collect()
}
