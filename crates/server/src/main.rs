//! The binary `sandpool`. Everything is in the library; here only what has to come first.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The launcher is this same executable under another name, and has to stay single-threaded.
    sandbox::native::launcher_entry();
    server::cli::main()
}
