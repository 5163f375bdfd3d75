//! Places, servers and users for the tests, and what is left on the host.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use sandbox::native::{Cgroups, GuestBinary, Native, NativeConfig, spawn_launcher_from};
use sandbox::{Backend, Group, KeptVolume, Level, Limits, Sandbox, SandboxSpec, SharedVolume};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

pub const LIMITS: Limits =
    Limits { memory_bytes: 128 << 20, cpu_millis: 1500, pids: 40, disk_bytes: 32 << 20, disk_inodes: 1000 };

/// Built by cargo along with the tests of this package.
pub fn helper() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().join("examples/native_helper")
}

/// Built by cargo with the workspace.
pub fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().unwrap().parent().unwrap().join("libsandpool_zygote.so")
}

/// These tests need root; elsewhere than in CI that is no failure.
#[allow(clippy::disallowed_methods, reason = "CI says by a variable that nothing may be skipped")]
pub fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none(), "cannot be skipped in CI: {reason}");
    eprintln!("SKIP: {reason}");
}

pub fn root() -> bool {
    let root = rustix::process::getuid().is_root();
    if !root {
        skip("this test starts as root");
    }
    root
}

pub struct Place(pub PathBuf);

impl Place {
    pub fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-native-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

pub fn config(dir: &Path) -> NativeConfig {
    NativeConfig {
        state_dir: dir.join("state"),
        runtime_dir: Some(dir.join("run")),
        guest: GuestBinary::Path(helper()),
        zygote: GuestBinary::Path(library()),
        label: label(),
        exclusive: true,
        mode: None,
        cgroups: Cgroups::default(),
        floor: Level::Basic,
        spares: 1,
        restarts: false,
        keep_free: sandbox::native::KeepFree::default(),
    }
}

/// The label of the servers of this process, by which it finds their cgroups while other tests run.
fn label() -> String {
    format!("test-{}", std::process::id())
}

pub async fn start(dir: &Path) -> Native {
    Native::start(spawn_launcher_from(&helper()).unwrap(), config(dir)).await.unwrap().0
}

pub fn spec() -> SandboxSpec {
    SandboxSpec {
        groups: vec![Group { name: "tenant".into(), memory_bytes: Some(512 << 20), cpu_millis: None }],
        limits: LIMITS,
        runtime: vec![],
        files: vec![("/opt/sandpool/driver.py".into(), b"print(1)\n".to_vec()).into()],
        volumes: vec![],
        kept: None,
        egress: false,
        browser: None,
    }
}

/// What the shell line prints inside.
pub async fn sh(sandbox: &dyn Sandbox, line: &str) -> String {
    let mut stream = sandbox.connect().await.unwrap();
    stream.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    let mut out = Vec::new();
    let _ = stream.read_to_end(&mut out).await;
    String::from_utf8_lossy(&out).into_owned()
}

/// Everything a sandbox of this test could leave on the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    pub processes: usize,
    pub mounts: usize,
    pub cgroups: BTreeSet<PathBuf>,
    pub loops: usize,
    pub files: BTreeSet<PathBuf>,
    pub descriptors: usize,
}

impl Left {
    /// `dir` holds the state and the slots; processes are those below this one.
    pub fn count(dir: &Path) -> Self {
        let below = descendants();
        let descriptors = |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
        let launcher: Vec<u32> =
            below.iter().filter(|(_, name)| name.starts_with("native_helper")).map(|(p, _)| *p).collect();
        Self {
            processes: below.len(),
            mounts: mounts_of(dir),
            cgroups: cgroups(),
            loops: loops_in(dir),
            files: files(dir),
            descriptors: launcher.iter().chain([&std::process::id()]).map(descriptors).sum(),
        }
    }
}

/// Counts again until it is as before, since a spare that was taken is replaced: in the background, so that a busy machine takes long.
pub fn assert_left(dir: &Path, before: &Left, when: &str) {
    let until = Instant::now() + Duration::from_secs(60);
    let mut left = Left::count(dir);
    while left != *before && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(2));
        left = Left::count(dir);
    }
    assert_eq!(&left, before, "{when}");
}

pub async fn start_without_spares(dir: &Path) -> Native {
    let config = NativeConfig { spares: 0, ..config(dir) };
    Native::start(spawn_launcher_from(&helper()).unwrap(), config).await.unwrap().0
}

/// A server that has been asked for one sandbox, which is gone, and holds a spare of its kind ever since.
pub async fn started_with_a_spare(dir: &Path, spec: &SandboxSpec) -> Native {
    let native = start(dir).await;
    native.create(spec).await.unwrap().destroy().await.unwrap();
    wait_for("a spare", || loops_in(dir) == 1 && descendants().len() == 1);
    native
}

pub fn descendants() -> BTreeMap<u32, String> {
    let mut parents = BTreeMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<u32>().ok()) else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        let (Some(open), Some(close)) = (stat.find('('), stat.rfind(')')) else { continue };
        let parent: u32 = stat[close + 2..].split(' ').nth(1).unwrap().parse().unwrap();
        parents.insert(pid, (parent, stat[open + 1..close].to_owned()));
    }
    let mut below = BTreeMap::new();
    let mut front = vec![std::process::id()];
    while let Some(parent) = front.pop() {
        for (pid, (of, name)) in &parents {
            if *of == parent {
                below.insert(*pid, name.clone());
                front.push(*pid);
            }
        }
    }
    below
}

/// Mounts of the host that name this directory.
pub fn mounts_of(dir: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    mounts.lines().filter(|line| line.contains(dir.to_str().unwrap())).count()
}

/// Directories of sandboxes of this label in all hierarchies; groups and trees stay as long as the server.
pub fn cgroups() -> BTreeSet<PathBuf> {
    fn walk(dir: &Path, prefix: &str, out: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|t| t.is_dir()) {
                if entry.file_name().to_string_lossy().starts_with(prefix) {
                    out.insert(entry.path());
                }
                walk(&entry.path(), prefix, out);
            }
        }
    }
    let mut out = BTreeSet::new();
    walk(Path::new("/sys/fs/cgroup"), &format!("sandpool-{}-", label()), &mut out);
    out
}

pub fn loops_in(dir: &Path) -> usize {
    let holds = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("loop/backing_file")).is_ok_and(|b| b.starts_with(dir.to_str().unwrap()))
    };
    fs::read_dir("/sys/block").unwrap().flatten().filter(holds).count()
}

pub fn files(dir: &Path) -> BTreeSet<PathBuf> {
    let mut out = BTreeSet::new();
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|t| t.is_dir()) {
            out.extend(files(&entry.path()));
        }
        out.insert(entry.path());
    }
    // The template of the size is meant to stay.
    out.retain(|p| !p.components().any(|c| c.as_os_str() == "templates"));
    out
}

pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(Instant::now() < until, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn uid_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("Uid:\t"))?.split('\t').next()?.parse().ok()
}

/// The limits in the cgroups whose path ends with `id`, by file name.
pub fn cgroup_files(id: &str) -> BTreeMap<String, String> {
    fn walk(dir: &Path, id: &str, out: &mut BTreeMap<String, String>) {
        for entry in
            fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir()))
        {
            if entry.path().ends_with(id) {
                for file in fs::read_dir(entry.path()).into_iter().flatten().flatten() {
                    let text = fs::read_to_string(file.path()).unwrap_or_default();
                    out.insert(file.file_name().to_string_lossy().into_owned(), text.trim().to_owned());
                }
            }
            walk(&entry.path(), id, out);
        }
    }
    let mut out = BTreeMap::new();
    walk(Path::new("/sys/fs/cgroup"), id, &mut out);
    out
}

pub fn group(name: &str, memory_bytes: Option<u64>) -> Group {
    Group { name: name.into(), memory_bytes, cpu_millis: None }
}

pub fn share(host: &Path, inside: &str, read_only: bool) -> SharedVolume {
    SharedVolume { host: host.to_owned(), inside: inside.into(), read_only }
}

pub fn kept(digit: char) -> KeptVolume {
    KeptVolume { name: digit.to_string().repeat(64), bytes: 16 << 20, inodes: 200, workspace: None }
}

/// A directory that belongs to this uid and gid.
pub fn owned(place: &Place, name: &str, id: u32) -> PathBuf {
    let dir = place.0.join(name);
    fs::create_dir_all(&dir).unwrap();
    std::os::unix::fs::chown(&dir, Some(id), Some(id)).unwrap();
    dir
}

pub fn owner(path: &Path) -> u32 {
    std::os::unix::fs::MetadataExt::uid(&fs::metadata(path).unwrap())
}

/// How many cgroups of this name there are below those of this test, in all hierarchies.
pub fn groups_called(name: &str) -> usize {
    fn walk(dir: &Path, name: &str) -> usize {
        let below = fs::read_dir(dir).into_iter().flatten().flatten().filter(|e| e.path().is_dir());
        below.map(|e| usize::from(e.file_name() == name) + walk(&e.path(), name)).sum()
    }
    cgroups().iter().map(|top| walk(top, name)).sum()
}

/// A file system mounted on the host for one test.
pub struct Mounted(PathBuf);

impl Mounted {
    pub fn new(kind: &str, at: &Path, owner: u32) -> Self {
        fs::create_dir_all(at).unwrap();
        rustix::mount::mount(kind, at, kind, rustix::mount::MountFlags::empty(), None).unwrap();
        std::os::unix::fs::chown(at, Some(owner), Some(owner)).unwrap();
        fs::set_permissions(at, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        Self(at.to_owned())
    }

    /// Shows a small part of the host's `proc` at a second path.
    pub fn proc(at: &Path) -> Self {
        fs::create_dir_all(at).unwrap();
        rustix::mount::mount_bind("/proc/sys/kernel/random", at).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Runs on in the sandbox, holding what it took; the count is in the file.
pub async fn taken(sandbox: &dyn Sandbox, take: &str) -> usize {
    let program = format!(
        "import ctypes, time; c = ctypes.CDLL(None); n = 0\\nwhile {take}: n += 1\\nprint(n, flush=True); time.sleep(60)"
    );
    let line = format!(
        "rm -f /tmp/taken; printf '{program}' > /tmp/take.py; setsid python3 /tmp/take.py > /tmp/taken 2>&1 & \
         until [ -s /tmp/taken ]; do sleep 0.05; done; cat /tmp/taken"
    );
    let out = sh(sandbox, &line).await;
    out.trim().parse().unwrap_or_else(|_| panic!("{out}"))
}

pub fn server(dir: &Path, line: &str) -> Command {
    server_that("serve", dir, line)
}

#[allow(clippy::disallowed_methods, reason = "the server under test")]
pub fn server_that(does: &str, dir: &Path, line: &str) -> Command {
    let mut command = Command::new(helper());
    command.args([does, "root", dir.join("state").to_str().unwrap(), line]).stdin(Stdio::null()).stderr(Stdio::null());
    command
}

/// The file behind a sandbox's volume.
pub async fn image_of(sandbox: &dyn Sandbox) -> String {
    let device = "sed -n 's|^[0-9]* [0-9]* \\([0-9:]*\\) [^ ]* /workspace .*|\\1|p' /proc/self/mountinfo";
    let device = sh(sandbox, device).await;
    fs::read_to_string(format!("/sys/dev/block/{}/loop/backing_file", device.trim())).unwrap()
}

/// The images that launchers below `dir` made as spares, whoever has them now.
pub fn images_of_spares(dir: &Path) -> BTreeSet<String> {
    let backing = |entry: fs::DirEntry| fs::read_to_string(entry.path().join("loop/backing_file")).ok();
    let all = fs::read_dir("/sys/block").unwrap().flatten().filter_map(backing);
    all.filter(|image| image.starts_with(dir.to_str().unwrap()) && image.contains("/spare/")).collect()
}

pub fn launcher_below(server: u32) -> Option<u32> {
    let path = format!("/proc/{server}/task/{server}/children");
    fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok()
}

pub fn alive(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|s| !s.contains(") Z "))
}

pub fn kill(pid: u32) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

pub const USER: &str = "sandpool-tester";

/// An ordinary user with a home that holds the helper; made when it is missing.
#[allow(clippy::disallowed_methods, reason = "the test's own user")]
pub fn as_user(place: &Place, args: &[&str]) -> Option<Output> {
    let exists = || Command::new("id").arg(USER).output().is_ok_and(|o| o.status.success());
    if !exists() {
        let _ = Command::new("useradd").args(["--no-create-home", USER]).output();
    }
    if !exists() {
        skip("cannot make an ordinary user");
        return None;
    }
    let program = copied_helper(place);
    let output = Command::new("setpriv")
        .args(["--reuid", USER, "--regid", USER, "--clear-groups", "--"])
        .arg(&program)
        .args(args)
        .output()
        .unwrap();
    Some(output)
}

/// With its library beside it.
pub fn copied_helper(place: &Place) -> PathBuf {
    let program = place.0.join("native_helper");
    fs::copy(helper(), &program).unwrap();
    fs::copy(library(), program.with_file_name("libsandpool_zygote.so")).unwrap();
    program
}

#[allow(clippy::disallowed_methods, reason = "the test's own server")]
pub fn as_root(place: &Place, args: &[&str]) -> Option<Output> {
    Some(Command::new(copied_helper(place)).args(args).output().unwrap())
}

/// Returns the modes that a server of an ordinary user can have on this machine.
pub fn modes() -> Vec<&'static str> {
    if Path::new("/usr/bin/newuidmap").exists() {
        return vec!["sub", "single"];
    }
    skip("newuidmap is not installed");
    vec!["single"]
}

/// Makes a place in which every user can have directories.
pub fn place_for_all(name: &str) -> Place {
    let place = Place::new(name);
    fs::set_permissions(&place.0, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    place
}
