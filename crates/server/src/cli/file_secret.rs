//! The secret from which the keys of links are made. A restart does not change it, because a link to a file of a
//! conversation outlives the server.

use telemetry::persistent_secret;

use super::Failed;
use crate::config::{Config, Secret};
use crate::digest::sha256;

/// Returns the secret that the operator set. If there is none, this returns one that is created once and stored.
pub(crate) fn file_secret(config: &Config) -> Result<[u8; 32], Failed> {
    if let Some(Secret(text)) = &config.files.secret {
        return Ok(sha256(text));
    }
    let path = config.state_dir.join("file-secret");
    persistent_secret::take(&path).map_err(|error| Failed(format!("`{}`: {error}", path.display())))
}
