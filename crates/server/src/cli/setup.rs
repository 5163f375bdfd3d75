//! `sandpool setup` prepares the language runtimes and shows its progress on stderr.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use runtimes::browser::{self, InstalledBrowser};
use runtimes::{Prepared, Preset, Progress, SetupError, SetupRequest};

use super::signals::Signals;
use super::{CommandEnv, CommandResult, Failed, block_on, output};

/// Prepare Python and Node for sandboxes
///
/// Installs packages, pinned with hashes, for a Python of this machine (3.11 to 3.14). With npm it installs packages for JavaScript, and
/// Node 24 unless this machine has Node 22 or newer. The first start of a server does the same; afterwards no network is needed. If a
/// set-up is interrupted, the next one starts over. A running server uses new packages after its next start.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Prepare again, even if everything is ready (stop running servers first)
    #[arg(long)]
    force: bool,
    /// Pinned packages to install, now and in later set-ups: `data` (the default) or `slim`
    #[arg(long, value_name = "PRESET", value_parser = preset)]
    preset: Option<Preset>,
    /// Packages to add, now and in later set-ups: `polars`, `polars==1.2.3`, or `npm:lodash` for JavaScript
    #[arg(long, value_name = "NAME", num_args = 1..)]
    add: Vec<String>,
    /// Packages to remove that `--add` added
    #[arg(long, value_name = "NAME", num_args = 1..)]
    remove: Vec<String>,
    /// Python interpreter (3.11 to 3.14) to build on
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Print the prepared interpreters as shell variables, for scripts
    #[arg(long)]
    shell: bool,
}

fn preset(name: &str) -> Result<Preset, &'static str> {
    Preset::named(name).ok_or("expected `data` or `slim`")
}

pub(crate) fn main(args: Args, context: CommandEnv) -> CommandResult {
    let mut config = context.config.runtimes;
    config.python = args.python.or(config.python);
    let request = SetupRequest { force: args.force, preset: args.preset, add: args.add, remove: args.remove };
    let (progress, _) = Progress::new();
    let (prepared, found) = block_on(async {
        let signals = Signals::listen()?;
        let prepared = tokio::select! {
            prepared = runtimes::set_up(&config, &context.environment, &progress, &request) => prepared?,
            () = signals.first.cancelled() => return Err(Failed("interrupted; the next set-up starts over".into())),
        };
        Ok((prepared, browser::find(&context.config.browser, &context.environment).await))
    })?;
    if args.shell {
        shell(&prepared)
    } else {
        summary(&prepared);
        mention(found);
    }
    match (prepared.node, prepared.node_packages) {
        (Ok(_), Ok(_)) => Ok(ExitCode::SUCCESS),
        (Err(why), _) => Err(Failed(format!("Python is ready, JavaScript is not: {why}"))),
        (Ok(_), Err(why)) => Err(Failed(format!("Python and Node are ready, packages for JavaScript are not: {why}"))),
    }
}

fn summary(prepared: &Prepared) {
    let python = &prepared.python;
    output::line(&format!(
        "Python {} with {} packages: {}",
        python.version(),
        python.packages().len(),
        python.base.dir.display()
    ));
    if let Ok(node) = &prepared.node {
        output::line(&format!("Node {}: {}", node.version(), node.binary().display()));
    }
}

/// Mentions the browser, which is never downloaded and whose absence is not a failure.
fn mention(found: Result<Option<InstalledBrowser>, SetupError>) {
    match found {
        Ok(Some(browser)) => output::line(&format!("Chromium {}: {}", browser.version, browser.program.display())),
        Ok(None) => {}
        Err(error) => output::line(&format!("No browser in sandboxes: {error}")),
    }
}

fn shell(prepared: &Prepared) {
    let set = |name: &str, path: &Path| {
        output::line(&format!("{name}='{}'", path.display().to_string().replace('\'', r"'\''")));
    };
    set("SANDPOOL_TEST_PYTHON", &prepared.python.base.dir.join("bin/python"));
    if let Ok(node) = &prepared.node {
        set("SANDPOOL_TEST_NODE", &node.binary());
    }
}
