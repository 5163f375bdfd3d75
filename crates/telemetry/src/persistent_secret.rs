//! Stores a secret of 32 bytes, which is created once, in a file that only its owner can read.

use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Returns the secret in a file. If the file does not exist, this creates it with a new secret.
pub fn take(path: &Path) -> io::Result<[u8; 32]> {
    if let Some(secret) = read(path)? {
        return Ok(secret);
    }
    let mut secret = [0; 32];
    rustix::rand::getrandom(&mut secret, rustix::rand::GetRandomFlags::empty())?;
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)?;
    // The file appears by a hard link, so it is complete or absent. If two servers start at once, the first one wins.
    let temporary = dir.join(format!(".secret-{}", uuid::Uuid::new_v4().simple()));
    let created = write_private(&temporary, &secret).and_then(|()| std::fs::hard_link(&temporary, path));
    let _ = std::fs::remove_file(&temporary);
    match created {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
        _ => read(path)?.ok_or_else(|| io::ErrorKind::NotFound.into()),
    }
}

/// Reads the secret. Returns `None` if the file does not exist.
pub fn read(path: &Path) -> io::Result<Option<[u8; 32]>> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let wrong = || io::Error::other("is not a secret of 32 bytes; remove it to have a new one generated");
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
