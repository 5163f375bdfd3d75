//! The binary `sandpool`. Everything except the first steps of the process is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    // The launcher is this same executable under another name, and has to stay single-threaded.
    sandbox::native::launcher_entry();
    // Tokens and secrets are in the memory of this process, so no other process may read it.
    if let Err(error) = sandbox::native::keep_memory_private() {
        eprintln!("error: cannot keep this process from being dumped: {error}");
        return ExitCode::FAILURE;
    }
    server::cli::main()
}
