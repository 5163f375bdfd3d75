//! Stores the runtimes in one subdirectory each, which is either complete or unusable.
//!
//! A Python environment cannot be built elsewhere and moved (scripts and bytecode contain its path), so it is built in
//! place and a marker file is written last. A directory without a marker is rubbish, and the next set-up removes it
//! under the lock.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ring::digest::{Context, SHA256};
use rustix::fs::{FlockOperation, flock};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use text::{hex, unix_now};

use super::{Progress, SetupError};

/// Version of the layout. It is raised when the content of a runtime changes otherwise than by its list.
const LAYOUT: &str = "1";
const MARKER: &str = "complete.json";
const LOCK: &str = "lock";

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Marker {
    /// Hash of the list from which the runtime was made; another list is another runtime.
    pub recipe: String,
    /// Version of the interpreter.
    pub version: String,
    /// Interpreter that an environment uses.
    pub base: Option<PathBuf>,
    /// Prefix of that interpreter, which contains its library.
    pub base_prefix: Option<PathBuf>,
    /// Installed packages with their versions.
    pub packages: BTreeMap<String, String>,
    /// Time of completion, in seconds since 1970.
    pub completed: u64,
    /// Digest over name, size, time and mode of each file. A prefix names the hash and the precision of the times.
    pub digest: String,
    /// Time of the newest file, in nanoseconds since 1970. A copy may have truncated the times, but only a change
    /// raises them.
    #[serde(default)]
    pub newest: u64,
}

#[derive(Debug, Clone)]
pub struct Runtime {
    pub dir: PathBuf,
    pub(crate) marker: Marker,
}

/// Returns the hash that identifies the ingredients of a runtime.
pub(crate) fn recipe(parts: &[&str]) -> String {
    let mut hash = Context::new(&SHA256);
    for part in [LAYOUT, std::env::consts::ARCH].iter().chain(parts) {
        hash.update(&(part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    hex(hash.finish().as_ref())
}

/// Returns the complete runtimes whose names begin with `prefix`, newest first. They are not verified yet.
pub(crate) fn complete(store: &Path, prefix: &str) -> Vec<Runtime> {
    let entries = fs::read_dir(store).into_iter().flatten().flatten();
    let named = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix));
    let mut found: Vec<Runtime> = named.filter_map(|entry| read(&entry.path())).collect();
    found.sort_by_key(|runtime| std::cmp::Reverse(runtime.marker.completed));
    found
}

fn read(dir: &Path) -> Option<Runtime> {
    let marker = serde_json::from_slice(&fs::read(dir.join(MARKER)).ok()?).ok()?;
    Some(Runtime { dir: dir.into(), marker })
}

impl Runtime {
    /// Returns the version of the interpreter.
    pub fn version(&self) -> &str {
        &self.marker.version
    }

    /// Returns the installed packages with their versions.
    pub fn packages(&self) -> &BTreeMap<String, String> {
        &self.marker.packages
    }

    /// Checks that nothing in the runtime was changed, added or removed since it was made.
    pub(crate) fn verify(&self) -> Result<(), SetupError> {
        let times = Times::of(&self.marker.digest);
        let (found, newest) = digest(&self.dir, times).map_err(SetupError::io(&self.dir))?;
        let newer = times == Times::Seconds && newest > self.marker.newest;
        if found == self.marker.digest && !newer {
            if times == Times::Nanoseconds {
                // The new marker makes it possible to copy the runtime. If it cannot be written, the runtime remains as
                // valid as before.
                let _ = self.renew_marker();
            }
            return Ok(());
        }
        let expected = self.marker.digest.clone();
        let found = if newer { format!("{found} and a newer file") } else { found };
        let dir = self.dir.clone();
        Err(match times {
            Times::Seconds => SetupError::Modified { dir, expected, found },
            Times::Nanoseconds => SetupError::ModifiedOrCopied { dir, expected, found },
        })
    }

    fn renew_marker(&self) -> std::io::Result<()> {
        let (digest, newest) = digest(&self.dir, Times::Seconds)?;
        write_marker(&self.dir, &Marker { digest, newest, ..self.marker.clone() })
    }
}

/// Replaces the marker atomically: a concurrent reader sees the old one or the new one.
fn write_marker(dir: &Path, marker: &Marker) -> std::io::Result<()> {
    let new = dir.with_file_name(format!(".{}.{}", MARKER, std::process::id()));
    let file = File::create(&new)?;
    serde_json::to_writer_pretty(&file, marker)?;
    file.sync_all()?;
    fs::rename(new, dir.join(MARKER))
}

/// The lock on the directory while runtimes are made. `pip` and `npm` inherit the descriptor: if one of them outlives a
/// killed set-up, the next set-up must not build into the directory to which it still writes.
pub(crate) struct Lock {
    store: PathBuf,
    _file: File,
}

impl Lock {
    pub(crate) async fn take(store: &Path, progress: &Progress) -> Result<Self, SetupError> {
        fs::create_dir_all(store).map_err(SetupError::io(store))?;
        let path = store.join(LOCK);
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(SetupError::io(&path))?;
        let mut announced = false;
        while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if !announced {
                progress.say("another sandpool is preparing the runtimes; waiting for it");
                announced = true;
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        fcntl_setfd(&file, FdFlags::empty()).map_err(|error| SetupError::io(&path)(error.into()))?;
        Ok(Self { store: store.into(), _file: file })
    }

    /// Removes the directories that interrupted set-ups left behind.
    pub(crate) fn remove_rubbish(&self) -> Result<(), SetupError> {
        let entries = fs::read_dir(&self.store).map_err(SetupError::io(&self.store))?;
        for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
            if read(&entry.path()).is_none() {
                fs::remove_dir_all(entry.path()).map_err(SetupError::io(&entry.path()))?;
            }
        }
        Ok(())
    }

    /// Creates an empty directory to build in. An existing directory of that name is removed, marker first.
    pub(crate) fn start(&self, name: &str) -> Result<PathBuf, SetupError> {
        let dir = self.store.join(name);
        let _ = fs::remove_file(dir.join(MARKER));
        if dir.exists() {
            fs::remove_dir_all(&dir).map_err(SetupError::io(&dir))?;
        }
        fs::create_dir(&dir).map_err(SetupError::io(&dir))?;
        fs::set_permissions(&dir, Permissions::from_mode(0o755)).map_err(SetupError::io(&dir))?;
        Ok(dir)
    }

    /// Seals the directory and only then writes the marker that declares it complete.
    pub(crate) fn finish(&self, dir: PathBuf, mut marker: Marker) -> Result<Runtime, SetupError> {
        let work = || -> std::io::Result<Marker> {
            seal(&dir)?;
            marker.completed = unix_now();
            (marker.digest, marker.newest) = digest(&dir, Times::Seconds)?;
            write_marker(&dir, &marker)?;
            Ok(marker)
        };
        let marker = work().map_err(SetupError::io(&dir))?;
        Ok(Runtime { dir, marker })
    }
}

/// Makes everything readable for the uid of a sandbox, whatever the umask was, removes write permission from files, and
/// clears setuid bits.
fn seal(dir: &Path) -> std::io::Result<()> {
    for (path, meta) in walk(dir)? {
        if meta.is_symlink() {
            continue;
        }
        let executable = meta.is_dir() || meta.mode() & 0o111 != 0;
        let mode = match (meta.is_dir(), executable) {
            (true, _) => 0o755,
            (false, true) => 0o555,
            (false, false) => 0o444,
        };
        if meta.mode() & 0o7777 != mode {
            fs::set_permissions(path, Permissions::from_mode(mode))?;
        }
    }
    Ok(())
}

/// Precision of file times in a digest. Tools that copy a runtime (archives, images, layers) mostly keep only seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Times {
    Seconds,
    /// Precision that earlier versions used; such a runtime is valid only where it was made.
    Nanoseconds,
}

impl Times {
    fn of(digest: &str) -> Self {
        if digest.starts_with(Self::Seconds.prefix()) { Self::Seconds } else { Self::Nanoseconds }
    }

    fn prefix(self) -> &'static str {
        match self {
            Self::Seconds => "sha256-s:",
            Self::Nanoseconds => "sha256:",
        }
    }
}

/// Returns the digest and the time of the newest file. It opens no file, so it is cheap enough for each start.
fn digest(dir: &Path, times: Times) -> std::io::Result<(String, u64)> {
    let (mut hash, mut newest) = (Context::new(&SHA256), 0);
    for (path, meta) in walk(dir)? {
        let name = path.strip_prefix(dir).unwrap_or(&path).as_os_str().as_bytes();
        if meta.is_dir() || name == MARKER.as_bytes() {
            continue;
        }
        hash.update(&(name.len() as u64).to_le_bytes());
        hash.update(name);
        if meta.is_symlink() {
            hash.update(fs::read_link(&path)?.as_os_str().as_bytes());
        } else {
            let nanoseconds = i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec());
            newest = newest.max(u64::try_from(nanoseconds).unwrap_or(0));
            let parts = (times == Times::Nanoseconds).then(|| meta.mtime_nsec().cast_unsigned());
            let numbers =
                [meta.len(), meta.mtime().cast_unsigned()].into_iter().chain(parts).chain([meta.mode().into()]);
            numbers.for_each(|number| hash.update(&number.to_le_bytes()));
        }
    }
    Ok((format!("{}{}", times.prefix(), hex(hash.finish().as_ref())), newest))
}

/// Returns everything below `dir`, sorted, without following symlinks.
fn walk(dir: &Path) -> std::io::Result<BTreeMap<PathBuf, fs::Metadata>> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![dir.to_owned()]);
    while let Some(dir) = todo.pop() {
        for entry in fs::read_dir(dir)? {
            let entry = entry?;
            let meta = entry.metadata()?;
            if meta.is_dir() {
                todo.push(entry.path());
            }
            found.insert(entry.path(), meta);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use testkit::scratch::Scratch;

    use super::*;

    fn marker() -> Marker {
        Marker { recipe: "r".into(), version: "1".into(), ..Marker::default() }
    }

    async fn built(place: &Scratch) -> (Lock, Runtime) {
        let lock = Lock::take(&place.0, &Progress::new().0).await.unwrap();
        let dir = lock.start("python-1").unwrap();
        fs::create_dir(dir.join("bin")).unwrap();
        fs::write(dir.join("bin/tool"), "content").unwrap();
        fs::set_permissions(dir.join("bin/tool"), Permissions::from_mode(0o4777)).unwrap();
        let runtime = lock.finish(dir, marker()).unwrap();
        (lock, runtime)
    }

    #[tokio::test]
    async fn what_has_no_marker_is_not_there_and_is_removed() {
        let place = Scratch::new();
        let (lock, _) = built(&place).await;
        let half = lock.start("python-2").unwrap();
        fs::write(half.join("file"), "x").unwrap();
        let names = |found: Vec<Runtime>| found.into_iter().map(|one| one.dir).collect::<Vec<_>>();
        assert_eq!(names(complete(&place.0, "python-")), [place.0.join("python-1")]);
        lock.remove_rubbish().unwrap();
        assert!(!half.exists());
        assert_eq!(names(complete(&place.0, "python-")), [place.0.join("python-1")]);
    }

    /// F27 and S06 of the hostile list.
    #[tokio::test]
    async fn a_changed_an_added_and_a_removed_file_are_each_noticed_and_nothing_is_setuid() {
        let place = Scratch::new();
        let (_lock, runtime) = built(&place).await;
        runtime.verify().unwrap();
        let tool = runtime.dir.join("bin/tool");
        assert_eq!(fs::metadata(&tool).unwrap().mode() & 0o7777, 0o555);

        let added = runtime.dir.join("bin/more");
        fs::write(&added, "").unwrap();
        assert!(matches!(runtime.verify(), Err(SetupError::Modified { .. })));
        fs::remove_file(added).unwrap();
        runtime.verify().unwrap();

        fs::set_permissions(&tool, Permissions::from_mode(0o755)).unwrap();
        fs::write(&tool, "cOntent").unwrap();
        fs::set_permissions(&tool, Permissions::from_mode(0o555)).unwrap();
        let error = runtime.verify().unwrap_err().to_string();
        assert!(error.contains("expected sha256-s:") && error.ends_with("run `sandpool setup --force`"), "{error}");
        fs::remove_file(tool).unwrap();
        assert!(matches!(runtime.verify(), Err(SetupError::Modified { .. })));
    }

    /// W41 of the hostile list: archives, images and layers of containers keep the seconds of a file's time and
    /// truncate the rest.
    #[tokio::test]
    async fn w41_a_runtime_that_was_copied_with_times_in_seconds_is_the_same() {
        let place = Scratch::new();
        let (_lock, runtime) = built(&place).await;
        let tool = runtime.dir.join("bin/tool");
        let set = |time: SystemTime| File::open(&tool).unwrap().set_modified(time).unwrap();
        let modified = fs::metadata(&tool).unwrap().modified().unwrap();
        let since = modified.duration_since(SystemTime::UNIX_EPOCH).unwrap();
        let seconds = SystemTime::UNIX_EPOCH + Duration::from_secs(since.as_secs());
        set(seconds);
        runtime.verify().unwrap();
        set(modified + Duration::from_nanos(1));
        assert!(matches!(runtime.verify(), Err(SetupError::Modified { .. })), "a change in the same second");
        set(seconds - Duration::from_secs(1));
        assert!(matches!(runtime.verify(), Err(SetupError::Modified { .. })));
        set(modified);

        // A runtime of an earlier version is valid where it was made; elsewhere the error says what to do.
        let (digest, _) = digest(&runtime.dir, Times::Nanoseconds).unwrap();
        let old = Runtime { marker: Marker { digest, newest: 0, ..runtime.marker.clone() }, ..runtime.clone() };
        old.verify().unwrap();
        let marked = &complete(&place.0, "python-")[0];
        assert_eq!(marked.marker, runtime.marker, "it is marked anew, so that it can be copied");
        set(seconds);
        marked.verify().unwrap();
        let error = old.verify().unwrap_err().to_string();
        assert!(error.ends_with("run `sandpool setup --force`") && error.contains("earlier version"), "{error}");
    }

    #[tokio::test]
    async fn a_second_one_waits_for_the_lock() {
        let place = Scratch::new();
        let (lock, _) = built(&place).await;
        let (progress, status) = Progress::new();
        let second = Lock::take(&place.0, &progress);
        let waited = tokio::time::timeout(Duration::from_millis(50), second).await;
        assert!(waited.is_err());
        assert_eq!(*status.borrow(), "another sandpool is preparing the runtimes; waiting for it");
        drop(lock);
        Lock::take(&place.0, &progress).await.unwrap();
    }
}
