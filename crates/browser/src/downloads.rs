//! Downloads: files that pages make the browser save. While a file arrives, it has a name that the browser chose. Once
//! it is complete, it gets its final name.
//!
//! The directory belongs to the code in the sandbox, so it may contain anything. No existing file is overwritten.

use std::collections::HashMap;
use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use proto::browser::PageEvent;
use rustix::fs::{CWD, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::state::{MAX_URL, shorten};

/// Maximum number of simultaneous downloads; further ones are cancelled.
const MAX_RUNNING: usize = 16;
/// Maximum length of a file name in bytes. With a number added, it is still valid on every file system.
const MAX_NAME: usize = 200;
/// Maximum number of files with the same name.
const MAX_SAME: u32 = 1000;
/// Maximum number of directory entries that are counted.
const MAX_LISTED: usize = 10_000;

pub(crate) struct Downloads {
    directory: PathBuf,
    /// The directory as clients know it: relative to the workspace, unless it is elsewhere.
    shown: PathBuf,
    running: HashMap<String, Download>,
    /// The moment at which the latest download began, on the clock of [`crate::state::BrowserState`].
    begun: u64,
    /// The moment of a click on a link that saves its target, until a download begins.
    expected: Option<u64>,
    /// Total size of the finished files in the directory.
    finished_bytes: u64,
    /// Returns the number of free bytes on the file system of the directory.
    free: fn(&Path) -> Option<u64>,
}

struct Download {
    url: String,
    name: String,
    begun: u64,
    received: u64,
    /// The reason why the download is being cancelled, if it is.
    refused: Option<String>,
}

impl Downloads {
    pub(crate) fn new(workspace: &str, directory: &str) -> Self {
        let directory = PathBuf::from(directory);
        let shown = directory.strip_prefix(workspace).unwrap_or(&directory).to_owned();
        Self { directory, shown, running: HashMap::new(), begun: 0, expected: None, finished_bytes: 0, free }
    }

    /// Returns whether a download that began after `moment` is still running.
    pub(crate) fn is_running_since(&self, moment: u64) -> bool {
        self.running.values().any(|download| download.begun > moment)
    }

    pub(crate) fn begun_since(&self, moment: u64) -> bool {
        self.begun > moment
    }

    /// Records that a link was clicked that saves its target.
    pub(crate) fn expect(&mut self, now: u64) {
        self.expected = Some(now);
    }

    pub(crate) fn expect_none(&mut self) {
        self.expected = None;
    }

    pub(crate) fn is_expected_since(&self, moment: u64) -> bool {
        self.expected.is_some_and(|expected| expected >= moment)
    }

    /// Returns the addresses of the downloads that began after `moment` and are still running.
    pub(crate) fn addresses_since(&self, moment: u64) -> Vec<String> {
        self.running.values().filter(|download| download.begun > moment).map(|download| download.url.clone()).collect()
    }

    /// Records a new download. Returns whether it may continue.
    pub(crate) fn begin(&mut self, now: u64, guid: &str, url: &str, suggested: &str) -> bool {
        self.begun = now;
        self.expected = None;
        let room = self.running.len() < MAX_RUNNING;
        if room {
            self.finished_bytes = self.in_directory();
            let (url, name) = (shorten(url, MAX_URL), safe_name(suggested));
            self.running.insert(guid.into(), Download { url, name, begun: now, received: 0, refused: None });
        }
        room
    }

    /// Records the progress of a download and returns whether it may continue. All downloads together may not use
    /// more of the disk than they leave free: a page can make the browser save data without end, and code needs the
    /// disk too. `announced` is 0 if the total size is unknown.
    pub(crate) fn progress(&mut self, guid: &str, received: u64, announced: u64) -> bool {
        let Some(download) = self.running.get_mut(guid).filter(|download| download.refused.is_none()) else {
            return true;
        };
        download.received = received;
        let Some(free) = (self.free)(&self.directory) else { return true };
        let coming = announced.saturating_sub(received);
        let received: u64 = self.running.values().map(|download| download.received).sum();
        let taken = self.finished_bytes.saturating_add(received).saturating_add(coming);
        let fits = taken <= free.saturating_sub(coming);
        if !fits && let Some(download) = self.running.get_mut(guid) {
            let most = self.finished_bytes.saturating_add(received).saturating_add(free) / 2;
            let why = format!("downloads may take half of the disk that is free, {most} bytes together");
            download.refused = Some(why);
        }
        fits
    }

    /// Returns the total size of the files in the directory, except those of running downloads.
    fn in_directory(&self) -> u64 {
        let entries = std::fs::read_dir(&self.directory).into_iter().flatten().flatten().take(MAX_LISTED);
        let finished =
            entries.filter(|entry| !entry.file_name().to_str().is_some_and(|name| self.running.contains_key(name)));
        finished
            .filter_map(|entry| entry.metadata().ok())
            .filter(std::fs::Metadata::is_file)
            .map(|file| file.len())
            .sum()
    }

    pub(crate) fn cancelled(&mut self, guid: &str) -> Option<PageEvent> {
        let Download { url, refused, .. } = self.running.remove(guid)?;
        // Remove the incomplete file, if there is one.
        let _ = std::fs::remove_file(self.directory.join(guid));
        let error = Some(refused.unwrap_or_else(|| "the download was broken off".into()));
        Some(PageEvent::Download { url, path: None, size: 0, error })
    }

    pub(crate) fn completed(&mut self, guid: &str) -> Option<PageEvent> {
        let Download { url, name, .. } = self.running.remove(guid)?;
        Some(match self.finish(guid, &name) {
            Ok((path, size)) => {
                self.finished_bytes = self.finished_bytes.saturating_add(size);
                PageEvent::Download { url, path: Some(path), size, error: None }
            }
            Err(error) => PageEvent::Download { url, path: None, size: 0, error: Some(error.to_string()) },
        })
    }

    /// Gives the file its final name and makes it readable for everyone.
    fn finish(&self, guid: &str, name: &str) -> io::Result<(String, u64)> {
        let unfinished = self.directory.join(guid);
        // The code in the sandbox may have replaced the file with anything, so symlinks are not followed and pipes
        // are not waited for.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = std::fs::File::from(rustix::fs::open(&unfinished, flags, Mode::empty())?);
        let size = file.metadata()?.len();
        file.set_permissions(Permissions::from_mode(0o644))?;
        for number in 0..MAX_SAME {
            let name = numbered(name, number);
            match rustix::fs::renameat_with(CWD, &unfinished, CWD, self.directory.join(&name), RenameFlags::NOREPLACE) {
                Ok(()) => return Ok((self.shown.join(&name).display().to_string(), size)),
                Err(Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::Error::other(format!("there are too many files named `{name}`")))
    }
}

fn free(directory: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(directory).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

fn numbered(name: &str, number: u32) -> String {
    match (number, name.rsplit_once('.')) {
        (0, _) => name.to_owned(),
        (_, Some((stem, extension))) if !stem.is_empty() => format!("{stem} ({number}).{extension}"),
        _ => format!("{name} ({number})"),
    }
}

/// Returns whether a character is invisible and reorders or separates the text around it.
fn is_unseen(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Returns a name that denotes one visible file in the directory and has no special meaning to a shell or a terminal.
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
        let mut downloads = Downloads::new("/workspace", place.to_str().unwrap());
        assert!(downloads.begin(1, "guid", "http://a.test/", "a.txt"));
        let told = downloads.completed("guid");
        assert!(matches!(told, Some(PageEvent::Download { path: None, error: Some(_), .. })), "{told:?}");
        assert_eq!(std::fs::metadata(&secret).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&place).unwrap();
    }

    /// W35: the disk has 1,000 free bytes at the start.
    #[test]
    fn w35_downloads_take_no_more_of_the_disk_than_they_leave_free() {
        let place = std::env::temp_dir().join(format!("sandpool-endless-{}", std::process::id()));
        std::fs::create_dir_all(&place).unwrap();
        let mut downloads = Downloads::new("/workspace", place.to_str().unwrap());
        downloads.free = |directory| {
            let sizes = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len());
            Some(1000 - sizes.sum::<u64>())
        };
        let size = |name: &str, bytes: usize| std::fs::write(place.join(name), vec![0; bytes]).unwrap();
        let begin = |downloads: &mut Downloads, guid: &str| assert!(downloads.begin(1, guid, "http://a.test/", guid));
        // Several downloads of unknown size count together.
        begin(&mut downloads, "one");
        begin(&mut downloads, "two");
        for bytes in [100, 200, 250] {
            size("one", bytes);
            assert!(downloads.progress("one", bytes as u64, 0), "{bytes}");
            size("two", bytes);
            assert!(downloads.progress("two", bytes as u64, 0), "{bytes}");
        }
        size("two", 251);
        assert!(!downloads.progress("two", 251, 0));
        let Some(PageEvent::Download { path: None, error: Some(error), .. }) = downloads.cancelled("two") else {
            panic!()
        };
        assert_eq!(error, "downloads may take half of the disk that is free, 500 bytes together");
        assert!(!place.join("two").exists());
        // Files saved earlier count as well, and the announced size counts before it arrives.
        assert!(matches!(downloads.completed("one"), Some(PageEvent::Download { path: Some(_), .. })));
        begin(&mut downloads, "three");
        assert!(downloads.progress("three", 0, 250));
        begin(&mut downloads, "four");
        assert!(!downloads.progress("four", 0, 251));
        assert!(downloads.progress("unknown", 1 << 60, 0));
        std::fs::remove_dir_all(&place).unwrap();
    }

    #[test]
    fn names_that_are_taken_get_a_number() {
        assert_eq!(numbered("a.tar.gz", 2), "a.tar (2).gz");
        assert_eq!(numbered("README", 1), "README (1)");
        assert_eq!(numbered(".x", 1), ".x (1)");
    }
}
