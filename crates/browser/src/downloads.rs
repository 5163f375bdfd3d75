//! Files that pages make the browser save: under a name of the browser's while they come, under their own once they are whole.
//!
//! The directory belongs to the code beside us: what is in it may be anything. Nothing that exists is written over.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use proto::browser::Happened;
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::state::{MAX_URL, shorten};

/// Under way at a time; more are cancelled.
const MAX_RUNNING: usize = 16;
/// Of a name, in bytes: with a number put in it is still one for every file system.
const MAX_NAME: usize = 200;
/// How many files of one name there are at most.
const MAX_SAME: u32 = 1000;

pub struct Downloads {
    directory: PathBuf,
    running: HashMap<String, Download>,
    /// When the last one began.
    begun: u64,
}

struct Download {
    url: String,
    name: String,
}

impl Downloads {
    pub fn new(directory: &str) -> Self {
        Self { directory: directory.into(), running: HashMap::new(), begun: 0 }
    }

    pub fn is_running(&self) -> bool {
        !self.running.is_empty()
    }

    pub fn begun_since(&self, moment: u64) -> bool {
        self.begun > moment
    }

    /// Whether it may go on.
    pub fn begin(&mut self, now: u64, guid: &str, url: &str, suggested: &str) -> bool {
        self.begun = now;
        let room = self.running.len() < MAX_RUNNING;
        if room {
            self.running.insert(guid.into(), Download { url: shorten(url, MAX_URL), name: safe_name(suggested) });
        }
        room
    }

    pub fn cancelled(&mut self, guid: &str) -> Option<Happened> {
        let Download { url, .. } = self.running.remove(guid)?;
        // A file that is not whole; there may be none.
        let _ = std::fs::remove_file(self.directory.join(guid));
        let error = Some("the download was broken off".into());
        Some(Happened::Download { url, path: None, size: 0, error })
    }

    pub fn completed(&mut self, guid: &str) -> Option<Happened> {
        let Download { url, name } = self.running.remove(guid)?;
        Some(match self.keep(guid, &name) {
            Ok((path, size)) => Happened::Download { url, path: Some(path), size, error: None },
            Err(error) => Happened::Download { url, path: None, size: 0, error: Some(error.to_string()) },
        })
    }

    /// Gives the file its name, and everybody the right to read it.
    fn keep(&self, guid: &str, name: &str) -> io::Result<(String, u64)> {
        let saved = self.directory.join(guid);
        let size = std::fs::symlink_metadata(&saved)?.len();
        std::fs::set_permissions(&saved, Permissions::from_mode(0o644))?;
        for number in 0..MAX_SAME {
            let name = numbered(name, number);
            match rustix::fs::renameat_with(CWD, &saved, CWD, self.directory.join(&name), RenameFlags::NOREPLACE) {
                Ok(()) => return Ok((self.shown(&name), size)),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!("there are too many files named `{name}`")))
    }

    /// Relative to what the directory is in.
    fn shown(&self, name: &str) -> String {
        let directory = self.directory.file_name().map_or(Path::new(""), Path::new);
        directory.join(name).display().to_string()
    }
}

fn numbered(name: &str, number: u32) -> String {
    match (number, name.rsplit_once('.')) {
        (0, _) => name.to_owned(),
        (_, Some((stem, extension))) if !stem.is_empty() => format!("{stem} ({number}).{extension}"),
        _ => format!("{name} ({number})"),
    }
}

/// A name that is one file in the directory, visible, and nothing to a shell or a terminal.
fn safe_name(suggested: &str) -> String {
    let last = suggested.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut name: String = last.chars().filter(|c| !c.is_control()).collect();
    name = name.trim().trim_start_matches(['.', '-']).to_owned();
    if name.len() > MAX_NAME {
        let extension =
            name.rsplit_once('.').map(|(_, e)| format!(".{e}")).filter(|e| e.len() <= 20).unwrap_or_default();
        let mut end = MAX_NAME - extension.len();
        while !name.is_char_boundary(end) {
            end -= 1;
        }
        name = format!("{}{extension}", &name[..end]);
    }
    if name.is_empty() { "download".into() } else { name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stays_in_the_directory() {
        for (suggested, name) in [
            ("report.pdf", "report.pdf"),
            ("../../etc/passwd", "passwd"),
            ("..", "download"),
            ("", "download"),
            (".bashrc", "bashrc"),
            ("-rf", "rf"),
            ("a\\b\\c.txt", "c.txt"),
            ("报告 2026.csv", "报告 2026.csv"),
            ("a\u{1b}[31m\n.txt", "a[31m.txt"),
        ] {
            assert_eq!(safe_name(suggested), name, "{suggested:?}");
        }
        let long = safe_name(&format!("{}.pdf", "é".repeat(300)));
        assert!(long.len() <= MAX_NAME && long.ends_with("é.pdf"), "{long}");
    }

    #[test]
    fn names_that_are_taken_get_a_number() {
        assert_eq!(numbered("a.tar.gz", 2), "a.tar (2).gz");
        assert_eq!(numbered("README", 1), "README (1)");
        assert_eq!(numbered(".x", 1), ".x (1)");
    }
}
