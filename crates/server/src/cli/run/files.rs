//! The files of `sandpool run`: those that it gives to the code, and those that the code left.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

use engine::op::{FileKind, FileOwner};
use engine::{Call, Engine, Op, Outcome};
use rustix::fs::{Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;

use super::super::{Failed, output};

/// Maximum size of a file that the code gets.
pub(super) const MAX_GIVEN: u64 = 64 << 20;

/// Files for the code, by the names that they have in its directory.
pub(super) type GivenFiles = BTreeMap<String, Vec<u8>>;

/// Reads the files of `--file`. The directory of the code has them under their own names.
pub(super) fn given(paths: &[PathBuf]) -> Result<GivenFiles, Failed> {
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
        let content = std::fs::read(path).map_err(|error| wrong(&error.to_string()))?;
        if files.insert(name, content).is_some() {
            return Err(wrong("two files have this name"));
        }
    }
    Ok(files)
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

/// Saves the files that the code left in its directory, except those of `given` that it did not change.
pub(super) async fn save(
    engine: &Engine,
    call: &Call,
    owner: &FileOwner,
    given: &GivenFiles,
    dir: &Path,
) -> Result<(), Failed> {
    let list = Op::ListFiles { owner: owner.clone(), path: String::new(), depth: None };
    let Outcome::Files(listing) = engine.execute(call, list).await? else {
        return Err(Failed("the engine listed no files".into()));
    };
    std::fs::create_dir_all(dir).map_err(|error| Failed(format!("cannot create `{}`: {error}", dir.display())))?;
    let left_out = listing.total.saturating_sub(listing.entries.len() as u64);
    for entry in listing.entries.iter().filter(|entry| entry.kind == FileKind::File && may_be_saved(&entry.path)) {
        let shown = dir.join(&entry.path).display().to_string().escape_debug().to_string();
        let wrong = |why: &str| Failed(format!("cannot write `{shown}`: {why}"));
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
        let mut saved = match create(dir, &entry.path) {
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

/// Creates a new file below `dir`, with its directories. The sandbox chose the path, so that it may neither leave `dir` nor
/// replace or follow what is there already.
fn create(dir: &Path, path: &str) -> std::io::Result<File> {
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
    let directory = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut at: OwnedFd = rustix::fs::open(dir, directory, Mode::empty())?;
    for parent in parents {
        match mkdirat(&at, *parent, Mode::from_raw_mode(0o777)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        at = openat(&at, *parent, directory | OFlags::NOFOLLOW, Mode::empty())?;
    }
    let new = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(File::from(openat(&at, *name, new, Mode::from_raw_mode(0o666))?))
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
        let out = dir.0.join("out");
        std::fs::create_dir(&out).unwrap();
        create(&out, "a/b/c.txt").unwrap().write_all(b"new").unwrap();
        let again = create(&out, "a/b/c.txt").unwrap_err();
        assert_eq!(again.kind(), std::io::ErrorKind::AlreadyExists);
        assert_eq!(std::fs::read_to_string(out.join("a/b/c.txt")).unwrap(), "new");
        assert!(may_be_saved("a/.gitignore") && !may_be_saved("sub/.git/config") && !may_be_saved(".Hg/hgrc"));
        symlink(&outside, out.join("link")).unwrap();
        symlink(&dir.0, out.join("up")).unwrap();
        for path in ["../outside", "/etc/passwd", "a/../../outside", "link", "up/outside", "", ".", "a"] {
            assert!(create(&out, path).is_err(), "{path}");
        }
        assert_eq!(std::fs::read_to_string(outside).unwrap(), "kept");
    }

    #[test]
    fn files_for_the_code_have_different_names_and_a_bounded_size() {
        let dir = Scratch::new();
        let a = dir.write("a.csv", "1");
        std::fs::create_dir(dir.0.join("sub")).unwrap();
        let other = dir.0.join("sub/a.csv");
        std::fs::write(&other, "2").unwrap();
        assert_eq!(given(std::slice::from_ref(&a)).unwrap()["a.csv"], b"1");
        let why = |paths: &[PathBuf]| given(paths).unwrap_err().0;
        assert!(why(&[a, other]).ends_with("two files have this name"));
        assert!(why(std::slice::from_ref(&dir.0)).ends_with("not a file"));
        let large = dir.0.join("large");
        File::create(&large).unwrap().set_len(MAX_GIVEN + 1).unwrap();
        assert!(why(&[large]).contains("larger than 64 MB"));
    }
}
