//! What a test can count and compare on the machine itself.

use std::path::PathBuf;

/// A directory of a test's own, removed with it.
pub struct StateDir(pub PathBuf);

impl StateDir {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    /// The names of the servers that have their state in `state` of this directory.
    pub fn instances(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.join("state/instances")).unwrap().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// The words by which [`traces`] finds what these servers hold. They must hold something already.
    pub fn marks(&self) -> Vec<String> {
        let marks: Vec<String> = self.instances().into_iter().chain([self.0.display().to_string()]).collect();
        assert!(traces(&marks).len() > 3, "nothing to look for at the end");
        marks
    }
}

impl Drop for StateDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
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

/// Waits (bounded) until nothing on this machine names one of `words`.
pub fn assert_no_traces(words: &[String]) {
    for _ in 0..1000 {
        if traces(words).is_empty() {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("left over: {:#?}", traces(words));
}

/// What no sandbox may change.
pub fn facts() -> Vec<String> {
    ["kernel/core_pattern", "kernel/hostname", "kernel/domainname", "vm/overcommit_memory", "kernel/modprobe"]
        .iter()
        .map(|name| std::fs::read_to_string(format!("/proc/sys/{name}")).unwrap_or_default())
        .collect()
}
