use std::fs as host;
use std::io::Read;
use std::os::unix::fs::{FileTypeExt, PermissionsExt, symlink};
use std::time::{Duration, Instant};

use super::*;

/// A root with a neighbour that must stay untouched: `base/root` and `base/outside/secret`.
struct Scene(PathBuf);

impl Scene {
    fn new(name: &str) -> Self {
        let base = std::env::temp_dir().join(format!("beneath-{name}-{}", std::process::id()));
        let _ = host::remove_dir_all(&base);
        for dir in ["root/sub", "root-evil", "outside"] {
            host::create_dir_all(base.join(dir)).unwrap();
        }
        host::write(base.join("root/sub/file"), "inside").unwrap();
        for neighbour in ["outside/secret", "root-evil/secret"] {
            host::write(base.join(neighbour), "secret").unwrap();
        }
        Self(base)
    }

    fn root(&self) -> Root {
        Root::open(self.0.join("root")).unwrap()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.0.join("root").join(path)
    }

    fn assert_neighbours_untouched(&self) {
        for (dir, names) in [("outside", "secret"), ("root-evil", "secret")] {
            let found: Vec<_> = host::read_dir(self.0.join(dir)).unwrap().map(|e| e.unwrap().file_name()).collect();
            assert_eq!(found, [names]);
            assert_eq!(host::read_to_string(self.0.join(dir).join(names)).unwrap(), "secret");
        }
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = host::remove_dir_all(&self.0);
    }
}

fn read(root: &Root, path: impl AsRef<Path>) -> Result<String> {
    let mut text = String::new();
    root.read_file(path)?.read_to_string(&mut text).unwrap();
    Ok(text)
}

fn write(root: &Root, path: impl AsRef<Path>, text: &str) -> Result<()> {
    let mut new = root.create_file(path)?;
    new.write_all(text.as_bytes()).map_err(|e| new.explain(&e))?;
    new.commit()
}

fn names(listing: &Listing) -> Vec<&str> {
    listing.entries.iter().map(|e| e.path.to_str().unwrap()).collect()
}

#[track_caller]
fn assert_invalid<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(BeneathError::InvalidPath { .. })), "{result:?}");
}

#[track_caller]
fn assert_not_found<T: std::fmt::Debug>(result: Result<T>) {
    assert!(matches!(result, Err(BeneathError::NotFound { .. })), "{result:?}");
}

#[test]
fn files_are_written_read_and_listed() {
    let scene = Scene::new("plain");
    let root = scene.root();
    write(&root, "a/b/c.txt", "one").unwrap();
    write(&root, "a/b/c.txt", "two").unwrap();
    write(&root, "./a//top.txt", "").unwrap();
    assert_eq!(read(&root, "a/b/c.txt").unwrap(), "two");
    assert_not_found(root.read_file("a/b/missing"));
    assert_not_found(root.list("missing", 10));
    let listing = root.list("", 100).unwrap();
    assert_eq!(names(&listing), ["a", "a/b", "a/b/c.txt", "a/top.txt", "sub", "sub/file"]);
    assert_eq!(names(&root.list("a", 2).unwrap()), ["b", "b/c.txt"]);
    assert_eq!(root.list("a", 2).unwrap().total, 3);
    let file = &root.list("a/b", 10).unwrap().entries[0];
    assert_eq!((file.kind, file.size), (EntryKind::File, 3));
}

#[test]
fn a_file_that_is_replaced_keeps_its_mode_and_an_abandoned_one_leaves_nothing() {
    let scene = Scene::new("mode");
    let root = scene.root();
    write(&root, "script", "x").unwrap();
    host::set_permissions(scene.at("script"), PermissionsExt::from_mode(0o755)).unwrap();
    write(&root, "script", "y").unwrap();
    assert_eq!(host::metadata(scene.at("script")).unwrap().permissions().mode() & 0o777, 0o755);
    let mut abandoned = root.create_file("script").unwrap();
    abandoned.write_all(b"z").unwrap();
    drop(abandoned);
    assert_eq!(read(&root, "script").unwrap(), "y");
    assert_eq!(names(&root.list("", 10).unwrap()), ["script", "sub", "sub/file"]);
}

/// W69: whoever is killed while it writes a file leaves nothing behind.
#[test]
fn w69_a_file_has_no_name_before_it_is_complete() {
    let scene = Scene::new("unnamed");
    let root = scene.root();
    let mut new = root.create_file("new").unwrap();
    new.write_all(b"x").unwrap();
    assert_eq!(names(&root.list("", 10).unwrap()), ["sub", "sub/file"]);
    new.commit().unwrap();
    assert_eq!(read(&root, "new").unwrap(), "x");
}

/// File systems without `O_TMPFILE`, and those that have it and refuse to link such a file.
#[test]
fn a_file_appears_complete_on_every_file_system() {
    let scene = Scene::new("named");
    let root = scene.root();
    write(&root, "f", "old").unwrap();
    host::set_permissions(scene.at("f"), PermissionsExt::from_mode(0o750)).unwrap();
    for (text, is_linked) in [("named", true), ("copied", false)] {
        let mut new = root.create_file("f").unwrap();
        if is_linked {
            let (file, temporary) = create_temporary(&new.parent).unwrap();
            fs::fchmod(&file, Mode::from_raw_mode(0o750)).unwrap();
            (new.file, new.temporary) = (file, Some(temporary));
        }
        new.write_all(text.as_bytes()).unwrap();
        if !is_linked {
            new.copy().unwrap();
        }
        assert_eq!(names(&root.list("", 10).unwrap()).len(), 4, "a temporary name, until the commit");
        new.commit().unwrap();
        assert_eq!(read(&root, "f").unwrap(), text);
        assert_eq!(host::metadata(scene.at("f")).unwrap().permissions().mode() & 0o777, 0o750);
        assert_eq!(names(&root.list("", 10).unwrap()), ["f", "sub", "sub/file"]);
    }
    let mut abandoned = root.create_file("g").unwrap();
    abandoned.copy().unwrap();
    drop(abandoned);
    assert_eq!(names(&root.list("", 10).unwrap()), ["f", "sub", "sub/file"]);
}

#[test]
fn levels_are_listed_and_the_rest_is_counted() {
    let scene = Scene::new("levels");
    let root = scene.root();
    for n in 0..40 {
        write(&root, format!("node_modules/p{}/{n}", n % 4), "x").unwrap();
        write(&root, format!("src/node_modules/{n}"), "x").unwrap();
    }
    write(&root, "src/a/b/c", "x").unwrap();
    write(&root, "z", "xyz").unwrap();
    symlink(scene.0.join("outside"), scene.at("src/a/out")).unwrap();
    let rows = |path: &str, max, depth| {
        let listing = root.list_levels(path, max, depth, &["node_modules"]).unwrap();
        let row = |entry: &DirEntry| (entry.path.display().to_string(), entry.below);
        (listing.entries.iter().map(row).collect::<Vec<_>>(), listing.total)
    };
    let row = |path: &str, below| (path.to_owned(), below);
    let top = vec![row("node_modules", Some(44)), row("src", Some(45)), row("sub", Some(1)), row("z", None)];
    assert_eq!(rows("", 100, 1), (top, 4));
    assert_eq!(rows("src", 100, 1).0, [row("a", Some(3)), row("node_modules", Some(40))]);
    let two = rows("", 100, 2);
    assert_eq!(
        two.0,
        [
            row("node_modules", Some(44)),
            row("src", None),
            row("src/a", Some(3)),
            row("src/node_modules", Some(40)),
            row("sub", None),
            row("sub/file", None),
            row("z", None)
        ]
    );
    // A directory that is named is opened, whatever its name is.
    assert_eq!(rows("node_modules", 2, 1), (vec![row("p0", Some(10)), row("p1", Some(10))], 4));
    assert_eq!(rows("src/a", 100, 9).0, [row("b", None), row("b/c", None), row("out", None)]);
    scene.assert_neighbours_untouched();
}

#[test]
fn links_that_lead_out_are_refused_for_reading_writing_and_listing() {
    // CVE-2025-53109 and CVE-2024-28189: the trusted side followed a symlink.
    let scene = Scene::new("links");
    let root = scene.root();
    let outside = scene.0.join("outside");
    symlink(&outside, scene.at("absolute")).unwrap();
    symlink("../outside", scene.at("relative")).unwrap();
    symlink("../../outside/secret", scene.at("sub/final")).unwrap();
    symlink(outside.join("secret"), scene.at("final")).unwrap();
    symlink("/proc/self/root", scene.at("magic")).unwrap();
    symlink("loop", scene.at("loop")).unwrap();
    for path in ["absolute/secret", "relative/secret", "sub/final", "final", "magic/etc/passwd", "loop", "loop/x"] {
        assert_invalid(root.read_file(path));
        assert_invalid(write(&root, path, "overwritten"));
        assert_invalid(write(&root, format!("{path}/new"), "overwritten"));
    }
    for path in ["absolute", "relative", "absolute/.", "magic", "magic/root"] {
        assert_invalid(root.list(path, 10));
    }
    let listed = root.list("", 100).unwrap();
    assert_eq!(names(&listed), ["absolute", "final", "loop", "magic", "relative", "sub", "sub/file", "sub/final"]);
    scene.assert_neighbours_untouched();
}

#[test]
fn links_that_stay_beneath_are_followed_on_the_way_but_not_written_through_at_the_end() {
    let scene = Scene::new("beneath");
    let root = scene.root();
    symlink("sub", scene.at("alias")).unwrap();
    symlink("sub/file", scene.at("name")).unwrap();
    symlink("nowhere", scene.at("dangling")).unwrap();
    assert_eq!(read(&root, "alias/file").unwrap(), "inside");
    assert_eq!(read(&root, "name").unwrap(), "inside");
    write(&root, "alias/new", "x").unwrap();
    assert_eq!(read(&root, "sub/new").unwrap(), "x");
    assert_invalid(write(&root, "name", "x"));
    assert_invalid(write(&root, "dangling", "x"));
    assert_not_found(write(&root, "dangling/x", "x"));
    assert_eq!(read(&root, "sub/file").unwrap(), "inside");
}

#[test]
fn dots_absolute_paths_and_siblings_with_the_roots_prefix_are_refused() {
    // CVE-2025-53110: a prefix comparison treated `/work-evil` as part of `/work`.
    let scene = Scene::new("dots");
    let root = scene.root();
    let absolute = scene.at("sub/file");
    let paths = [
        "..",
        "../outside/secret",
        "sub/../../outside/secret",
        "sub/../sub/file",
        "../root-evil/secret",
        "/etc/passwd",
    ];
    for path in paths.into_iter().chain([absolute.to_str().unwrap()]) {
        assert_invalid(root.read_file(path));
        assert_invalid(write(&root, path, "x"));
        assert_invalid(root.list(path, 10));
    }
    for path in ["", ".", "sub/", "new/"] {
        assert!(root.read_file(path).is_err());
        assert_invalid(write(&root, path, "x"));
    }
    for nul in ["a\0b", "sub/file\0.txt"] {
        assert_invalid(root.read_file(nul));
        assert_invalid(write(&root, nul, "x"));
        assert_invalid(root.list(nul, 1));
    }
    scene.assert_neighbours_untouched();
}

#[test]
fn pipes_sockets_devices_and_directories_are_refused_at_once() {
    let scene = Scene::new("kinds");
    let root = scene.root();
    fs::mknodat(fs::CWD, scene.at("pipe"), FileType::Fifo, Mode::from_raw_mode(0o666), 0).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(scene.at("socket")).unwrap();
    let mut kinds = vec!["pipe", "socket", "sub"];
    let device = fs::mknodat(fs::CWD, scene.at("zero"), FileType::CharacterDevice, Mode::from_raw_mode(0o666), 0x105);
    match device {
        Ok(()) => kinds.push("zero"),
        Err(_) => eprintln!("SKIP the device: only root can make one"),
    }
    let started = Instant::now();
    for path in kinds {
        assert_invalid(root.read_file(path));
        assert_invalid(write(&root, path, "x"));
    }
    assert!(started.elapsed() < Duration::from_secs(1));
    assert!(host::symlink_metadata(scene.at("pipe")).unwrap().file_type().is_fifo());
    assert_invalid(write(&root, "sub/file/below", "x"));
    assert_invalid(root.list("sub/file", 1));
}

#[test]
fn weird_names_are_names() {
    let scene = Scene::new("weird");
    let root = scene.root();
    let bytes: Vec<u8> = (1..=255).filter(|b| *b != b'/').take(200).collect();
    let odd = [
        OsStr::from_bytes(&bytes),
        OsStr::new("-rf"),
        OsStr::new("..."),
        OsStr::new("a\nb"),
        OsStr::new("%2e%2e"),
        OsStr::new("\u{202e}gnp"),
    ];
    for name in odd {
        write(&root, Path::new("odd").join(name), "x").unwrap();
        assert_eq!(read(&root, Path::new("odd").join(name)).unwrap(), "x");
    }
    assert_eq!(root.list("odd", 100).unwrap().total, odd.len() as u64);
    let longest = "n".repeat(255);
    write(&root, &longest, "x").unwrap();
    assert_eq!(read(&root, &longest).unwrap(), "x");
    assert_invalid(write(&root, "n".repeat(256), "x"));
    assert_invalid(root.read_file("n".repeat(256)));
    assert_invalid(write(&root, "d/".repeat(3000) + "x", "x"));
}

#[test]
fn a_tree_deeper_than_a_path_can_name_is_listed_as_far_as_it_can_be() {
    let scene = Scene::new("deep");
    let root = scene.root();
    let mut dir = fs::openat(&root, "sub", DIRECTORY, Mode::empty()).unwrap();
    let name = "d".repeat(200);
    for _ in 0..40 {
        fs::mkdirat(&dir, &name, Mode::from_raw_mode(0o755)).unwrap();
        dir = fs::openat(&dir, &name, DIRECTORY, Mode::empty()).unwrap();
    }
    let listing = root.list("sub", 1000).unwrap();
    assert!((20..=42).contains(&listing.total), "{}", listing.total);
}

/// W73: PID 1 walks, and does nothing else meanwhile.
#[test]
fn w73_depth_and_length_of_paths_bound_a_walk_too() {
    let scene = Scene::new("walk");
    let root = scene.root();
    // A hundred directories that are a hundred levels deep, each with one file.
    let deep = scene.at("a/".repeat(100).as_str());
    for number in 0..100 {
        host::create_dir_all(deep.join(number.to_string())).unwrap();
        host::write(deep.join(number.to_string()).join("file"), "").unwrap();
    }
    let walk = || root.walk_at(Path::new("."), 10, SortOrder::Path).unwrap();
    let whole = walk().run().unwrap().total;
    assert_eq!(whole, 2 + 100 + 200, "`sub` and its file, the levels, and what is in the last one");
    // The levels take 5,000 steps to open, and each of the directories 101.
    let tired = || Walk { resolved: MAX_RESOLVED - 10_000, ..walk() };
    for total in [tired().run(), tired().run_levels(1000, &[])].map(|listing| listing.unwrap().total) {
        assert!((240..260).contains(&total), "{total}");
    }
    let counted = tired().run_levels(1, &[]).unwrap();
    let below: u64 = counted.entries.iter().filter_map(|entry| entry.below).sum();
    assert!(counted.total == 2 && (240..260).contains(&below), "{counted:?}");
    // The paths of the levels have 10,000 bytes, and each of the others some 200.
    let full = Walk { path_bytes: MAX_PATH_BYTES - 20_000, ..walk() };
    let total = full.run().unwrap().total;
    assert!((140..160).contains(&total), "{total}");
}

#[test]
fn a_full_volume_is_no_space() {
    let scene = Scene::new("full");
    let root = scene.root();
    let new = root.create_file("x").unwrap();
    let full = io::Error::from_raw_os_error(libc::ENOSPC);
    assert!(matches!(new.explain(&full), BeneathError::NoSpace { .. }));
    assert!(matches!(error(Path::new("x"), Errno::DQUOT), BeneathError::NoSpace { .. }));
}

/// W74: a mount that the operator made read-only is not damaged, and a file that may not be read is no failure.
#[test]
fn w74_what_may_not_be_read_or_written_is_told_from_what_is_damaged() {
    let scene = Scene::new("rights");
    let new = scene.root().create_file("x").unwrap();
    for errno in [libc::EROFS, libc::EIO] {
        assert!(matches!(new.explain(&io::Error::from_raw_os_error(errno)), BeneathError::Damaged { .. }));
    }
    assert!(matches!(error(Path::new("x"), Errno::ROFS), BeneathError::ReadOnly { .. }));
    for errno in [Errno::ACCESS, Errno::PERM] {
        assert!(matches!(error(Path::new("x"), errno), BeneathError::InvalidPath { .. }));
    }
}

#[test]
fn a_swapper_never_turns_a_read_write_or_list_to_the_outside() {
    // K50, A10: a directory and a symlink to the outside are swapped continuously.
    let scene = Scene::new("race");
    let root = scene.root();
    symlink("../outside", scene.at("link")).unwrap();
    write(&root, "dir/secret", "inside").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let swap = || fs::renameat_with(&root, "dir", &root, "link", fs::RenameFlags::EXCHANGE).unwrap();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                swap();
            }
        });
        let (mut served, mut refused) = (0, 0);
        for round in 0..100_000 {
            match read(&root, "dir/secret") {
                Ok(text) => {
                    assert_eq!(text, "inside");
                    served += 1;
                }
                Err(_) => refused += 1,
            }
            if round % 4 == 0 {
                let _ = write(&root, "dir/made/new", "x");
                let _ = write(&root, "dir/secret", "inside");
            }
            if round % 16 == 0
                && let Ok(listing) = root.list("dir", 10)
            {
                assert!(names(&listing).contains(&"made"), "{listing:?}");
            }
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(served > 0 && refused > 0, "no race was run: {served} served, {refused} refused");
    });
    scene.assert_neighbours_untouched();
}
