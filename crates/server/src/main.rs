//! The binary `sandpool`. Everything is in the library; here only what has to come first.

use std::process::ExitCode;

fn main() -> ExitCode {
    server::cli::main()
}
