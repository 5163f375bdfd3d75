//! The attacker's tools: raw system calls, a child to try things in, and words for what came of it.

use std::ffi::CString;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

use testkit::probe::Outcome;

use crate::Found;

/// An errno.
pub type Errno = i32;
pub type Result = std::result::Result<i64, Errno>;

/// A system call by number; pointers are passed as numbers.
pub fn call<const N: usize>(number: i64, args: [usize; N]) -> Result {
    let mut six = [0; 6];
    six[..N].copy_from_slice(&args);
    let [a, b, c, d, e, f] = six;
    // SAFETY: none is claimed for the arguments, which is the point of this program. Callers pass numbers or addresses of
    // memory that lives until the call returns, so that the process itself stays sound.
    let result = unsafe { libc::syscall(number, a, b, c, d, e, f) };
    if result == -1 { Err(errno()) } else { Ok(result) }
}

pub fn errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

pub fn text(path: &str) -> CString {
    CString::new(path).expect("no NUL in a literal")
}

/// The address of a value, for a system call.
pub fn at<T>(value: &T) -> usize {
    std::ptr::from_ref(value) as usize
}

pub fn at_mut<T>(value: &mut T) -> usize {
    std::ptr::from_mut(value) as usize
}

pub fn str_at(value: &CString) -> usize {
    value.as_ptr() as usize
}

pub fn open(path: &str, flags: i32) -> Result {
    call(libc::SYS_openat, [libc::AT_FDCWD as usize, str_at(&text(path)), flags as usize, 0o600])
}

pub fn allowed(detail: impl Into<String>) -> Found {
    (Outcome::Allowed, detail.into())
}

pub fn blocked(detail: impl Into<String>) -> Found {
    (Outcome::Blocked, detail.into())
}

pub fn absent(detail: impl Into<String>) -> Found {
    (Outcome::Absent, detail.into())
}

/// Success is success.
pub fn judge(result: Result) -> Found {
    reached(result, &[])
}

/// Success, or an error that only somebody with the permission gets to see.
pub fn reached(result: Result, permitted: &[Errno]) -> Found {
    match result {
        Ok(value) => allowed(format!("returned {value}")),
        Err(e) if permitted.contains(&e) => allowed(format!("got as far as {}", name(e))),
        Err(e @ (libc::ENOENT | libc::ESRCH)) => absent(name(e)),
        Err(e) => blocked(name(e)),
    }
}

pub fn name(errno: Errno) -> String {
    let known = [
        (libc::EPERM, "EPERM"),
        (libc::EACCES, "EACCES"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EROFS, "EROFS"),
        (libc::EINVAL, "EINVAL"),
        (libc::ENOENT, "ENOENT"),
        (libc::ESRCH, "ESRCH"),
        (libc::ENOTTY, "ENOTTY"),
        (libc::EXDEV, "EXDEV"),
        (libc::EBADF, "EBADF"),
        (libc::ENOEXEC, "ENOEXEC"),
        (libc::EAFNOSUPPORT, "EAFNOSUPPORT"),
        (libc::EPROTONOSUPPORT, "EPROTONOSUPPORT"),
        (libc::ESOCKTNOSUPPORT, "ESOCKTNOSUPPORT"),
        (libc::ENOPROTOOPT, "ENOPROTOOPT"),
        (libc::EOPNOTSUPP, "EOPNOTSUPP"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
    ];
    known.iter().find(|(e, _)| *e == errno).map_or_else(|| format!("errno {errno}"), |(_, n)| (*n).to_owned())
}

/// Forks; 0 in the child.
pub fn fork() -> i32 {
    // SAFETY: this program has one thread (attempts that start others do so in a child of their own).
    unsafe { libc::fork() }
}

pub fn exit(code: i32) -> ! {
    // SAFETY: ends the process; nothing of the parent's is flushed twice.
    unsafe { libc::_exit(code) }
}

pub fn wait(pid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: `status` lives until the call returns.
    unsafe { libc::waitpid(pid, &raw mut status, 0) };
    status
}

pub fn kill(pid: i32, signal: i32) -> Result {
    call(libc::SYS_kill, [pid as usize, signal as usize])
}

/// Runs an attempt in a child, so that neither a seccomp kill nor a changed namespace reaches the next one.
pub fn in_child(attempt: impl FnOnce() -> Found) -> Found {
    const PATIENCE: Duration = Duration::from_secs(20);
    let (mut reader, mut writer) = pipe();
    let pid = fork();
    if pid == 0 {
        // The attempts that look at descriptors must not find the pipe.
        drop(reader);
        let (outcome, detail) = attempt();
        let code = match outcome {
            Outcome::Allowed => b'A',
            Outcome::Blocked => b'B',
            Outcome::Absent => b'-',
        };
        let _ = writer.write_all(&[&[code], detail.as_bytes()].concat());
        exit(0);
    }
    drop(writer);
    let deadline = Instant::now() + PATIENCE;
    let ended = loop {
        let mut status = 0;
        // SAFETY: `status` lives until the call returns.
        if unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) } == pid {
            break Some(status);
        }
        if Instant::now() > deadline {
            let _ = kill(pid, libc::SIGKILL);
            wait(pid);
            break None;
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let mut answer = Vec::new();
    let _ = reader.read_to_end(&mut answer);
    let Some(status) = ended else { return blocked("did not end") };
    match answer.split_first() {
        Some((code, detail)) => {
            let detail = String::from_utf8_lossy(detail).into_owned();
            match code {
                b'A' => allowed(detail),
                b'B' => blocked(detail),
                _ => absent(detail),
            }
        }
        None if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSYS => blocked("killed by SIGSYS"),
        None => absent(format!("ended without a word, status {status:#x}")),
    }
}

/// A pipe, high enough that an attempt can tell it from descriptors it was given.
fn pipe() -> (File, File) {
    let mut fds = [0; 2];
    // SAFETY: `fds` has room for two; what comes back is owned by the files alone.
    unsafe {
        assert_eq!(libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC), 0);
        let [r, w] = fds.map(|fd| {
            let high = libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, OWN_FDS);
            libc::close(fd);
            high
        });
        (File::from_raw_fd(r), File::from_raw_fd(w))
    }
}

/// From here on descriptors are the probe's own.
pub const OWN_FDS: i32 = 200;
