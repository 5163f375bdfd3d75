//! This module manages the directory of a running server. The directory is locked while the server lives; the next
//! server uses it to clean up afterwards.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use crate::cgroup;
use crate::ids::private_dir;

/// How long a restarted server waits for the launcher of its predecessor, which may still be cleaning up.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug)]
pub(crate) struct Instance {
    pub state_dir: PathBuf,
    pub dir: PathBuf,
    _lock: File,
    _server: Option<File>,
}

/// The record in the instance's directory: the top directories of its cgroup trees, whose names are unique.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct InstanceRecord {
    cgroups: Vec<PathBuf>,
}

pub(crate) fn random_name() -> io::Result<String> {
    let mut bytes = [0u8; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|b| format!("{b:02x}")).collect())
}

impl Instance {
    /// Destroys the orphans of dead servers and creates the directory. With `exclusive`, fails if another server uses
    /// the state directory.
    pub(crate) fn open(state_dir: &Path, name: &str, exclusive: bool, cgroups: Vec<PathBuf>) -> io::Result<Self> {
        private_dir(state_dir)?;
        let server = if exclusive { Some(lock_server(state_dir)?) } else { None };
        let all = state_dir.join("instances");
        private_dir(&all)?;
        // Only one server at a time gets past this lock, because an instance looks dead between its mkdir and its lock.
        let guard = lock_file(&state_dir.join("instances.lock"))?;
        flock(&guard, FlockOperation::LockExclusive)?;
        sweep_dead(&all, PATIENCE);
        let dir = all.join(name);
        private_dir(&dir)?;
        let lock = lock_file(&dir.join("lock"))?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        fs::write(dir.join("instance.json"), serde_json::to_vec(&InstanceRecord { cgroups })?)?;
        Ok(Self { state_dir: state_dir.to_owned(), dir, _lock: lock, _server: server })
    }

    /// Destroys the orphans of servers in this state directory that died since this one started. A live server holds
    /// its lock, so concurrent servers never touch each other's directories.
    pub(crate) fn sweep_others(&self) -> io::Result<()> {
        let guard = lock_file(&self.state_dir.join("instances.lock"))?;
        match flock(&guard, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => sweep_dead(&self.state_dir.join("instances"), Duration::ZERO),
            // A server that is just starting does the same work.
            Err(rustix::io::Errno::WOULDBLOCK) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }

    /// Removes the directory at the end, when no sandbox is left.
    pub(crate) fn remove(&self) {
        sweep_cgroups(&self.dir);
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn lock_file(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW)
        .open(path)
}

fn lock_server(state_dir: &Path) -> io::Result<File> {
    let lock = lock_file(&state_dir.join("server.lock"))?;
    let until = Instant::now() + PATIENCE;
    while let Err(e) = flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        if e != rustix::io::Errno::WOULDBLOCK {
            return Err(e.into());
        }
        if Instant::now() > until {
            return Err(io::Error::other(format!(
                "another server uses the state directory `{}`; stop it, or start this one with another `--state-dir`",
                state_dir.display()
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(lock)
}

fn sweep_dead(all: &Path, patience: Duration) {
    for entry in fs::read_dir(all).into_iter().flatten().flatten() {
        let dir = entry.path();
        // A live server holds its lock.
        let Ok(lock) = lock_file(&dir.join("lock")) else { continue };
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            sweep(&dir, patience);
        }
    }
}

/// Destroys everything that belongs to the instance in `dir`, and `dir` itself. If the record is unreadable, its
/// cgroups are left behind, but the server still starts.
fn sweep(dir: &Path, patience: Duration) {
    let until = Instant::now() + patience;
    while !sweep_cgroups(dir) {
        if Instant::now() >= until {
            // A sweep without patience leaves the rest to the next one.
            if patience.is_zero() {
                return;
            }
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let _ = fs::remove_dir_all(dir);
}

/// Removes the cgroups of an instance. Returns true if nothing is left.
fn sweep_cgroups(dir: &Path) -> bool {
    let read = fs::read(dir.join("instance.json")).ok();
    let Some(owned) = read.and_then(|text| serde_json::from_slice::<InstanceRecord>(&text).ok()) else { return true };
    let ours = |top: &&PathBuf| top.file_name().is_some_and(|n| n.to_string_lossy().starts_with("sandpool-"));
    let left = owned.cgroups.iter().filter(ours).filter(|top| !cgroup::sweep(top)).count();
    left == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_server_is_refused_and_side_by_side_instances_are_not() {
        let dir = crate::test_dir("instance");
        let a = Instance::open(&dir, "a", true, vec![]).unwrap();
        let b = Instance::open(&dir, "b", false, vec![]).unwrap();
        let refused = Instance::open(&dir, "c", true, vec![]).unwrap_err().to_string();
        assert!(refused.starts_with("another server uses the state directory"), "{refused}");
        assert!(a.dir.exists() && b.dir.exists());
        drop(a);
        let _c = Instance::open(&dir, "c", true, vec![]).unwrap();
        assert!(!dir.join("instances/a").exists(), "a dead instance is swept");
        assert!(dir.join("instances/b").exists(), "a living one is not");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_living_server_sweeps_what_a_dead_one_left_and_nothing_else() {
        let dir = crate::test_dir("sweep");
        let a = Instance::open(&dir, "a", false, vec![]).unwrap();
        let b = Instance::open(&dir, "b", false, vec![]).unwrap();
        let dead = Instance::open(&dir, "c", false, vec![]).unwrap();
        drop(dead);
        a.sweep_others().unwrap();
        assert!(!dir.join("instances/c").exists() && b.dir.exists() && a.dir.exists());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_corrupt_record_does_not_stop_the_start() {
        let dir = crate::test_dir("corrupt");
        drop(Instance::open(&dir, "a", false, vec![]).unwrap());
        fs::write(dir.join("instances/a/instance.json"), b"{\"cgroups\": [7").unwrap();
        Instance::open(&dir, "b", false, vec![]).unwrap();
        assert!(!dir.join("instances/a").exists());
        fs::remove_dir_all(dir).unwrap();
    }
}
