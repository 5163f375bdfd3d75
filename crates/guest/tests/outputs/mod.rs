//! Long output that is kept: what is in it, how it goes, and what the code that wrote it can do about it.

use proto::{FromGuest, GuestFailure, KeptOutput, ListOrder, MAX_KEPT, Root, RunStatus, ToGuest};

use crate::harness::*;

struct Keeping {
    scratch: Scratch,
    client: Client,
}

impl Keeping {
    fn new() -> Self {
        let scratch = Scratch::new();
        let mut client = Client::raw(guest::GuestConfig { outputs: scratch.path().to_owned(), ..config() });
        client.hello();
        Self { scratch, client }
    }

    fn exec(&mut self, script: &str, keep_over: u64) -> Ran {
        let call = self.client.exec_with(script, LONG, 1000, Some(keep_over), false);
        self.client.finish(call)
    }

    fn read(&mut self, name: &str) -> Result<Vec<u8>, GuestFailure> {
        let read = self.client.read_part(Root::Outputs, name, 0, u64::MAX, None);
        read.map(|(_, bytes)| bytes).map_err(|(failure, _)| failure)
    }

    fn names(&mut self) -> Vec<String> {
        let (entries, total) = self.client.list(Root::Outputs, "", 100, ListOrder::Newest);
        assert_eq!(entries.len() as u64, total);
        entries.into_iter().map(|entry| entry.path).collect()
    }

    fn nothing_on_disk(&self) {
        assert_eq!(std::fs::read_dir(self.scratch.path()).unwrap().count(), 0);
    }
}

fn kept(name: &str, bytes: u64) -> Option<KeptOutput> {
    Some(KeptOutput { name: name.into(), bytes })
}

#[test]
fn long_output_is_kept_whole_and_read_in_ranges() {
    let mut on = Keeping::new();
    let ran = on.exec("seq 40000; echo short >&2", 50_000);
    let whole: String = (1..=40_000).map(|i| format!("{i}\n")).collect();
    let end = ran.end.unwrap();
    assert_eq!((end.stdout_kept, end.stderr_kept), (kept("stdout-1.txt", whole.len() as u64), None));
    assert_eq!(end.stdout_bytes, whole.len() as u64);
    assert_eq!(on.read("stdout-1.txt").unwrap(), whole.as_bytes());
    let (start, part) = on.client.read_part(Root::Outputs, "stdout-1.txt", 100_000, 500, None).unwrap();
    assert_eq!((start.0, &part[..]), (whole.len() as u64, &whole.as_bytes()[100_000..100_500]));
    assert_eq!(
        on.client.read_part(Root::Outputs, "stdout-1.txt", 0, 1, Some(9)).unwrap_err().0,
        GuestFailure::TooLarge
    );

    let ran = on.exec("seq 40000 >&2", 50_000);
    assert_eq!(ran.end.unwrap().stderr_kept, kept("stderr-2.txt", whole.len() as u64));
    assert_eq!(on.names(), ["stderr-2.txt", "stdout-1.txt"]);
    let (entries, total) = on.client.list(Root::Outputs, ".", 1, ListOrder::Path);
    assert_eq!((entries[0].path.as_str(), entries[0].size, total), ("stderr-2.txt", whole.len() as u64, 2));
    on.nothing_on_disk();
    on.client.nothing_left();
}

#[test]
fn only_what_is_longer_than_asked_for_is_kept() {
    let mut on = Keeping::new();
    for (script, over) in [("printf 12345", 5), ("head -c 100000 /dev/zero", 100_000), ("true", 0)] {
        assert_eq!(on.exec(script, over).end.unwrap().stdout_kept, None, "{script}");
    }
    assert_eq!(on.exec("printf 123456", 5).end.unwrap().stdout_kept, kept("stdout-1.txt", 6));
    assert_eq!(on.exec("head -c 100001 /dev/zero", 100_000).end.unwrap().stdout_kept, kept("stdout-2.txt", 100_001));
    let call = on.client.exec("seq 40000", LONG, 1000);
    assert_eq!(on.client.finish(call).end.unwrap().stdout_kept, None);
    assert_eq!(on.names(), ["stdout-2.txt", "stdout-1.txt"]);
}

#[test]
fn of_a_flood_the_beginning_is_kept() {
    let mut on = Keeping::new();
    let end = on.exec(&format!("echo first; head -c {} /dev/zero", MAX_KEPT + 1000), 10).end.unwrap();
    assert_eq!((end.stdout_bytes, end.stdout_kept), (MAX_KEPT + 1006, kept("stdout-1.txt", MAX_KEPT)));
    let (start, bytes) = on.client.read_part(Root::Outputs, "stdout-1.txt", 0, 6, None).unwrap();
    assert_eq!((start.0, &bytes[..]), (MAX_KEPT, &b"first\n"[..]));
}

#[test]
fn a_cell_that_times_out_or_dies_has_its_output_kept() {
    let mut on = Keeping::new();
    on.client.started(1, &exec_fake());
    let mut ended = |code: &str, after_ms| {
        let deadline = proto::Deadline { after_ms, grace_ms: 50 };
        let (code, env) = (format!("out('x' * 20_000)\n{code}"), Default::default());
        let run = ToGuest::Run { kernel: 1, code, env, deadline, forward_bytes: 10, keep_over: Some(100) };
        let call = on.client.send(&run);
        on.client.finish(call).end.unwrap()
    };
    let end = ended("pass", 15_000);
    assert_eq!((end.status, end.stdout_kept), (RunStatus::Ok, kept("stdout-1.txt", 20_000)));
    let end = ended("time.sleep(60)", 300);
    assert_eq!(
        (end.status, end.stdout_kept),
        (RunStatus::TimedOut { state_kept: false }, kept("stdout-2.txt", 20_000))
    );
    assert_eq!(on.read("stdout-2.txt").unwrap(), vec![b'x'; 20_000]);
}

#[test]
fn nothing_that_is_planted_is_read_and_nothing_is_written_from_outside() {
    let mut on = Keeping::new();
    let planted = on.scratch.path().join("stdout-1.txt");
    std::os::unix::fs::symlink("/etc/passwd", &planted).unwrap();
    std::fs::write(on.scratch.path().join("stdout-2.txt"), "forged").unwrap();
    let names = ["stdout-1.txt", "stdout-2.txt", "", ".", "..", "../x", "/etc/passwd", "/proc/self/environ", "a\0b"];
    for name in names {
        assert_eq!(on.read(name), Err(GuestFailure::NotFound), "{name:?}");
        let (root, path) = (Root::Outputs, name.to_owned());
        let written = on.client.call(&ToGuest::WriteFile { root, path, size: 0 });
        assert!(
            matches!(written, FromGuest::Failed { failure: GuestFailure::InvalidPath, .. }),
            "{name:?}: {written:?}"
        );
    }
    assert_eq!(on.names(), [""; 0]);
    for path in ["..", "/", "x"] {
        let list =
            ToGuest::ListFiles { root: Root::Outputs, path: path.into(), max_entries: 9, order: ListOrder::Path };
        let listed = on.client.call(&list);
        assert!(matches!(listed, FromGuest::Failed { failure: GuestFailure::NotFound, .. }), "{path}: {listed:?}");
    }
    let end = on.exec("seq 10000", 10).end.unwrap();
    assert_eq!(end.stdout_kept, kept("stdout-1.txt", 48_894));
    assert!(on.read("stdout-1.txt").unwrap().starts_with(b"1\n2\n"));
    assert!(planted.is_symlink());
    on.client.nothing_left();
}

#[test]
fn the_code_that_writes_never_sees_a_file_to_change() {
    let mut on = Keeping::new();
    let dir = on.scratch.path().display().to_string();
    let end = on.exec(&format!("seq 20000; ls -A {dir} >&2; sleep 0.1; ls -A {dir} >&2"), 10).end.unwrap();
    assert_eq!((end.stdout_kept, end.stderr_bytes), (kept("stdout-1.txt", 108_894), 0));
    on.nothing_on_disk();
}

#[test]
fn a_place_that_cannot_be_written_costs_only_the_keeping() {
    let mut on = Keeping::new();
    let dir = on.scratch.path().to_owned();
    let mut run = || {
        let ran = on.exec("seq 20000", 10);
        assert_eq!(ran.status(), &RunStatus::Ended { how: proto::Ended::Exited { code: 0 } });
        assert_eq!(ran.end.as_ref().unwrap().stdout_bytes, 108_894);
        ran.end.unwrap().stdout_kept
    };
    std::fs::remove_dir(&dir).unwrap();
    assert_eq!(run(), None);
    std::fs::write(&dir, "a file").unwrap();
    assert_eq!(run(), None);
    std::fs::remove_file(&dir).unwrap();
    std::os::unix::fs::symlink("/proc/self", &dir).unwrap();
    assert_eq!(run(), None);
    std::fs::remove_file(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    assert_eq!(run(), kept("stdout-1.txt", 108_894));
}
