//! The tools that read, write and list files.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::FileOwner;
use serde_json::{Value, json};
use text::{clipped, shown};

use super::errors::failure;
use super::target;
use crate::args::{AnyText, Argument, Count, args};
use crate::operation::{self, FileRead, FileWritten};
use crate::output::output;
use crate::shared::TEXT_BUDGET;
use crate::shared::files::{Encoding, FILE_BUDGET, Listing, WORKSPACE, decode, path_below};
use crate::shared::run::{PICTURE_BUDGET, VISIBLE};
use crate::{Answer, ArgError, Block, Lowering, Options, RenderInput, mime};

args! {
    struct ReadFileArgs {
        path: FilePath,
        context: Option<String>,
        encoding: Option<Encoding>,
        /// Lines are counted from 1.
        offset: Option<Count>,
        limit: Option<Count>,
    }

    struct WriteFileArgs { path: FilePath, content: AnyText, context: Option<String>, encoding: Option<Encoding> }
    struct ListFilesArgs { path: Option<FilePath>, context: Option<String> }
}

/// Holds a path relative to the workspace.
struct FilePath(String);

impl Argument for FilePath {
    const FILLED: bool = true;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        below(&String::parse(field, value)?).map(Self)
    }
}

pub(super) fn below(path: &str) -> Result<String, ArgError> {
    path_below(WORKSPACE, path).map_err(|why| ArgError::new(format!("path {} is refused: {why}", shown(path))))
}

pub(super) fn read_file(mut args: ReadFileArgs, _: &Options) -> Lowering {
    let owner = FileOwner::Context(target(args.context.take()));
    let path = std::mem::take(&mut args.path.0);
    operation::read_file(owner, path).answer(move |input, read| file(input, &args, read))
}

pub(super) fn write_file(args: WriteFileArgs, _: &Options) -> Lowering {
    let AnyText(content) = args.content;
    let content = match args.encoding {
        None | Some(Encoding::Utf8) => content.into_bytes(),
        Some(Encoding::Base64) => {
            decode(&content).map_err(|why| ArgError::new(format!("content is not base64: {why}")))?
        }
    };
    operation::write_file(FileOwner::Context(target(args.context)), args.path.0, content).answer(written)
}

pub(super) fn list_files(args: ListFilesArgs, _: &Options) -> Lowering {
    let directory = args.path.map_or_else(|| ".".to_owned(), |path| path.0);
    operation::list_files(FileOwner::Context(target(args.context)), directory.clone())
        .answer(move |_, files| Answer::json(&Listing::of(&directory, files)))
}

output! {
    struct WrittenFile { path: String, size: u64, url: Option<String> }

    #[derive(Default)]
    struct File {
        path: String,
        size: u64,
        encoding: Option<&'static str>,
        /// The text of an answer has the content in a separate block.
        content: Option<String>,
        first_line: Option<usize>,
        next_line: Option<usize>,
        total_lines: Option<usize>,
        note: Option<String>,
        url: Option<String>,
    }
}

fn written(input: &RenderInput<'_>, written: FileWritten) -> Answer {
    let FileWritten { path, size, key } = written;
    let link = input.link(&key, &path, Some(size));
    let mut answer = Answer::json(&WrittenFile { path, size, url: Block::address(link.as_ref()) });
    answer.blocks.extend(link);
    answer
}

fn file(input: &RenderInput<'_>, asked: &ReadFileArgs, read: FileRead) -> Answer {
    let FileRead { path, content, size, key } = read;
    let link = input.link(&key, &path, Some(size));
    let file = File { size, url: Block::address(link.as_ref()), path, ..File::default() };
    if content.len() as u64 != size {
        let note = match link {
            Some(_) => {
                "Too large for an answer: fetch it from the url, or read parts of it with run_command (head, tail, sed)."
            }
            None => "Too large for an answer: read parts of it with run_command (head, tail, sed).",
        };
        let mut answer = Answer::json(&File { note: Some(note.into()), ..file });
        answer.blocks.extend(link);
        return answer;
    }
    let mut answer = match (asked.encoding, String::from_utf8(content)) {
        (None | Some(Encoding::Utf8), Ok(text)) => text_file(asked, file, &text),
        (Some(Encoding::Base64), content) => {
            bytes_file(file, &content.map_or_else(|e| e.into_bytes(), String::into_bytes))
        }
        (Some(Encoding::Utf8), Err(_)) => {
            return failure(format!("{} is not text in UTF-8; read it with encoding base64.", shown(&file.path)));
        }
        (None, Err(content)) => other_file(file, content.as_bytes()),
    };
    answer.blocks.extend(link);
    answer
}

/// Renders the content unchanged in a separate block, then the other facts. The object has both.
fn with_content(file: File, content: String) -> Answer {
    let mut answer = Answer::json(&file);
    answer.blocks.insert(0, Block::Text(content.clone()));
    answer.structured = json!(File { content: Some(content), ..file });
    answer
}

/// Returns as many of the requested lines as fit.
fn text_file(asked: &ReadFileArgs, file: File, text: &str) -> Answer {
    let count = |lines: Count| usize::try_from(lines.0).unwrap_or(usize::MAX);
    let first = asked.offset.map_or(1, count);
    let total = text.split_inclusive('\n').count();
    if first > total.max(1) {
        return failure(format!("{} has {total} lines; offset {first} is beyond its end.", shown(&file.path)));
    }
    let mut content = String::new();
    let mut room = TEXT_BUDGET;
    let mut next = first;
    let mut note = None;
    for line in text.split_inclusive('\n').skip(first - 1).take(asked.limit.map_or(usize::MAX, count)) {
        let length = line.chars().count();
        if length > room && next > first {
            break;
        }
        if length > room {
            note = Some(format!(
                "Line {first} has {length} characters, of which some are left out; read it with run_code."
            ));
        }
        content.push_str(&clipped(line, room));
        room = room.saturating_sub(length);
        next += 1;
    }
    let next_line = (next <= total).then_some(next);
    let first_line = (first > 1 || next_line.is_some()).then_some(first);
    let file = File { encoding: Some("utf-8"), first_line, next_line, total_lines: Some(total), note, ..file };
    with_content(file, content)
}

fn bytes_file(file: File, bytes: &[u8]) -> Answer {
    let content = STANDARD.encode(bytes);
    if content.len() > FILE_BUDGET {
        return failure(format!(
            "{} has {} bytes, too many for one answer; read it in parts with run_code{}.",
            shown(&file.path),
            file.size,
            if file.url.is_some() { ", or download it from the link" } else { "" }
        ));
    }
    with_content(File { encoding: Some("base64"), ..file }, content)
}

/// Renders a file that is not text: a picture is shown if possible; of other bytes only the facts are useful to a
/// reader.
fn other_file(file: File, bytes: &[u8]) -> Answer {
    let mime = mime::of(&file.path);
    let data = VISIBLE.contains(&mime).then(|| STANDARD.encode(bytes)).filter(|data| data.len() <= PICTURE_BUDGET);
    let Some(data) = data else {
        let note = "Not text: work on it with run_code, or read it with encoding base64.";
        return Answer::json(&File { note: Some(note.into()), ..file });
    };
    let mut answer = Answer::json(&File { note: Some("The picture follows as an image block.".into()), ..file });
    answer.blocks.push(Block::Image { data, mime });
    answer
}
