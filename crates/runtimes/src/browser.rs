//! Finds Chromium on this machine; it is never downloaded. The headless shell is preferred to the whole browser,
//! because it takes a third of its memory and start time.
//!
//! The search is for the binaries only, because the files in `/usr/bin` are scripts that add flags and keys.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use engine::config::BrowserCommand;

use super::kernel::outside_usr;
use super::process::Tool;
use super::python::{exposes_home, is_binary};
use super::{BrowserChoice, HostEnvironment, SetupError};

/// Paths where packages install the headless shell, Debian's first.
const SHELLS: &[&str] = &[
    "/usr/lib/chromium/chromium-headless-shell",
    "/usr/lib64/chromium-browser/headless_shell",
    "/usr/lib/chromium-browser/headless_shell",
    "/usr/lib/chromium/headless_shell",
    "/opt/chrome-headless-shell-linux64/chrome-headless-shell",
    "/opt/chrome-headless-shell/chrome-headless-shell",
];
const SHELL_NAMES: &[&str] = &["chromium-headless-shell", "chrome-headless-shell", "headless_shell"];

const WHOLE: &[&str] = &[
    "/usr/lib/chromium/chromium",
    "/usr/lib64/chromium-browser/chromium-browser",
    "/usr/lib/chromium-browser/chromium-browser",
    "/usr/lib/chromium-browser/chrome",
    "/opt/google/chrome/chrome",
    "/opt/google/chrome-beta/chrome",
];
const WHOLE_NAMES: &[&str] = &["chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome"];

/// Where test tools store downloaded browsers below the home directory: the directory, the beginning of the names in
/// it, and the path of the binary below each of them.
const FETCHED_SHELLS: &[(&str, &str, &str)] = &[
    (".cache/ms-playwright", "chromium_headless_shell-", "chrome-headless-shell-linux64/chrome-headless-shell"),
    (".cache/ms-playwright", "chromium_headless_shell-", "chrome-linux/headless_shell"),
    (".cache/puppeteer/chrome-headless-shell", "linux-", "chrome-headless-shell-linux64/chrome-headless-shell"),
];
const FETCHED_WHOLE: &[(&str, &str, &str)] = &[
    (".cache/ms-playwright", "chromium-", "chrome-linux64/chrome"),
    (".cache/ms-playwright", "chromium-", "chrome-linux/chrome"),
    (".cache/puppeteer/chrome", "linux-", "chrome-linux64/chrome"),
];

/// Directories with fonts that a sandbox sees.
const FONTS: &[&str] = &["/usr/share/fonts", "/usr/local/share/fonts"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstalledBrowser {
    pub version: String,
    pub program: PathBuf,
    /// Whether this is the headless shell rather than the whole browser.
    pub shell: bool,
}

/// Returns the browser to use, or `None` if the operator wants none.
pub async fn find(choice: &BrowserChoice, env: &HostEnvironment) -> Result<Option<InstalledBrowser>, SetupError> {
    match choice {
        BrowserChoice::Off => Ok(None),
        BrowserChoice::Path(path) => probe(path, env).await.map(Some),
        BrowserChoice::Auto => installed(candidates(env), env).await.map(Some),
    }
}

async fn installed(candidates: Vec<PathBuf>, env: &HostEnvironment) -> Result<InstalledBrowser, SetupError> {
    let mut refused = Vec::new();
    for path in candidates {
        match probe(&path, env).await {
            Ok(browser) => return Ok(browser),
            Err(error) => refused.push(error.to_string()),
        }
    }
    Err(SetupError::NoBrowser(refused))
}

fn candidates(env: &HostEnvironment) -> Vec<PathBuf> {
    let shells = paths(SHELLS, SHELL_NAMES, FETCHED_SHELLS, env);
    let mut found = [shells, paths(WHOLE, WHOLE_NAMES, FETCHED_WHOLE, env)].concat();
    let mut seen = std::collections::BTreeSet::new();
    found.retain(|path| is_binary(path) && path.canonicalize().is_ok_and(|real| seen.insert(real)));
    found
}

fn paths(packaged: &[&str], names: &[&str], fetched: &[(&str, &str, &str)], env: &HostEnvironment) -> Vec<PathBuf> {
    let packaged = packaged.iter().map(PathBuf::from);
    let on_path = env.path.iter().cloned().flat_map(|dir| names.iter().map(move |name| dir.join(name)));
    let fetched = fetched.iter().flat_map(|(dir, begin, binary)| {
        let Some(dir) = env.home.as_deref().map(|home| home.join(dir)) else { return Vec::new() };
        let mut versions: Vec<PathBuf> = fs::read_dir(dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(begin))
            .map(|entry| entry.path().join(binary))
            .collect();
        versions.sort();
        versions.reverse(); // newest first
        versions
    });
    packaged.chain(on_path).chain(fetched).collect()
}

/// Checks that a browser can be used: the program has to report its version, and its directory must be safe to show to
/// sandboxes.
async fn probe(path: &Path, env: &HostEnvironment) -> Result<InstalledBrowser, SetupError> {
    let refused = |why: &str| SetupError::tool(&format!("`{}`", path.display()), why);
    let program = path.canonicalize().map_err(SetupError::io(path))?;
    if !is_binary(&program) {
        return Err(refused("is a script or no program at all; name the binary that it starts"));
    }
    if env.can_be_changed(path) {
        return Err(refused("is in a writable mount, where code can change it"));
    }
    if directory(&program).is_none_or(|dir| exposes_home(dir, env)) {
        return Err(refused(
            "the home directory would be visible in sandboxes; put the browser into a separate directory",
        ));
    }
    let answer = Tool::new("chromium", &program).args(["--version"]).ask(Duration::from_secs(20)).await?;
    let version = version(&answer).ok_or_else(|| refused("does not say which version it is"))?;
    let name = program.file_name().unwrap_or_default().to_string_lossy();
    Ok(InstalledBrowser { version: version.into(), shell: SHELL_NAMES.contains(&&*name), program })
}

/// Returns the version in an answer such as `Chromium 156.0.8078.79 built on …`.
fn version(answer: &str) -> Option<&str> {
    answer.split_whitespace().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))
}

/// Returns the directory of the program, which also contains its data.
fn directory(program: &Path) -> Option<&Path> {
    program.parent().filter(|dir| dir.parent().is_some())
}

impl InstalledBrowser {
    pub(crate) fn command(&self, fontconfig: PathBuf) -> BrowserCommand {
        let major = self.version.split('.').next().unwrap_or_default();
        BrowserCommand {
            label: format!("chromium-{major}"),
            program: self.program.clone(),
            shell: self.shell,
            fontconfig: Some(fontconfig),
            binds: outside_usr(directory(&self.program).map(Path::to_owned)),
        }
    }
}

/// Returns whether this machine has fonts. Without them, a browser has only the font of the Python runtime.
pub fn has_fonts() -> bool {
    fn any(dir: &Path, depth: usize) -> bool {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).any(|path| {
            let font = path.extension().is_some_and(|kind| ["ttf", "otf", "ttc"].iter().any(|font| kind == *font));
            font || (depth > 0 && path.is_dir() && any(&path, depth - 1))
        })
    }
    FONTS.iter().any(|dir| any(Path::new(dir), 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::scratch::Scratch;

    /// Creates a program that answers `--version` with a version: a copy of GNU's `echo`, which is started by its real
    /// name.
    fn stand_in(at: &Path) -> PathBuf {
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        fs::copy("/bin/echo", at).unwrap();
        at.to_owned()
    }

    fn home(scratch: &Scratch) -> HostEnvironment {
        HostEnvironment { home: Some(scratch.0.clone()), ..HostEnvironment::default() }
    }

    #[test]
    fn the_version_is_read_from_whatever_a_build_calls_itself() {
        assert_eq!(version("Chromium 156.0.8078.79 built on Debian 12\n"), Some("156.0.8078.79"));
        assert_eq!(version("Google Chrome for Testing 131.0.6778.87 \n"), Some("131.0.6778.87"));
        assert_eq!(version("no display\n"), None);
    }

    #[tokio::test]
    async fn the_newest_fetched_shell_is_found_and_its_directory_shown_to_sandboxes() {
        let scratch = Scratch::new();
        let fetched = scratch.0.join(".cache/ms-playwright");
        stand_in(&fetched.join("chromium_headless_shell-1100/chrome-linux/headless_shell"));
        let newest = stand_in(&fetched.join("chromium_headless_shell-1200/chrome-linux/headless_shell"));
        let env = home(&scratch);
        let browser = installed(paths(&[], SHELL_NAMES, FETCHED_SHELLS, &env), &env).await.unwrap();
        let command = browser.command("/runtime/fonts.conf".into());
        assert_eq!((command.program.as_path(), command.shell), (newest.as_path(), true));
        assert_eq!(command.binds, [newest.parent().unwrap()]);
    }

    /// W64: code that can write to `~/.cache` puts a program there.
    #[tokio::test]
    async fn w64_a_browser_that_code_can_change_is_not_executed() {
        let scratch = Scratch::new();
        let cache = scratch.0.canonicalize().unwrap().join(".cache");
        let shell = stand_in(&cache.join("ms-playwright/chromium_headless_shell-1200/chrome-linux/headless_shell"));
        let env = HostEnvironment { writable: vec![cache], ..home(&scratch) };
        let error = installed(paths(&[], SHELL_NAMES, FETCHED_SHELLS, &env), &env).await.unwrap_err();
        assert!(error.to_string().contains("is in a writable mount, where code can change it"), "{error}");
        assert!(find(&BrowserChoice::Path(shell), &env).await.is_err());
    }

    #[tokio::test]
    async fn a_wrapper_script_is_refused_and_the_answer_says_what_to_name() {
        let scratch = Scratch::new();
        let script = scratch.write("chromium", "#!/bin/sh\nexec /usr/lib/chromium/chromium \"$@\"\n");
        let error = find(&BrowserChoice::Path(script.clone()), &home(&scratch)).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("`{}`: is a script or no program at all; name the binary that it starts", script.display())
        );
    }

    #[tokio::test]
    async fn a_program_that_lies_in_the_home_directory_itself_is_refused() {
        let scratch = Scratch::new();
        let program = stand_in(&scratch.0.join("chrome"));
        let error = find(&BrowserChoice::Path(program), &home(&scratch)).await.unwrap_err();
        assert!(error.to_string().contains("home directory"), "{error}");
    }

    #[tokio::test]
    async fn off_is_none_and_a_machine_without_one_is_told_what_to_install() {
        let scratch = Scratch::new();
        assert_eq!(find(&BrowserChoice::Off, &home(&scratch)).await.unwrap(), None);
        let error = installed(Vec::new(), &home(&scratch)).await.unwrap_err();
        assert!(error.to_string().contains("apt-get install chromium-headless-shell"), "{error}");
    }
}
