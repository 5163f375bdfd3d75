//! Files that the host writes, reads and lists.

use std::os::unix::fs::{PermissionsExt, symlink};

use proto::{FileKind, FoundLines, FromGuest, GuestFailure, ListOrder, Root, SearchBound, SearchQuery, ToGuest};

use crate::harness::*;

#[test]
fn files_are_written_read_and_listed_beneath_the_root() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|i| (i * 7) as u8).collect();
    let call =
        client.send(&ToGuest::WriteFile { root: Root::Workspace, path: "a/b/c.bin".into(), size: bytes.len() as u64 });
    client.send_file(call, &bytes);
    assert_eq!(client.answer(call), FromGuest::Written { size: bytes.len() as u64 });
    let absolute = root.path().join("empty").to_str().unwrap().to_owned();
    assert_eq!(
        client.call(&ToGuest::WriteFile { root: Root::Workspace, path: absolute, size: 0 }),
        FromGuest::Written { size: 0 }
    );

    assert_eq!(client.read_file("a/b/c.bin", u64::MAX), Ok(bytes));
    assert_eq!(client.read_file("empty", 0), Ok(Vec::new()));
    assert_eq!(client.read_file("a/b/c.bin", 10).unwrap_err().0, GuestFailure::TooLarge);
    assert_eq!(client.read_file("none", 10).unwrap_err().0, GuestFailure::NotFound);
    assert_eq!(client.read_file("a", 10).unwrap_err().0, GuestFailure::InvalidPath);
    assert_eq!(client.read_file("/etc/passwd", 10).unwrap_err().0, GuestFailure::InvalidPath);
    assert_eq!(client.read_file("a/../../x", 10).unwrap_err().0, GuestFailure::InvalidPath);
    std::os::unix::fs::symlink("/etc/passwd", root.path().join("out")).unwrap();
    assert_eq!(client.read_file("out", 10_000).unwrap_err().0, GuestFailure::InvalidPath);

    let listed = |client: &mut Client, path: &str, max_entries| {
        let (entries, total) = client.list(Root::Workspace, path, max_entries, ListOrder::Path);
        (entries.into_iter().map(|e| (e.path, e.kind)).collect::<Vec<_>>(), total)
    };
    let all = [
        ("a", FileKind::Directory),
        ("a/b", FileKind::Directory),
        ("a/b/c.bin", FileKind::File),
        ("empty", FileKind::File),
        ("out", FileKind::Symlink),
    ];
    let all = all.map(|(path, kind)| (path.to_owned(), kind));
    assert_eq!(listed(&mut client, "", 100), (all.to_vec(), 5));
    assert_eq!(listed(&mut client, root.path().to_str().unwrap(), 2), (all[..2].to_vec(), 5));
    assert_eq!(listed(&mut client, "a/b", 9), (vec![("c.bin".to_owned(), FileKind::File)], 1));
    client.nothing_left();
    client.bye();
}

#[test]
fn bytes_for_a_refused_file_come_to_nothing() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    let call = client.send(&ToGuest::WriteFile { root: Root::Workspace, path: "../x".into(), size: 300_000 });
    client.send_file(call, &[0; 300_000]);
    assert!(matches!(client.answer(call), FromGuest::Failed { failure: GuestFailure::InvalidPath, .. }));
    client.nothing_left();
    // A host that goes away in the middle leaves nothing.
    let call = client.send(&ToGuest::WriteFile { root: Root::Workspace, path: "half".into(), size: 300_000 });
    client.send_file(call, &[0; 100_000]);
    client.call(&ToGuest::Ping);
    client.bye();
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
}

#[test]
fn each_root_is_its_own() {
    let (root, data) = (Scratch::new(), Scratch::new());
    let (workspace, data_dir) = (root.path().to_owned(), data.path().to_owned());
    let mut client =
        Client::raw(guest::GuestConfig { workspace: workspace.clone(), data: data_dir.clone(), ..config() });
    client.hello();
    let write = |client: &mut Client, root, path: &str| {
        let call = client.send(&ToGuest::WriteFile { root, path: path.into(), size: 3 });
        client.send_file(call, b"abc");
        client.answer(call)
    };
    let inside = |dir: &std::path::Path, path: &str| dir.join(path).to_str().unwrap().to_owned();
    assert_eq!(write(&mut client, Root::Data, "d/x"), FromGuest::Written { size: 3 });
    assert_eq!(write(&mut client, Root::Data, &inside(&data_dir, "y")), FromGuest::Written { size: 3 });
    assert_eq!(std::fs::read(data_dir.join("d/x")).unwrap(), b"abc");
    assert_eq!(std::fs::read_dir(&workspace).unwrap().count(), 0);
    std::os::unix::fs::symlink(&workspace, data_dir.join("out")).unwrap();
    std::fs::write(workspace.join("secret"), "s").unwrap();
    for path in ["out/secret", "../x", "d/../../x", "\0", &inside(&workspace, "secret"), "/etc/passwd"] {
        let read = client.read_part(Root::Data, path, 0, 9, None);
        assert_eq!(read.unwrap_err().0, GuestFailure::InvalidPath, "{path}");
        let written = write(&mut client, Root::Data, path);
        assert!(matches!(written, FromGuest::Failed { failure: GuestFailure::InvalidPath, .. }), "{path}: {written:?}");
    }
    assert_eq!(client.read_part(Root::Workspace, "d/x", 0, 9, None).unwrap_err().0, GuestFailure::NotFound);
    assert_eq!(client.list(Root::Data, "", 9, ListOrder::Newest).1, 2);
    client.nothing_left();
}

#[test]
fn a_file_is_read_in_ranges_and_known_again() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    let bytes: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
    std::fs::write(root.path().join("f"), &bytes).unwrap();
    let mut read = |offset, length| client.read_part(Root::Workspace, "f", offset, length, None).unwrap();
    let (start, all) = read(0, u64::MAX);
    assert_eq!((start.0, &all), (200_000, &bytes));
    for (offset, length) in [(0, 0), (0, 1), (65_535, 70_000), (199_999, 5), (200_000, 5), (u64::MAX, u64::MAX)] {
        let from = bytes.len().min(usize::try_from(offset).unwrap());
        let to = bytes.len().min(from.saturating_add(usize::try_from(length).unwrap()));
        assert_eq!(read(offset, length), (start, bytes[from..to].to_vec()), "{offset} {length}");
    }
    // Another file of the same name and size, then the same one changed.
    let other = root.path().join("other");
    std::fs::write(&other, &bytes).unwrap();
    std::fs::rename(&other, root.path().join("f")).unwrap();
    let (replaced, _) = read(0, 1);
    assert!(replaced.0 == start.0 && replaced.2 != start.2, "{start:?} {replaced:?}");
    let file = std::fs::OpenOptions::new().write(true).open(root.path().join("f")).unwrap();
    file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1, 5)).unwrap();
    assert_eq!(read(0, 1).0, (200_000, 1_000_000_005, replaced.2));
    assert_eq!(client.read_part(Root::Workspace, "f", 0, 1, Some(199_999)).unwrap_err().0, GuestFailure::TooLarge);
    client.nothing_left();
}

#[test]
fn a_large_file_costs_no_memory() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    std::fs::File::create(root.path().join("f")).unwrap().set_len(2 << 30).unwrap();
    let resident_kb = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim_end_matches("kB").trim().parse::<u64>().unwrap()
    };
    let (before, mut most) = (resident_kb(), 0);
    for at in (0..2048u64).step_by(8) {
        let (start, bytes) = client.read_part(Root::Workspace, "f", at << 20, 1 << 20, None).unwrap();
        assert_eq!((start.0, bytes.len()), (2 << 30, 1 << 20));
        most = most.max(resident_kb());
    }
    assert!(most < before + (24 << 10), "{before} kB, then {most} kB");
}

#[test]
fn the_newest_files_come_first() {
    let root = Scratch::new();
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    std::fs::create_dir_all(root.path().join("d/e")).unwrap();
    for (path, nanos) in [("old", 1), ("d/e/new", 9), ("d/mid", 5), ("twin", 5), ("z", 2)] {
        let file = std::fs::File::create(root.path().join(path)).unwrap();
        file.set_modified(std::time::UNIX_EPOCH + std::time::Duration::new(1000, nanos)).unwrap();
    }
    std::os::unix::fs::symlink("old", root.path().join("link")).unwrap();
    let mut newest = |path, most| {
        let (entries, total) = client.list(Root::Workspace, path, most, ListOrder::Newest);
        (entries.into_iter().map(|e| e.path).collect::<Vec<_>>(), total)
    };
    assert_eq!(newest("", 100), (["d/e/new", "d/mid", "twin", "z", "old"].map(String::from).to_vec(), 5));
    assert_eq!(newest("", 2), (["d/e/new", "d/mid"].map(String::from).to_vec(), 5));
    assert_eq!(newest("d", 9), (["e/new", "mid"].map(String::from).to_vec(), 2));
}

// ---- both streams, several commands, one cell's environment

fn guest_in(root: &Scratch) -> Client {
    let mut client = Client::raw(guest::GuestConfig { workspace: root.path().to_owned(), ..config() });
    client.hello();
    client
}

/// Names of the files in a directory, sorted.
fn names(root: &Scratch) -> Vec<String> {
    let entries = std::fs::read_dir(root.path()).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn a_streamed_file_appears_whole_or_not_at_all() {
    let root = Scratch::new();
    let mut client = guest_in(&root);
    let stream = |path: &str| ToGuest::StreamFile { root: Root::Workspace, path: path.into(), max_size: 200_000 };
    let call = client.send(&stream("d/whole"));
    client.send_file(call, &[1; 100_000]);
    client.call(&ToGuest::Ping);
    assert_eq!(names(&root), ["d"]);
    client.send_file(call, &[2; 100_000]);
    assert_eq!(client.read_file("d/whole", u64::MAX).unwrap_err().0, GuestFailure::NotFound);
    client.send_as(call, &ToGuest::EndFile);
    assert_eq!(client.answer(call), FromGuest::Written { size: 200_000 });
    assert_eq!(client.read_file("d/whole", u64::MAX).unwrap().len(), 200_000);

    let call = client.send(&stream("empty"));
    client.send_as(call, &ToGuest::EndFile);
    assert_eq!(client.answer(call), FromGuest::Written { size: 0 });

    let call = client.send(&stream("aborted"));
    client.send_file(call, &[1; 100_000]);
    client.interrupt(call);
    // What still comes for it is ignored.
    client.send_file(call, &[1; 100_000]);
    client.send_as(call, &ToGuest::EndFile);
    client.call(&ToGuest::Ping);
    for path in ["../x", "/etc/x", "d", ""] {
        let refused = client.call(&stream(path));
        assert!(matches!(refused, FromGuest::Failed { failure: GuestFailure::InvalidPath, .. }), "{path}: {refused:?}");
    }
    client.nothing_left();
    assert_eq!(names(&root), ["d", "empty"]);
    // An ordinary file does not end with the message.
    let call = client.send(&ToGuest::WriteFile { root: Root::Workspace, path: "sized".into(), size: 2 });
    client.send_file(call, b"a");
    client.send_as(call, &ToGuest::EndFile);
    client.send_file(call, b"b");
    assert_eq!(client.answer(call), FromGuest::Written { size: 2 });
}

fn edit(client: &mut Client, path: &str, old: &str, new: &str, all: bool) -> FromGuest {
    let (root, path, old, new) = (Root::Workspace, path.into(), old.into(), new.into());
    client.call(&ToGuest::EditFile { root, path, old, new, all, max_size: 1 << 20 })
}

#[test]
fn an_edit_replaces_exactly_one_place_or_all_and_keeps_the_mode() {
    let root = Scratch::new();
    let path = root.path().join("a.sh");
    std::fs::write(&path, "one\ntwo two\nthree\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o750)).unwrap();
    let mut client = guest_in(&root);
    let edited =
        |found, replaced, lines: &[u64], size| FromGuest::Edited { found, replaced, lines: lines.into(), size };
    assert_eq!(edit(&mut client, "a.sh", "one\n", "1\n", false), edited(1, 1, &[1], 16));
    assert_eq!(edit(&mut client, "a.sh", "two", "2", false), edited(2, 0, &[2, 2], 16));
    assert_eq!(edit(&mut client, "a.sh", "four", "4", false), edited(0, 0, &[], 16));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\ntwo two\nthree\n");
    assert_eq!(edit(&mut client, "a.sh", "two", "", true), edited(2, 2, &[2, 2], 10));
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "1\n \nthree\n");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o750);
    assert_eq!(names(&root), ["a.sh"], "no other file remains");
}

#[test]
fn an_edit_touches_nothing_that_is_not_text_or_lies_elsewhere() {
    let (root, outside) = (Scratch::new(), Scratch::new());
    std::fs::write(outside.path().join("secret"), "secret").unwrap();
    std::fs::write(root.path().join("latin"), b"\xe9t\xe9 a").unwrap();
    std::fs::write(root.path().join("binary"), b"a\0b").unwrap();
    std::fs::write(root.path().join("many"), "a".repeat(1 << 20)).unwrap();
    std::fs::write(root.path().join("large"), "a".repeat((1 << 20) + 1)).unwrap();
    std::fs::create_dir(root.path().join("dir")).unwrap();
    symlink(outside.path().join("secret"), root.path().join("link")).unwrap();
    symlink(outside.path(), root.path().join("out")).unwrap();
    symlink("nowhere", root.path().join("dangling")).unwrap();
    symlink("many", root.path().join("inside")).unwrap();
    let mut client = guest_in(&root);
    let mut why = |path: &str, old: &str, new: &str| match edit(&mut client, path, old, new, true) {
        FromGuest::Failed { failure, .. } => failure,
        other => panic!("{path}: {other:?}"),
    };
    for path in ["latin", "binary", "dir", "link", "out/secret", "inside", "../x", "/etc/passwd", ""] {
        assert_eq!(why(path, "a", "b"), GuestFailure::InvalidPath, "{path}");
    }
    for path in ["dangling", "none"] {
        assert_eq!(why(path, "a", "b"), GuestFailure::NotFound, "{path}");
    }
    assert_eq!(why("large", "a", "b"), GuestFailure::TooLarge);
    // A terabyte is not made in order to learn that it is too large.
    assert_eq!(why("many", "a", &"b".repeat(1 << 20)), GuestFailure::TooLarge);
    assert_eq!(why("many", "", "b"), GuestFailure::InvalidPath);
    assert_eq!(std::fs::read_to_string(outside.path().join("secret")).unwrap(), "secret");
    assert_eq!(std::fs::read_to_string(root.path().join("many")).unwrap(), "a".repeat(1 << 20));
}

fn query() -> SearchQuery {
    SearchQuery { glob: None, text: None, regex: false, max_lines: 100, max_bytes: 10_000, after_ms: 60_000 }
}

fn search(client: &mut Client, path: &str, query: SearchQuery) -> FoundLines {
    match client.call(&ToGuest::SearchFiles { root: Root::Workspace, path: path.into(), query }) {
        FromGuest::Found { found } => found,
        other => panic!("{other:?}"),
    }
}

fn shown(found: &FoundLines) -> Vec<String> {
    found.lines.iter().map(|line| format!("{}:{}:{}", line.path, line.line, line.text)).collect()
}

fn project() -> Scratch {
    let root = Scratch::new();
    let long = format!("{}needle{}", "x".repeat(100_000), "y".repeat(1000));
    for (path, content) in [
        ("a.py", "import os\r\nneedle = 1\r\n"),
        ("src/b.py", "no\n\nNeedle, needle and needle"),
        ("src/deep/c.ts", "let needle;\n"),
        ("src/long.txt", &long),
        ("binary.bin", "needle\0"),
        (".git/config", "needle"),
        ("node_modules/x/index.js", "needle"),
        ("src/node_modules/y.js", "needle"),
    ] {
        let path = root.path().join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, content).unwrap();
    }
    symlink("/etc", root.path().join("out")).unwrap();
    symlink("a.py", root.path().join("again.py")).unwrap();
    root
}

#[test]
fn a_search_finds_lines_and_names_and_leaves_out_what_tools_made() {
    let root = project();
    let mut client = guest_in(&root);
    let text = |text: &str| SearchQuery { text: Some(text.into()), ..query() };
    let found = search(&mut client, "", text("needle"));
    let long = format!("…{}needle{}…", "x".repeat(60), "y".repeat(174));
    assert_eq!(
        shown(&found),
        [
            "a.py:2:needle = 1".to_owned(),
            "src/b.py:3:Needle, needle and needle".into(),
            "src/deep/c.ts:1:let needle;".into(),
            format!("src/long.txt:1:{long}"),
        ]
    );
    assert_eq!((found.files, found.skipped, found.stopped), (4, 1, None));
    assert_eq!(shown(&search(&mut client, "src/deep", text("needle"))), ["c.ts:1:let needle;"]);
    // A file can be searched alone, and so can what is left out elsewhere.
    assert_eq!(shown(&search(&mut client, "a.py", text("needle"))), [":2:needle = 1"]);
    assert_eq!(shown(&search(&mut client, "src/node_modules", text("needle"))), ["y.js:1:needle"]);
    // A text is no pattern, unless it is said to be one.
    assert_eq!(shown(&search(&mut client, "", text("n.edle"))), Vec::<String>::new());
    let regex = SearchQuery { glob: Some("*.{py,ts}".into()), regex: true, ..text(r"(?i)^needle\b") };
    assert_eq!(shown(&search(&mut client, "", regex)), ["a.py:2:needle = 1", "src/b.py:3:Needle, needle and needle"]);
    let names = |glob: &str| SearchQuery { glob: Some(glob.into()), ..query() };
    assert_eq!(shown(&search(&mut client, "", names("*.py"))), ["a.py:0:", "src/b.py:0:"]);
    assert_eq!(shown(&search(&mut client, "", names("src/**/*.ts"))), ["src/deep/c.ts:0:"]);
    assert_eq!(search(&mut client, "", query()).lines.len(), 5);
    client.nothing_left();
}

#[test]
fn a_search_is_bounded_and_stays_inside() {
    let root = project();
    let mut client = guest_in(&root);
    let all = SearchQuery { text: Some("e".into()), ..query() };
    let few = search(&mut client, "", SearchQuery { max_lines: 1, ..all.clone() });
    assert_eq!((few.lines.len(), few.stopped), (1, Some(SearchBound::Results)));
    let short = search(&mut client, "", SearchQuery { max_bytes: 60, ..all.clone() });
    assert_eq!((short.lines.len(), short.stopped), (1, Some(SearchBound::Results)));
    let late = search(&mut client, "", SearchQuery { after_ms: 0, ..all.clone() });
    assert_eq!((late.lines.len(), late.stopped), (0, Some(SearchBound::Time)));
    for path in ["out", "..", "/etc", "src/../..", "none/x", "a.py/x"] {
        let refused =
            client.call(&ToGuest::SearchFiles { root: Root::Workspace, path: path.into(), query: all.clone() });
        let inside =
            matches!(refused, FromGuest::Failed { failure: GuestFailure::InvalidPath | GuestFailure::NotFound, .. });
        assert!(inside, "{path}: {refused:?}");
    }
    for (glob, text) in [(None, Some("(")), (None, Some("(a{1000}){1000}")), (Some("{"), None)] {
        let (glob, text) = (glob.map(str::to_owned), text.map(str::to_owned));
        let query = SearchQuery { glob, text, regex: true, ..query() };
        let refused = client.call(&ToGuest::SearchFiles { root: Root::Workspace, path: "".into(), query });
        assert!(matches!(refused, FromGuest::Failed { failure: GuestFailure::Pattern, .. }), "{refused:?}");
    }
    client.nothing_left();
}

/// A search that needs minutes: each piece of a line takes long, because the automaton is as large as one may be.
fn hostile(after_ms: u64) -> ToGuest {
    let text = Some("needle|(?:a?){3000}z".into());
    let query = SearchQuery { text, regex: true, after_ms, ..query() };
    ToGuest::SearchFiles { root: Root::Workspace, path: "".into(), query }
}

fn hostile_tree() -> Scratch {
    let root = Scratch::new();
    std::fs::write(root.path().join("a"), "the needle\n").unwrap();
    std::fs::write(root.path().join("b"), "a".repeat(8 << 20)).unwrap();
    root
}

#[test]
fn searches_that_take_long_delay_nobody_and_can_be_cancelled() {
    let root = hostile_tree();
    let mut client = guest_in(&root);
    let mut calls: Vec<u64> = (0..8).map(|_| client.send(&hostile(60_000))).collect();
    let busy = client.call(&hostile(60_000));
    assert!(matches!(busy, FromGuest::Failed { failure: GuestFailure::Busy, .. }), "{busy:?}");
    // Were each of these to wait for a piece of a line, the searches would have ended meanwhile.
    for _ in 0..100 {
        assert_eq!(client.call(&ToGuest::Ping), FromGuest::Done);
    }
    assert_eq!(client.read_file("a", 100).unwrap(), b"the needle\n");
    let command = client.exec("echo fine", LONG, 100);
    assert_eq!(client.finish(command).out(), "fine\n");
    assert!(client.unclaimed.is_empty(), "the searches go on");
    client.interrupt(calls.pop().unwrap());
    assert_eq!(shown(&search(&mut client, "a", SearchQuery { text: Some("needle".into()), ..query() })).len(), 1);
    calls.into_iter().for_each(|call| client.interrupt(call));
    client.nothing_left();
}

#[test]
fn a_search_keeps_its_time_and_returns_what_it_has() {
    let root = hostile_tree();
    let mut client = guest_in(&root);
    match client.call(&hostile(3000)) {
        FromGuest::Found { found } => {
            assert_eq!((shown(&found), found.stopped), (vec!["a:1:the needle".into()], Some(SearchBound::Time)));
        }
        other => panic!("{other:?}"),
    }
    client.nothing_left();
}

#[test]
fn a_search_that_is_stopped_killed_or_lies_costs_one_call() {
    let killed =
        FromGuest::Failed { failure: GuestFailure::Io, message: "the search was killed before its end".into() };
    let late = FromGuest::Found { found: FoundLines { stopped: Some(SearchBound::Time), ..FoundLines::default() } };
    for (script, reply) in [
        ("kill -STOP $$", &late),
        ("kill -KILL $$", &killed),
        ("exit 0", &killed),
        ("echo '{\"t\":\"done\"}'", &killed),
        ("echo '{'", &killed),
        ("yes", &killed),
    ] {
        let root = Scratch::new();
        let searcher = ["/bin/sh", "-c", script].map(String::from).to_vec();
        let workspace = root.path().to_owned();
        let mut client = Client::raw(guest::GuestConfig { workspace, searcher, ..config() });
        client.hello();
        assert_eq!(client.call(&hostile(0)), *reply, "{script}");
        client.nothing_left();
    }
}

#[test]
fn tmp_is_a_root_of_its_own() {
    let (root, tmp) = (Scratch::new(), Scratch::new());
    std::fs::write(tmp.path().join("t"), "in tmp").unwrap();
    std::fs::write(root.path().join("w"), "in workspace").unwrap();
    symlink(root.path().join("w"), tmp.path().join("link")).unwrap();
    let (workspace, tmp_dir) = (root.path().to_owned(), tmp.path().to_owned());
    let mut client = Client::raw(guest::GuestConfig { workspace, tmp: tmp_dir, ..config() });
    client.hello();
    assert_eq!(client.read_part(Root::Tmp, "t", 0, 9, None).unwrap().1, b"in tmp");
    for path in ["link", "../w", "/etc/passwd"] {
        assert_eq!(client.read_part(Root::Tmp, path, 0, 9, None).unwrap_err().0, GuestFailure::InvalidPath, "{path}");
    }
}
