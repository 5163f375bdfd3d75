//! Renders the outcome of a cell or a command: its streams, how it ended, pictures, kept output.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{Ended, MimeBundle, Ran, RunOutcome};
use text::clipped;

use super::files::decode;
use super::{TEXT_BUDGET, add_lines, seconds};
use crate::{Block, RenderInput};

/// Maximum size of all pictures of one answer, in base64. TypeScript clients close the connection at a message of 10
/// MiB.
pub(crate) const PICTURE_BUDGET: usize = 5 << 20;

/// The parts of the sentences about the end of a run that differ between dialects.
pub(crate) struct RunWording {
    /// The word for a context in this dialect: context, session or sandbox.
    pub context: &'static str,
    /// Where to run the code again after the sandbox was lost.
    pub retry: &'static str,
}

pub(crate) fn succeeded(end: &RunOutcome) -> bool {
    matches!(end, RunOutcome::Ok | RunOutcome::Exit { code: 0 })
}

/// Returns the printed text, then the displays that are text, then the last value as the REPL prints it.
pub(crate) fn stdout(ran: &Ran) -> String {
    let mut shown = text_displays(&ran.displays);
    if let Some(value) = ran.value.as_ref().and_then(text_of) {
        add_lines(&mut shown, value);
    }
    let mut out = ran.stdout.text.clone();
    if !shown.is_empty() {
        add_lines(&mut out, &clipped(&shown, TEXT_BUDGET));
    }
    out
}

/// Returns the displays that are not pictures, as text on separate lines.
pub(crate) fn text_displays(displays: &[MimeBundle]) -> String {
    let mut shown = String::new();
    for text in displays.iter().filter(|bundle| picture(bundle).is_none()).filter_map(text_of) {
        add_lines(&mut shown, text);
    }
    shown
}

fn text_of(bundle: &MimeBundle) -> Option<&str> {
    bundle.get("text/plain").or_else(|| bundle.values().next())?.as_str()
}

/// Returns the notice of what was lost before, then stderr, the traceback and the denials.
pub(crate) fn stderr(ran: &Ran) -> String {
    let mut out = String::new();
    if let Some(notice) = &ran.notice {
        add_lines(&mut out, notice);
    }
    if let Some(late) = &ran.late {
        add_lines(
            &mut out,
            &format!("[printed by background processes since the last call]\n{}", clipped(late, TEXT_BUDGET)),
        );
    }
    out.push_str(&ran.stderr.text);
    if let Some(error) = &ran.error {
        add_lines(&mut out, &clipped(&error.text, TEXT_BUDGET));
    }
    add_denied(&mut out, ran);
    out
}

/// Appends the denials of the network, because they say more than the error messages of programs.
pub(crate) fn add_denied(out: &mut String, ran: &Ran) {
    for sentence in &ran.denied {
        add_lines(out, &format!("[network] {sentence}"));
    }
}

/// Says how a run of code ended, whether variables were kept and what to do next. Returns `None` if that needs no
/// words.
pub(crate) fn ending(end: &RunOutcome, wording: &RunWording) -> Option<String> {
    let context = wording.context;
    let lost_state = format!(
        "variables are lost, files are kept; the {context} can be used again: run the code that defines them first"
    );
    Some(match end {
        RunOutcome::Ok | RunOutcome::Error => return None,
        RunOutcome::Exit { code } => {
            format!("The code called exit with code {code}: variables are kept, the {context} can be used further.")
        }
        RunOutcome::TimedOut { after, state_kept: true } => format!(
            "Execution timed out after {} and was interrupted: variables are kept; do the work in shorter steps.",
            seconds(*after)
        ),
        RunOutcome::TimedOut { after, state_kept: false } => {
            format!("Execution timed out after {} and was killed: {lost_state}, in shorter steps.", seconds(*after))
        }
        RunOutcome::Cancelled { state_kept: true } => "Execution was cancelled: variables are kept.".into(),
        RunOutcome::Cancelled { state_kept: false } => format!("Execution was cancelled and killed: {lost_state}."),
        RunOutcome::Interrupted => {
            "Execution was interrupted: variables are kept; run it again if it should complete.".into()
        }
        RunOutcome::OutOfMemory { limit_bytes } => format!(
            "Out of memory: the interpreter was killed {}: {lost_state}, with less data at a time.",
            at_limit(*limit_bytes)
        ),
        RunOutcome::SandboxOutOfMemory { limit_bytes } => lost_for_memory(*limit_bytes, wording),
        RunOutcome::Ended { how: Ended::Exited { code } } => {
            format!("The interpreter exited with code {code}: {lost_state}.")
        }
        RunOutcome::Ended { how: Ended::Signaled { signal } } => {
            format!("The interpreter crashed with signal {signal}{}: {lost_state}.", signal_name(*signal))
        }
        RunOutcome::SandboxLost { why } => lost(why, wording),
    })
}

/// Says at which limit a process was killed for its memory. An unknown limit is that of the server or of the whole
/// machine.
pub(crate) fn at_limit(bytes: Option<u64>) -> String {
    match bytes {
        Some(bytes) => format!("at the limit of {} MB", bytes >> 20),
        None => "when the memory of the server ran out".into(),
    }
}

/// Says how a command ended. A command is a separate process, so variables are not affected.
pub(crate) fn command_ending(end: &RunOutcome, wording: &RunWording) -> Option<String> {
    Some(match end {
        RunOutcome::Ok | RunOutcome::Exit { code: 0 } | RunOutcome::Ended { how: Ended::Exited { code: 0 } } => {
            return None;
        }
        RunOutcome::Error => "The command could not be started.".into(),
        RunOutcome::Exit { code } | RunOutcome::Ended { how: Ended::Exited { code } } => {
            format!("The command exited with code {code}.")
        }
        RunOutcome::Ended { how: Ended::Signaled { signal } } => {
            format!("The command was ended by signal {signal}{}.", signal_name(*signal))
        }
        RunOutcome::TimedOut { after, .. } => format!(
            "The command timed out after {} and was killed: files are kept; do the work in shorter steps.",
            seconds(*after)
        ),
        RunOutcome::Cancelled { .. } => "The command was cancelled and killed: files are kept.".into(),
        RunOutcome::Interrupted => {
            "The command was interrupted: files are kept; run it again if it should complete.".into()
        }
        RunOutcome::OutOfMemory { limit_bytes } => format!(
            "Out of memory: the command was killed {}: files are kept; work with less data at a time.",
            at_limit(*limit_bytes)
        ),
        RunOutcome::SandboxOutOfMemory { limit_bytes } => lost_for_memory(*limit_bytes, wording),
        RunOutcome::SandboxLost { why } => lost(why, wording),
    })
}

/// Returns whether a command ran to its end, so that its exit status says everything.
pub(crate) fn has_status(end: &RunOutcome) -> bool {
    matches!(end, RunOutcome::Ok | RunOutcome::Exit { .. } | RunOutcome::Ended { how: Ended::Exited { .. } })
}

fn lost(why: &str, wording: &RunWording) -> String {
    format!(
        "The sandbox was lost ({why}): variables and files are lost; run the code that makes them again, {}.",
        wording.retry
    )
}

fn lost_for_memory(limit_bytes: u64, wording: &RunWording) -> String {
    format!(
        "Out of memory: the sandbox was ended {}: variables and files are lost; run the code that makes them again with \
         less data at a time, {}.",
        at_limit(Some(limit_bytes)),
        wording.retry
    )
}

/// Returns the status of a command as a shell would report it, or −1 if the sandbox was lost with it.
pub(crate) fn exit_code(end: &RunOutcome) -> i32 {
    match end {
        RunOutcome::Ok => 0,
        RunOutcome::Exit { code } | RunOutcome::Ended { how: Ended::Exited { code } } => *code,
        RunOutcome::Ended { how: Ended::Signaled { signal } } => 128 + signal,
        RunOutcome::Error => 127,
        RunOutcome::TimedOut { .. } => 124,
        RunOutcome::Cancelled { .. } | RunOutcome::Interrupted => 130,
        RunOutcome::OutOfMemory { .. } | RunOutcome::SandboxOutOfMemory { .. } => 137,
        RunOutcome::SandboxLost { .. } => -1,
    }
}

pub(crate) fn signal_name(signal: i32) -> &'static str {
    match signal {
        4 => " (SIGILL)",
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        8 => " (SIGFPE)",
        9 => " (SIGKILL)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        31 => " (SIGSYS)",
        _ => "",
    }
}

/// Types of pictures that models can see.
pub(crate) const VISIBLE: [&str; 4] = ["image/png", "image/jpeg", "image/webp", "image/gif"];

/// Returns the picture of a bundle, if it has one that models can see.
pub(crate) fn picture(bundle: &MimeBundle) -> Option<(&'static str, &str)> {
    VISIBLE.into_iter().find_map(|mime| Some((mime, bundle.get(mime)?.as_str()?)))
}

/// Returns the pictures in the order in which they were made.
pub(crate) fn pictures(ran: &Ran) -> Vec<Block> {
    let mut left = PICTURE_BUDGET;
    let mut blocks = Vec::new();
    for (number, (mime, data)) in ran.displays.iter().chain(&ran.value).filter_map(picture).enumerate() {
        blocks.push(match Picture::within(left, mime, data) {
            Picture::Shown(block) => {
                left -= data.len();
                block
            }
            Picture::LeftOut(why) => Block::Text(format!("picture {} is left out: {why}", number + 1)),
        });
    }
    blocks
}

/// One picture, or the reason why it is left out. Clients would discard the whole answer if the data were not base64.
pub(crate) enum Picture {
    Shown(Block),
    LeftOut(String),
}

impl Picture {
    /// Checks a picture that is the only one of its answer.
    pub fn of(mime: &'static str, data: &str) -> Self {
        Self::within(PICTURE_BUDGET, mime, data)
    }

    fn within(left: usize, mime: &'static str, data: &str) -> Self {
        if data.len() > left {
            let bytes = data.len();
            return Self::LeftOut(format!(
                "{bytes} bytes of base64 are over the limit of {PICTURE_BUDGET} for one answer"
            ));
        }
        match decode(data) {
            Ok(bytes) => Self::Shown(Block::Image { data: STANDARD.encode(bytes), mime }),
            Err(_) => Self::LeftOut("it is not base64".into()),
        }
    }
}

/// Streams that were cut and whose kept output is available by a link.
#[derive(Default)]
pub(crate) struct KeptWhole {
    /// One line for each stream, with its address.
    pub lines: String,
    pub links: Vec<Block>,
}

/// Returns the kept output of both streams. It is empty if no links can be made, because kept output can be read only
/// by a link.
pub(crate) fn kept(input: &RenderInput<'_>, ran: &Ran) -> KeptWhole {
    let mut whole = KeptWhole::default();
    for (stream, captured) in [("stdout", &ran.stdout), ("stderr", &ran.stderr)] {
        let Some(kept) = &captured.kept else { continue };
        let Some(link) = input.link(&kept.key, &kept.name, Some(kept.bytes)) else { continue };
        if let Block::Link { uri, .. } = &link {
            let part = if kept.bytes < captured.total_bytes { "the first" } else { "all" };
            add_lines(
                &mut whole.lines,
                &format!("[{stream} was cut; {part} {} bytes of it, for an hour: {uri}]", kept.bytes),
            );
        }
        whole.links.push(link);
    }
    whole
}
