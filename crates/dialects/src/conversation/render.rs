//! Renders outcomes as the document prints them. Its content type `output` does not exist in the protocol and every
//! client drops it, so the same JSON is sent in a text block.

use engine::DATA;
use engine::op::{Captured, Ended, EngineError, FileKind, FileListing, Language, Ran, RunOutcome, RuntimeInfo};
use text::{clipped, shown};

use crate::operation::FileWritten;
use crate::output::output;
use crate::shared::files::written_length;
use crate::shared::run::{add_denied, at_limit, pictures, signal_name, text_displays};
use crate::shared::{TEXT_BUDGET, add_lines, seconds};
use crate::{Answer, ArgError, Block, RenderInput, Reply};

const INVALID_PARAMS: i32 = -32602;
const INTERNAL_ERROR: i32 = -32603;

/// Maximum number of files named in one answer, newest first.
const MOST_FILES: usize = 100;

/// Maximum length of the names of these files together. A name appears in an answer up to six times, three of them
/// percent-encoded.
const NAMES_BUDGET: usize = 64 << 10;

pub(super) fn refusal(_: &RenderInput<'_>, refused: &ArgError) -> Reply {
    Reply::Error { code: INVALID_PARAMS, message: refused.message.clone(), data: None }
}

output! {
    struct RunResult {
        success: bool,
        output: String,
        files: Vec<FileLink>,
        /// Number of files in `/data` that are not in `files`.
        more_files as "moreFiles": Option<u64>,
        /// Address of the kept output, if `output` was cut.
        output_url as "outputUrl": Option<String>,
    }

    struct FileLink { name: String, url: Option<String> }
    struct Runners { languages: Vec<Runner> }
    struct Runner { language: &'static str, image: String }
    struct Uploaded { success: bool, message: String, file: Option<FileLink> }
}

/// Returns the row of a file and, if links can be made, the block with its address.
fn linked(input: &RenderInput<'_>, key: &str, path: &str, size: u64) -> (FileLink, Option<Block>) {
    let block = input.link(key, path, Some(size));
    (FileLink { name: path.to_owned(), url: Block::address(block.as_ref()) }, block)
}

pub(super) fn ran(input: &RenderInput<'_>, ran: Ran) -> Answer {
    let (files, links, more) = ran.files.as_ref().map(|files| listed(input, files)).unwrap_or_default();
    let whole = whole_output(input, &ran.stdout);
    let success = succeeded(&ran.end);
    let mut answer = Answer::json(&RunResult {
        success,
        output: output(&ran),
        files,
        more_files: more,
        output_url: Block::address(whole.as_ref()),
    });
    answer.blocks.extend(pictures(&ran));
    answer.blocks.extend(more.map(|more| Block::Text(format!("{more} more files in {DATA} are not listed."))));
    answer.blocks.extend(whole);
    answer.blocks.extend(links);
    if success { answer } else { answer.unsuccessful() }
}

/// Returns whether a run succeeded. The code is a separate program, so every kind of exit with code 0 is a success.
fn succeeded(end: &RunOutcome) -> bool {
    matches!(end, RunOutcome::Ok | RunOutcome::Exit { code: 0 } | RunOutcome::Ended { how: Ended::Exited { code: 0 } })
}

/// Returns both streams in the order written (the engine has merged them), the displays, the traceback, and how the run
/// ended if that needs an explanation. It leaves out the last value, because a program does not print it.
fn output(ran: &Ran) -> String {
    let mut out = String::new();
    if let Some(notice) = &ran.notice {
        add_lines(&mut out, notice);
    }
    out.push_str(&ran.stdout.text);
    out.push_str(&ran.stderr.text);
    let displayed = text_displays(&ran.displays);
    if !displayed.is_empty() {
        add_lines(&mut out, &clipped(&displayed, TEXT_BUDGET));
    }
    if let Some(error) = &ran.error {
        add_lines(&mut out, &clipped(&error.text, TEXT_BUDGET));
    }
    add_denied(&mut out, ran);
    if let Some(sentence) = ending(&ran.end) {
        add_lines(&mut out, &sentence);
    }
    out
}

fn ending(end: &RunOutcome) -> Option<String> {
    Some(match end {
        RunOutcome::Ok | RunOutcome::Error => return None,
        RunOutcome::Exit { code: 0 } | RunOutcome::Ended { how: Ended::Exited { code: 0 } } => return None,
        RunOutcome::Exit { code } | RunOutcome::Ended { how: Ended::Exited { code } } => {
            format!("The program exited with code {code}.")
        }
        RunOutcome::Ended { how: Ended::Signaled { signal } } => {
            format!("The program crashed with signal {signal}{}; files in {DATA} are kept.", signal_name(*signal))
        }
        RunOutcome::TimedOut { after, .. } => format!(
            "Execution timed out after {} and was ended; files in {DATA} are kept. Do the work in shorter steps and keep what is \
             needed between them in {DATA}.",
            seconds(*after)
        ),
        RunOutcome::Cancelled { .. } => format!("Execution was cancelled; files in {DATA} are kept."),
        RunOutcome::Interrupted => {
            format!("Execution was interrupted; files in {DATA} are kept. Run it again if it should complete.")
        }
        RunOutcome::OutOfMemory { limit_bytes } => format!(
            "Out of memory: the program was killed {}; files in {DATA} are kept. Work with less data at a time.",
            at_limit(*limit_bytes)
        ),
        RunOutcome::SandboxOutOfMemory { limit_bytes } => format!(
            "Out of memory: the program was killed {}; files in {DATA} are kept. Work with less data at a time.",
            at_limit(Some(*limit_bytes))
        ),
        RunOutcome::SandboxLost { why } => {
            format!("The sandbox was lost ({why}); files in {DATA} are kept. Run the code again.")
        }
    })
}

/// Returns the rows, the link blocks, and the number of files that are in neither.
fn listed(input: &RenderInput<'_>, files: &FileListing) -> (Vec<FileLink>, Vec<Block>, Option<u64>) {
    let mut left = NAMES_BUDGET;
    let only_files = files.entries.iter().filter(|entry| entry.kind == FileKind::File);
    let named = only_files.take(MOST_FILES).map_while(|entry| {
        let needed = written_length(&entry.path);
        let fits = needed <= left;
        left = left.saturating_sub(needed);
        fits.then(|| linked(input, &files.key, &entry.path, entry.size))
    });
    let (rows, links): (Vec<FileLink>, Vec<Option<Block>>) = named.unzip();
    let more = files.total.saturating_sub(rows.len() as u64);
    (rows, links.into_iter().flatten().collect(), (more > 0).then_some(more))
}

fn whole_output(input: &RenderInput<'_>, output: &Captured) -> Option<Block> {
    let kept = output.kept.as_ref()?;
    input.link(&kept.key, &kept.name, Some(kept.bytes))
}

/// Renders a run that did not start. The answer has the same object as a run, so that clients that read only `success`
/// and `output` learn of it.
fn failed_run(why: String) -> Answer {
    let result = RunResult { success: false, output: why, files: Vec::new(), more_files: None, output_url: None };
    Answer::json(&result).unsuccessful()
}

pub(super) fn run_error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    match error {
        EngineError::InvalidEnvironment(why) => {
            Reply::Error { code: INVALID_PARAMS, message: format!("environment is refused: {why}"), data: None }
        }
        EngineError::NetworkOff(why) => failed_run(format!(
            "Network access is off: {why}. Run the code with network false, or ask the operator for it."
        ))
        .into(),
        other => failed_run(sentence(other)).into(),
    }
}

/// Says what went wrong and what to do, for every tool.
fn sentence(error: &EngineError) -> String {
    use EngineError as E;
    match error {
        E::Busy(waited) | E::NotStarted { timeout: waited, .. } => {
            format!("The server was busy for {}; try again later.", seconds(*waited))
        }
        E::QueueFull(most) => format!("{most} calls wait already; try again later."),
        E::NotReady(why) => format!("The server is not ready: {why}. Try again in a moment."),
        E::ShuttingDown => "The server is shutting down; try again later.".into(),
        E::InUse(why) => format!("The conversation's files are in use elsewhere: {why}. Try again in a moment."),
        E::OverLimit { what, limit } => {
            format!("Over the limit {what} of {limit}; use a conversationId that is there already, or try again later.")
        }
        E::ContextLimit(most) => format!("{most} programs run already; try again when one has ended."),
        E::FileTooLarge { path, limit } => format!("File too large: {} is over {limit} bytes.", shown(path)),
        E::NoSpace { .. } => format!("No space is left in the conversation's {DATA}; delete files with code first."),
        E::InvalidPath { path, why } => format!("The file name {} is refused: {why}.", shown(path)),
        E::Cancelled => "Cancelled by the client.".into(),
        E::Sandbox(why) | E::HostDiskFull(why) | E::CreateFailed(why) => {
            format!("The sandbox failed: {why}. Try again.")
        }
        other => format!("The call failed: {other}."),
    }
}

/// Lists the advertised languages. Plain JavaScript is accepted but not listed.
pub(super) fn runners(runtimes: Vec<RuntimeInfo>) -> Answer {
    let advertised = runtimes.into_iter().filter(|runtime| runtime.language != Language::Javascript);
    let languages = advertised.map(|runtime| Runner { language: runtime.language.name(), image: runtime.name });
    Answer::json(&Runners { languages: languages.collect() })
}

pub(super) fn runners_error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    Reply::Error { code: INTERNAL_ERROR, message: sentence(error), data: None }
}

pub(super) fn uploaded(input: &RenderInput<'_>, written: FileWritten) -> Answer {
    let FileWritten { path, size, key } = written;
    let (file, link) = linked(input, &key, &path, size);
    let message = format!("{size} bytes written to {DATA}/{}", shown(&path));
    let mut answer = Answer::json(&Uploaded { success: true, message, file: Some(file) });
    answer.blocks.extend(link);
    answer
}

pub(super) fn upload_error(_: &RenderInput<'_>, error: &EngineError) -> Reply {
    Answer::json(&Uploaded { success: false, message: sentence(error), file: None }).unsuccessful().into()
}
