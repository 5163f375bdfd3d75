//! Makes a link for uploading one file. The upload itself is in `crate::upload`.

use super::{OpContext, check_path};
use crate::op::{Call, EngineError, FileOwner, Outcome, Target};

impl OpContext {
    pub(super) async fn upload_link(&self, call: &Call, target: Target, path: String) -> Result<Outcome, EngineError> {
        check_path(&path)?;
        let access = self.file_access(call, FileOwner::workspace(target)).await?;
        let config = &self.inner.config;
        let link = self.inner.upload_links.issue(config, &call.tenant, &access.key, path)?;
        Ok(Outcome::UploadLink(link))
    }
}
