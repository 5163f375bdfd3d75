//! The `K` rows: each shown to work outside, as root, and not to work in a sandbox, in the three modes of the native back end.
//! What is tried is in `testkit::probe`, who tries it in `src/bin/probe`, and what is compared in `src/bin/hostile`.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Binaries that any user can reach, a state directory of that user's, and nothing left afterwards.
struct Bench {
    dir: PathBuf,
}

impl Bench {
    fn new(mode: &str, owner: u32) -> Self {
        let dir = std::env::temp_dir().join(format!("sandpool-hostile-{mode}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&dir);
        fs::create_dir_all(dir.join("state")).unwrap();
        fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
        let guest = Path::new(env!("CARGO_BIN_EXE_hostile")).with_file_name("sandpool-guest");
        assert!(guest.exists(), "`{}` is missing: run `cargo build -p sandpool-guest` first", guest.display());
        for program in [Path::new(env!("CARGO_BIN_EXE_hostile")), Path::new(env!("CARGO_BIN_EXE_probe")), &guest] {
            let copy = dir.join(program.file_name().unwrap());
            fs::copy(program, &copy).unwrap();
            fs::set_permissions(&copy, PermissionsExt::from_mode(0o755)).unwrap();
        }
        if is_root() {
            chown(dir.join("state"), Some(owner), Some(owner)).unwrap();
        }
        Self { dir }
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).to_str().unwrap().to_owned()
    }

    fn words(&self, mode: &str) -> Vec<String> {
        vec![self.path("hostile"), self.path("probe"), self.path("sandpool-guest"), self.path("state"), mode.into()]
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

fn is_root() -> bool {
    rustix::process::getuid().is_root()
}

#[allow(clippy::disallowed_methods, reason = "programs under test")]
fn run(program: &str, words: &[String]) -> Output {
    Command::new(program).args(words).output().unwrap()
}

#[track_caller]
fn assert_nothing_wrong(output: &Output) {
    let (said, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let wrong: Vec<&str> = said.lines().filter(|l| !l.starts_with("ok ")).collect();
    assert!(output.status.success(), "{}\n{errors}", wrong.join("\n"));
    assert!(said.lines().filter(|l| l.starts_with("ok ")).count() > 130, "{said}");
    keep(&said);
}

/// `make hostile` makes its report of this; otherwise it is seen with `--nocapture`.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn keep(said: &str) {
    eprintln!("{said}");
    let mode = said.split_whitespace().nth(1).unwrap_or_default().trim_end_matches(',').to_lowercase();
    if let Some(dir) = std::env::var_os("SANDPOOL_HOSTILE_REPORT") {
        fs::write(Path::new(&dir).join(format!("probe-{mode}.txt")), said).unwrap();
    }
}

/// A machine for CI has everything; elsewhere what is missing is said.
#[allow(clippy::disallowed_methods, reason = "a test's own switch")]
fn skip(why: &str) {
    assert!(std::env::var_os("CI").is_none(), "{why}");
    eprintln!("SKIP: {why}");
}

/// In a mount namespace with our own account files, so that the machine's are not touched; then as that user.
fn as_user(bench: &Bench, uid: u32, subordinate: bool, words: &[String]) -> Output {
    let account = format!("root:x:0:0::/:/bin/sh\nhostile:x:{uid}:{uid}::{}:/bin/sh\n", bench.path("state"));
    fs::write(bench.dir.join("passwd"), account).unwrap();
    fs::write(bench.dir.join("group"), format!("root:x:0:\nhostile:x:{uid}:\n")).unwrap();
    let range = if subordinate { "hostile:1400000000:65536\n" } else { "" };
    for name in ["subuid", "subgid"] {
        fs::write(bench.dir.join(name), range).unwrap();
    }
    let script = r#"
        cd "$1"; uid=$2; shift 2
        for f in passwd group subuid subgid; do
            if [ -e /etc/$f ]; then mount --bind $f /etc/$f; fi
        done
        exec setpriv --reuid $uid --regid $uid --clear-groups -- "$@""#;
    let mut all: Vec<String> = ["-m", "--propagation", "private", "sh", "-ec", script, "sh"].map(String::from).to_vec();
    all.extend([bench.dir.to_str().unwrap().to_owned(), uid.to_string()]);
    all.extend_from_slice(words);
    run("unshare", &all)
}

#[test]
fn nothing_of_the_kernel_rows_works_in_a_sandbox_made_by_root() {
    if !is_root() {
        skip("needs root");
        return;
    }
    let bench = Bench::new("root", 0);
    let words = bench.words("root");
    assert_nothing_wrong(&run(&words[0], &words[1..]));
}

#[test]
fn nor_in_one_made_by_a_user_with_subordinate_ids() {
    let able = ["/usr/bin/newuidmap", "/etc/subuid", "/etc/subgid"].iter().all(|p| Path::new(p).exists());
    if !is_root() || !able {
        skip("needs root to become an ordinary user, newuidmap, and /etc/subuid to be laid over");
        return;
    }
    let bench = Bench::new("sub", 61_234);
    assert_nothing_wrong(&as_user(&bench, 61_234, true, &bench.words("sub")));
}

#[test]
fn nor_in_one_made_by_a_user_alone() {
    if !is_root() {
        skip("needs root to become an ordinary user");
        return;
    }
    let bench = Bench::new("single", 61_235);
    assert_nothing_wrong(&as_user(&bench, 61_235, false, &bench.words("single")));
}

/// K46: a guest that sends descriptors. The host reads its stream without room for them, so the kernel drops them.
#[tokio::test]
async fn descriptors_sent_by_a_guest_never_arrive() {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::AsFd;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    use tokio::io::AsyncReadExt;

    let (mut host, guest) = tokio::net::UnixStream::pair().unwrap();
    let count = || fs::read_dir("/proc/self/fd").unwrap().count();
    let file = fs::File::open("/dev/null").unwrap();
    let before = count();
    for _ in 0..200 {
        let fds = [file.as_fd(); 100];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(100))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        sendmsg(&guest, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        let mut byte = [0; 16];
        assert_eq!(host.read(&mut byte).await.unwrap(), 1);
    }
    assert_eq!(count(), before);
}
