//! Landlock: which paths the processes of a sandbox may touch, decided by inode and held across exec.
//!
//! A second lock behind the mounts: it also covers what a mount cannot, such as `/proc/self/exe` of a forked interpreter, which
//! leads to a file of the warm one's root and not of the sandbox's. Rules go by inode, so all mounts have to be there first. Files that no
//! path leads to (memfds, pipes) are not its concern. The network has its own namespace and no rules here.
#![allow(unsafe_code, reason = "the kernel's ABI is asked for with a raw system call")]

use std::fmt;
use std::path::{Path, PathBuf};

use ::landlock::{
    ABI, Access, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, PathFdError, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope, make_bitflags,
};

/// The newest ABI whose rights were tried here. An older kernel enforces what it knows of them.
const TRIED: ABI = ABI::V7;

/// What the kernel enforces: its ABI, at most the one that was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The kernel is without landlock, or it is switched off.
    Absent,
    Abi(u8),
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::Abi(abi) => write!(f, "abi {abi}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum LandlockError {
    #[error("cannot open `{}` for a landlock rule", path.display())]
    Path { path: PathBuf, source: PathFdError },
    #[error("landlock refused the rules")]
    Rules(#[from] RulesetError),
}

/// Paths inside the sandbox, and what may be done below them. A path that is not there needs no rule and is passed over.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LandlockRules {
    /// Listed, but nothing below it is readable by that alone: `/`.
    pub list: Vec<PathBuf>,
    /// Read and executed: the runtimes, `/etc`.
    pub run: Vec<PathBuf>,
    /// Read, and not executed.
    pub read: Vec<PathBuf>,
    /// Read, written, made and removed, and not executed: what a browser writes.
    pub store: Vec<PathBuf>,
    /// Like that, but plain files alone: what others look into, for whom a link, a pipe or a directory would be a trap.
    pub deliver: Vec<PathBuf>,
    /// Everything: `/workspace`, `/data`, `/tmp`, `/dev/shm`, what the operator shares.
    pub write: Vec<PathBuf>,
    /// Read and written, ioctls too, nothing made or removed: the device nodes and `/dev/pts`.
    pub devices: Vec<PathBuf>,
    /// Read, and written where the file allows it: `/proc` (`/proc/self/comm`, `oom_score_adj`).
    pub adjust: Vec<PathBuf>,
}

impl LandlockRules {
    /// The rules of a sandbox whose read-only parts are `run`, and which may write `shared` besides its own.
    pub fn sandbox(run: &[PathBuf], shared: &[PathBuf]) -> Self {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        Self {
            list: paths(&["/", "/dev"]),
            run: run.to_owned(),
            write: [paths(&["/workspace", "/data", "/tmp", "/dev/shm"]), shared.to_owned()].concat(),
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

    /// The rules of its browser: the system, a home, what it downloads and what it is to upload, and nothing else of the code's.
    pub fn browser(run: &[PathBuf]) -> Self {
        let paths = |list: &[&str]| list.iter().map(PathBuf::from).collect::<Vec<_>>();
        Self {
            // Not `/`: whoever may list a directory may list those below it.
            list: Vec::new(),
            run: run.to_owned(),
            read: paths(&["/uploads"]),
            store: paths(&["/browser", "/dev/shm"]),
            deliver: paths(&["/workspace/downloads"]),
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

    /// Puts the calling thread, and what it starts from now on, under the rules. Sets `no_new_privs`.
    ///
    /// Signals are left to the pid namespace: a kernel that was forked into the sandbox is beside its guest and not below it, and the
    /// guest could not even kill it.
    pub fn restrict(&self) -> Result<Level, LandlockError> {
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
    let fd = match PathFd::new(path) {
        Ok(fd) => fd,
        Err(_) if !path.exists() => return Ok(ruleset),
        Err(source) => return Err(LandlockError::Path { path: path.to_owned(), source }),
    };
    // A plain file takes only the rights that mean something for files.
    let access = if path.is_dir() { access } else { access & AccessFs::from_file(TRIED) };
    Ok(ruleset.add_rule(PathBeneath::new(fd, access))?)
}

/// What this kernel would enforce, without restricting anybody: for `doctor`.
pub fn available() -> Level {
    const VERSION: u32 = 1; // LANDLOCK_CREATE_RULESET_VERSION
    // SAFETY: with this flag the kernel takes no attributes and answers its ABI.
    let abi = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<()>(), 0, VERSION) };
    if abi <= 0 { Level::Absent } else { Level::Abi(ABI::from(abi as i32).min(TRIED) as u8) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::ErrorKind::PermissionDenied;

    use super::*;

    /// Restrictions belong to a thread: one of its own keeps the other tests free.
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
    fn seventeen_layers_of_a_users_own_loosen_nothing() {
        // K61: the kernel stops at sixteen; each layer only takes away.
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
