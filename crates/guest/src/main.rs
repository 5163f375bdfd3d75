//! `sandpool-guest [--grace SECONDS]` runs the guest on the listening socket at descriptor 3. Forked kernels arrive on
//! descriptor 4, if it is open.
//!
//! `sandpool-guest browser` runs the browser driver on the socket at descriptor 3.
//!
//! `sandpool-guest search REQUEST` runs a search beneath the directory at descriptor 3.
//!
//! `sandpool-guest transpile` runs the transpiler on standard input and output.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::time::Duration;

use guest::GuestConfig;
use rustix::process::{DumpableBehavior, Signal};

const LISTENER: i32 = 3;
const FORKS: i32 = 4;
const LEASH: i32 = 4;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("sandpool-guest: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    // Code in the sandbox has the same uid, and must not read or trace its PID 1.
    rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(|error| format!("cannot become undumpable: {error}"))?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let config = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["transpile"] => return transpile(),
        ["search", request] => return search(request),
        ["browser"] => return browse(),
        [] => GuestConfig::default(),
        ["--grace", seconds] => {
            let seconds = seconds.parse().map_err(|_| format!("`{seconds}` is not a number of seconds"))?;
            GuestConfig { adoption_grace: Duration::from_secs(seconds), ..GuestConfig::default() }
        }
        _ => return Err("usage: sandpool-guest [--grace SECONDS | browser | search REQUEST | transpile]".into()),
    };
    let listener = jail::inherited::take_fd(LISTENER).map_err(|error| format!("no socket at descriptor 3: {error}"))?;
    let forks = jail::inherited::take_fd(FORKS).ok();
    let signals = jail::inherited::signal_fd(&[Signal::CHILD.as_raw(), Signal::TERM.as_raw()])
        .map_err(|error| format!("cannot take signals: {error}"))?;
    guest::serve_listener(UnixListener::from(listener), signals, forks, config).map_err(|error| error.to_string())
}

/// Runs the browser driver. Descriptor 3 is the channel to the guest here.
fn browse() -> Result<(), String> {
    // This process keeps the leash open, and no child inherits it: the guest ends this process by closing the other
    // end.
    let _leash = jail::inherited::take_fd(LEASH);
    let channel = jail::inherited::take_fd(LISTENER).map_err(|error| format!("no socket at descriptor 3: {error}"))?;
    browser::serve(channel.into()).map_err(|error| error.to_string())
}

/// Runs one search. Descriptor 3 is the directory here.
fn search(request: &str) -> Result<(), String> {
    let root = jail::inherited::take_fd(LISTENER).map_err(|error| format!("no directory at descriptor 3: {error}"))?;
    guest::serve_search(root, request, std::io::stdout()).map_err(|error| error.to_string())
}

fn transpile() -> Result<(), String> {
    // The reply contains the message of a panic, so it is not printed.
    std::panic::set_hook(Box::new(|_| {}));
    // Rust's standard output would write line by line.
    let output = std::io::stdout().as_fd().try_clone_to_owned().map_err(|error| error.to_string())?;
    guest::serve_transpiler(std::io::stdin(), File::from(output)).map_err(|error| error.to_string())
}
