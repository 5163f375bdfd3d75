//! What a process says about itself once: small things with no safe call elsewhere in the workspace.

use std::io;

use rustix::process::DumpableBehavior;

/// `oom_score_adj` of what runs code: a memory kill shall take the one that grew, not the guest.
pub const KERNEL_OOM_SCORE: &str = "500";

/// Nobody but the host's root can trace this process, read its memory or take its descriptors from now on, same uid or not.
/// An `exec` undoes it, so a program has to say it again for itself.
pub fn set_not_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)?)
}

/// Makes `/proc/self` the process's own again after a change of ids.
pub fn set_dumpable() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(DumpableBehavior::Dumpable)?)
}

/// No `exec` can give more than the process has: set-uid bits and file capabilities are ignored. For good, children included.
pub fn set_no_new_privs() -> io::Result<()> {
    Ok(rustix::thread::set_no_new_privs(true)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_new_privs_is_seen_in_proc() {
        // A thread's own: the test process keeps its privileges.
        std::thread::spawn(|| {
            set_no_new_privs().unwrap();
            let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
            assert!(status.contains("NoNewPrivs:\t1"), "{status}");
        })
        .join()
        .unwrap();
    }
}
