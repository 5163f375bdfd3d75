//! The attacker: a program that runs inside a sandbox and tries what must not work there.
//!
//! Each attempt of `testkit::probe::ATTEMPTS` is a function here. It does the real thing, in a child of its own, and says in one
//! line of JSON whether it worked. It is also run outside, as root, where it has to work; so what could harm a host is asked
//! for with arguments that change nothing (the hour that it is, a file that is not there), and mounts are made in a namespace
//! of the child's own. It needs nothing but libc and proves nothing by itself: `tests/probe.rs` compares.
#![allow(unsafe_code, reason = "an attacker makes raw system calls; it is never linked into anything that is shipped")]

mod files;
mod kernel;
mod mounts;
mod processes;
mod sockets;
mod sys;

use std::io::{self, Write};
use std::process::ExitCode;

use testkit::probe::{ATTEMPTS, Attempt, Outcome, Report};

/// What happened, and the errno or finding.
type Found = (Outcome, String);

/// What an attempt may be told.
struct Args {
    /// The process to attack; a child of the attempt's own when 0.
    target: i32,
    /// A process of the host.
    victim: i32,
    /// The name of an abstract socket on the host.
    canary: String,
}

type Attack = fn(&Args) -> Found;

fn attack(name: &str) -> Option<Attack> {
    [mounts::ATTACKS, processes::ATTACKS, kernel::ATTACKS, sockets::ATTACKS, files::ATTACKS]
        .into_iter()
        .flatten()
        .find(|(known, _)| *known == name)
        .map(|(_, attack)| *attack)
}

fn main() -> ExitCode {
    let mut args = Args { target: 0, victim: 0, canary: String::new() };
    let mut wanted = None;
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().unwrap_or_default();
        match word.as_str() {
            "--list" => return list(),
            "--all" => wanted = Some(String::new()),
            "--row" => wanted = Some(value()),
            "--target" => args.target = value().parse().unwrap_or_default(),
            "--victim" => args.victim = value().parse().unwrap_or_default(),
            "--canary" => args.canary = value(),
            // What the probe runs of itself.
            "--status" => return status(),
            "--write" => return write(&value()),
            _ => return usage(),
        }
    }
    match wanted {
        Some(row) => try_all(&args, &row),
        None => usage(),
    }
}

fn usage() -> ExitCode {
    let text = "usage: probe --list | (--all | --row K01) [--target PID] [--victim PID] [--canary NAME]";
    let _ = writeln!(io::stderr(), "{text}");
    ExitCode::FAILURE
}

fn list() -> ExitCode {
    for Attempt { row, name, what, inside } in ATTEMPTS {
        let _ = writeln!(io::stdout(), "{row} {name}: {what} ({inside:?})");
    }
    ExitCode::SUCCESS
}

fn try_all(args: &Args, row: &str) -> ExitCode {
    for attempt in ATTEMPTS.iter().filter(|a| row.is_empty() || a.row == row || a.name == row) {
        let Some(attack) = attack(attempt.name) else { return ExitCode::FAILURE };
        let (outcome, detail) = sys::in_child(|| attack(args));
        let report = Report { row: attempt.row.into(), name: attempt.name.into(), outcome, detail };
        let line = serde_json::to_string(&report).expect("a report is plain data");
        let _ = writeln!(io::stdout(), "{line}");
    }
    ExitCode::SUCCESS
}

/// `--status`: what the kernel says of this process, for an attempt that runs the probe again.
fn status() -> ExitCode {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    for line in
        text.lines().filter(|l| l.starts_with("Cap") || l.starts_with("Seccomp:") || l.starts_with("NoNewPrivs"))
    {
        let _ = writeln!(io::stdout(), "{line}");
    }
    ExitCode::SUCCESS
}

/// `--write PATH`: makes and removes a file.
fn write(path: &str) -> ExitCode {
    let made = std::fs::write(path, "x").and_then(|()| std::fs::remove_file(path));
    ExitCode::from(made.map_or_else(|e| e.raw_os_error().unwrap_or(1) as u8, |()| 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_attempt_of_the_table_has_its_attack() {
        let missing: Vec<&str> = ATTEMPTS.iter().map(|a| a.name).filter(|name| attack(name).is_none()).collect();
        assert_eq!(missing, [""; 0]);
    }
}
