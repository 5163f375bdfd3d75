//! Converts the arguments of the browser tools to browser actions. One tool performs all actions; the action is an
//! argument, and each action has its own fields.

use std::time::Duration;

use engine::op::browser::{BrowserAction as Ask, MouseButton, SnapshotAsk, TabAsk};
use engine::op::{Browse, Browsed, NewContext, Target};
use serde_json::Value;

use super::files::below;
use super::{page, target};
use crate::args::{AnyText, Argument, Count, Timeout, Whole, args, choice, choices};
use crate::operation::{self, Operation};
use crate::shared::browse::{LOOKING, OPENING};
use crate::shared::files::{WORKSPACE, path_below};
use crate::{ArgError, FieldKind, Lowering, Options};

args! {
    struct OpenArgs { url: String, context: Option<String>, timeout: Option<PageTimeout> }

    /// Holds every field that an action can have. All fields are read for every action, so that a wrong value is
    /// refused even if the action does not use it.
    struct ActArgs {
        action: Action,
        target: Option<String>,
        text: Option<AnyText>,
        submit: bool,
        append: bool,
        slowly: bool,
        key: Option<String>,
        button: Option<MouseButton>,
        double: bool,
        options: Option<Vec<String>>,
        files: Vec<String>,
        direction: Option<Direction>,
        pixels: Option<Whole<1, MOST_PIXELS>>,
        gone: bool,
        tab: Option<Whole<1, { u32::MAX as u64 }>>,
        url: Option<String>,
        close: bool,
        expression: Option<String>,
        changes: Option<bool>,
        context: Option<String>,
        timeout: Option<PageTimeout>,
    }

    struct SnapshotArgs {
        context: Option<String>,
        max_chars: Option<Whole<1, MOST_SNAPSHOT_CHARS>>,
        from: Option<String>,
        since: Option<Count>,
        find: Option<String>,
        within: Option<String>,
    }

    struct ScreenshotArgs { context: Option<String>, target: Option<String>, full_page: bool }
}

/// Names of the actions, the most frequent first.
const ACTIONS: &[&str] = &[
    "click", "type", "press", "select", "hover", "scroll", "back", "forward", "reload", "wait", "upload", "tab",
    "evaluate", "log",
];

/// Holds the name of an action.
struct Action(&'static str);

impl Argument for Action {
    const CHOICES: &'static [&'static str] = ACTIONS;

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        String::parse(field, value)?;
        let actions: Vec<(&str, &str)> = ACTIONS.iter().map(|action| (*action, *action)).collect();
        choice(field, value, &actions).map(Self)
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Down,
    Up,
    Right,
    Left,
}

choices!(Direction {
    "down" => Direction::Down,
    "up" => Direction::Up,
    "right" => Direction::Right,
    "left" => Direction::Left,
});

/// Timeout of an action that names none. It is long enough for a page that settles slowly.
const USUAL: Duration = Duration::from_secs(10);
/// Usual scroll distance, similar to one turn of a mouse wheel.
const USUAL_PIXELS: u64 = 600;
const MOST_PIXELS: u64 = 1_000_000;
const LOG_LINES: u32 = 200;
const MOST_FILES: usize = 20;

/// Maximum length of the report of what an action changed.
const CHANGES_CHARS: u32 = 1500;

const USUAL_SNAPSHOT_CHARS: u32 = 20_000;
const MOST_SNAPSHOT_CHARS: u64 = 100_000;

/// Time for an action of the browser.
struct PageTimeout(Timeout);

impl Argument for PageTimeout {
    const KIND: FieldKind = Timeout::KIND;
    const RANGE: Option<fn(&Options) -> String> = Some(|options| format!("1–{}", options.max_timeout));

    fn parse(field: &str, value: &Value) -> Result<Self, ArgError> {
        Timeout::parse(field, value).map(Self)
    }
}

impl PageTimeout {
    fn read(asked: Option<Self>, options: &Options) -> Result<Option<Duration>, ArgError> {
        Timeout::up_to(asked.map(|timeout| timeout.0), options.max_timeout)
    }
}

/// Returns an action in the context of the call. A context that is created for the browser has a browser ready.
fn browse(context: Option<String>, ask: Ask, timeout: Duration) -> Browse {
    let Target { which, make } = target(context);
    let target = Target { which, make: make.map(|new| NewContext { browser: true, ..new }) };
    Browse { target, ask, uploads: Vec::new(), changes: 0, timeout }
}

fn answered(operation: Operation<Browsed>) -> Lowering {
    operation.answer(|input, browsed| page::browsed(input, browsed, USUAL_SNAPSHOT_CHARS as usize))
}

pub(super) fn open(args: OpenArgs, options: &Options) -> Lowering {
    let timeout = PageTimeout::read(args.timeout, options)?.unwrap_or(OPENING);
    let ask = match workspace_file(&args.url) {
        Some(path) => {
            let path = path_below(WORKSPACE, &path).map_err(|why| ArgError::new(format!("url: {why}")))?;
            Ask::OpenFile { path }
        }
        None => Ask::Open { url: args.url },
    };
    answered(operation::browse(browse(args.context, ask, timeout)))
}

/// Returns the path of a file of the workspace if `url` means one: `/workspace/a.html`, `file:///workspace/a.html`, or
/// `a.html`. A relative path counts only with the extension of a page, because `example.com` is meant as a host.
fn workspace_file(url: &str) -> Option<String> {
    let url = url.trim();
    let is_below = |path: &str| path.strip_prefix(WORKSPACE).is_some_and(|rest| rest.starts_with('/'));
    if let Some(path) = url.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("file://")).map(|_| &url[7..]) {
        let path = path.strip_prefix("localhost").unwrap_or(path);
        let path = path.split(['?', '#']).next().unwrap_or_default();
        return text::percent_decoded(path).filter(|path| is_below(path));
    }
    let lower = url.to_ascii_lowercase();
    let is_page = lower.ends_with(".html") || lower.ends_with(".htm");
    let is_relative = is_page && !url.starts_with('/') && !url.contains(':');
    (is_below(url) || is_relative).then(|| url.to_owned())
}

pub(super) fn act(mut args: ActArgs, options: &Options) -> Lowering {
    let uploads: Result<Vec<String>, _> = args.files.iter().map(|file| below(file)).collect();
    let uploads = uploads.map_err(|why| ArgError::new(format!("files: {}", why.message)))?;
    if uploads.len() > MOST_FILES {
        return Err(ArgError::new(format!("files cannot be more than {MOST_FILES}")));
    }
    // An action that may open a page gets the timeout of opening one.
    let usual = if matches!(args.action.0, "wait" | "tab" | "back" | "forward" | "reload") { OPENING } else { USUAL };
    let timeout = PageTimeout::read(args.timeout.take(), options)?.unwrap_or(usual);
    let uploads = if args.action.0 == "upload" {
        args.needed("files", Some(uploads).filter(|files| !files.is_empty()))?
    } else {
        Vec::new()
    };
    let changes = if args.changes.unwrap_or(true) { CHANGES_CHARS } else { 0 };
    let browse = browse(args.context.take(), args.ask()?, timeout);
    answered(operation::browse(Browse { uploads, changes, ..browse }))
}

pub(super) fn snapshot(args: SnapshotArgs, _: &Options) -> Lowering {
    let most = args.max_chars.and_then(|most| u32::try_from(most.0).ok());
    let ask = SnapshotAsk {
        max_chars: most.unwrap_or(USUAL_SNAPSHOT_CHARS),
        from: args.from,
        since: args.since.map(|since| since.0),
        find: args.find,
        within: args.within,
        apart: None,
    };
    let most = ask.max_chars as usize;
    operation::browse(browse(args.context, Ask::Snapshot(ask), LOOKING))
        .answer(move |input, browsed| page::browsed(input, browsed, most))
}

pub(super) fn screenshot(args: ScreenshotArgs, _: &Options) -> Lowering {
    let ask = Ask::Screenshot { at: args.target, full_page: args.full_page };
    answered(operation::browse(browse(args.context, ask, LOOKING)))
}

impl ActArgs {
    /// Returns a field without which this action cannot work.
    fn needed<T>(&self, field: &str, value: Option<T>) -> Result<T, ArgError> {
        value.ok_or_else(|| ArgError::new(format!("{field} is required for the action {}", self.action.0)))
    }

    fn text(&self) -> Option<String> {
        self.text.as_ref().map(|text| text.0.clone())
    }

    fn target(&self) -> Result<String, ArgError> {
        self.needed("target", self.target.clone())
    }

    fn ask(&self) -> Result<Ask, ArgError> {
        Ok(match self.action.0 {
            "click" => Ask::Click { at: self.target()?, button: self.button.unwrap_or_default(), double: self.double },
            "type" => Ask::Type {
                at: self.target()?,
                text: self.needed("text", self.text())?,
                append: self.append,
                submit: self.submit,
                keys: self.slowly,
            },
            "press" => Ask::Press { key: self.needed("key", self.key.clone())?, at: self.target.clone() },
            "select" => Ask::Select { at: self.target()?, options: self.needed("options", self.options.clone())? },
            "hover" => Ask::Hover { at: self.target()? },
            "scroll" => self.scroll(),
            "back" => Ask::Back,
            "forward" => Ask::Forward,
            "reload" => Ask::Reload,
            "wait" => {
                let text = self.text().filter(|text| !text.is_empty());
                Ask::Wait { text: self.needed("text", text)?, gone: self.gone }
            }
            // The engine puts the files where the browser finds them.
            "upload" => Ask::Upload { at: self.target()?, files: Vec::new() },
            "tab" => Ask::Tab { tab: self.tab_ask()? },
            "evaluate" => Ask::Evaluate { expression: self.needed("expression", self.expression.clone())? },
            _ => Ask::Log { max_lines: LOG_LINES },
        })
    }

    /// Scrolls an element into view unless a direction is given. Without both it scrolls the page down.
    fn scroll(&self) -> Ask {
        let pixels = i32::try_from(self.pixels.map_or(USUAL_PIXELS, |pixels| pixels.0)).unwrap_or(i32::MAX);
        let (right, down) = match (self.direction, &self.target) {
            (None, Some(_)) => (0, 0),
            (None | Some(Direction::Down), _) => (0, pixels),
            (Some(Direction::Up), _) => (0, -pixels),
            (Some(Direction::Right), _) => (pixels, 0),
            (Some(Direction::Left), _) => (-pixels, 0),
        };
        Ask::Scroll { at: self.target.clone(), right, down }
    }

    fn tab_ask(&self) -> Result<TabAsk, ArgError> {
        let tab = self.tab.map(|tab| u32::try_from(tab.0).unwrap_or(u32::MAX));
        match (tab, &self.url, self.close) {
            (Some(_), Some(_), _) | (None, Some(_), true) => {
                Err(ArgError::new("url is for a new tab: leave tab and close out"))
            }
            (None, None, true) => Err(ArgError::new("tab is required to close one")),
            (Some(tab), None, true) => Ok(TabAsk::Close { tab }),
            (Some(tab), None, false) => Ok(TabAsk::Select { tab }),
            (None, Some(url), false) => Ok(TabAsk::New { url: Some(url.clone()) }),
            (None, None, false) => Ok(TabAsk::List),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sp57_files_of_the_workspace_are_told_from_addresses() {
        for (url, path) in [
            ("/workspace/report.html", "/workspace/report.html"),
            ("file:///workspace/a%20b/%E6%8A%A5.html#top", "/workspace/a b/报.html"),
            ("FILE://localhost/workspace/x.pdf", "/workspace/x.pdf"),
            ("file:///workspace/50%.pdf", "/workspace/50%.pdf"),
            ("report.html", "report.html"),
            (" out/Report.HTM ", "out/Report.HTM"),
        ] {
            assert_eq!(workspace_file(url).as_deref(), Some(path), "{url}");
        }
        for url in [
            "http://a.test/workspace/a.html",
            "https://a.test/x.html",
            "localhost:8000/x.html",
            "example.com",
            "file:///etc/passwd",
            "file:///workspacex/a.html",
            "file:///workspace",
            "file:///workspace/%ff.html",
            "/etc/x.html",
            "/workspace",
            "data:text/html,x.html",
            "",
        ] {
            assert_eq!(workspace_file(url), None, "{url}");
        }
    }
}
