//! Which programs of this machine can be trusted although code can write to some of its directories.

use std::fs;
use std::path::{Path, PathBuf};

use super::HostEnvironment;

/// A path as the Linux kernel follows it, as far as it exists.
pub struct Resolved {
    /// The path without symlinks.
    pub real: PathBuf,
    /// The symlinks on the way, each where it is.
    pub links: Vec<PathBuf>,
}

impl Resolved {
    pub fn of(path: &Path) -> Self {
        /// The Linux kernel follows no more.
        const MOST: usize = 40;
        let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let (mut real, mut links) = (PathBuf::from("/"), Vec::new());
        let steps = |path: &Path| path.components().rev().map(|part| part.as_os_str().to_owned()).collect::<Vec<_>>();
        let mut left = steps(&absolute);
        while let Some(step) = left.pop() {
            if step == ".." {
                real.pop();
                continue;
            }
            let next = real.join(step);
            match fs::read_link(&next) {
                Ok(target) if links.len() < MOST => {
                    links.push(next);
                    left.extend(steps(&target));
                }
                _ => real = next,
            }
        }
        Self { real, links }
    }
}

/// Returns the directories from which a program loads what it executes: `lib` beside the `bin` of the program and of each
/// symlink to it (a virtual environment has one of its own), otherwise the directory of the program.
pub fn libraries(program: &Path) -> Vec<PathBuf> {
    let Resolved { real, links } = Resolved::of(program);
    let beside = |program: &Path| {
        let bin = program.parent().filter(|dir| dir.ends_with("bin"))?;
        Some(bin.with_file_name("lib"))
    };
    let own = beside(&real).or_else(|| real.parent().map(Path::to_owned));
    links.iter().filter_map(|link| beside(link)).chain(own).map(|dir| Resolved::of(&dir).real).collect()
}

impl HostEnvironment {
    /// Returns whether code can change where a path leads, or what is there.
    pub fn is_writable(&self, path: &Path) -> bool {
        let Resolved { real, links } = Resolved::of(path);
        links.iter().chain([&real]).any(|at| self.writable.iter().any(|dir| at.starts_with(dir)))
    }

    /// Returns whether code can change what a program does. Such a program must not be executed outside of a sandbox.
    pub(crate) fn can_be_changed(&self, program: &Path) -> bool {
        let holds_one = |dir: &PathBuf| self.writable.iter().any(|writable| writable.starts_with(dir));
        let mut libraries = libraries(program).into_iter();
        self.is_writable(program) || libraries.any(|dir| self.is_writable(&dir) || holds_one(&dir))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use testkit::scratch::Scratch;

    #[test]
    fn a_path_is_followed_as_the_kernel_follows_it() {
        let dir = Scratch::new();
        let root = dir.0.canonicalize().unwrap();
        fs::create_dir(root.join("a")).unwrap();
        symlink("a/none", root.join("one")).unwrap();
        symlink(root.join("one"), root.join("two")).unwrap();
        symlink("round", root.join("round")).unwrap();
        let Resolved { real, links } = Resolved::of(&root.join("a/../two/./x"));
        assert_eq!((real, links), (root.join("a/none/x"), vec![root.join("two"), root.join("one")]));
        assert_eq!(Resolved::of(&root.join("round")).links.len(), 40);
    }

    /// W64: the program itself, a symlink to it, the libraries beside it, and those of a virtual environment.
    #[test]
    fn w64_a_program_that_code_can_change_is_found() {
        let dir = Scratch::new();
        let root = dir.0.canonicalize().unwrap();
        for path in ["python/bin", "python/lib/python3.13", "venv/bin", "venv/lib", "links", "browser/data", "other"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        fs::write(root.join("python/bin/python3"), "").unwrap();
        fs::write(root.join("browser/chrome"), "").unwrap();
        symlink(root.join("python/bin/python3"), root.join("links/python3")).unwrap();
        symlink(root.join("links/python3"), root.join("venv/bin/python3")).unwrap();
        let changed = |writable: &str, program: &str| {
            let env = HostEnvironment { writable: vec![root.join(writable)], ..HostEnvironment::default() };
            env.can_be_changed(&root.join(program))
        };
        for writable in ["", "venv", "venv/bin", "venv/lib", "links", "python", "python/lib", "python/lib/python3.13"] {
            assert!(changed(writable, "venv/bin/python3"), "{writable}");
        }
        assert!(changed("browser/data", "browser/chrome") && changed("browser", "browser/chrome"));
        assert!(!changed("other", "venv/bin/python3") && !changed("other", "browser/chrome"));
        assert!(!changed("venv", "python/bin/python3"));
    }
}
