//! `sandpool setup`: prepares the language runtimes, with progress on stderr.

use std::path::PathBuf;
use std::process::ExitCode;

use super::signals::Signals;
use super::{Context, Done, Failed, block_on, output};
use crate::runtimes::{self, Prepared, Progress};

/// Prepare Python and Node for sandboxes
///
/// Makes an environment on a Python of this machine (3.11 or newer) from a pinned and hashed list of packages, and takes Node 22 or
/// newer from this machine or Node 24 from npm. Happens by itself at first use; afterwards no network is needed. Interrupted, it
/// leaves nothing half done.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Prepare anew, even if all is there (stop running servers first)
    #[arg(long)]
    force: bool,
    /// The Python interpreter to build on
    #[arg(long, value_name = "PATH")]
    python: Option<PathBuf>,
    /// Print the prepared interpreters as shell variables, for scripts
    #[arg(long)]
    shell: bool,
}

pub fn main(args: Args, context: Context) -> Done {
    let mut config = context.config.runtimes;
    config.python = args.python.or(config.python);
    let (progress, _) = Progress::new();
    let prepared = block_on(async {
        let signals = Signals::listen()?;
        tokio::select! {
            prepared = runtimes::prepare(&config, &context.environment, &progress, args.force) => Ok(prepared?),
            () = signals.first.cancelled() => Err(Failed("interrupted; nothing half done is used".into())),
        }
    })?;
    if args.shell {
        shell(&prepared)
    } else {
        summary(&prepared)
    }
    match prepared.node {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(why) => Err(Failed(format!("Python is ready, JavaScript is not: {why}"))),
    }
}

fn summary(prepared: &Prepared) {
    let python = &prepared.python;
    output::line(&format!(
        "Python {} with {} packages: {}",
        python.marker.version,
        python.marker.packages.len(),
        python.dir.display()
    ));
    if let Ok(node) = &prepared.node {
        output::line(&format!("Node {}: {}", node.version(), node.binary().display()));
    }
}

fn shell(prepared: &Prepared) {
    output::line(&format!("SANDPOOL_TEST_PYTHON='{}'", prepared.python.dir.join("bin/python").display()));
    if let Ok(node) = &prepared.node {
        output::line(&format!("SANDPOOL_TEST_NODE='{}'", node.binary().display()));
    }
}
