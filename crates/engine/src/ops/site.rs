//! Where the files of an operation are: in the sandbox of a context, or with a conversation.

use std::sync::Arc;

use proto::Root;

use super::run_once::{Conversation, no_place};
use super::{Entered, World};
use crate::context::InUse;
use crate::live::Place;
use crate::op::{Call, EngineError, Holder};

/// Held as long as its files are worked with.
pub(super) struct Site {
    pub(super) place: Arc<Place>,
    pub(super) root: Root,
    /// Of links to its files.
    pub(super) key: String,
    _hold: Hold,
}

/// Dropped when the work is done; nothing looks into it.
enum Hold {
    Context { _in_use: InUse },
    Conversation { _turn: Box<Conversation> },
}

impl World {
    pub(super) async fn site(&self, call: &Call, holder: Holder) -> Result<Site, EngineError> {
        match holder {
            Holder::Context(target) => {
                let Entered { context, mut news, .. } = self.enter(call, target, None).await?;
                let place = self.place_for_files(&context).await?;
                news.tell();
                let key = context.keys.files.clone();
                Ok(Site { place, root: Root::Workspace, key, _hold: Hold::Context { _in_use: context } })
            }
            Holder::Conversation(conversation) => {
                let mut turn = Box::new(self.converse(call, &conversation).await?);
                let Conversation { key, shape, turn: held } = &mut *turn;
                let place = self.inner.place_for_data(held, shape).await.map_err(no_place)?;
                let key = key.clone();
                Ok(Site { place, root: Root::Data, key, _hold: Hold::Conversation { _turn: turn } })
            }
        }
    }

    /// Whoever asks for what is not there is told so before anything else.
    pub(super) fn exists(&self, call: &Call, holder: &Holder) -> Result<(), EngineError> {
        match holder {
            Holder::Context(target) if target.make.is_none() => {
                self.holdings.find(&target.which, call.connection.as_deref()).map(drop)
            }
            _ => Ok(()),
        }
    }
}
