//! This module sets the resource limits of a process. The cgroup is the real bound on memory, processor and processes;
//! these limits cover what it does not count.

use std::io;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limits that can be chosen. All others are fixed in [`Rlimits::apply`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rlimits {
    pub open_files: u64,
    /// Maximum number of processes; `None` where a cgroup counts them. The Linux kernel counts processes per uid, so
    /// with a uid that processes of the host share, the limit would hit the wrong ones.
    pub processes: Option<u64>,
    /// Maximum size of a single file, in bytes.
    pub file_size: Option<u64>,
}

impl Default for Rlimits {
    fn default() -> Self {
        Self { open_files: 4096, processes: None, file_size: None }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("cannot limit `{resource:?}` to `{limit}`")]
pub(crate) struct RlimitError {
    pub resource: Resource,
    pub limit: u64,
    #[source]
    pub source: io::Error,
}

impl Rlimits {
    /// Sets the soft and hard limits of the calling process; they cannot be raised again.
    pub(crate) fn apply(&self) -> Result<(), RlimitError> {
        for (resource, limit) in self.table() {
            lower(resource, limit).map_err(|source| RlimitError { resource, limit, source })?;
        }
        Ok(())
    }

    fn table(&self) -> impl Iterator<Item = (Resource, u64)> {
        [
            (Resource::Core, Some(NO_CORE)),
            (Resource::Nice, Some(0)),     // no negative nice
            (Resource::Rtprio, Some(0)),   // no real-time scheduling
            (Resource::Msgqueue, Some(0)), // message queues are kernel memory
            (Resource::Memlock, Some(8 << 20)),
            (Resource::Sigpending, Some(4096)),
            (Resource::Nofile, Some(self.open_files)),
            (Resource::Nproc, self.processes),
            (Resource::Fsize, self.file_size),
        ]
        .into_iter()
        .filter_map(|(resource, limit)| Some((resource, limit?)))
    }
}

/// Core size limit that prevents core dumps. It is smaller than any core file, and the one value at which the Linux
/// kernel does not start the host's `core_pattern` helper either; at 0 it starts the helper, as root of the host.
pub(crate) const NO_CORE: u64 = 1;

/// Prevents core dumps of this process and of the processes it starts.
pub fn no_cores() -> io::Result<()> {
    lower(Resource::Core, NO_CORE)
}

/// Sets a limit, but never above the existing hard limit: raising it needs a capability, and a stricter setting of the
/// host takes precedence.
fn lower(resource: Resource, limit: u64) -> io::Result<()> {
    // At 0 the Linux kernel would start the `core_pattern` helper, so 1 is the stricter limit.
    if resource == Resource::Core && set(resource, limit).is_ok() {
        return Ok(());
    }
    let limit = getrlimit(resource).maximum.map_or(limit, |hard| hard.min(limit));
    set(resource, limit)
}

fn set(resource: Resource, limit: u64) -> io::Result<()> {
    Ok(setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let limits = Rlimits { open_files: 256, processes: Some(64), file_size: None };
        let lines: Vec<String> = limits.table().map(|(r, l)| format!("{r:?} {l}")).collect();
        insta::assert_snapshot!(lines.join("\n"), @"
        Core 1
        Nice 0
        Rtprio 0
        Msgqueue 0
        Memlock 8388608
        Sigpending 4096
        Nofile 256
        Nproc 64
        ");
    }
}
