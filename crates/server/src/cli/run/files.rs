//! The files of `sandpool run`: those that it gives to the code, and those that the code left.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use engine::op::{FileKind, FileOwner};
use engine::{Call, Engine, Op, Outcome};
use runtimes::{HostEnvironment, Resolved};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, unlinkat};
use rustix::io::Errno;

use super::super::{Failed, output};
use super::program::STDIN;

/// Maximum size of a file that the code gets.
pub(super) const MAX_GIVEN: u64 = 64 << 20;

/// Files for the code, by the names that they have in its directory.
pub(super) type GivenFiles = BTreeMap<String, Vec<u8>>;

/// Reads the files of `--file`. The directory of the code has them under their own names. If it is the directory `workspace`
/// of this machine, a file that is there already is not copied, and one that would replace another file is refused.
pub(super) fn given(paths: &[PathBuf], workspace: Option<&Path>) -> Result<GivenFiles, Failed> {
    let mut files = BTreeMap::new();
    for path in paths {
        let wrong = |why: &str| Failed(format!("`--file {}`: {why}", path.display()));
        let found = std::fs::metadata(path).map_err(|error| wrong(&error.to_string()))?;
        if !found.is_file() {
            return Err(wrong("not a file"));
        }
        if found.len() > MAX_GIVEN {
            return Err(wrong(&too_large()));
        }
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| wrong("its name is not text"))?.to_owned();
        let there = workspace.map(|dir| dir.join(&name));
        if there.is_some() && path.canonicalize().ok() == there {
            continue;
        }
        if let Some(there) = there.filter(|there| is_taken(there)) {
            return Err(wrong(&format!("`{}` exists and would be replaced; rename one of them", there.display())));
        }
        let content = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        if files.insert(name, content).is_some() {
            return Err(wrong("two files have this name"));
        }
    }
    Ok(files)
}

/// Refuses a standard input whose file would replace one in the directory `workspace` of this machine.
pub(super) fn check_stdin(workspace: Option<&Path>) -> Result<(), Failed> {
    match workspace.map(|dir| dir.join(STDIN)).filter(|file| is_taken(file)) {
        None => Ok(()),
        Some(file) => Err(Failed(format!(
            "`{}` exists, and the standard input would replace it; remove the file, unless another `sandpool run` has just \
             made it",
            file.display()
        ))),
    }
}

/// Returns whether something has this name, even if it is a symlink that leads nowhere.
fn is_taken(path: &Path) -> bool {
    !matches!(path.symlink_metadata(), Err(error) if error.kind() == std::io::ErrorKind::NotFound)
}

pub(super) fn too_large() -> String {
    format!("larger than {} MB, which is the most", MAX_GIVEN >> 20)
}

/// Writes the files into the directory of the code.
pub(super) async fn give(engine: &Engine, call: &Call, owner: &FileOwner, files: &GivenFiles) -> Result<(), Failed> {
    for (name, content) in files {
        let (owner, path, content) = (owner.clone(), name.clone(), content.clone());
        engine.execute(call, Op::WriteFile { owner, path, content }).await?;
    }
    Ok(())
}

/// Saves the files that the code left in its directory, except those of `given` that it did not change. Together they may
/// have the size of the sandbox's disk, which only files with holes, or with several names, can exceed.
pub(super) async fn save(
    engine: &Engine,
    call: &Call,
    owner: &FileOwner,
    given: &GivenFiles,
    (out, disk_bytes): (&Destination, u64),
) -> Result<(), Failed> {
    let list = Op::ListFiles { owner: owner.clone(), path: String::new(), depth: None };
    let Outcome::Files(listing) = engine.execute(call, list).await? else {
        return Err(Failed("the engine listed no files".into()));
    };
    let left_out = listing.total.saturating_sub(listing.entries.len() as u64);
    let mut room = disk_bytes;
    for entry in listing.entries.iter().filter(|entry| entry.kind == FileKind::File && may_be_saved(&entry.path)) {
        let shown = out.shown(&entry.path);
        let wrong = |why: &str| Failed(format!("cannot write `{shown}`: {why}"));
        if entry.size > room {
            let (size, disk) = (entry.size >> 20, disk_bytes >> 20);
            let why = format!("it has {size} MB, and all files together more than the sandbox's disk of {disk} MB");
            output::error(&format!("sandpool: {shown} was left out: {why}"));
            continue;
        }
        let file = engine.open_file(&listing.key, &entry.path).await?;
        if let Some(content) = given.get(&entry.path).filter(|content| content.len() as u64 == file.size) {
            let mut same = 0;
            while same < content.len() {
                let part = file.read(same as u64, u64::MAX).await?;
                if part.is_empty() || !content[same..].starts_with(&part) {
                    break;
                }
                same += part.len();
            }
            if same == content.len() {
                continue;
            }
        }
        room = room.checked_sub(file.size).ok_or_else(|| wrong("the file grew meanwhile"))?;
        let mut saved = match out.create(&entry.path) {
            Ok(saved) => saved,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                output::error(&format!("sandpool: {shown} is there already and was not replaced"));
                continue;
            }
            Err(error) => return Err(wrong(&error.to_string())),
        };
        let mut offset = 0;
        while offset < file.size {
            let part = file.read(offset, u64::MAX).await?;
            if part.is_empty() {
                return Err(wrong("the file ended early"));
            }
            saved.write_all(&part).map_err(|error| wrong(&error.to_string()))?;
            offset += part.len() as u64;
        }
        output::error(&format!("saved {shown}"));
    }
    if left_out > 0 {
        output::error(&format!("sandpool: {left_out} more files were left out"));
    }
    Ok(())
}

/// Returns whether a file may be saved. Version control runs programs that are named in its own files.
fn may_be_saved(path: &str) -> bool {
    !path.split('/').any(|name| [".git", ".hg", ".svn"].iter().any(|own| name.eq_ignore_ascii_case(own)))
}

/// A directory of the user that gets files from the sandbox. It is opened before the code runs and stays open: code that can
/// write to it or to its parents cannot make the files go elsewhere.
pub(super) struct Destination {
    dir: OwnedFd,
    /// The directory as the user named it.
    named: PathBuf,
}

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Destination {
    /// Creates the directory, unless it exists, and opens it. It may not be a symlink, and its path may not lead through
    /// one that code can change.
    pub(super) fn open(path: &Path, env: &HostEnvironment) -> Result<Self, Failed> {
        let wrong = |why: &str| Failed(format!("cannot save to `{}`: {why}", path.display()));
        let failed = |error: std::io::Error| wrong(&error.to_string());
        // Without a slash at the end, behind which a symlink would be followed.
        let absolute: PathBuf = std::path::absolute(path).map_err(failed)?.components().collect();
        if absolute.is_symlink() {
            return Err(wrong("it is a symlink; name the directory that it leads to"));
        }
        let Resolved { real, links } = Resolved::of(&absolute);
        if let Some(link) = links.iter().find(|link| env.writable.iter().any(|dir| link.starts_with(dir))) {
            let link = link.display();
            return Err(wrong(&format!("`{link}` is a symlink in a writable mount, where code can change it")));
        }
        std::fs::create_dir_all(&real).map_err(failed)?;
        let dir = openat2(CWD, &real, DIRECTORY, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            .map_err(|error| failed(error.into()))?;
        Ok(Self { dir, named: path.to_owned() })
    }

    /// Returns the path of a file below the directory, for messages.
    fn shown(&self, path: &str) -> String {
        self.named.join(path).display().to_string().escape_debug().to_string()
    }

    /// Saves a file under a name in the directory. A file of an earlier run that has this name is removed first, so that
    /// nothing is written through a link.
    pub(super) fn replace(&self, name: &str, content: &[u8]) -> Result<(), Failed> {
        let removed = match unlinkat(&self.dir, name, AtFlags::empty()) {
            Err(Errno::NOENT) => Ok(()),
            other => other.map_err(std::io::Error::from),
        };
        let saved = removed.and_then(|()| self.create(name)?.write_all(content));
        saved.map_err(|error| Failed(format!("cannot write `{}`: {error}", self.shown(name))))?;
        output::error(&format!("saved {}", self.shown(name)));
        Ok(())
    }

    /// Creates a new file below the directory, with its directories. The sandbox chose the path, so the path must neither
    /// leave the directory nor replace or follow what is there already.
    fn create(&self, path: &str) -> std::io::Result<File> {
        let names: Option<Vec<_>> = Path::new(path)
            .components()
            .map(|component| match component {
                Component::Normal(name) => Some(name),
                _ => None,
            })
            .collect();
        let Some((name, parents)) = names.as_deref().and_then(<[_]>::split_last) else {
            return Err(std::io::Error::other("the path leads elsewhere"));
        };
        let mut at = self.dir.try_clone()?;
        for parent in parents {
            match mkdirat(&at, *parent, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            at = openat(&at, *parent, DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
        }
        let new =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(File::from(openat(&at, *name, new, Mode::from_raw_mode(0o666))?))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use testkit::scratch::Scratch;

    #[test]
    fn a_file_is_saved_below_the_directory_and_nowhere_else() {
        let dir = Scratch::new();
        let outside = dir.write("outside", "kept");
        let path = dir.0.join("new/out");
        let out = Destination::open(&path, &HostEnvironment::default()).unwrap();
        out.create("a/b/c.txt").unwrap().write_all(b"new").unwrap();
        let again = out.create("a/b/c.txt").unwrap_err();
        assert_eq!(again.kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(path.join("a/b/c.txt")).unwrap(), "new");
        assert!(may_be_saved("a/.gitignore") && !may_be_saved("sub/.git/config") && !may_be_saved(".Hg/hgrc"));
        symlink(&outside, path.join("link")).unwrap();
        symlink(&dir.0, path.join("up")).unwrap();
        for name in ["../outside", "/etc/passwd", "a/../../outside", "link", "up/outside", "", ".", "a"] {
            assert!(out.create(name).is_err(), "{name}");
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "kept");
    }

    /// W62: code has made the directory a symlink, or makes it one while it runs.
    #[test]
    fn w62_files_go_into_the_directory_that_was_there_before_the_code_ran() {
        let dir = Scratch::new();
        let at = |name: &str| dir.0.canonicalize().unwrap().join(name);
        for name in ["outside", "project/real"] {
            std::fs::create_dir_all(at(name)).unwrap();
        }
        symlink(at("outside"), at("project/link")).unwrap();
        let env = HostEnvironment { writable: vec![at("project")], ..HostEnvironment::default() };
        let refused = |name: &str| Destination::open(&at(name), &env).err().unwrap().0;
        assert!(refused("project/link").ends_with("it is a symlink; name the directory that it leads to"));
        let through = refused("project/link/new");
        assert!(through.ends_with("is a symlink in a writable mount, where code can change it"), "{through}");
        assert_eq!(std::fs::read_dir(at("outside")).unwrap().count(), 0);
        // A symlink that code cannot change may be a part of the path.
        symlink(at("project"), at("short")).unwrap();
        let out = Destination::open(&at("short/real"), &env).unwrap();
        std::fs::rename(at("project/real"), at("project/moved")).unwrap();
        symlink(at("outside"), at("project/real")).unwrap();
        out.create("x").unwrap();
        assert!(at("project/moved/x").exists() && std::fs::read_dir(at("outside")).unwrap().count() == 0);
    }

    /// W62: code has put a symlink, or another name of a file, where a picture will be saved.
    #[test]
    fn w62_a_picture_replaces_the_one_of_an_earlier_run_and_is_written_through_no_link() {
        let dir = Scratch::new();
        let outside = dir.write("outside", "kept");
        let path = dir.0.join("pictures");
        let out = Destination::open(&path, &HostEnvironment::default()).unwrap();
        out.replace("figure-1.png", b"first").unwrap();
        out.replace("figure-1.png", b"second").unwrap();
        assert_eq!(std::fs::read(path.join("figure-1.png")).unwrap(), b"second");
        symlink(&outside, path.join("figure-2.png")).unwrap();
        std::fs::hard_link(&outside, path.join("figure-3.png")).unwrap();
        for name in ["figure-2.png", "figure-3.png"] {
            out.replace(name, b"new").unwrap();
            assert_eq!(std::fs::read(path.join(name)).unwrap(), b"new");
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "kept");
        std::fs::create_dir(path.join("figure-4.png")).unwrap();
        let refused = out.replace("figure-4.png", b"new").unwrap_err().0;
        assert!(refused.contains("pictures/figure-4.png`: "), "{refused}");
    }

    /// W63: the directory of the code is one of the user's.
    #[test]
    fn w63_files_for_the_code_replace_no_file_of_the_user() {
        let dir = Scratch::new();
        let workspace = dir.0.canonicalize().unwrap().join("project");
        std::fs::create_dir(&workspace).unwrap();
        let given = |path: &Path| given(&[path.to_owned()], Some(&workspace));
        let (data, new) = (dir.write("data.csv", "other"), dir.write("new.csv", "new"));
        std::fs::write(workspace.join("data.csv"), "mine").unwrap();
        let refused = given(&data).unwrap_err().0;
        assert!(refused.contains("project/data.csv` exists and would be replaced"), "{refused}");
        assert_eq!(given(&new).unwrap()["new.csv"], b"new");
        symlink("nowhere", workspace.join("new.csv")).unwrap();
        assert!(given(&new).is_err());
        // The file itself is there already.
        assert!(given(&dir.0.join("project/../project/data.csv")).unwrap().is_empty());

        assert!(check_stdin(Some(&workspace)).is_ok() && check_stdin(None).is_ok());
        std::fs::write(workspace.join(STDIN), "mine").unwrap();
        let refused = check_stdin(Some(&workspace)).unwrap_err().0;
        assert!(refused.contains(".sandpool-stdin` exists, and the standard input would replace it"), "{refused}");
    }

    #[test]
    fn files_for_the_code_have_different_names_and_a_bounded_size() {
        let dir = Scratch::new();
        let a = dir.write("a.csv", "1");
        std::fs::create_dir(dir.0.join("sub")).unwrap();
        let other = dir.0.join("sub/a.csv");
        std::fs::write(&other, "2").unwrap();
        assert_eq!(given(std::slice::from_ref(&a), None).unwrap()["a.csv"], b"1");
        let why = |paths: &[PathBuf]| given(paths, None).unwrap_err().0;
        assert!(why(&[a, other]).ends_with("two files have this name"));
        assert!(why(std::slice::from_ref(&dir.0)).ends_with("not a file"));
        let large = dir.0.join("large");
        File::create(&large).unwrap().set_len(MAX_GIVEN + 1).unwrap();
        assert!(why(&[large]).contains("larger than 64 MB"));
    }
}
