//! Starts the processes of a set-up: interpreters that are queried, `pip` and `npm`. Nothing else in this crate does.
//!
//! Each process gets a chosen environment, no stdin, a separate process group that is killed when the call ends, and a
//! working directory that is not the server's.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::Command;

use super::{HostEnvironment, SetupError};

/// Number of lines of a failed tool's output that the error contains.
const TAIL: usize = 12;

pub(crate) struct Tool {
    name: String,
    command: Command,
}

impl Tool {
    /// Creates a tool. `name` is its name in messages. The working directory of the server is often the project that
    /// code can write to, and the programs that choose a version (mise, Volta) read there which one to start.
    #[allow(clippy::disallowed_methods, reason = "the one place that starts processes of the host")]
    pub(crate) fn new(name: &str, program: impl AsRef<OsStr>) -> Self {
        let program = Path::new(program.as_ref());
        // A path stays relative to the directory of the server; a name alone is looked up in `PATH`.
        let has_directory = program.parent().is_some_and(|dir| !dir.as_os_str().is_empty());
        let absolute = has_directory.then(|| std::path::absolute(program).ok()).flatten();
        let mut command = Command::new(absolute.as_deref().unwrap_or(program));
        command.current_dir("/");
        command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.process_group(0).kill_on_drop(true);
        Self { name: name.into(), command }
    }

    pub(crate) fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Passes on the variables for tools, and the directories in which the tool finds its helpers.
    pub(crate) fn environment(mut self, env: &HostEnvironment) -> Self {
        self.command.envs(env.handed_on.iter().map(|(name, value)| (name, value)));
        let joined = std::env::join_paths(&env.path);
        self.env("PATH", joined.unwrap_or_else(|_| OsString::from("/usr/local/bin:/usr/bin:/bin")))
    }

    pub(crate) fn dir(mut self, dir: &Path) -> Self {
        self.command.current_dir(dir);
        self
    }

    /// Runs the tool to its end, passes each line to `on_line` as it arrives, and returns all of stdout.
    pub(crate) async fn run(mut self, mut on_line: impl FnMut(&str)) -> Result<String, SetupError> {
        let failed = |why: String| SetupError::Tool { name: self.name.clone(), why };
        let mut child = self.command.spawn().map_err(|error| failed(error.to_string()))?;
        let _group = Group(child.id().and_then(|id| Pid::from_raw(id.cast_signed())));
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(failed("its output is not a pipe".into()));
        };
        let (mut stdout, mut stderr) = (lines(stdout), lines(stderr));
        let (mut out, mut tail) = (String::new(), VecDeque::new());
        let (mut stdout_open, mut stderr_open) = (true, true);
        while stdout_open || stderr_open {
            let line = tokio::select! {
                line = next(&mut stdout), if stdout_open => {
                    stdout_open = line.is_some();
                    out.extend(line.iter().flat_map(|line| [line.as_str(), "\n"]));
                    line
                }
                line = next(&mut stderr), if stderr_open => { stderr_open = line.is_some(); line }
            };
            let Some(line) = line else { continue };
            on_line(&line);
            tail.push_back(line);
            if tail.len() > TAIL {
                tail.pop_front();
            }
        }
        let status = child.wait().await.map_err(|error| failed(error.to_string()))?;
        if status.success() {
            return Ok(out);
        }
        let tail: String = tail.iter().map(|line| format!("\n  {line}")).collect();
        Err(failed(format!("ended with {status}{tail}")))
    }

    /// Runs the tool for a short query: without a line callback and with a timeout.
    pub(crate) async fn ask(self, within: Duration) -> Result<String, SetupError> {
        let name = self.name.clone();
        tokio::time::timeout(within, self.run(|_| ()))
            .await
            .unwrap_or_else(|_| Err(SetupError::Tool { name, why: format!("no answer within {within:?}") }))
    }
}

/// Kills the process group when it is dropped: `pip` and `npm` start helpers, which must not outlive an interrupted
/// set-up.
struct Group(Option<Pid>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(leader) = self.0 {
            let _ = kill_process_group(leader, Signal::KILL);
        }
    }
}

struct OutputLines<R>(BufReader<R>, Vec<u8>);

fn lines<R: AsyncRead + Unpin>(stream: R) -> OutputLines<R> {
    OutputLines(BufReader::new(stream), Vec::new())
}

/// Returns the next line. The future is cancel safe, because bytes read so far stay in the buffer.
async fn next<R: AsyncRead + Unpin>(lines: &mut OutputLines<R>) -> Option<String> {
    let _ = lines.0.read_until(b'\n', &mut lines.1).await;
    if lines.1.is_empty() {
        return None;
    }
    let line = String::from_utf8_lossy(&std::mem::take(&mut lines.1)).trim_end().to_owned();
    Some(line)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use testkit::scratch::Scratch;

    /// W71: a program that chooses the version of another one by a file of the working directory. The directory of a
    /// test is that of the crate.
    #[tokio::test]
    async fn w71_a_tool_reads_nothing_of_the_directory_in_which_the_server_was_started() {
        assert!(Path::new("Cargo.toml").exists());
        let dir = Scratch::new();
        let shim = dir.write("shim", "#!/bin/sh\npwd; cat Cargo.toml 2>/dev/null; exit 0\n");
        std::fs::set_permissions(&shim, PermissionsExt::from_mode(0o755)).unwrap();
        let ask = |program: &Path| Tool::new("shim", program).ask(Duration::from_secs(60));
        assert_eq!(ask(&shim).await.unwrap(), "/\n");
        // A relative path still means what it meant.
        let up = "../".repeat(std::env::current_dir().unwrap().components().count());
        assert_eq!(ask(&Path::new(&up).join(shim.strip_prefix("/").unwrap())).await.unwrap(), "/\n");
        assert_eq!(ask(Path::new("pwd")).await.unwrap(), "/\n");
    }
}
