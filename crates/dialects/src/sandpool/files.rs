//! The tools that read, write, edit, list and search files, and the one that makes links for uploads.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use engine::op::{
    Edit, Edited, EngineError, FileEntry, FileKind, FileListing, FileOwner, FoundLines, Root, Search, SearchBound,
    UploadLink,
};
use serde_json::{Value, json};
use text::{clipped, iso8601, shown};

use super::answer::answer;
use super::errors::{self, failure};
use super::target;
use crate::args::{AnyText, Argument, Count, Whole, args};
use crate::links::Address;
use crate::operation::{self, FileRead, FileWritten};
use crate::output::output;
use crate::shared::files::{Encoding, WORKSPACE, decode, path_below};
use crate::shared::run::{PICTURE_BUDGET, VISIBLE};
use crate::{Answer, ArgError, Block, Lowering, Options, RenderInput, Reply, mime};

args! {
    struct ReadFileArgs {
        path: Readable,
        context: Option<String>,
        encoding: Option<Encoding>,
        /// Lines are counted from 1.
        offset: Option<Count>,
        limit: Option<Count>,
    }

    struct WriteFileArgs { path: FilePath, content: AnyText, context: Option<String>, encoding: Option<Encoding> }
    struct ListFilesArgs { path: Option<FilePath>, depth: Option<Whole<1, MOST_LEVELS>>, context: Option<String> }

    struct EditFileArgs {
        path: Located,
        old_string: String,
        new_string: AnyText,
        replace_all: bool,
        context: Option<String>,
    }

    struct SearchFilesArgs {
        text: Option<String>,
        regex: bool,
        glob: Option<String>,
        path: Option<Located>,
        context: Option<String>,
    }

    struct UploadLinkArgs { path: FilePath, context: Option<String> }
}

/// Directories beside the workspace. The last one holds kept output; no code can look into it.
pub(super) const OUTPUTS: &str = "/outputs";
const DIRECTORIES: [(&str, Root); 3] = [("/tmp", Root::Tmp), ("/data", Root::Data), (OUTPUTS, Root::Outputs)];
const MOST_LEVELS: u64 = 100;

/// A path in one of the directories of a context.
struct Located {
    root: Root,
    /// Path relative to the directory.
    path: String,
}

impl Argument for Located {
    const FILLED: bool = true;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        let text = String::parse(field, value)?;
        let is_below = |dir: &str| text.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        let elsewhere = DIRECTORIES.iter().find(|(dir, _)| is_below(dir));
        let (dir, root) = elsewhere.copied().unwrap_or((WORKSPACE, Root::Workspace));
        path_in(dir, &text).map(|path| Self { root, path })
    }
}

impl Located {
    fn owner(&self, context: Option<String>) -> FileOwner {
        FileOwner::Context(target(context), self.root)
    }

    /// Returns the directory as it stands before paths in answers: nothing for the workspace.
    fn prefix(&self) -> String {
        let elsewhere = DIRECTORIES.iter().find(|(_, root)| *root == self.root);
        elsewhere.map(|(dir, _)| format!("{dir}/")).unwrap_or_default()
    }
}

/// What `read_file` can read: a path, or the address of a link.
enum Readable {
    Path(Located),
    Link(Address),
}

impl Argument for Readable {
    const FILLED: bool = true;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        match Address::of_url(&String::parse(field, value)?) {
            Some(address) => Ok(Self::Link(address)),
            None => Located::parse(field, value).map(Self::Path),
        }
    }
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
    path_in(WORKSPACE, path)
}

fn path_in(dir: &str, path: &str) -> Result<String, ArgError> {
    path_below(dir, path).map_err(|why| ArgError::new(format!("path {} is refused: {why}", shown(path))))
}

pub(super) fn read_file(args: ReadFileArgs, _: &Options) -> Lowering {
    let ReadFileArgs { path, context, encoding, offset, limit } = args;
    let view = View { encoding, offset, limit };
    match path {
        Readable::Path(at) => {
            let (owner, prefix) = (at.owner(context), at.prefix());
            operation::read_file(owner, at.path).answer(move |input, read| file(input, &view, &prefix, read))
        }
        Readable::Link(Address { key, path }) => {
            operation::read_link(key, path, u64::MAX).answer(move |input, read| file(input, &view, "", read))
        }
    }
}

pub(super) fn write_file(args: WriteFileArgs, _: &Options) -> Lowering {
    let AnyText(content) = args.content;
    let content = match args.encoding {
        None | Some(Encoding::Utf8) => content.into_bytes(),
        Some(Encoding::Base64) => {
            decode(&content).map_err(|why| ArgError::new(format!("content is not base64: {why}")))?
        }
    };
    operation::write_file(FileOwner::workspace(target(args.context)), args.path.0, content).answer(written)
}

pub(super) fn list_files(args: ListFilesArgs, _: &Options) -> Lowering {
    let directory = args.path.map_or_else(|| ".".to_owned(), |path| path.0);
    let depth = args.depth.and_then(|depth| u32::try_from(depth.0).ok()).unwrap_or(1);
    operation::list_levels(FileOwner::workspace(target(args.context)), directory.clone(), depth)
        .answer(move |input, files| listed(input, &directory, files))
}

pub(super) fn edit_file(args: EditFileArgs, _: &Options) -> Lowering {
    let AnyText(new) = args.new_string;
    let (owner, prefix) = (args.path.owner(args.context), args.path.prefix());
    let edit = Edit { old: args.old_string, new, all: args.replace_all };
    operation::edit_file(owner, args.path.path, edit).answer(move |_, edit| edited(&prefix, edit))
}

pub(super) fn search_files(args: SearchFilesArgs, options: &Options) -> Lowering {
    let at = args.path.unwrap_or(Located { root: Root::Workspace, path: ".".into() });
    let search = Search { glob: args.glob, text: args.text, regex: args.regex, max_bytes: options.text_budget / 4 * 3 };
    let owner = at.owner(args.context);
    let prefix = at.prefix() + &prefix_of(&at.path);
    operation::search_files(owner, at.path, search).answer(move |input, found| matches(input, &prefix, found))
}

pub(super) fn upload_link(args: UploadLinkArgs, _: &Options) -> Lowering {
    operation::upload_link(target(args.context), args.path.0).answer(|input, link| {
        let UploadLink { id, path, max_bytes, expires_at } = link;
        match input.links.upload(&id) {
            Some(url) => {
                let expires_at = iso8601(i64::try_from(expires_at).unwrap_or(i64::MAX));
                Answer::compact(&UploadAddress { url, path, max_bytes, expires_at })
            }
            None => failure("This server has no address for links; send the file with write_file.".into()),
        }
    })
}

/// Renders an error of a tool that takes paths in several directories. The engine knows a path relative to its
/// directory; the client knows the one that it passed.
pub(super) fn error(input: &RenderInput<'_>, error: &EngineError) -> Reply {
    use EngineError as E;
    let given = input.args.get("path").and_then(Value::as_str).unwrap_or_default();
    let elsewhere = input.args.get("path").and_then(|path| Located::parse("path", path).ok());
    let Some(Located { root, path: inner }) = elsewhere.filter(|at| at.root != Root::Workspace) else {
        return errors::error(input, error);
    };
    let named = |why: &str| why.replace(&format!("`{inner}`"), &format!("`{given}`"));
    let error = match error {
        E::FileNotFound(_) if root == Root::Outputs => {
            return failure(format!(
                "There is no kept output {}: it belongs to the context of its run, and is kept for an hour.",
                shown(given)
            ))
            .into();
        }
        E::FileNotFound(_) => {
            return failure(format!("There is no file {}; run_command with ls shows what there is.", shown(given)))
                .into();
        }
        E::InvalidPath { why, .. } => E::InvalidPath { path: given.into(), why: named(why) },
        E::FileTooLarge { limit, .. } => E::FileTooLarge { path: given.into(), limit: *limit },
        E::Sandbox(why) => E::Sandbox(named(why)),
        other => other.clone(),
    };
    errors::error(input, &error)
}

/// How much of a file to show, and how.
struct View {
    encoding: Option<Encoding>,
    offset: Option<Count>,
    limit: Option<Count>,
}

output! {
    struct EditedFile { path: String, replaced: u64, size: u64 }
    struct Matches { matches: Vec<String>, note: Option<String> }
    struct Listed { files: Vec<String>, note: Option<String> }
    struct UploadAddress { url: String, path: String, max_bytes: u64, expires_at: String }
    struct WrittenFile { path: String, size: u64, url: Option<String> }

    #[derive(Default)]
    struct File {
        path: String,
        size: u64,
        /// `base64`, or nothing for text.
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
    let url = input.links.to(&key, &path);
    Answer::compact(&WrittenFile { path, size, url })
}

/// Returns a line for each entry: a path and its size, or a directory and the number of entries below it if they are not
/// listed. Paths begin where the next call expects it.
fn listed(input: &RenderInput<'_>, directory: &str, listing: FileListing) -> Answer {
    let prefix = prefix_of(directory);
    let row = |entry: &FileEntry| {
        let path = format!("{prefix}{}", entry.path);
        match (entry.kind, entry.below) {
            (FileKind::File, _) => format!("{path} {}", entry.size),
            (FileKind::Directory, None) => format!("{path}/"),
            (FileKind::Directory, Some(1)) => format!("{path}/ 1 entry"),
            (FileKind::Directory, Some(below)) => format!("{path}/ {below} entries"),
            (FileKind::Symlink, _) => format!("{path} symlink"),
            (FileKind::Other, _) => format!("{path} special"),
        }
    };
    let left = listing.total.saturating_sub(listing.entries.len() as u64);
    let note = (left > 0).then(|| format!("{left} more are not listed."));
    let object = Listed { files: listing.entries.iter().map(row).collect(), note };
    answer(input, object, |object| &mut object.note, "List a subdirectory with path, or find names with search_files.")
}

/// Returns what stands before the paths below a directory.
fn prefix_of(directory: &str) -> String {
    match directory.trim_matches('/').trim_start_matches("./") {
        "" | "." => String::new(),
        below => format!("{below}/"),
    }
}

fn edited(prefix: &str, edited: Edited) -> Answer {
    let Edited { path, found, replaced, lines, size } = edited;
    let path = format!("{prefix}{path}");
    match (replaced, found) {
        (1.., _) => Answer::compact(&EditedFile { path, replaced, size }),
        (0, 0) => failure(format!(
            "old_string does not occur in {}; read_file shows its text. Spaces and line ends count.",
            shown(&path)
        )),
        (0, _) => {
            let places: Vec<String> = lines.iter().map(u64::to_string).collect();
            failure(format!(
                "old_string occurs {found} times in {} (lines {}{}): add text around it until it is unique, or pass \
                 replace_all=true.",
                shown(&path),
                places.join(", "),
                if found > lines.len() as u64 { ", …" } else { "" }
            ))
        }
    }
}

fn matches(input: &RenderInput<'_>, prefix: &str, found: FoundLines) -> Answer {
    let row = |line: &engine::op::FoundLine| {
        // An empty path means that the searched path is a file.
        let path = if line.path.is_empty() { prefix.trim_end_matches('/') } else { prefix };
        match line.line {
            0 => format!("{path}{}", line.path),
            number => format!("{path}{}:{number}: {}", line.path, line.text),
        }
    };
    let stopped = found.stopped.map(|bound| match bound {
        SearchBound::Time => "Stopped after 10 s; search a smaller directory.".to_owned(),
        SearchBound::Size => "Stopped, because there are too many files; search a smaller directory.".to_owned(),
        SearchBound::Results => "There are more; search for something rarer, or in a smaller directory.".to_owned(),
    });
    let skipped = (found.skipped > 0).then(|| format!("Left out as binary or too large: {}.", found.skipped));
    let notes: Vec<String> = stopped.into_iter().chain(skipped).collect();
    let note = (!notes.is_empty()).then(|| notes.join(" "));
    let object = Matches { matches: found.lines.iter().map(row).collect(), note };
    answer(input, object, |object| &mut object.note, "Search for something rarer, or in a smaller directory.")
}

fn file(input: &RenderInput<'_>, asked: &View, prefix: &str, read: FileRead) -> Answer {
    let FileRead { path, content, size, key } = read;
    let url = input.links.to(&key, &path).filter(|_| !key.is_empty());
    let file = File { size, url, path: format!("{prefix}{path}"), ..File::default() };
    let most = input.options.text_budget;
    if content.len() as u64 != size {
        let note = match &file.url {
            Some(_) if prefix.starts_with(OUTPUTS) => "Too large for an answer: fetch it from the url.",
            Some(_) => {
                "Too large for an answer: fetch it from the url, or read parts of it with run_command (head, tail, sed)."
            }
            None => "Too large for an answer: read parts of it with run_command (head, tail, sed).",
        };
        return Answer::compact(&File { note: Some(note.into()), ..file });
    }
    match (asked.encoding, String::from_utf8(content)) {
        (None | Some(Encoding::Utf8), Ok(text)) => text_file(asked, file, &text, most),
        (Some(Encoding::Base64), content) => {
            bytes_file(file, &content.map_or_else(|e| e.into_bytes(), String::into_bytes), most)
        }
        (Some(Encoding::Utf8), Err(_)) => {
            failure(format!("{} is not text in UTF-8; read it with encoding base64.", shown(&file.path)))
        }
        (None, Err(content)) => other_file(file, content.as_bytes()),
    }
}

/// Renders the content unchanged in a separate block, then the other facts. The object has both.
fn with_content(file: File, content: String) -> Answer {
    let mut answer = Answer::compact(&file);
    answer.blocks.insert(0, Block::Text(content.clone()));
    answer.structured = json!(File { content: Some(content), ..file });
    answer
}

/// Returns as many of the requested lines as fit.
fn text_file(asked: &View, file: File, text: &str, most: usize) -> Answer {
    let count = |lines: Count| usize::try_from(lines.0).unwrap_or(usize::MAX);
    let first = asked.offset.map_or(1, count);
    let total = text.split_inclusive('\n').count();
    if first > total.max(1) {
        return failure(format!("{} has {total} lines; offset {first} is beyond its end.", shown(&file.path)));
    }
    let mut content = String::new();
    let mut room = most;
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
    let file = File { first_line, next_line, total_lines: first_line.map(|_| total), note, ..file };
    with_content(file, content)
}

fn bytes_file(file: File, bytes: &[u8], most: usize) -> Answer {
    let content = STANDARD.encode(bytes);
    if content.len() > most {
        return failure(format!(
            "{} has {} bytes, too many for one answer; read it in parts with run_code{}.",
            shown(&file.path),
            file.size,
            if file.url.is_some() { ", or download it from its url" } else { "" }
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
        return Answer::compact(&File { note: Some(note.into()), ..file });
    };
    let mut answer = Answer::compact(&file);
    answer.blocks.push(Block::Image { data, mime });
    answer
}
