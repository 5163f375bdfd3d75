//! What a result says about data is true: files on a full disk (row W23), output of earlier calls (row W26).

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::host::StateDir;

use crate::support::stdio_of;

fn run(client: &mut Client, context: &str, code: &str) -> Value {
    client.call("run_code", json!({ "code": code, "context": context })).json()
}

fn context(client: &mut Client, name: &str) -> String {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let made = client.call("create_context", json!({ "name": name }));
        if !made.is_error() {
            return made.field("context");
        }
        // The pool is still being filled, on a machine under load.
        assert!(made.0.to_string().contains("not ready") && Instant::now() < until, "{}", made.0);
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// In Python that was forked and in JavaScript: neither stdout nor stderr of the later call has it.
#[test]
fn w26_what_an_earlier_call_left_running_does_not_print_into_a_later_one() {
    let state = StateDir::new("late");
    let mut client = Client::start(stdio_of("sandpool", &state.0, ""));
    let id = context(&mut client, "late");
    let begun = "import threading, sys\ngo = threading.Event()\n\
        def later():\n    go.wait(); print('forged'); print('forged too', file=sys.stderr)\n\
        t = threading.Thread(target=later); t.start(); print('begun')";
    assert_eq!(run(&mut client, &id, begun)["stdout"], "begun\n");
    run(&mut client, &id, "1");
    let next = run(&mut client, &id, "go.set(); t.join(); print('mine')");
    assert_eq!((&next["stdout"], &next["stderr"]), (&json!("mine\n"), &json!("")), "{next}");
    let heading = "[printed by what the call 2 before this one left running]\n";
    assert_eq!(next["late_output"], format!("{heading}forged\nforged too\n"), "{next}");
    let after = run(&mut client, &id, "print('alone')");
    assert_eq!((&after["stdout"], after.get("late_output")), (&json!("alone\n"), None), "{after}");
    client.finish();
}

/// The kernel is told to find an error in the volume, as it does when the disk below fails.
#[test]
fn w23_a_damaged_volume_is_reported_by_runs_and_by_tools_that_write() {
    if !rustix::process::getuid().is_root() {
        eprintln!("SKIP: volumes are on disk for root alone");
        return;
    }
    let state = StateDir::new("damaged");
    let mut client = Client::start(stdio_of("sandpool", &state.0, ""));
    let id = context(&mut client, "damaged");
    let device = run(&mut client, &id, "import os; d = os.stat('.').st_dev; print(os.major(d), os.minor(d))");
    let device = device["stdout"].as_str().unwrap().trim().to_owned();
    let Some(number) = device.strip_prefix("7 ") else { panic!("`{device}` is no loop device") };
    std::fs::write(format!("/sys/fs/ext4/loop{number}/trigger_fs_error"), "asked for by a test").unwrap();
    // The guest looks once a second.
    let told = (0..1000).map(|_| run(&mut client, &id, "import time; time.sleep(0.01); print(1 + 1)")).find(|told| {
        assert_eq!(told["stdout"], "2\n");
        told["late_output"].is_string()
    });
    let told = told.expect("a run that tells of the damage");
    let late = told["late_output"].as_str().unwrap_or_default();
    assert!(late.starts_with("[the volume of `/workspace` is damaged and can only be read"), "{told}");
    let refused = client.call("write_file", json!({ "path": "a", "content": "x", "context": id }));
    assert!(refused.is_error() && refused.0.to_string().contains("volume is damaged"), "{}", refused.0);
    client.finish();
}

/// A small disk, unmounted however the test ends.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf) -> Self {
        std::fs::create_dir(&at).unwrap();
        let size = Some(c"size=320m,mode=700");
        rustix::mount::mount("tmpfs", &at, "tmpfs", rustix::mount::MountFlags::empty(), size).unwrap();
        Self(at)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

const MEGABYTE: usize = 1 << 20;

fn pattern(number: usize) -> String {
    format!("file number {number:06}\n").repeat(MEGABYTE / 19 + 1)[..MEGABYTE].to_owned()
}

/// Two contexts fill a small disk. Every file that `write_file` has confirmed is then read past the cache.
#[test]
fn w23_a_file_that_was_reported_as_written_is_there_whoever_fills_the_disk() {
    if !rustix::process::getuid().is_root() {
        eprintln!("SKIP: volumes are on disk for root alone");
        return;
    }
    let state = StateDir::new("full");
    let disk = Disk::mount(state.0.join("state"));
    let settings = "keep_free_mb = 64\nready_max = 0\n[dialect.sandpool]\ndisk_mb = 128\npool_size = 1\n";
    let mut client = Client::start(stdio_of("sandpool", &state.0, settings));
    let (victim, attacker) = (context(&mut client, "victim"), context(&mut client, "attacker"));
    let other = context(&mut client, "other");
    let write = |client: &mut Client, n: usize| {
        let content = pattern(n);
        client.call("write_file", json!({ "path": format!("f{n}"), "content": content, "context": victim }))
    };
    let mut written: Vec<usize> = (0..4).filter(|n| !write(&mut client, *n).is_error()).collect();
    assert_eq!(written.len(), 4, "there is room at first");
    // Until nothing more can be had, which the budget hands out in pieces.
    let fill = "import os, time\nn = tries = 0\nwith open('big', 'wb', buffering=0) as f:\n    while tries < 40:\n        \
        try: n += f.write(bytes(1 << 20)); tries = 0\n        except OSError as e: tries += 1; time.sleep(0.05)\n\
        os.sync(); print(e.strerror if tries else '')";
    let calls =
        [&attacker, &other].map(|context| client.begin_call("run_code", json!({ "code": fill, "context": context })));
    let mut refused = None;
    let until = Instant::now() + Duration::from_secs(120);
    for n in 4.. {
        let answer = write(&mut client, n);
        match answer.is_error() {
            false => written.push(n),
            true => refused = Some(answer.0.to_string()),
        }
        if (refused.is_some() && calls.iter().all(|call| client.has_answer(*call)))
            || n == 150
            || Instant::now() > until
        {
            break;
        }
    }
    calls.iter().for_each(|call| drop(client.wait_call(*call)));
    let refused = refused.expect("128 files of 1 MB do not fit");
    assert!(refused.contains("space") || refused.contains("disk is full"), "{refused}");
    let check = format!(
        "import hashlib, mmap, os\nos.sync()\ndef direct(name):\n    fd = os.open(name, os.O_RDONLY | os.O_DIRECT); m = mmap.mmap(-1, 1 << 20)\n    \
         n = os.readv(fd, [m]); os.close(fd); return m[:n]\n\
         want = lambda n: (b'file number %06d\\n' % n * ((1 << 20) // 19 + 1))[:1 << 20]\n\
         print([n for n in {written:?} if direct(f'f{{n}}') != want(n)])"
    );
    let checked = run(&mut client, &victim, &check);
    assert_eq!(checked["stdout"], "[]\n", "of {} files: {checked}", written.len());

    // What is deleted elsewhere makes room here.
    run(&mut client, &attacker, "import os; os.remove('big')");
    run(&mut client, &victim, "import glob, os; [os.remove(f) for f in glob.glob('f*')]; None");
    let until = Instant::now() + Duration::from_secs(60);
    while write(&mut client, 1000).is_error() {
        assert!(Instant::now() < until, "no room although files were deleted");
        std::thread::sleep(Duration::from_millis(100));
    }
    client.finish();
    drop(disk);
}
