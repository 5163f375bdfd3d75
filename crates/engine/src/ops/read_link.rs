//! Reads the file behind a link for the tenant that owns it.

use super::{OpContext, check_path, unless_cancelled};
use crate::op::{Call, EngineError, Outcome};

impl OpContext {
    pub(super) async fn read_link(
        &self,
        call: &Call,
        key: &str,
        path: &str,
        max_bytes: u64,
    ) -> Result<Outcome, EngineError> {
        check_path(path)?;
        let (inner, key, path) = (self.inner.clone(), key.to_owned(), path.to_owned());
        let most = max_bytes.min(inner.config.max_file_bytes);
        let (tenant, memory) = (call.tenant.clone(), call.memory.clone());
        let reading = async move {
            let file = inner.open_link(&key, &path, Some(&tenant)).await?;
            let mut content = Vec::new();
            while (content.len() as u64) < file.size.min(most) {
                let left = file.size.min(most) - content.len() as u64;
                let piece = file.read(content.len() as u64, left).await?;
                if piece.is_empty() {
                    return Err(EngineError::Sandbox("the file changed while it was read".into()));
                }
                memory.add(piece.len())?;
                content.extend(piece);
            }
            Ok(Outcome::File { path, content, size: file.size, key })
        };
        unless_cancelled(call, reading, &self.inner).await
    }
}
