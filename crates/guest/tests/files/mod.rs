//! Files that the host writes, reads and lists.

use proto::{FileKind, FromGuest, GuestFailure, ListOrder, Root, ToGuest};

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
