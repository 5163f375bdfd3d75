//! Replaces text in a file of a sandbox. The guest does it in one step, so that no other change is lost between reading
//! and writing.

use proto::{FromGuest, ToGuest};

use super::{FILE_WAIT, OpContext, check_path, file_error, unless_cancelled};
use crate::op::{Call, Edit, Edited, EngineError, FileOwner, LimitKind, Outcome};

/// Maximum size of both texts of an edit together. Even if every character is escaped, they fit into one message.
const MAX_TEXTS: usize = 2 << 20;

impl OpContext {
    pub(super) async fn edit_file(
        &self,
        call: &Call,
        owner: FileOwner,
        path: String,
        edit: Edit,
    ) -> Result<Outcome, EngineError> {
        let limit = self.inner.config.max_file_bytes;
        check_path(&path)?;
        if edit.old.len() + edit.new.len() > MAX_TEXTS {
            self.check_exists(call, &owner)?;
            return Err(EngineError::OverLimit { what: LimitKind::EditBytes, limit: MAX_TEXTS.to_string() });
        }
        let access = self.file_access(call, owner).await?;
        let editing = async move {
            let Edit { old, new, all } = edit;
            let request = ToGuest::EditFile { root: access.root, path: path.clone(), old, new, all, max_size: limit };
            let reply = access.sandbox.guest.ask(&request, FILE_WAIT).await;
            match reply.map_err(|lost| EngineError::Sandbox(lost.0))? {
                FromGuest::Edited { found, replaced, mut lines, size } => {
                    lines.truncate(MAX_LINES);
                    Ok(Outcome::Edited(Edited { path, found, replaced, lines, size }))
                }
                other => Err(file_error(&path, limit, other, &access.sandbox)),
            }
        };
        unless_cancelled(call, editing, &self.inner).await
    }
}

/// Maximum number of line numbers in the result.
const MAX_LINES: usize = 10;
