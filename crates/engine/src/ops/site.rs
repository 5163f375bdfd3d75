//! Where the files of an operation are: the sandbox of a context.

use std::sync::Arc;

use proto::Root;

use super::World;
use crate::context::InUse;
use crate::live::Place;
use crate::op::{Call, EngineError, Holder};

/// Held as long as its files are worked with.
pub(super) struct Site {
    pub(super) place: Arc<Place>,
    pub(super) root: Root,
    /// Of links to its files.
    pub(super) key: String,
    _hold: InUse,
}

impl World {
    pub(super) async fn site(&self, call: &Call, holder: Holder) -> Result<Site, EngineError> {
        match holder {
            Holder::Context(target) => {
                let context = self.enter(call, target, None).await?.context;
                let place = self.place_for_files(&context).await?;
                Ok(Site { place, root: Root::Workspace, key: context.keys.files.clone(), _hold: context })
            }
            Holder::Conversation(_) => Err(EngineError::Sandbox("not built yet".into())),
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
