//! Renders outcomes as the document demands: a line that says how the call ended, then JSON; or a hint that names the
//! next call.
//!
//! Nothing that a sandbox prints can look like these lines, because output appears only inside the JSON and, without
//! line breaks, in the first line.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{ContextInfo, EngineError, FileListing, Language, Ran, RunOutcome};
use serde::Serialize;
use serde_json::json;

use crate::operation::{FileRead, FileWritten};
use crate::output::{output, unless_empty};
use crate::shared::files::{FileFacts, FileRow, Written, rows};
use crate::shared::run::{self, RunWording};
use crate::shared::{add_lines, one_line, seconds};
use crate::{Answer, ArgError, Block, RenderInput, Reply};

const WORDING: RunWording =
    RunWording { context: "sandbox", retry: "in a new sandbox made with sandbox_create if this one is not found" };

pub(super) fn succeeded<T: Serialize>(input: &RenderInput<'_>, how: &str, facts: &T) -> Answer {
    let mut answer = Answer::json(facts);
    prepend(&mut answer, &format!("{} ok: {}", input.tool, one_line(how)));
    answer
}

fn prepend(answer: &mut Answer, line: &str) {
    if let Some(Block::Text(json)) = answer.blocks.first_mut() {
        *json = format!("{line}\n{json}");
    }
}

pub(super) fn failure_line(input: &RenderInput<'_>, why: &str, hint: &str) -> String {
    format!("{} failed: {}\nhint: {hint}", input.tool, one_line(why))
}

fn failed(input: &RenderInput<'_>, why: &str, hint: &str) -> Answer {
    let text = failure_line(input, why, hint);
    let structured = json!({ "error": why, "hint": hint });
    Answer { blocks: vec![Block::Text(text)], structured, ..Answer::default() }.failed()
}

pub(super) fn refusal(input: &RenderInput<'_>, refused: &ArgError) -> Reply {
    let hint = format!("correct the arguments and call {} again", input.tool);
    failed(input, &refused.message, &hint).into()
}

pub(super) fn error(input: &RenderInput<'_>, error: &EngineError) -> Reply {
    use EngineError as E;
    let again = || format!("call {} again in a moment", input.tool);
    let (why, hint) = match error {
        E::NoCurrent { ids } if ids.is_empty() => {
            ("no sandbox is running".to_owned(), "call sandbox_create first".to_owned())
        }
        E::NoCurrent { ids } => (
            format!("{} sandboxes are running, and none was named", ids.len()),
            format!("call {} again with sandbox_id, one of {}", input.tool, ids.join(", ")),
        ),
        E::ContextNotFound(id) => (
            format!("no sandbox is running under this id (sandbox_id=\"{id}\")"),
            "call sandbox_create first and use the sandbox_id it returns".to_owned(),
        ),
        E::ContextLimit(most) => {
            (format!("there are {most} sandboxes, the most there may be"), "call sandbox_destroy first".to_owned())
        }
        E::Busy(waited) | E::NotStarted { timeout: waited, .. } => {
            (format!("all sandboxes were busy for {}", seconds(*waited)), again())
        }
        E::QueueFull(most) => (format!("{most} runs wait already"), again()),
        E::NotReady(why) => (format!("the server is not ready: {why}"), again()),
        E::FileNotFound(path) => {
            (format!("file not found (path=\"{path}\")"), "call file_list to see which files there are".to_owned())
        }
        E::InvalidPath { path, why } => (
            format!("{why} (path=\"{path}\")"),
            "call file_list to see which files there are; paths are relative to /workspace".to_owned(),
        ),
        E::FileTooLarge { path, limit } => (
            format!("file is larger than {limit} bytes (path=\"{path}\")"),
            "call code_run to read or write it in parts".to_owned(),
        ),
        E::NoSpace { .. } => (
            "no space left in the sandbox".to_owned(),
            "call code_run to delete files, or sandbox_create for a new sandbox".to_owned(),
        ),
        E::CreateFailed(why) => (
            format!("the sandbox could not be made: {why}"),
            match input.args.get("sandbox_id") {
                Some(_) => "call sandbox_create without sandbox_id, or with one that is free".to_owned(),
                None => again(),
            },
        ),
        E::StopFailed(why) => (format!("the sandbox could not be destroyed: {why}"), again()),
        E::Sandbox(why) | E::HostDiskFull(why) => (
            format!("the sandbox failed: {why}"),
            format!("call {} again, or sandbox_create for a new sandbox", input.tool),
        ),
        E::NoBrowser(why) => (
            format!("there is no browser: {why}"),
            "work without one: call code_run, file_read, file_write or file_list".to_owned(),
        ),
        other => (other.to_string(), again()),
    };
    failed(input, &why, &hint).into()
}

output! {
    struct Created {
        sandbox_id: String,
        level: String,
        limits: LimitsOutput,
        /// Id of the sandbox that was removed to make room for this one.
        replaced: Option<String>,
    }

    struct LimitsOutput {
        /// Left out if nothing on this host limits the processors.
        cpus: Option<f64>,
        memory_mb: u64,
        disk_mb: u64,
        /// Left out if nothing on this host limits the processes.
        processes: Option<u32>,
    }

    struct Destroyed { sandbox_id: String }

    struct Executed {
        language: &'static str,
        success: bool,
        stdout: String,
        stderr: String,
        exit_code: Option<i32>,
        execution_time: f64,
        /// Denials of the network.
        denied: Option<Vec<String>>,
    }

    struct Directory { path: String, files: Vec<FileRow>, total: u64 }
}

pub(super) fn created(input: &RenderInput<'_>, context: ContextInfo, replaced: Option<String>) -> Answer {
    let ContextInfo { id, limits, isolation, .. } = context;
    let limits = LimitsOutput {
        cpus: (!isolation.unheld.cpu).then_some(f64::from(limits.cpu_millis) / 1000.0),
        memory_mb: limits.memory_bytes >> 20,
        disk_mb: limits.disk_bytes >> 20,
        processes: (!isolation.unheld.processes).then_some(limits.pids),
    };
    let cpus = limits.cpus.map(|cpus| format!("{cpus} CPUs, ")).unwrap_or_default();
    let mut how = format!("{id} ({cpus}{} MB)", limits.memory_mb);
    if let Some(old) = &replaced {
        how += &format!(" replaces {old}, whose variables and files are gone");
    }
    let level = json!(isolation.level).as_str().unwrap_or_default().to_owned();
    succeeded(input, &how, &Created { sandbox_id: id, level, limits, replaced })
}

/// Renders a run of code in a language, or of a line of the shell.
pub(super) fn ran(input: &RenderInput<'_>, language: Option<Language>, ran: &Ran) -> Answer {
    let (shell, language) = (language.is_none(), language.map_or("shell", Language::name));
    let ending = if shell { run::command_ending(&ran.end, &WORDING) } else { run::ending(&ran.end, &WORDING) };
    let kept = run::kept(input, ran);
    let mut stderr = run::stderr(ran);
    let ending_line = ending.as_ref().filter(|_| !(shell && run::has_status(&ran.end)));
    for note in [Some(&kept.lines).filter(|lines| !lines.is_empty()), ending_line].into_iter().flatten() {
        add_lines(&mut stderr, note);
    }
    let success = run::succeeded(&ran.end);
    let took = seconds(ran.duration);
    let line = if success {
        format!("{} ok: {language} in {took}", input.tool)
    } else {
        failure_line(input, &what_failed(ran, ending), hint(&ran.end, shell))
    };
    let mut answer = Answer::json(&Executed {
        language,
        success,
        stdout: run::stdout(ran),
        stderr,
        exit_code: shell.then(|| run::exit_code(&ran.end)),
        execution_time: (ran.duration.as_secs_f64() * 1e6).round() / 1e6,
        denied: unless_empty(ran.denied.clone()),
    });
    prepend(&mut answer, &line);
    answer.blocks.extend(run::pictures(ran));
    answer.blocks.extend(kept.links);
    answer.is_error = !success;
    answer
}

fn what_failed(ran: &Ran, ending: Option<String>) -> String {
    let error = || ran.error.as_ref().map(|error| format!("{}: {}", error.name, error.value));
    let in_a_line = |sentence: String| {
        let sentence = sentence.trim_end_matches('.');
        sentence.chars().take(1).flat_map(char::to_lowercase).chain(sentence.chars().skip(1)).collect()
    };
    ending.map(in_a_line).or_else(error).unwrap_or_else(|| "the code failed".into())
}

fn hint(end: &RunOutcome, shell: bool) -> &'static str {
    match end {
        RunOutcome::TimedOut { .. } | RunOutcome::OutOfMemory { .. } => "call code_run again with less work at a time",
        // Only interpreters have variables; a shell has none to lose.
        RunOutcome::Ended { .. } if !shell => "call code_run with the code that defines the variables first",
        RunOutcome::SandboxOutOfMemory { .. } | RunOutcome::SandboxLost { .. } => {
            "call sandbox_create for a new sandbox and start over"
        }
        RunOutcome::Cancelled { .. } | RunOutcome::Interrupted => "call code_run again if it should complete",
        RunOutcome::Ok | RunOutcome::Error | RunOutcome::Exit { .. } | RunOutcome::Ended { .. } => {
            "read stderr below, correct the code and call code_run again"
        }
    }
}

pub(super) fn written(input: &RenderInput<'_>, written: FileWritten) -> Answer {
    let FileWritten { path, size, .. } = written;
    succeeded(input, &format!("{path} ({size} bytes)"), &Written { path, size })
}

pub(super) fn file(input: &RenderInput<'_>, read: FileRead) -> Answer {
    let FileRead { path, content, size, key } = read;
    let whole = content.len() as u64 == size;
    let (encoding, content) = match String::from_utf8(content) {
        Ok(text) => ("utf-8", text),
        Err(bytes) => ("base64", STANDARD.encode(bytes.into_bytes())),
    };
    let link = input.link(&key, &path, Some(size));
    let Some(facts) = FileFacts::new(&path, size, encoding, whole.then_some(content), link.as_ref()) else {
        let why = format!("{size} bytes are too many for one answer (path=\"{path}\")");
        return failed(input, &why, "call code_run to read it in parts");
    };
    let mut how = format!("{path} ({size} bytes)");
    if facts.link.is_some() {
        how += ", too large for an answer: fetch it from the link";
    }
    let mut answer = succeeded(input, &how, &facts);
    answer.blocks.extend(link);
    answer
}

/// Lists the files that fit into an answer. `total` also counts those that do not fit.
pub(super) fn files(input: &RenderInput<'_>, path: String, listing: FileListing) -> Answer {
    let FileListing { entries, total, .. } = listing;
    let files = rows(&path, entries);
    let entries = if total == 1 { "entry" } else { "entries" };
    succeeded(input, &format!("{path} ({total} {entries})"), &Directory { path, files, total })
}
