//! Lists a directory of a sandbox, and the newest files of a tenant.

use proto::{FileEntry, FileKind, FromGuest, ListOrder, Root, ToGuest};

use super::{FILE_WAIT, OpContext, check_path, file_error, unless_cancelled};
use crate::op::{Call, EngineError, FileListing, FileOwner, Outcome, RecentFile};
use crate::registry::LiveSandbox;

/// Maximum size of all paths of one listing together.
const MAX_PATHS: usize = 4 << 20;
/// Maximum number of recent files, and of the files of a conversation that the answer to a call lists.
pub(super) const NEWEST: u32 = 100;
/// Maximum number of contexts in which recent files are searched.
const CONTEXTS: usize = 20;

impl OpContext {
    pub(super) async fn list_files(
        &self,
        call: &Call,
        owner: FileOwner,
        path: String,
        depth: Option<u32>,
    ) -> Result<Outcome, EngineError> {
        let (limit, max_entries) = (self.inner.config.max_file_bytes, self.inner.config.max_files_listed);
        check_path(&path)?;
        let access = self.file_access(call, owner).await?;
        let listing = async move {
            let order = depth.map_or(ListOrder::Path, |depth| ListOrder::Levels { depth });
            let wanted = ListRequest { root: access.root, path: &path, max_entries, order };
            let (entries, total) = list(&access.sandbox, wanted, limit).await?;
            Ok(Outcome::Files(FileListing { entries, total, key: access.key.clone() }))
        };
        unless_cancelled(call, listing, &self.inner).await
    }

    /// Lists the newest files of the contexts that have a sandbox. A sandbox that does not answer contributes none.
    pub(super) async fn recent_files(&self) -> Outcome {
        let limit = self.inner.config.max_file_bytes;
        let mut asking = tokio::task::JoinSet::new();
        for context in self.tenancy.recently_used(CONTEXTS) {
            let Some(sandbox) = context.live_sandbox() else { continue };
            asking.spawn(async move {
                let wanted =
                    ListRequest { root: Root::Workspace, path: "", max_entries: NEWEST, order: ListOrder::Newest };
                let (entries, _) = list(&sandbox, wanted, limit).await.unwrap_or_default();
                let recent = |entry: FileEntry| RecentFile {
                    key: context.keys.files.clone(),
                    path: entry.path,
                    size: entry.size,
                    modified: entry.modified,
                    context_id: context.id.clone(),
                };
                let files = entries.into_iter().filter(|entry| entry.kind == FileKind::File);
                files.map(recent).collect::<Vec<_>>()
            });
        }
        let mut files: Vec<RecentFile> = asking.join_all().await.into_iter().flatten().collect();
        files.sort_by(|a, b| (b.modified, &a.context_id, &a.path).cmp(&(a.modified, &b.context_id, &b.path)));
        files.truncate(NEWEST as usize);
        Outcome::Recent(files)
    }
}

pub(super) struct ListRequest<'a> {
    pub(super) root: Root,
    pub(super) path: &'a str,
    pub(super) max_entries: u32,
    pub(super) order: ListOrder,
}

pub(super) async fn list(
    sandbox: &LiveSandbox,
    wanted: ListRequest<'_>,
    limit: u64,
) -> Result<(Vec<FileEntry>, u64), EngineError> {
    let ListRequest { root, path, max_entries, order } = wanted;
    let request = ToGuest::ListFiles { root, path: path.into(), max_entries, order };
    match sandbox.guest.ask(&request, FILE_WAIT).await.map_err(|lost| EngineError::Sandbox(lost.0))? {
        FromGuest::Files { entries, total } => {
            let entries = bounded(entries, max_entries as usize);
            let total = total.max(entries.len() as u64);
            Ok((entries, total))
        }
        other => Err(file_error(path, limit, other, sandbox)),
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
