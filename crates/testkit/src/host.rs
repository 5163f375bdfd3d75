//! What a test can count and compare on the machine itself.

use std::path::{Path, PathBuf};

/// A directory of a test's own, removed with it.
pub struct StateDir(pub PathBuf);

impl StateDir {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Everything of ours the host can count: sandbox processes, mounts, cgroups, loop devices.
#[derive(Debug, PartialEq, Eq)]
pub struct Leftovers {
    processes: usize,
    mounts: usize,
    cgroups: usize,
    loops: usize,
}

impl Leftovers {
    pub fn count() -> Self {
        Self {
            processes: processes(),
            mounts: mounts(),
            cgroups: cgroups(Path::new("/sys/fs/cgroup"), 0),
            loops: loops(),
        }
    }

    /// Waits (bounded) until the counts are what they were.
    pub fn assert_same(&self) {
        for _ in 0..1000 {
            if Self::count() == *self {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(&Self::count(), self, "left over");
    }
}

/// Whatever runs in a cgroup of ours: guests, interpreters, and what code has started. (By name would find other tests' guests.)
fn processes() -> usize {
    let Ok(processes) = std::fs::read_dir("/proc") else { return 0 };
    processes
        .flatten()
        .filter_map(|p| std::fs::read_to_string(p.path().join("cgroup")).ok())
        .filter(|cgroups| cgroups.contains("/sandpool"))
        .count()
}

/// What on this machine names one of `words`: processes by their cgroups, cgroups, loop devices, mounts. Finds what one server
/// left, whoever else makes sandboxes meanwhile.
pub fn traces(words: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    let mut note = |kind: &str, text: String| {
        if words.iter().any(|word| text.contains(word.as_str())) {
            found.push(format!("{kind}: {text}"));
        }
    };
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        note("process", std::fs::read_to_string(process.path().join("cgroup")).unwrap_or_default());
    }
    for device in std::fs::read_dir("/sys/block").into_iter().flatten().flatten() {
        note("loop device", std::fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default());
    }
    for mount in std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines() {
        note("mount", mount.to_owned());
    }
    let mut directories = vec![(PathBuf::from("/sys/fs/cgroup"), 0)];
    while let Some((directory, depth)) = directories.pop() {
        note("cgroup", directory.display().to_string());
        let inner = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let inner = inner.filter(|entry| depth < 8 && entry.file_type().is_ok_and(|kind| kind.is_dir()));
        directories.extend(inner.map(|entry| (entry.path(), depth + 1)));
    }
    found
}

fn mounts() -> usize {
    std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default().lines().count()
}

fn cgroups(dir: &Path, depth: usize) -> usize {
    let Ok(entries) = std::fs::read_dir(dir) else { return 0 };
    entries
        .flatten()
        .filter(|e| depth < 8 && e.file_type().is_ok_and(|t| t.is_dir()))
        .map(|e| usize::from(e.path().to_string_lossy().contains("sandpool")) + cgroups(&e.path(), depth + 1))
        .sum()
}

fn loops() -> usize {
    let Ok(devices) = std::fs::read_dir("/sys/block") else { return 0 };
    devices.flatten().filter(|d| d.path().join("loop/backing_file").exists()).count()
}

/// What no sandbox may change.
pub fn facts() -> Vec<String> {
    ["kernel/core_pattern", "kernel/hostname", "kernel/domainname", "vm/overcommit_memory", "kernel/modprobe"]
        .iter()
        .map(|name| std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default())
        .collect()
}
