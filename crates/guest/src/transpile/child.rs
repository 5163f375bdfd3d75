//! This module runs the transpiler as a separate process, which reads requests from standard input and writes replies
//! to standard output.
//!
//! ```text
//! request: language u8, number u64, length u32, code
//! reply:   0 u8, length u32, length u32, code, map (empty: none)
//!          1 u8, length u32, length u32, value, text      the code is at fault
//!          2 u8, length u32, length u32, message, empty   the transpiler is at fault
//! ```

use std::io::{self, Read, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};

use proto::Language;

use super::{Output, SourceCell, TranspileError, transpile};

/// Stack size of the transpiler's thread. The parser recurses into nested code; only the part of the stack that is used
/// costs memory.
const STACK: usize = 256 << 20;

/// Maximum length of a reply. The transpiler never sends a longer one.
const MAX_REPLY: usize = 64 << 20;

/// Code that is transpiled before the first request, with its result discarded, because the first run takes ten times
/// as long as later ones.
const REHEARSAL: &str =
    "import a, { b } from 'c'\nvar d: number = await b(), e = 1\nclass F<G> {}\nconsole.log(a, d)\n";

const REQUEST_HEADER: usize = 13;
const REPLY_HEADER: usize = 9;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TranspileReply {
    Done(Output),
    Refused(TranspileError),
    Broken(String),
}

pub(crate) fn request(cell: SourceCell<'_>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_HEADER + cell.code.len());
    bytes.push(u8::from(cell.language == Language::Typescript));
    bytes.extend_from_slice(&cell.number.to_le_bytes());
    bytes.extend_from_slice(&(cell.code.len() as u32).to_le_bytes());
    bytes.extend_from_slice(cell.code.as_bytes());
    bytes
}

/// Parses the reply at the beginning of the bytes. Returns `None` while it is incomplete, and an error if it is
/// invalid.
pub(crate) fn reply_from(bytes: &[u8]) -> Result<Option<TranspileReply>, &'static str> {
    let Some(&[kind, a0, a1, a2, a3, b0, b1, b2, b3]) = bytes.first_chunk::<REPLY_HEADER>() else { return Ok(None) };
    let first = u32::from_le_bytes([a0, a1, a2, a3]) as usize;
    let second = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
    if first.saturating_add(second) > MAX_REPLY {
        return Err("the answer is too long");
    }
    let Some(body) = bytes.get(REPLY_HEADER..REPLY_HEADER + first + second) else { return Ok(None) };
    let (first, second) = body.split_at(first);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| "the answer is not text");
    let (first, second) = (text(first)?, text(second)?);
    match kind {
        0 => Ok(Some(TranspileReply::Done(Output { code: first, map: Some(second).filter(|map| !map.is_empty()) }))),
        1 => Ok(Some(TranspileReply::Refused(TranspileError { value: first, text: second }))),
        2 => Ok(Some(TranspileReply::Broken(first))),
        _ => Err("the answer is of no known kind"),
    }
}

/// Writes the reply in one piece, because each write would wake the guest.
fn write_reply(out: &mut impl Write, reply: &TranspileReply) -> io::Result<()> {
    let (kind, first, second) = match reply {
        TranspileReply::Done(done) => (0, done.code.as_str(), done.map.as_deref().unwrap_or_default()),
        TranspileReply::Refused(refusal) => (1, refusal.value.as_str(), refusal.text.as_str()),
        TranspileReply::Broken(message) => (2, message.as_str(), ""),
    };
    let mut bytes = Vec::with_capacity(REPLY_HEADER + first.len() + second.len());
    bytes.push(kind);
    bytes.extend_from_slice(&(first.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(second.len() as u32).to_le_bytes());
    bytes.extend_from_slice(first.as_bytes());
    bytes.extend_from_slice(second.as_bytes());
    out.write_all(&bytes)
}

/// Runs the transpiler: replies to requests until the input ends.
pub fn serve(input: impl Read + Send + 'static, output: impl Write + Send + 'static) -> io::Result<()> {
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(move || reply_to_all(input, output))?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the transpiler panicked")))
}

fn reply_to_all(mut input: impl Read, mut output: impl Write) -> io::Result<()> {
    let _ = guarded(SourceCell { language: Language::Typescript, number: 0, code: REHEARSAL });
    loop {
        let mut header = [0; REQUEST_HEADER];
        match input.read_exact(&mut header) {
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(()),
            read => read?,
        }
        let [language, n0, n1, n2, n3, n4, n5, n6, n7, length @ ..] = header;
        let mut code = Vec::new();
        (&mut input).take(u64::from(u32::from_le_bytes(length))).read_to_end(&mut code)?;
        let code = String::from_utf8(code).map_err(io::Error::other)?;
        let language = if language == 1 { Language::Typescript } else { Language::Javascript };
        let number = u64::from_le_bytes([n0, n1, n2, n3, n4, n5, n6, n7]);
        write_reply(&mut output, &guarded(SourceCell { language, number, code: &code }))?;
    }
}

fn guarded(cell: SourceCell<'_>) -> TranspileReply {
    match catch_unwind(AssertUnwindSafe(|| transpile(cell))) {
        Ok(Ok(output)) => TranspileReply::Done(output),
        Ok(Err(refusal)) => TranspileReply::Refused(refusal),
        Err(panic) => {
            let message = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            TranspileReply::Broken(format!(
                "the transpiler failed on this code: {}",
                message.unwrap_or("no reason given")
            ))
        }
    }
}
