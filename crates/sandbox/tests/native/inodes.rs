//! What sandboxes have in common with each other and with the host: nothing that can be watched or locked, and few figures.

use super::*;

fn with_attacker() -> SandboxSpec {
    let mut spec = spec();
    spec.files.push(("/opt/sandpool/inodes.py".into(), include_bytes!("inodes.py").to_vec()).into());
    spec
}

const ATTACKER: &str = "python3 -I -B /opt/sandpool/inodes.py";

/// A directory, a program in it, a library's directory, a file of `/etc`, a file of a runtime: what every sandbox shows of the host.
fn shown(runtime: &Path) -> Vec<String> {
    let etc = ["/etc/services", "/etc/protocols", "/etc/mime.types", "/etc/ssl/openssl.cnf"];
    let etc = etc.into_iter().find(|path| Path::new(path).exists());
    let paths = ["/usr/bin", "/usr/bin/cksum", runtime.to_str().unwrap()];
    paths.into_iter().chain(etc).map(str::to_owned).collect()
}

/// What anybody does who uses a file.
fn use_all(paths: &[String]) -> String {
    let used = paths.iter().filter(|path| Path::new(path).is_file() || path.starts_with("/dev"));
    let read = used.map(|path| format!("head -c 1 {path} > /dev/null")).collect::<Vec<_>>().join("; ");
    format!("cksum /opt/sandpool/inodes.py > /dev/null; ls /usr/bin > /dev/null; {read}")
}

#[allow(clippy::disallowed_methods, reason = "the host's own use of the files")]
fn on_host(line: &str) {
    assert!(Command::new("/bin/sh").args(["-c", line]).status().unwrap().success());
}

fn lock(path: &str) -> Option<fs::File> {
    use rustix::fs::{FlockOperation, flock};
    let file = fs::File::open(path).unwrap();
    flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok().then_some(file)
}

/// W06, W07. What is watched and locked in one sandbox is another file for its neighbour and for the host.
#[tokio::test]
async fn w06_w07_what_one_sandbox_watches_and_locks_is_its_own_alone() {
    if !root() {
        return;
    }
    let place = Place::new("inodes");
    let runtime = place.0.join("runtime");
    fs::copy("/bin/sleep", &runtime).unwrap();
    let native = start(&place.0).await;
    let spec = SandboxSpec { runtime: vec![runtime.clone()], ..with_attacker() };
    let (one, other) = (native.create(&spec).await.unwrap(), native.create(&spec).await.unwrap());
    // As root a sandbox has device nodes of its own, too.
    let mut targets = shown(&runtime);
    targets.extend(["/dev/full", "/dev/zero"].map(str::to_owned));
    let words = targets.join(" ");

    let mut stream = tokio::io::BufReader::new(one.connect().await.unwrap());
    stream.write_all(format!("{ATTACKER} watch {words}\n").as_bytes()).await.unwrap();
    let mut said = String::new();
    tokio::io::AsyncBufReadExt::read_line(&mut stream, &mut said).await.unwrap();
    assert_eq!(said, "watching\n");
    assert_eq!(sh(&*other, &use_all(&targets)).await, "");
    assert_eq!(sh(&*other, &format!("{ATTACKER} lock {words}")).await, "");
    on_host(&use_all(&targets).replace("/opt/sandpool/inodes.py", runtime.to_str().unwrap()));
    for path in &targets {
        assert!(lock(path).is_some(), "`{path}` is locked on the host");
    }
    // A program that runs inside can be written on the host.
    assert_eq!(sh(&*other, &format!("{} 600 > /dev/null 2>&1 &", runtime.display())).await, "");
    assert!(fs::OpenOptions::new().write(true).open(&runtime).is_ok());
    assert_eq!(sh(&*one, ": > /workspace/stop").await, "");
    let mut said = String::new();
    stream.read_to_string(&mut said).await.unwrap();
    assert_eq!(said, format!("others:\nown: {words}\n"));
    native.shutdown().await;
}

/// W06. An overlay ends where another file system is mounted: that one gets its own.
#[tokio::test]
async fn w06_what_is_mounted_below_a_runtime_is_seen_and_has_inodes_of_the_sandboxs_own_too() {
    if !root() {
        return;
    }
    let place = Place::new("mounted-runtime");
    let runtime = place.0.join("runtime");
    let below = runtime.join("my files");
    let _mounted = Mounted::new("tmpfs", &below, 0);
    fs::write(below.join("file"), "seen").unwrap();
    let native = start(&place.0).await;
    let sandbox = native.create(&SandboxSpec { runtime: vec![runtime.clone()], ..spec() }).await.unwrap();
    assert_eq!(sandbox.isolation().missing, Vec::<String>::new());
    let _lock = lock(below.join("file").to_str().unwrap()).unwrap();
    let line = format!("cd '{}' && cat file && flock -n file echo ' free' && echo x > file", below.display());
    let said = sh(&*sandbox, &line).await;
    assert!(said.starts_with("seen free\n") && said.contains("Read-only file system"), "{said}");
    native.shutdown().await;
}

/// W06, W07 for ordinary users: the host holds every lock there is, and a sandbox takes it all the same. Device nodes alone are the
/// host's: a user cannot make any.
#[test]
fn w06_w07_an_ordinary_users_sandbox_has_inodes_of_its_own_too() {
    if !root() {
        return;
    }
    let place = place_for_all("user-inodes");
    let targets: Vec<String> = shown(Path::new("/usr/bin/env"));
    let locks: Vec<_> = targets.iter().map(|path| lock(path).expect("nobody else has it")).collect();
    let lines: Vec<String> = targets.iter().map(|path| format!("flock -n {path} echo {path}")).collect();
    let kinds =
        "stat -f -c %T /usr /etc/ld.so.cache /etc/ssl/certs | sort -u; cat /proc/sys/kernel/random/boot_id /proc/locks";
    for mode in modes() {
        let state = place.0.join(mode);
        let words = ["serve", mode, state.to_str().unwrap()];
        let lines: Vec<&str> = lines.iter().map(String::as_str).chain([kinds]).collect();
        let Some(output) = as_user(&place, &[&words[..], &lines[..]].concat()) else { return };
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        let said: Vec<&str> = said.lines().skip(1).collect();
        let (taken, rest) = said.split_at(targets.len());
        assert_eq!(taken, targets, "{said:?}");
        assert_eq!(rest[0], "overlayfs");
        assert_ne!(rest[1], boot_id());
        assert_eq!(rest.len(), 2, "{said:?}");
    }
    drop(locks);
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned()
}

/// W11, W15, W17.
#[tokio::test]
async fn w11_w15_w17_a_sandbox_learns_little_about_the_host_and_takes_few_of_its_terminals() {
    if !root() {
        return;
    }
    let place = Place::new("figures");
    let native = start(&place.0).await;
    let spec = with_attacker();
    let (one, other) = (native.create(&spec).await.unwrap(), native.create(&spec).await.unwrap());
    let id = "cat /proc/sys/kernel/random/boot_id";
    let ids = BTreeSet::from([sh(&*one, id).await, sh(&*other, id).await, boot_id() + "\n"]);
    assert_eq!(ids.iter().map(String::len).collect::<Vec<_>>(), [37; 3], "{ids:?}");
    // The file cannot be written, and who reads it twice reads the same.
    assert!(ids.contains(&sh(&*one, id).await));

    assert_eq!(
        sh(&*one, &format!("{ATTACKER} ask /usr/bin/cksum")).await,
        "fiemap ENOTTY\nnowait ENOTSUP\npreadv2 works\ndontneed works\nmincore ENOSYS\npageout EINVAL\nmerge EINVAL\ncachestat ENOSYS\nlease EINVAL\nnotify EINVAL\n\
         handle EPERM\nfanotify EPERM\n"
    );
    let held = "flock -x /workspace sh -c 'cat /proc/locks'; cat /proc/mdstat /proc/cgroups 2> /dev/null; true";
    assert_eq!(sh(&*one, held).await, "");
    let still =
        "cat /proc/vmstat /proc/sys/fs/file-nr /proc/sys/fs/inode-nr /proc/sys/fs/inode-state /proc/sys/kernel/pty/nr";
    assert_eq!(sh(&*one, still).await, sh(&*other, still).await);
    // `/dev/loop7` is said to be there, and is not.
    assert_eq!(
        sh(&*one, "grep -c -e devtmpfs -e ' 8:' -e ' 25[0-9]:' /proc/self/mountinfo").await.lines().next(),
        Some("0")
    );

    assert_eq!(sh(&*one, &format!("{ATTACKER} terminals")).await, "8 ENOSPC\n");
    native.shutdown().await;
}
