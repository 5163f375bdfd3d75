//! Locates the files of an operation: in the sandbox of a context or in that of a conversation.

use std::sync::Arc;

use proto::Root;

use super::run_once::{Conversation, no_sandbox};
use super::{OpContext, ResolvedContext};
use crate::context::ContextLease;
use crate::op::{Call, EngineError, FileOwner};
use crate::registry::LiveSandbox;

/// Access to files, held as long as an operation works with them.
pub(super) struct FileAccess {
    pub(super) sandbox: Arc<LiveSandbox>,
    pub(super) root: Root,
    /// Key of links to the files.
    pub(super) key: String,
    _hold: FileLease,
}

/// Keeps the context or the conversation's turn until the work is done. Its content is never read.
enum FileLease {
    Context { _in_use: ContextLease },
    Conversation { _turn: Box<Conversation> },
}

impl OpContext {
    pub(super) async fn site(&self, call: &Call, holder: FileOwner) -> Result<FileAccess, EngineError> {
        match holder {
            FileOwner::Context(target) => {
                let ResolvedContext { context, mut news, .. } = self.enter(call, target, None).await?;
                let sandbox = self.sandbox_for_files(call, &context).await?;
                news.tell();
                let key = context.keys.files.clone();
                Ok(FileAccess { sandbox, root: Root::Workspace, key, _hold: FileLease::Context { _in_use: context } })
            }
            FileOwner::Conversation(conversation) => {
                let mut turn = Box::new(self.converse(call, &conversation).await?);
                let Conversation { key, shape, turn: held } = &mut *turn;
                let sandbox = self.inner.sandbox_for_data(held, shape).await.map_err(no_sandbox)?;
                let key = key.clone();
                Ok(FileAccess { sandbox, root: Root::Data, key, _hold: FileLease::Conversation { _turn: turn } })
            }
        }
    }

    /// Checks that the context exists, so that a missing one is reported before any other error.
    pub(super) fn exists(&self, call: &Call, holder: &FileOwner) -> Result<(), EngineError> {
        match holder {
            FileOwner::Context(target) if target.make.is_none() => {
                self.tenancy.find(&target.which, call.connection.as_deref()).map(drop)
            }
            _ => Ok(()),
        }
    }
}
