//! This module surveys what the host offers for sandboxes, layer by layer: on, off or absent, why, and what would turn
//! it on.
//!
//! A survey changes nothing on the host, except that the survey of a starting server claims the cgroups that it found.
//! Namespaces are tested in a child that ends at once, because a switch in `/proc/sys` says what was configured, not
//! what works.

mod capabilities;

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags};
use rustix::process::{Pid, WaitOptions};
use serde::{Deserialize, Serialize};

use crate::cgroup::{self, CgroupSource, Controller, Layout, Version};
use crate::ids::{self, Mode, SubRange};
use crate::{sys, volume};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FactState {
    On,
    /// The layer exists but is switched off, or we cannot use it.
    Off,
    /// The layer does not exist.
    Absent,
}

/// One line in the output of `doctor`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    pub layer: String,
    pub state: FactState,
    pub why: String,
    /// What would turn the layer on; empty if there is nothing to do.
    pub what_to_do: String,
}

/// A requirement that is not met, without which the server does not start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingRequirement {
    pub why: String,
    pub hint: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    pub mode: Mode,
    pub refusal: Option<MissingRequirement>,
    pub facts: Vec<Fact>,
    pub cgroup: Layout,
    pub landlock: Option<u32>,
    /// Whether volumes are ext4 images on disk. Otherwise they are in memory.
    pub ext4: bool,
    pub(crate) sub: Option<Subordinate>,
    /// Whether the Linux kernel counts processes per user namespace (5.14), so that an rlimit can replace the pids
    /// cgroup.
    pub counts_processes: bool,
}

/// The ranges that `newuidmap` and `newgidmap` have to map besides the user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Subordinate {
    pub uids: SubRange,
    pub gids: SubRange,
}

/// The purpose of a survey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The survey is only reported.
    Look,
    /// The server starts with the result of the survey.
    Start,
}

/// The mechanism that bounds the number of processes in a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProcessBound {
    Cgroup,
    /// `RLIMIT_NPROC` bounds the processes that the Linux kernel counts in the sandbox's user namespace.
    Rlimit,
    Nothing,
}

impl Survey {
    /// Takes a survey. `ours` are the server's processes. `wanted` overrides the mode, but only downwards: a request
    /// does not make an ordinary user root.
    pub(crate) fn take(wanted: Option<Mode>, source: CgroupSource, ours: &[Pid], purpose: Purpose) -> Self {
        let mut facts = Vec::new();
        let release = rustix::system::uname().release().to_string_lossy().into_owned();
        facts.push(kernel(&release));
        let counts_processes = series(&release).is_some_and(|(series, _)| series >= (5, 14));
        let uid = rustix::process::getuid().as_raw();
        let (sub, sub_fact) = subordinate(uid);
        let mode = match (uid, wanted, sub) {
            (0, ..) => Mode::Root,
            (_, None | Some(Mode::Sub | Mode::Root), Some(_)) => Mode::Sub,
            _ => Mode::Single,
        };
        let sub = sub.filter(|_| mode == Mode::Sub);
        let (refusal, namespaces) = namespaces(mode);
        // Missing syscalls come first, because other failures follow from them.
        let refusal = too_old(&release, &sys::missing_calls()).or(refusal);
        let refusal = refusal.or_else(|| (mode == Mode::Root).then(unmapped_root).flatten());
        facts.push(namespaces);
        let (incapable, capabilities) = (mode == Mode::Root).then(capabilities::check).unzip();
        let refusal = refusal.or(incapable.flatten());
        facts.extend(capabilities);
        facts.push(identity(mode));
        facts.extend((mode != Mode::Root).then_some(sub_fact));
        facts.extend((mode == Mode::Single).then(extra_groups));
        let seccomp = sys::seccomp_available();
        facts.push(fact("seccomp", seccomp, "system-call filter", "a kernel with CONFIG_SECCOMP_FILTER is needed"));
        let landlock = sys::landlock_abi();
        facts.push(landlock_fact(landlock));
        let no_seccomp = || MissingRequirement {
            why: "the kernel has no system-call filter (seccomp)".into(),
            hint: "use a kernel with CONFIG_SECCOMP_FILTER, or another back end".into(),
        };
        let refusal = refusal.or_else(|| (!seccomp).then(no_seccomp));
        let cgroup = Layout::obtain(source, ours, purpose == Purpose::Start && refusal.is_none());
        facts.extend(Controller::ALL.map(|c| cgroup_fact(&cgroup, c)));
        facts.push(memory(&cgroup));
        facts.push(processes(process_bound(&cgroup, counts_processes, mode)));
        facts.push(swap(&cgroup));
        facts.extend(socket_buffers(&cgroup, &fs::read_to_string("/proc/cmdline").unwrap_or_default()));
        facts.push(network_limits(mode));
        facts.push(file_locks());
        let (ext4, disk) = disk(mode);
        facts.push(disk);
        facts.push(inodes(mode));
        facts.push(memfd());
        facts.push(open_files());
        Self { mode, refusal, facts, cgroup, landlock, ext4, sub, counts_processes }
    }

    pub(crate) fn process_bound(&self) -> ProcessBound {
        process_bound(&self.cgroup, self.counts_processes, self.mode)
    }
}

fn process_bound(cgroup: &Layout, counts_processes: bool, mode: Mode) -> ProcessBound {
    if cgroup.has(Controller::Pids) {
        ProcessBound::Cgroup
    } else if counts_processes || mode == Mode::Sub {
        ProcessBound::Rlimit
    } else {
        ProcessBound::Nothing
    }
}

/// Reports what holds the memory limit. Without a cgroup, the watchdog always can: a sandbox that it cannot measure is
/// ended.
fn memory(cgroup: &Layout) -> Fact {
    let why = match cgroup.has(Controller::Memory) {
        true => "cgroup memory",
        false => "a watchdog, which ends a sandbox a moment after it exceeded its limit",
    };
    fact(MEMORY, true, why, "")
}

/// Names of the layers that limit memory and processes, by whatever means.
pub const MEMORY: &str = "memory";
pub const PROCESSES: &str = "processes";

fn processes(bound: ProcessBound) -> Fact {
    let why = match bound {
        ProcessBound::Cgroup => "cgroup pids",
        ProcessBound::Rlimit => "an rlimit, which counts in each sandbox for itself",
        ProcessBound::Nothing => "nothing: the kernel counts all processes of a host uid together",
    };
    fact(PROCESSES, bound != ProcessBound::Nothing, why, "use Linux 5.14 or newer, or have a cgroup with `pids`")
}

fn fact(layer: &str, on: bool, why: impl Into<String>, what_to_do: impl Into<String>) -> Fact {
    let what_to_do = if on { String::new() } else { what_to_do.into() };
    Fact { layer: layer.into(), state: if on { FactState::On } else { FactState::Off }, why: why.into(), what_to_do }
}

/// Known vulnerabilities of the Linux kernel through which code has escaped from sandboxes: series, first fixed
/// release, name. Series older than the first one listed were not checked.
const HOLES: &[((u32, u32), u32, &str)] = &[
    ((6, 18), 22, "Copy Fail (CVE-2026-31431)"),
    ((6, 18), 29, "Dirty Frag (CVE-2026-43284, CVE-2026-43500)"),
    ((6, 19), 12, "Copy Fail (CVE-2026-31431)"),
];

/// The oldest supported Linux kernel, the first that has `mount_setattr`.
const OLDEST: (u32, u32) = (5, 12);

/// Parses a release into `(major, minor)` and the patch level.
fn series(release: &str) -> Option<((u32, u32), u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse().ok());
    Some(((numbers.next()?, numbers.next()?), numbers.next().unwrap_or(0)))
}

fn kernel(release: &str) -> Fact {
    let Some((series, patch)) = series(release) else {
        return fact("kernel", false, format!("cannot read the version `{release}`"), "");
    };
    if series < OLDEST {
        let why = format!("`{release}` is older than {}.{}", OLDEST.0, OLDEST.1);
        return fact("kernel", false, why, "use a newer kernel");
    }
    let open: Vec<&str> =
        HOLES.iter().filter(|(s, fixed, _)| *s == series && patch < *fixed).map(|(.., name)| *name).collect();
    if !open.is_empty() {
        let why = format!("`{release}` has known holes: {}", open.join(", "));
        return fact("kernel", false, why, "update the kernel: sandboxes share it");
    }
    let known = HOLES.iter().any(|(s, ..)| *s == series) || series > (6, 19);
    let note = if known { "" } else { "; this series is not in the table of known holes, ask your distribution" };
    fact("kernel", true, format!("{release}{note}"), "")
}

/// Refuses a Linux kernel without these syscalls, because every creation would fail halfway with an error that explains
/// little.
fn too_old(release: &str, missing: &[&str]) -> Option<MissingRequirement> {
    (!missing.is_empty()).then(|| MissingRequirement {
        why: format!(
            "the kernel `{release}` does not have, or a filter around this process hides: {}",
            missing.join(", ")
        ),
        hint: format!(
            "use Linux {}.{} or newer; in a container `--security-opt seccomp=unconfined`",
            OLDEST.0, OLDEST.1
        ),
    })
}

/// Name of the layer that separates sandboxes by their uids on the host.
pub const HOST_UID: &str = "host uid per sandbox";

fn identity(mode: Mode) -> Fact {
    let (own, why, hint) = match mode {
        Mode::Root => (true, "root: every sandbox has a separate host uid", ""),
        Mode::Sub => (true, "sub: every sandbox has a separate subordinate uid", ""),
        Mode::Single => (
            false,
            "single: sandboxes are your own user on the host, and share it",
            "install newuidmap and newgidmap (package uidmap) and give your user a range in /etc/subuid and /etc/subgid",
        ),
    };
    fact(HOST_UID, own, why, hint)
}

/// Refuses root in a user namespace that maps few ids (a rootless container), which has no ids to give to sandboxes.
fn unmapped_root() -> Option<MissingRequirement> {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    (!maps(&map, ids::ROOT_BASE)).then(|| MissingRequirement {
        why: format!("root here cannot use the uids from {} on, which sandboxes are given", ids::ROOT_BASE),
        hint: "start the server as an ordinary user, or outside of the user namespace".into(),
    })
}

fn maps(map: &str, id: u32) -> bool {
    let covers = |line: &str| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|n| n.parse().ok()).collect();
        matches!(numbers[..], [start, _, count] if (start..start + count).contains(&u64::from(id)))
    };
    map.lines().any(covers)
}

fn extra_groups() -> Fact {
    let own = rustix::process::getegid();
    let groups = rustix::process::getgroups().unwrap_or_default();
    let extra: Vec<String> = groups.iter().filter(|g| **g != own).map(|g| g.as_raw().to_string()).collect();
    let why = if extra.is_empty() {
        "none that a sandbox would keep".to_owned()
    } else {
        format!("groups {} cannot be given up in single mode", extra.join(", "))
    };
    fact("extra groups", extra.is_empty(), why, "run the server as a user without them, or set up newuidmap")
}

/// Finds a set-uid program such as `newuidmap`, which may map a subordinate range.
pub(crate) fn find_program(name: &str) -> Option<std::path::PathBuf> {
    ["/usr/bin", "/bin", "/usr/local/bin", "/usr/sbin", "/sbin"]
        .iter()
        .map(|d| Path::new(d).join(name))
        .find(|p| p.exists())
}

fn subordinate(uid: u32) -> (Option<Subordinate>, Fact) {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let passwd = read("/etc/passwd");
    let name = ids::login_name(&passwd, uid).unwrap_or_default();
    let (subuid, subgid) = (read("/etc/subuid"), read("/etc/subgid"));
    let (uids, gids) = (ids::sub_range(&subuid, name, uid), ids::sub_range(&subgid, name, uid));
    let programs = find_program("newuidmap").is_some() && find_program("newgidmap").is_some();
    let layer = "newuidmap";
    match (programs, uids, gids) {
        (false, ..) => (None, absent(layer, "newuidmap or newgidmap is not installed", "install the package uidmap")),
        (true, Some(uids), Some(gids)) => {
            let why = format!("uids {}+{}, gids {}+{}", uids.start, uids.count, gids.start, gids.count);
            (Some(Subordinate { uids, gids }), fact(layer, true, why, ""))
        }
        _ => {
            let hint = match ids::free_range([&subuid, &subgid], [&passwd, &read("/etc/group")]) {
                Some(SubRange { start, count }) => {
                    let range = format!("{start}-{}", start + count - 1);
                    format!("usermod --add-subuids {range} --add-subgids {range} {name}")
                }
                None => "give this user a range in /etc/subuid and /etc/subgid that is nobody else's".into(),
            };
            (None, fact(layer, false, "no range for this user in /etc/subuid and /etc/subgid", hint))
        }
    }
}

fn absent(layer: &str, why: impl Into<String>, what_to_do: impl Into<String>) -> Fact {
    Fact { layer: layer.into(), state: FactState::Absent, why: why.into(), what_to_do: what_to_do.into() }
}

fn landlock_fact(abi: Option<u32>) -> Fact {
    match abi {
        Some(abi) => fact("landlock", true, format!("abi {abi}"), ""),
        None => absent(
            "landlock",
            "the kernel does not offer it",
            "use a kernel of 5.13 or newer with `landlock` in its lsm= list",
        ),
    }
}

fn cgroup_fact(layout: &Layout, controller: Controller) -> Fact {
    let layer = format!("cgroup {}", controller.name());
    if let Some(h) = layout.hierarchies.iter().find(|h| h.controllers.contains(&controller)) {
        let why = match h.version {
            Version::V1 => format!("v1, below {}", h.base.display()),
            Version::V2 if layout.scope_to_come => {
                "v2, in a scope that the server requests from systemd when it starts".into()
            }
            Version::V2 => format!("v2, below {}", h.base.display()),
        };
        return fact(&layer, true, why, "");
    }
    match layout.absent.get(&controller) {
        Some(absence) => fact(&layer, false, &*absence.why, &*absence.what_to_do),
        None => fact(&layer, false, "", ""),
    }
}

fn swap(layout: &Layout) -> Fact {
    let limited = layout
        .hierarchies
        .iter()
        .find(|h| h.controllers.contains(&Controller::Memory))
        .is_some_and(|h| h.version == Version::V2 || h.base.join("memory.memsw.limit_in_bytes").exists());
    let none = fs::read_to_string("/proc/swaps").is_ok_and(|text| text.lines().count() < 2);
    let why = match (limited, none) {
        (true, _) => "limited together with memory",
        (false, true) => "this host has no swap",
        (false, false) => "not limited: a sandbox can use swap beyond its memory",
    };
    fact("swap", limited || none, why, "boot with swapaccount=1, or use cgroup v2")
}

/// Reports whether socket buffers are limited; `None` where memory is not limited at all.
fn socket_buffers(layout: &Layout, boot: &str) -> Option<Fact> {
    let memory = layout.hierarchies.iter().find(|h| h.controllers.contains(&Controller::Memory))?;
    let uncounted = boot.split_whitespace().any(|word| word.starts_with("cgroup.memory=") && word.contains("nosocket"));
    let (on, why) = match memory.version {
        Version::V2 if !uncounted => (true, "counted with memory"),
        Version::V1 if memory.base.join(cgroup::SOCKET_LIMIT).exists() => {
            (true, "limited to a quarter of the memory limit, in addition to it")
        }
        _ => (false, "not counted: sockets can hold memory beyond a sandbox's limit"),
    };
    Some(fact("socket buffers", on, why, "use cgroup v2, and boot without cgroup.memory=nosocket"))
}

/// Tests in a child whether the settings that bound what no cgroup counts can be changed in a new network namespace.
fn network_limits(mode: Mode) -> Fact {
    let unset = match sys::fork() {
        Ok(None) => {
            let user_namespace = if mode == Mode::Root { 0 } else { libc::CLONE_NEWUSER };
            let made = sys::unshare(libc::CLONE_NEWNET | user_namespace);
            sys::leave(made.map_or(i32::from(u8::MAX), |()| sys::limit_network().into()))
        }
        Ok(Some(child)) => {
            let ended = rustix::process::waitpid(Some(child), WaitOptions::empty()).ok().flatten();
            ended.and_then(|(_, status)| status.exit_status()).unwrap_or(i32::from(u8::MAX))
        }
        Err(_) => i32::from(u8::MAX),
    };
    // Where `optmem_max` does not exist for each network namespace, the host's default is as low.
    let named = |(number, (name, _)): (usize, &(&str, &str))| {
        let host = || fs::read_to_string(Path::new("/proc/sys/net").join(name)).unwrap_or_default();
        let matters = match *name {
            "core/optmem_max" => false,
            "core/tstamp_allow_data" => host().trim() != "0",
            _ => true,
        };
        (unset & 1 << number != 0 && matters).then(|| format!("net.{}", name.replace('/', ".")))
    };
    let unset: Vec<String> = sys::NETWORK_LIMITS.iter().enumerate().filter_map(named).collect();
    let why = match &unset[..] {
        [] => "memory of sockets that no cgroup counts is bounded".to_owned(),
        unset => format!(
            "{} cannot be set for a sandbox alone: its sockets can hold memory that no limit counts",
            unset.join(", ")
        ),
    };
    let hint = "sysctl net.core.tstamp_allow_data=0; in a container a writable /proc/sys";
    fact("network limits", unset.is_empty(), why, hint)
}

/// Reports file locks as unbounded, which is true of every Linux kernel: the lock caches were charged to cgroups for
/// one release (5.15-rc1) and not since.
fn file_locks() -> Fact {
    let why = "not bounded: each record lock that code takes costs the host 190 bytes that no cgroup counts, until its process ends";
    let hint =
        "where tenants are hostile, watch `file_lock_cache` in /proc/slabinfo and end the context that makes it grow";
    fact("file locks", false, why, hint)
}

fn disk(mode: Mode) -> (bool, Fact) {
    let layer = "disk quota";
    let in_memory = |why: &str, hint: &str| {
        let why = format!("in memory, {why}; a volume is at most half of the sandbox's memory");
        (false, Fact { layer: layer.into(), state: FactState::On, why, what_to_do: hint.into() })
    };
    if mode != Mode::Root {
        return in_memory("an ordinary user cannot mount a disk", "");
    }
    if let Err(e) = mountable("ext4") {
        let hint = "use a kernel with ext4, or load the module: `modprobe ext4`";
        return in_memory(&format!("the kernel cannot mount ext4 ({e})"), hint);
    }
    if let Err(e) = volume::loop_devices() {
        let hint = "load the module loop, or give the container the host's /dev";
        return in_memory(&format!("there is no loop device ({e})"), hint);
    }
    if volume::mkfs().is_none() {
        return in_memory("mkfs.ext4 is not installed", "install e2fsprogs");
    }
    (true, fact(layer, true, "ext4 images on disk, bytes and inodes", ""))
}

/// Asks the Linux kernel for a file system as a mount would, which loads its module if necessary. `/proc/filesystems`
/// lists only what is already loaded.
fn mountable(kind: &str) -> Result<(), Errno> {
    rustix::mount::fsopen(kind, rustix::mount::FsOpenFlags::FSOPEN_CLOEXEC).map(drop)
}

/// Reports what can be known in advance about inodes that belong to a sandbox alone. A layer that fails only when a
/// sandbox is created is reported with that sandbox.
fn inodes(mode: Mode) -> Fact {
    let layer = "own inodes";
    let knows = |list: &str, name: &str| fs::read_to_string(list).is_ok_and(|text| text.contains(name));
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let modules = format!("/lib/modules/{release}/modules.dep");
    if !knows("/proc/filesystems", "\toverlay\n") && !knows(&modules, "/overlay.ko") {
        let why = "the kernel has no overlayfs: sandboxes can watch and lock the system's files for each other and for the host";
        return fact(layer, false, why, "use a kernel with CONFIG_OVERLAY_FS");
    }
    if mode == Mode::Root {
        return fact(layer, true, "nothing that sandboxes see of the host can be watched or locked for others", "");
    }
    let why = "an ordinary user cannot make device nodes: sandboxes can see when others open `/dev/null`, and lock it";
    Fact { layer: layer.into(), state: FactState::On, why: why.into(), what_to_do: "start the server as root".into() }
}

fn memfd() -> Fact {
    let value = fs::read_to_string("/proc/sys/vm/memfd_noexec").unwrap_or_default();
    let why = match value.trim() {
        "2" => "from an unlinked file: vm.memfd_noexec is 2",
        _ => "from a sealed memfd",
    };
    fact("guest program", true, why, "")
}

fn open_files() -> Fact {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let hard = limit.maximum.unwrap_or(u64::MAX);
    fact(
        "open files",
        hard >= 4096,
        format!("at most {hard} for the server and for the launcher"),
        "raise LimitNOFILE (ulimit -n)",
    )
}

/// Steps of the trial, in order; a failure returns the index of its step with the error.
const TRIAL: &[&str] = &[
    "a user namespace",
    "its id maps",
    "mount, pid, net, ipc and uts namespaces",
    "a fork",
    "private mounts",
    "a fresh /proc",
];

fn namespaces(mode: Mode) -> (Option<MissingRequirement>, Fact) {
    let layer = "namespaces";
    let Err((step, errno)) = trial(mode) else {
        return (None, fact(layer, true, "user, mount, pid, net, ipc, uts, cgroup", ""));
    };
    let what = TRIAL.get(step).copied().unwrap_or("the trial");
    let why = format!("cannot make {what}: {errno}");
    let hint = hint_for(mode, step);
    (Some(MissingRequirement { why: why.clone(), hint: hint.clone() }), fact(layer, false, why, hint))
}

fn hint_for(mode: Mode, step: usize) -> String {
    let sysctl = |path: &str| fs::read_to_string(Path::new("/proc/sys").join(path)).map(|s| s.trim().to_owned()).ok();
    if sysctl("kernel/apparmor_restrict_unprivileged_userns").as_deref() == Some("1") && mode != Mode::Root {
        return "AppArmor restricts user namespaces: give the sandpool binary a profile with `userns,`, \
                or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
            .into();
    }
    if sysctl("kernel/unprivileged_userns_clone").as_deref() == Some("0") {
        return "sysctl kernel.unprivileged_userns_clone=1".into();
    }
    if sysctl("user/max_user_namespaces").as_deref() == Some("0") {
        return "sysctl user.max_user_namespaces=10000".into();
    }
    match (mode, step) {
        (_, 5) => "the outer /proc is masked: in a container use `--security-opt systempaths=unconfined`".into(),
        (Mode::Root, _) => {
            "in a container: `--cap-add SYS_ADMIN --security-opt seccomp=unconfined`, or use another back end".into()
        }
        _ => "use another back end, or run on a host where ordinary users may make user namespaces".into(),
    }
}

/// Creates everything that a sandbox needs in a child, which then ends.
fn trial(mode: Mode) -> Result<(), (usize, Errno)> {
    let no_report = (TRIAL.len(), Errno::IO);
    let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| (3, e))?;
    match sys::fork().map_err(|e| (3, e))? {
        None => {
            let code = match attempt(mode) {
                Ok(()) => [u8::MAX, 0, 0],
                Err((step, errno)) => report(step, errno),
            };
            let _ = rustix::io::write(&write, &code);
            sys::leave(0)
        }
        Some(child) => {
            drop(write);
            let answer = read_answer(read);
            let _ = rustix::process::waitpid(Some(child), WaitOptions::empty());
            match answer {
                Some([u8::MAX, ..]) => Ok(()),
                Some([step, low, high]) => {
                    Err((usize::from(step), Errno::from_raw_os_error(i32::from(u16::from_le_bytes([low, high])))))
                }
                None => Err(no_report),
            }
        }
    }
}

fn report(step: usize, errno: Errno) -> [u8; 3] {
    let [low, high] = (errno.raw_os_error() as u16).to_le_bytes();
    [step as u8, low, high]
}

fn read_answer(pipe: OwnedFd) -> Option<[u8; 3]> {
    let mut answer = [0; 3];
    fs::File::from(pipe).read_exact(&mut answer).ok()?;
    Some(answer)
}

fn attempt(mode: Mode) -> Result<(), (usize, Errno)> {
    let spaces = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWNET | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    if mode != Mode::Root {
        let (uid, gid) = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
        sys::unshare(libc::CLONE_NEWUSER).map_err(|e| (0, e))?;
        map_self(uid, gid).map_err(|e| (1, e))?;
    }
    sys::unshare(spaces | libc::CLONE_NEWCGROUP).map_err(|e| (2, e))?;
    let Some(inner) = sys::fork().map_err(|e| (3, e))? else {
        let done = inner_attempt(mode);
        sys::leave(match done {
            Ok(()) => 0,
            Err((step, _)) => step as i32 + 1,
        })
    };
    let status = rustix::process::waitpid(Some(inner), WaitOptions::empty()).map_err(|e| (3, e))?;
    match status.and_then(|(_, s)| s.exit_status()) {
        Some(0) => Ok(()),
        Some(code) => Err((code as usize - 1, Errno::PERM)),
        None => Err((3, Errno::CHILD)),
    }
}

fn inner_attempt(mode: Mode) -> Result<(), (usize, Errno)> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(|e| (4, e))?;
    rustix::mount::mount("proc", "/proc", "proc", MountFlags::NOSUID | MountFlags::NODEV, None).map_err(|e| (5, e))?;
    if mode == Mode::Root {
        sys::unshare(libc::CLONE_NEWUSER).map_err(|e| (0, e))?;
    }
    Ok(())
}

/// Writes the id maps of a new user namespace: 0 inside stands for our uid and gid outside.
pub(crate) fn map_self(uid: u32, gid: u32) -> Result<(), Errno> {
    let put = |file: &str, text: String| {
        fs::write(Path::new("/proc/self").join(file), text)
            .map_err(|e| e.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))
    };
    put("setgroups", "deny".into())?;
    put("uid_map", format!("0 {uid} 1"))?;
    put("gid_map", format!("0 {gid} 1"))
}

#[cfg(test)]
mod tests;
