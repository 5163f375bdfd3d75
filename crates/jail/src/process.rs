//! This module sets attributes of the calling process that the rest of the workspace cannot set safely.

use std::io;

use rustix::process::DumpableBehavior;

/// `oom_score_adj` of processes that run code: a memory kill has to hit the process that grew, not the guest.
pub const KERNEL_OOM_SCORE: &str = "500";

/// Makes the process undumpable: from now on only the host's root can trace it, read its memory or take its
/// descriptors, even if another process has the same uid. An `exec` undoes this, so each program has to call it again.
pub fn set_not_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Makes the process dumpable again, so that it owns its `/proc/self` after a change of ids.
pub(crate) fn set_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// Sets `no_new_privs`: `exec` ignores set-uid bits and file capabilities from now on. This is permanent and applies to
/// children.
pub(crate) fn set_no_new_privs() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_new_privs_is_seen_in_proc() {
        // The attribute belongs to a thread: the test process keeps its privileges.
        std::thread::spawn(|| {
            set_no_new_privs().unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        })
        .join()
        .unwrap();
    }
}
