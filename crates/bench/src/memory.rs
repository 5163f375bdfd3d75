//! Private memory of processes, as the Linux kernel counts it.

use std::path::Path;

use crate::BenchError;

/// Returns the bytes that these processes share with no other process, which would be free without them.
pub(crate) fn private(pids: &[u32]) -> Result<f64, BenchError> {
    let one = |pid: &u32| {
        let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"));
        text.map(|text| private_of(&text)).map_err(BenchError::io("private memory cannot be read here"))
    };
    pids.iter().map(one).sum()
}

fn private_of(rollup: &str) -> f64 {
    let of = |name: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    (of("Private_Clean:") + of("Private_Dirty:")) * 1024.0
}

/// Returns the processes of a PID namespace, given its name in `/proc/self/ns/pid` inside.
pub(crate) fn members(namespace: &str) -> Result<Vec<u32>, BenchError> {
    let all = std::fs::read_dir("/proc").map_err(BenchError::io("`/proc` cannot be read"))?;
    let pids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let inside =
        |pid: &u32| std::fs::read_link(format!("/proc/{pid}/ns/pid")).is_ok_and(|found| found == Path::new(namespace));
    let found: Vec<u32> = pids.filter(inside).collect();
    match found.is_empty() {
        true => Err(BenchError::Said("the processes of a sandbox cannot be seen by this user".into())),
        false => Ok(found),
    }
}

/// Returns a process and all its descendants.
pub(crate) fn family(pid: u32) -> Result<Vec<u32>, BenchError> {
    let all = std::fs::read_dir("/proc").map_err(BenchError::io("`/proc` cannot be read"))?;
    let pids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parents: Vec<(u32, u32)> = pids.filter_map(|pid| Some((pid, parent(pid)?))).collect();
    let mut family = vec![pid];
    let mut at = 0;
    while let Some(one) = family.get(at).copied() {
        family.extend(parents.iter().filter(|(_, parent)| *parent == one).map(|(pid, _)| *pid));
        at += 1;
    }
    Ok(family)
}

/// Returns the parent of a process from `/proc/<pid>/stat`, where it comes after a name in parentheses.
fn parent(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Returns the memory that the machine could still give to programs.
pub(crate) fn available() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    kilobytes(&text, "MemAvailable:").map(|kilobytes| kilobytes * 1024.0)
}

pub(crate) fn kilobytes(meminfo: &str, name: &str) -> Option<f64> {
    meminfo.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_is_what_is_shared_with_nobody() {
        let rollup = "5581-7ffd ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\nShared_Dirty: 100 kB\n\
                      Private_Clean:         12 kB\nPrivate_Dirty:        500 kB\nSwap: 0 kB\n";
        assert_eq!(private_of(rollup), 512.0 * 1024.0);
    }

    #[test]
    fn this_process_is_of_its_parents_family() {
        let family = family(parent(std::process::id()).unwrap()).unwrap();
        assert!(family.contains(&std::process::id()));
    }

    #[test]
    fn this_process_is_in_its_namespace() {
        let own = std::fs::read_link("/proc/self/ns/pid").unwrap();
        assert!(members(own.to_str().unwrap()).unwrap().contains(&std::process::id()));
        assert!(members("pid:[1]").is_err());
    }
}
