//! Files that pages make the browser save: under a name of the browser's while they come, under their own once they are whole.
//!
//! The directory belongs to the code beside us: what is in it may be anything. Nothing that exists is written over.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use proto::browser::Happened;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
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
    begun: u64,
}

impl Downloads {
    pub fn new(directory: &str) -> Self {
        Self { directory: directory.into(), running: HashMap::new(), begun: 0 }
    }

    /// One that began after this moment is still under way.
    pub fn is_running_since(&self, moment: u64) -> bool {
        self.running.values().any(|download| download.begun > moment)
    }

    pub fn begun_since(&self, moment: u64) -> bool {
        self.begun > moment
    }

    /// Whether it may go on.
    pub fn begin(&mut self, now: u64, guid: &str, url: &str, suggested: &str) -> bool {
        self.begun = now;
        let room = self.running.len() < MAX_RUNNING;
        if room {
            let download = Download { url: shorten(url, MAX_URL), name: safe_name(suggested), begun: now };
            self.running.insert(guid.into(), download);
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
        let Download { url, name, .. } = self.running.remove(guid)?;
        Some(match self.keep(guid, &name) {
            Ok((path, size)) => Happened::Download { url, path: Some(path), size, error: None },
            Err(error) => Happened::Download { url, path: None, size: 0, error: Some(error.to_string()) },
        })
    }

    /// Gives the file its name, and everybody the right to read it.
    fn keep(&self, guid: &str, name: &str) -> io::Result<(String, u64)> {
        let saved = self.directory.join(guid);
        // The code beside us may have put anything in its place: a link is not followed, a pipe not waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::open(&saved, flags, Mode::empty())?);
        let size = file.metadata()?.len();
        file.set_permissions(Permissions::from_mode(0o644))?;
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

/// Turns or parts the text around it, and is not to be seen itself.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A name that is one file in the directory, visible, and nothing to a shell or a terminal.
fn safe_name(suggested: &str) -> String {
    let last = suggested.rsplit(['/', '\\']).next().unwrap_or_default();
    let mut name: String = last.chars().filter(|c| !c.is_control() && !is_unseen(*c)).collect();
    let is_front = |c: char| c.is_whitespace() || matches!(c, '.' | '-');
    name = name.trim_start_matches(is_front).trim_end().to_owned();
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
            ("cod\u{202e}fdp.exe", "codfdp.exe"),
            ("a\0.txt", "a.txt"),
            (". . -x", "x"),
        ] {
            assert_eq!(safe_name(suggested), name, "{suggested:?}");
        }
        let long = safe_name(&format!("{}.pdf", "é".repeat(300)));
        assert!(long.len() <= MAX_NAME && long.ends_with("é.pdf"), "{long}");
    }

    #[test]
    fn a_link_in_the_place_of_a_download_is_not_followed() {
        let place = std::env::temp_dir().join(format!("sandpool-downloads-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let secret = place.join("secret");
        std::fs::write(&secret, "x").unwrap();
        std::fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&secret, place.join("guid")).unwrap();
        let mut downloads = Downloads::new(place.to_str().unwrap());
        assert!(downloads.begin(1, "guid", "http://a.test/", "a.txt"));
        let told = downloads.completed("guid");
        assert!(matches!(told, Some(Happened::Download { path: None, error: Some(_), .. })), "{told:?}");
        assert_eq!(std::fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn names_that_are_taken_get_a_number() {
        assert_eq!(numbered("a.tar.gz", 2), "a.tar (2).gz");
        assert_eq!(numbered("README", 1), "README (1)");
        assert_eq!(numbered(".x", 1), ".x (1)");
    }
}
