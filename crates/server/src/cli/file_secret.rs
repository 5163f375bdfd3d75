//! What the addresses of files are made with, the same over restarts: a link to a conversation's file outlives the server.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::Failed;
use crate::config::{Config, Secret};

/// The operator's, or one that is made once and kept.
pub fn file_secret(config: &Config) -> Result<[u8; 32], Failed> {
    if let Some(Secret(text)) = &config.files.secret {
        return Ok(Sha256::digest(text.as_bytes()).into());
    }
    let path = config.state_dir.join("file-secret");
    let failed = |error: io::Error| Failed(format!("`{}`: {error}", path.display()));
    if let Some(secret) = read_secret(&path).map_err(failed)? {
        return Ok(secret);
    }
    let mut secret = [0; 32];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty()).map_err(|e| failed(e.into()))?;
    std::fs::create_dir_all(&config.state_dir).map_err(failed)?;
    // Complete or absent: it appears by a link, and of two servers that start at once one is first.
    let half = config.state_dir.join(format!(".file-secret-{}", uuid::Uuid::new_v4().simple()));
    let made = write_private(&half, &secret).and_then(|()| std::fs::hard_link(&half, &path));
    let _ = std::fs::remove_file(&half);
    match made {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
        _ => read_secret(&path).map_err(failed)?.ok_or_else(|| failed(io::ErrorKind::NotFound.into())),
    }
}

fn read_secret(path: &Path) -> io::Result<Option<[u8; 32]>> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let wrong = || io::Error::other("is not a secret of 32 bytes; remove it, and a new one is made");
            bytes.try_into().map(Some).map_err(|_| wrong())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn write_private(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
