//! The binary `sandpool`. Everything is in the library, except what has to happen first.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The launcher is this same executable under another name, and has to stay single-threaded.
    sandbox::native::launcher_entry();
    // Tokens and secrets are in the memory of this process.
    if let Err(error) = sandbox::native::keep_memory_private() {
        eprintln!("error: cannot keep this process from being dumped: {error}");
        return ExitCode::FAILURE;
    }
    server::cli::main()
}
