//! What the addresses of files are made with, the same over restarts: a link to a conversation's file outlives the server.

use sha2::{Digest, Sha256};

use super::Failed;
use crate::config::{Config, Secret};
use crate::persistent_secret;

/// The operator's, or one that is made once and kept.
pub fn file_secret(config: &Config) -> Result<[u8; 32], Failed> {
    if let Some(Secret(text)) = &config.files.secret {
        return Ok(Sha256::digest(text.as_bytes()).into());
    }
    let path = config.state_dir.join("file-secret");
    persistent_secret::take(&path).map_err(|error| Failed(format!("`{}`: {error}", path.display())))
}
