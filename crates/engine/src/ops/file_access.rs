//! Gives file operations access to the files of a context or a conversation.

use std::sync::Arc;

use proto::Root;

use super::run_once::{Conversation, no_sandbox};
use super::{OpContext, ResolvedContext};
use crate::context::ContextLease;
use crate::op::{Call, EngineError, FileOwner, Target};
use crate::registry::LiveSandbox;

/// Access to the files of one owner, until it is dropped.
pub(super) struct FileAccess {
    pub(super) sandbox: Arc<LiveSandbox>,
    pub(super) root: Root,
    /// Key of links to the files; empty if there are none.
    pub(super) key: String,
    _lease: FileLease,
}

/// Keeps the context in use, or the conversation's turn taken, until the operation is done.
enum FileLease {
    Context { _lease: ContextLease },
    Conversation { _turn: Box<Conversation> },
}

impl OpContext {
    pub(super) async fn file_access(&self, call: &Call, owner: FileOwner) -> Result<FileAccess, EngineError> {
        match owner {
            FileOwner::Context(target, root) => self.context_access(call, target, root).await,
            FileOwner::Conversation(id) => {
                let mut conversation = Box::new(self.open_conversation(call, &id).await?);
                let Conversation { key, shape, turn } = &mut *conversation;
                let sandbox = self.inner.sandbox_for_data(turn, shape).await.map_err(no_sandbox)?;
                let key = key.clone();
                let _lease = FileLease::Conversation { _turn: conversation };
                Ok(FileAccess { sandbox, root: Root::Data, key, _lease })
            }
        }
    }

    async fn context_access(&self, call: &Call, target: Target, root: Root) -> Result<FileAccess, EngineError> {
        let ResolvedContext { context, mut new_notice, .. } = self.resolve(call, target, None).await?;
        let sandbox = self.sandbox_for_files(call, &context).await?;
        new_notice.report();
        let key = match root {
            Root::Workspace => context.keys.files.clone(),
            Root::Outputs => context.keys.outputs.clone(),
            Root::Data | Root::Tmp => String::new(),
        };
        Ok(FileAccess { sandbox, root, key, _lease: FileLease::Context { _lease: context } })
    }

    /// Checks that the context exists, so that a missing one is reported before any other error.
    pub(super) fn check_exists(&self, call: &Call, owner: &FileOwner) -> Result<(), EngineError> {
        match owner {
            FileOwner::Context(target, _) if target.make.is_none() => {
                self.find(&target.which, call.connection.as_deref()).map(drop)
            }
            _ => Ok(()),
        }
    }
}
