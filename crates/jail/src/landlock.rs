//! This module restricts the paths that processes of a sandbox may access with landlock, which decides by inode and is
//! enforced across `exec`.
//!
//! Landlock is a second barrier behind the mounts and covers what mounts cannot, such as `/proc/self/exe` of a forked
//! interpreter, which leads to a file in the root of the warm interpreter and not of the sandbox. Rules refer to
//! inodes, so all mounts have to exist first. Landlock does not restrict files without a path (memfds, pipes). There
//! are no rules for the network, which has its own namespace.

use std::path::{Path, PathBuf};

use ::landlock::{
    ABI, Access, AccessFs, BitFlags, LandlockStatus, PathBeneath, Ruleset, RulesetAttr, RulesetCreated,
    RulesetCreatedAttr, RulesetError, Scope, make_bitflags,
};
use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::spec::{DATA, WORKSPACE};

/// The newest ABI whose rights were tested here. An older Linux kernel enforces the rights that it knows.
const TRIED: ABI = ABI::V7;

/// The ABI that the Linux kernel enforces, limited to the newest one that was tested.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Level {
    /// The Linux kernel was built without landlock, or landlock is switched off.
    Absent,
    Abi(u8),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum LandlockError {
    #[error("cannot open `{}` for a landlock rule", path.display())]
    Path { path: PathBuf, source: Errno },
    #[error("landlock refused the rules")]
    Rules(#[from] RulesetError),
}

/// Paths inside the sandbox, grouped by what is allowed below them. Paths that do not exist need no rule and are
/// skipped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct LandlockRules {
    /// Directories that can be listed, such as `/`. This alone does not make the files below them readable.
    pub list: Vec<PathBuf>,
    /// Paths that can be read and executed: the runtimes and `/etc`.
    pub run: Vec<PathBuf>,
    /// Paths that can be read but not executed.
    pub read: Vec<PathBuf>,
    /// Directories in which files can be read, written, created and removed, but not executed: the ones a browser
    /// writes to.
    pub store: Vec<PathBuf>,
    /// Directories like those of `store`, but limited to regular files: other processes read them, and a symlink, a
    /// pipe or a directory would be a trap for those.
    pub deliver: Vec<PathBuf>,
    /// Directories with full access: `/workspace`, `/data`, `/tmp`, `/dev/shm` and the writable shared volumes.
    pub write: Vec<PathBuf>,
    /// Paths that allow reading, writing and ioctls, but no creation or removal: the device nodes and `/dev/pts`.
    pub devices: Vec<PathBuf>,
    /// Paths that can be read, and written where the file allows it: `/proc` (`/proc/self/comm`, `oom_score_adj`).
    pub adjust: Vec<PathBuf>,
}

impl LandlockRules {
    /// Returns the rules of a sandbox whose read-only parts are `run` and which may write to `shared` besides its own
    /// directories.
    pub(crate) fn sandbox(run: &[PathBuf], shared: &[PathBuf]) -> Self {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        Self {
            list: paths(&["/", "/dev"]),
            run: run.to_owned(),
            write: [paths(&[WORKSPACE, DATA, "/tmp", "/dev/shm"]), shared.to_owned()].concat(),
            devices: paths(&[
                "/dev/null",
                "/dev/zero",
                "/dev/full",
                "/dev/random",
                "/dev/urandom",
                "/dev/tty",
                "/dev/ptmx",
                "/dev/pts",
            ]),
            adjust: paths(&["/proc"]),
            ..Self::default()
        }
    }

    /// Returns the rules of the browser in a sandbox: the system, a home, its downloads and the files it is to upload,
    /// and none of the other files of the code.
    pub(crate) fn browser(run: &[PathBuf], downloads: &Path) -> Self {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        Self {
            // Without `/`: the right to list a directory includes the directories below it.
            list: Vec::new(),
            run: run.to_owned(),
            read: paths(&["/uploads"]),
            store: paths(&["/browser", "/dev/shm"]),
            deliver: vec![downloads.to_owned()],
            write: Vec::new(),
            devices: paths(&["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]),
            adjust: paths(&["/proc"]),
        }
    }

    fn table(&self) -> impl Iterator<Item = (&Path, BitFlags<AccessFs>)> {
        let list = AccessFs::ReadDir.into();
        let run = AccessFs::from_read(TRIED);
        let read = run & !AccessFs::Execute;
        let write = AccessFs::from_all(TRIED) & !make_bitflags!(AccessFs::{MakeChar | MakeBlock | IoctlDev});
        let store = write & !AccessFs::Execute;
        let deliver =
            make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | Truncate | MakeReg | RemoveFile | Refer});
        let adjust = make_bitflags!(AccessFs::{ReadFile | ReadDir | WriteFile | Truncate});
        let devices = adjust | AccessFs::IoctlDev;
        [
            (&self.list, list),
            (&self.run, run),
            (&self.read, read),
            (&self.store, store),
            (&self.deliver, deliver),
            (&self.write, write),
            (&self.devices, devices),
            (&self.adjust, adjust),
        ]
        .into_iter()
        .flat_map(|(paths, access)| paths.iter().map(move |p| (p.as_path(), access)))
    }

    /// Restricts the calling thread, and everything it starts from now on, to these rules. Sets `no_new_privs`.
    ///
    /// Signals are left to the pid namespace: a kernel that was forked into the sandbox has a landlock domain beside
    /// the guest's and not below it, so with a signal scope the guest could not even kill it.
    pub(crate) fn restrict(&self) -> Result<Level, LandlockError> {
        let mut ruleset =
            Ruleset::default().handle_access(AccessFs::from_all(TRIED))?.scope(Scope::AbstractUnixSocket)?.create()?;
        for (path, access) in self.table() {
            ruleset = add(ruleset, path, access)?;
        }
        Ok(match ruleset.restrict_self()?.landlock {
            LandlockStatus::Available { effective_abi, .. } => Level::Abi(effective_abi.min(TRIED) as u8),
            LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => Level::Absent,
        })
    }
}

fn add(ruleset: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> Result<RulesetCreated, LandlockError> {
    // Code can replace what is below these directories, also while a kernel enters its sandbox. A symlink would give
    // the rule's rights to any other directory.
    let is_codes = [WORKSPACE, DATA, "/tmp"].iter().any(|dir| path.starts_with(dir));
    let how = if is_codes { ResolveFlags::NO_SYMLINKS } else { ResolveFlags::empty() } | ResolveFlags::NO_MAGICLINKS;
    let fd = match rustix::fs::openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), how) {
        Ok(fd) => fd,
        Err(_) if is_codes || !path.exists() => return Ok(ruleset),
        Err(source) => return Err(LandlockError::Path { path: path.to_owned(), source }),
    };
    let found = rustix::fs::fstat(&fd).map_err(|source| LandlockError::Path { path: path.to_owned(), source })?;
    // A regular file accepts only the rights that apply to files.
    let is_dir = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
    let access = if is_dir { access } else { access & AccessFs::from_file(TRIED) };
    Ok(ruleset.add_rule(PathBeneath::new(fd, access))?)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind::PermissionDenied;

    use super::*;

    /// Returns what this Linux kernel would enforce, without restricting any process.
    fn available() -> Level {
        let enforced = |abi| Level::Abi(ABI::from(abi as i32).min(TRIED) as u8);
        crate::sys::landlock_abi().map_or(Level::Absent, enforced)
    }

    /// Runs `attempt` in a new thread: restrictions apply to a thread, so the other tests stay unrestricted.
    fn restricted(rules: LandlockRules, attempt: impl FnOnce() + Send + 'static) {
        if available() == Level::Absent {
            eprintln!("SKIP: no landlock in this kernel");
            return;
        }
        let run = move || {
            assert_eq!(rules.restrict().unwrap(), available());
            attempt();
        };
        std::thread::spawn(run).join().unwrap();
    }

    #[allow(clippy::disallowed_methods, reason = "the program is what is to be refused")]
    fn runs(program: &Path) -> std::io::Result<()> {
        std::process::Command::new(program).status().map(drop)
    }

    fn scratch(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("landlock-{name}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        for sub in ["run", "read", "store", "deliver", "write", "other"] {
            fs::create_dir_all(dir.join(sub)).unwrap();
            fs::write(dir.join(sub).join("file"), sub).unwrap();
        }
        dir
    }

    #[test]
    fn only_what_a_rule_names_can_be_touched() {
        let dir = scratch("rules");
        let rules = LandlockRules {
            list: vec!["/".into()],
            run: vec![dir.join("run")],
            write: vec![dir.join("write"), dir.join("not there")],
            adjust: vec!["/proc".into()],
            devices: vec!["/dev/null".into()],
            read: vec![dir.join("read")],
            store: vec![dir.join("store")],
            deliver: vec![dir.join("deliver")],
        };
        let inside = dir.clone();
        restricted(rules, move || {
            let denied = |r: std::io::Result<()>| assert_eq!(r.unwrap_err().kind(), PermissionDenied);
            assert_eq!(fs::read_to_string(inside.join("run/file")).unwrap(), "run");
            denied(fs::write(inside.join("run/file"), "x"));
            denied(fs::read(inside.join("other/file")).map(drop));
            assert_eq!(fs::read_to_string(inside.join("read/file")).unwrap(), "read");
            denied(fs::write(inside.join("read/file"), "x"));
            fs::write(inside.join("store/new"), "#!/bin/sh\n").unwrap();
            fs::set_permissions(inside.join("store/new"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
            denied(runs(&inside.join("store/new")));
            fs::rename(inside.join("store/new"), inside.join("deliver/new")).unwrap();
            fs::remove_file(inside.join("deliver/new")).unwrap();
            denied(fs::create_dir(inside.join("deliver/deep")));
            denied(std::os::unix::fs::symlink("file", inside.join("deliver/link")));
            std::os::unix::fs::symlink("file", inside.join("store/link")).unwrap();
            denied(fs::rename(inside.join("store/link"), inside.join("deliver/link")));
            denied(fs::rename(inside.join("write/file"), inside.join("other/moved")));
            denied(fs::remove_file(inside.join("other/file")));
            fs::create_dir(inside.join("write/deep")).unwrap();
            fs::rename(inside.join("write/file"), inside.join("write/deep/file")).unwrap();
            fs::write(inside.join("write/deep/file"), "x").unwrap();
            fs::write("/dev/null", "x").unwrap();
            fs::write("/proc/thread-self/comm", "renamed").unwrap();
            assert!(fs::read_dir("/").unwrap().count() > 3);
            denied(fs::read("/etc/passwd").map(drop));
        });
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn w68_a_symlink_of_code_gives_no_rights_to_what_it_leads_to() {
        let dir = scratch("symlinks");
        std::os::unix::fs::symlink(dir.join("other"), dir.join("link")).unwrap();
        let write = vec![dir.join("link"), dir.join("write")];
        let inside = dir.clone();
        restricted(LandlockRules { write, ..LandlockRules::default() }, move || {
            assert_eq!(fs::write(inside.join("other/file"), "x").unwrap_err().kind(), PermissionDenied);
            fs::write(inside.join("write/file"), "x").unwrap();
        });
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn seventeen_layers_of_a_users_own_loosen_nothing() {
        // K61: the Linux kernel allows sixteen layers; each layer can only remove rights.
        let dir = scratch("layers");
        let rules = LandlockRules { write: vec![dir.join("write")], ..LandlockRules::default() };
        let inside = dir.clone();
        restricted(rules, move || {
            let everything = LandlockRules { write: vec!["/".into()], ..LandlockRules::default() };
            let layers = (0..17).take_while(|_| everything.restrict().is_ok()).count();
            assert_eq!(layers, 15);
            assert_eq!(fs::read(inside.join("other/file")).unwrap_err().kind(), PermissionDenied);
            fs::write(inside.join("write/file"), "x").unwrap();
        });
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn abstract_sockets_end_at_the_sandbox() {
        if available() < Level::Abi(6) {
            eprintln!("SKIP: landlock scopes need ABI 6");
            return;
        }
        use std::os::linux::net::SocketAddrExt;
        use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
        let address = SocketAddr::from_abstract_name(format!("landlock-{}", std::process::id())).unwrap();
        let _listener = UnixListener::bind_addr(&address).unwrap();
        UnixStream::connect_addr(&address).unwrap();
        restricted(LandlockRules::default(), move || {
            assert_eq!(UnixStream::connect_addr(&address).unwrap_err().kind(), PermissionDenied);
        });
    }
}
