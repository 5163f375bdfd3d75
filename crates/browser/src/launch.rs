//! Starts Chromium: its flags, environment and home directory. No other code in this crate starts a process.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use command_fds::{CommandFdExt, FdMapping};
use proto::BrowserSpec;
use tokio::net::unix::pipe;
use tokio::process::Child;

/// Flags of Chromium. Its own sandbox is off because it cannot be created inside ours, which is the boundary.
const FLAGS: &[&str] = &[
    "--no-sandbox",
    "--remote-debugging-pipe",
    "--no-startup-window",
    "--no-first-run",
    "--no-default-browser-check",
    // Starts no crash handler process, and nothing that calls home.
    "--disable-breakpad",
    "--disable-crash-reporter",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-domain-reliability",
    "--disable-client-side-phishing-detection",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-pings",
    "--password-store=basic",
    "--use-mock-keychain",
    // Uses no graphics card, and no process that renders in software in its place.
    "--disable-gpu",
    "--disable-software-rasterizer",
    "--mute-audio",
    "--hide-scrollbars",
    // All traffic goes through the proxy: nothing uses UDP, and no page learns an address of the sandbox.
    "--disable-quic",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    // No user is present to answer a prompt.
    "--deny-permission-prompts",
    "--disable-notifications",
    "--noerrdialogs",
    "--disable-prompt-on-repost",
    "--disable-popup-blocking",
    // All tabs keep working, whichever one is shown.
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-background-timer-throttling",
    "--disable-hang-monitor",
    // Makes the roles and names of the accessibility tree available without rebuilding the tree for each of them.
    "--enable-blink-features=ComputedAccessibilityInfo",
    // Runs the network service without a separate process.
    "--enable-features=NetworkServiceInProcess2",
    "--disable-features=BackForwardCache,Translate,MediaRouter,OptimizationHints,AutofillServerCommunication,DialMediaRouteProvider",
    "--window-size=1280,800",
];

/// Hosts that bypass the proxy: only the sandbox's loopback. Link-local addresses use the proxy too, although
/// Chromium exempts them by default.
const BYPASS: &str = "<-loopback>;localhost;127.0.0.1;[::1]";

pub(crate) struct Chromium {
    pub process: Child,
    pub to: pipe::Sender,
    pub from: pipe::Receiver,
}

/// Starts Chromium. It ends when its pipe closes.
pub(crate) fn start(spec: &BrowserSpec) -> io::Result<Chromium> {
    let home = Path::new(&spec.home);
    let temporary = home.join("tmp");
    clear(home)?;
    [&temporary, &home.join("profile")].into_iter().try_for_each(fs::create_dir_all)?;
    if let Some(database) = &spec.nssdb {
        copy_trust(Path::new(database), &home.join(".pki/nssdb"))?;
    }
    let (their_input, to) = io::pipe()?;
    let (from, their_output) = io::pipe()?;
    let mut command = command(spec);
    command.args(arguments(spec)).current_dir(home).env_clear();
    command.env("HOME", home).env("TMPDIR", &temporary).env("LANG", "C.UTF-8");
    for (name, directory) in
        [("XDG_CONFIG_HOME", ".config"), ("XDG_CACHE_HOME", ".cache"), ("XDG_DATA_HOME", ".local/share")]
    {
        command.env(name, home.join(directory));
    }
    command.envs(spec.fontconfig.as_ref().map(|path| ("FONTCONFIG_FILE", path)));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mappings = vec![
        FdMapping { parent_fd: their_input.into(), child_fd: 3 },
        FdMapping { parent_fd: their_output.into(), child_fd: 4 },
    ];
    command.fd_mappings(mappings).map_err(io::Error::other)?;
    let mut command = tokio::process::Command::from(command);
    command.kill_on_drop(true);
    // The command holds our copies of the child's pipe ends, which are closed when it is dropped.
    let process = command.spawn()?;
    drop(command);
    let (to, from) = (pipe::Sender::from_owned_fd(to.into())?, pipe::Receiver::from_owned_fd(from.into())?);
    Ok(Chromium { process, to, from })
}

/// Removes everything that an earlier browser left behind: logins, service workers, and anything that a page planted
/// after taking the browser over.
fn clear(home: &Path) -> io::Result<()> {
    fs::create_dir_all(home)?;
    for entry in fs::read_dir(home)? {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() { fs::remove_dir_all(path)? } else { fs::remove_file(path)? }
    }
    Ok(())
}

#[allow(clippy::disallowed_methods, reason = "the driver's one place to start a process")]
fn command(spec: &BrowserSpec) -> std::process::Command {
    std::process::Command::new(&spec.program)
}

fn arguments(spec: &BrowserSpec) -> Vec<String> {
    let mut arguments: Vec<String> = FLAGS.iter().map(|&flag| flag.to_owned()).collect();
    if !spec.shell {
        arguments.push("--headless".into());
    }
    let profile: PathBuf = Path::new(&spec.home).join("profile");
    arguments.push(format!("--user-data-dir={}", profile.display()));
    match &spec.proxy {
        Some(proxy) => {
            arguments.push(format!("--proxy-server=http://{proxy}"));
            arguments.push(format!("--proxy-bypass-list={BYPASS}"));
        }
        None => arguments.push("--no-proxy-server".into()),
    }
    arguments
}

/// Copies the certificate database, because the browser needs a writable one.
fn copy_trust(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for name in ["cert9.db", "key4.db", "pkcs11.txt"] {
        let bytes = fs::read(from.join(name))?;
        fs::write(to.join(name), bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_an_earlier_home_is_left_and_no_link_is_followed() {
        let root = std::env::temp_dir().join(format!("browser-home-{}", std::process::id()));
        let (home, beside) = (root.join("home"), root.join("beside"));
        fs::create_dir_all(home.join(".config/deep")).unwrap();
        fs::create_dir_all(beside.join("kept")).unwrap();
        fs::write(home.join("file"), "x").unwrap();
        std::os::unix::fs::symlink(&beside, home.join(".pki")).unwrap();
        clear(&home).unwrap();
        assert_eq!(fs::read_dir(&home).unwrap().count(), 0);
        assert!(beside.join("kept").exists());
        fs::remove_dir_all(root).unwrap();
    }
}
