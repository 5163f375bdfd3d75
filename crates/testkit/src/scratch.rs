//! A directory for one test, removed with it.

use std::path::PathBuf;

pub struct Scratch(pub PathBuf);

impl Scratch {
    #[allow(clippy::new_without_default, reason = "it creates a directory, which a default value should not")]
    pub fn new() -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-scratch-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&dir).unwrap();
        Self(dir)
    }

    /// Writes a file into the directory.
    pub fn write(&self, name: &str, content: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, content).unwrap();
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
