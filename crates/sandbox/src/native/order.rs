//! This module expresses the specification of a sandbox in the launcher's words.

use std::path::PathBuf;

use jail::cgroup;
use jail::spec::FileSpec;
use jail::wire::Create;

use crate::{BrowserRoom, Group, PROXY, SandboxSpec};

pub(super) fn order_files(files: Vec<(PathBuf, Vec<u8>)>) -> Vec<FileSpec> {
    files.into_iter().map(|(path, bytes)| FileSpec { path, content: bytes.into() }).collect()
}

pub(super) fn order(sandbox: String, spec: &SandboxSpec, fail_at: Option<usize>) -> Create {
    let SandboxSpec { groups, limits, runtime, files, volumes, kept, egress, browser } = spec;
    Create {
        sandbox,
        groups: groups.iter().map(order_group).collect(),
        limits: cgroup::CgroupLimits {
            memory_bytes: Some(limits.memory_bytes),
            cpu_millis: Some(limits.cpu_millis),
            pids: Some(limits.pids),
        },
        disk_bytes: limits.disk_bytes,
        disk_inodes: limits.disk_inodes,
        runtime: runtime.clone(),
        files: order_files(files.clone()),
        shared: volumes.clone(),
        kept: kept.clone(),
        browser: browser.map(|BrowserRoom { memory_bytes, pids }| cgroup::CgroupLimits {
            memory_bytes: Some(memory_bytes),
            cpu_millis: None,
            pids: Some(pids),
        }),
        egress: egress.then_some(PROXY),
        fail_at,
    }
}

fn order_group(group: &Group) -> cgroup::Group {
    let Group { name, memory_bytes, cpu_millis } = group;
    let limits = cgroup::CgroupLimits { memory_bytes: *memory_bytes, cpu_millis: *cpu_millis, pids: None };
    cgroup::Group { name: name.clone(), limits }
}
