//! This module contains the configuration that differs between a guest in a sandbox and one in a test.

use std::path::PathBuf;
use std::time::Duration;

use jail::spec::{DATA, WORKSPACE};

#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Directory of the file operations, together with `data` and `tmp`. They reach nothing outside of these three.
    pub workspace: PathBuf,
    pub data: PathBuf,
    pub tmp: PathBuf,
    /// Directory for files that the browser may read.
    pub uploads: PathBuf,
    /// Directory on whose file system long output is kept. No file in this directory gets a name.
    pub outputs: PathBuf,
    /// Command that starts the transpiler. In a sandbox the guest executes itself again.
    pub transpiler: Vec<String>,
    /// Command that starts a search, like `transpiler`.
    pub searcher: Vec<String>,
    /// Time that a guest without a host waits for one.
    pub adoption_grace: Duration,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            workspace: WORKSPACE.into(),
            data: DATA.into(),
            tmp: "/tmp".into(),
            uploads: "/uploads".into(),
            outputs: "/tmp".into(),
            transpiler: vec!["/proc/self/exe".into(), "transpile".into()],
            searcher: vec!["/proc/self/exe".into(), "search".into()],
            adoption_grace: Duration::from_secs(600),
        }
    }
}
