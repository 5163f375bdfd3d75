//! `sandpool doctor`: what this machine can do, layer by layer.

use std::process::ExitCode;

use super::{Context, Done};

/// Say what isolates on this machine, what does not, why, and what to do
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
}

pub fn main(_args: Args, _context: Context) -> Done {
    Ok(ExitCode::SUCCESS)
}
