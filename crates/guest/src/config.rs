//! What differs between a guest in a sandbox and one in a test.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Where the file operations happen; nothing outside of these two is reached.
    pub workspace: PathBuf,
    pub data: PathBuf,
    /// Where files are put that the browser may read.
    pub uploads: PathBuf,
    /// On which file system long output is kept. Nothing in this directory gets a name.
    pub outputs: PathBuf,
    /// How to start the transpiler. In a sandbox the guest executes itself again.
    pub transpiler: Vec<String>,
    /// How long a guest without a host waits for one.
    pub adoption_grace: Duration,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            workspace: "/workspace".into(),
            data: "/data".into(),
            uploads: "/uploads".into(),
            outputs: "/tmp".into(),
            transpiler: vec!["/proc/self/exe".into(), "transpile".into()],
            adoption_grace: Duration::from_secs(600),
        }
    }
}
