//! Converts the arguments of the browser tools to requests. One tool performs all actions, with the action as an
//! argument and separate fields for each action.

use std::time::Duration;

use engine::op::browser::{BrowserAction as Ask, MouseButton, SnapshotAsk, TabAsk};
use engine::op::{Browse, NewContext, Op, Target};

use super::{CONTEXT, READS, TIMEOUT, page, path, target};
use crate::args::{self, ArgError, Args, FieldError};
use crate::shared::browse::{LOOKING, OPENING};
use crate::{Field, FieldKind, Hints, Options, SchemaForm, ToolRow};

pub(super) const BROWSER_OPEN: ToolRow = ToolRow {
    name: "browser_open",
    prose: "browser_open",
    fields: &[Field::required("url"), CONTEXT, TIMEOUT],
    form: SchemaForm::Full,
    output_schema: page::opened_schema,
    hints: Hints { read_only: false, destructive: true, idempotent: false },
    lower: browser_open,
    render: page::browsed,
    render_error: page::error,
};

pub(super) const BROWSER_ACT: ToolRow = ToolRow {
    name: "browser_act",
    prose: "browser_act",
    fields: &[
        Field { required: true, ..Field::one_of("action", ACTIONS) },
        Field::optional("target"),
        Field::optional("text"),
        Field::new("submit", FieldKind::Flag),
        Field::new("append", FieldKind::Flag),
        Field::new("slowly", FieldKind::Flag),
        Field::optional("key"),
        Field::one_of("button", &["left", "right", "middle"]),
        Field::new("double", FieldKind::Flag),
        Field::new("options", FieldKind::TextList),
        Field::new("files", FieldKind::TextList),
        Field::one_of("direction", &["down", "up", "right", "left"]),
        Field::new("pixels", FieldKind::Whole),
        Field::new("gone", FieldKind::Flag),
        Field::new("tab", FieldKind::Whole),
        Field::optional("url"),
        Field::new("close", FieldKind::Flag),
        Field::optional("expression"),
        CONTEXT,
        TIMEOUT,
    ],
    output_schema: page::acted_schema,
    lower: browser_act,
    ..BROWSER_OPEN
};

pub(super) const BROWSER_SNAPSHOT: ToolRow = ToolRow {
    name: "browser_snapshot",
    prose: "browser_snapshot",
    fields: &[
        CONTEXT,
        Field::new("max_chars", FieldKind::Whole),
        Field::optional("from"),
        Field::new("since", FieldKind::Whole),
        Field::optional("find"),
        Field::optional("within"),
    ],
    output_schema: page::snapshot_schema,
    hints: READS,
    lower: browser_snapshot,
    ..BROWSER_OPEN
};

pub(super) const BROWSER_SCREENSHOT: ToolRow = ToolRow {
    name: "browser_screenshot",
    prose: "browser_screenshot",
    fields: &[CONTEXT, Field::optional("target"), Field::new("full_page", FieldKind::Flag)],
    output_schema: page::screenshot_schema,
    hints: READS,
    lower: browser_screenshot,
    ..BROWSER_OPEN
};

/// Actions, in the order of how often they are wanted.
const ACTIONS: &[&str] = &[
    "click", "type", "press", "select", "hover", "scroll", "back", "forward", "reload", "wait", "upload", "tab",
    "evaluate", "log",
];

/// Timeout of an action that names none; it is enough for a page that settles slowly.
const USUAL: Duration = Duration::from_secs(10);
/// Usual scroll distance, similar to one turn of a mouse wheel.
const USUAL_PIXELS: u64 = 600;
const MOST_PIXELS: u64 = 1_000_000;
const LOG_LINES: u32 = 200;
const MOST_FILES: usize = 20;

/// Usual number of characters of a snapshot.
pub(super) const SNAPSHOT_CHARS: u64 = 20_000;
pub(super) const MOST_SNAPSHOT_CHARS: u64 = 100_000;

/// Returns the context of the call. A context that is created for the browser has a browser ready.
fn place(args: &Args) -> Result<Target, FieldError> {
    let Target { which, make } = target(args)?;
    Ok(Target { which, make: make.map(|new| NewContext { browser: true, ..new }) })
}

fn browse(args: &Args, ask: Ask, timeout: Duration) -> Result<Op, FieldError> {
    Ok(Op::Browse(Browse { target: place(args)?, ask, uploads: Vec::new(), timeout }))
}

fn timeout(args: &Args, options: &Options, usual: Duration) -> Result<Duration, FieldError> {
    Ok(args::whole(args, "timeout", 1..=options.max_timeout)?.map_or(usual, Duration::from_secs))
}

fn browser_open(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let url = args::required(args, "url")?.to_owned();
    Ok(browse(args, Ask::Open { url }, timeout(args, options, OPENING)?)?)
}

fn owned(args: &Args, field: &str) -> Result<Option<String>, FieldError> {
    Ok(args::filled(args, field)?.map(str::to_owned))
}

fn number(args: &Args, field: &str, most: u64) -> Result<Option<u32>, FieldError> {
    Ok(args::whole(args, field, 1..=most)?.map(|number| u32::try_from(number).unwrap_or(u32::MAX)))
}

/// Every field that an action can have. All fields are read for every action, so that a wrong value is refused even if
/// the action does not use it.
struct ActionFields {
    action: String,
    target: Option<String>,
    text: Option<String>,
    submit: bool,
    append: bool,
    slowly: bool,
    key: Option<String>,
    button: MouseButton,
    double: bool,
    options: Option<Vec<String>>,
    files: Option<Vec<String>>,
    direction: Option<Direction>,
    pixels: i32,
    gone: bool,
    tab: Option<u32>,
    url: Option<String>,
    close: bool,
    expression: Option<String>,
}

#[derive(Clone, Copy)]
enum Direction {
    Down,
    Up,
    Right,
    Left,
}

impl ActionFields {
    fn read(args: &Args) -> Result<Self, FieldError> {
        const BUTTONS: [(&str, MouseButton); 3] =
            [("left", MouseButton::Left), ("right", MouseButton::Right), ("middle", MouseButton::Middle)];
        const DIRECTIONS: [(&str, Direction); 4] =
            [("down", Direction::Down), ("up", Direction::Up), ("right", Direction::Right), ("left", Direction::Left)];
        let flag = |field| Ok(args::flag(args, field)?.unwrap_or_default());
        args::required(args, "action")?;
        let actions: Vec<(&str, &str)> = ACTIONS.iter().map(|action| (*action, *action)).collect();
        let files = args::text_list(args, "files")?.map(|files| files.iter().map(|file| below(file)).collect());
        let pixels = args::whole(args, "pixels", 1..=MOST_PIXELS)?.unwrap_or(USUAL_PIXELS);
        Ok(Self {
            action: args::choice(args, "action", &actions)?.unwrap_or_default().to_owned(),
            target: owned(args, "target")?,
            text: args::text(args, "text")?.map(str::to_owned),
            submit: flag("submit")?,
            append: flag("append")?,
            slowly: flag("slowly")?,
            key: owned(args, "key")?,
            button: args::choice(args, "button", &BUTTONS)?.unwrap_or_default(),
            double: flag("double")?,
            options: args::text_list(args, "options")?,
            files: files.transpose()?,
            direction: args::choice(args, "direction", &DIRECTIONS)?,
            pixels: i32::try_from(pixels).unwrap_or(i32::MAX),
            gone: flag("gone")?,
            tab: number(args, "tab", u64::from(u32::MAX))?,
            url: owned(args, "url")?,
            close: flag("close")?,
            expression: owned(args, "expression")?,
        })
    }

    /// Returns a field without which this action cannot work.
    fn needed<T>(&self, field: &str, value: Option<T>) -> Result<T, FieldError> {
        value.ok_or_else(|| FieldError(format!("{field} is required for the action {}", self.action)))
    }

    fn target(&self) -> Result<String, FieldError> {
        self.needed("target", self.target.clone())
    }

    fn ask(&self) -> Result<Ask, FieldError> {
        Ok(match self.action.as_str() {
            "click" => Ask::Click { at: self.target()?, button: self.button, double: self.double },
            "type" => Ask::Type {
                at: self.target()?,
                text: self.needed("text", self.text.clone())?,
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
                let text = self.text.clone().filter(|text| !text.is_empty());
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
        let (right, down) = match (self.direction, &self.target) {
            (None, Some(_)) => (0, 0),
            (None | Some(Direction::Down), _) => (0, self.pixels),
            (Some(Direction::Up), _) => (0, -self.pixels),
            (Some(Direction::Right), _) => (self.pixels, 0),
            (Some(Direction::Left), _) => (-self.pixels, 0),
        };
        Ask::Scroll { at: self.target.clone(), right, down }
    }

    fn tab_ask(&self) -> Result<TabAsk, FieldError> {
        match (self.tab, &self.url, self.close) {
            (Some(_), Some(_), _) | (None, Some(_), true) => {
                Err(FieldError("url is for a new tab: leave tab and close out".into()))
            }
            (None, None, true) => Err(FieldError("tab is required to close one".into())),
            (Some(tab), None, true) => Ok(TabAsk::Close { tab }),
            (Some(tab), None, false) => Ok(TabAsk::Select { tab }),
            (None, Some(url), false) => Ok(TabAsk::New { url: Some(url.clone()) }),
            (None, None, false) => Ok(TabAsk::List),
        }
    }

    fn uploads(&self) -> Result<Vec<String>, FieldError> {
        match self.action.as_str() {
            "upload" => self.needed("files", self.files.clone().filter(|files| !files.is_empty())),
            _ => Ok(Vec::new()),
        }
    }
}

fn below(file: &str) -> Result<String, FieldError> {
    path(file).map_err(|FieldError(why)| FieldError(format!("files: {why}")))
}

fn browser_act(args: &Args, options: &Options) -> Result<Op, ArgError> {
    let given = ActionFields::read(args)?;
    if given.files.as_ref().is_some_and(|files| files.len() > MOST_FILES) {
        return Err(FieldError(format!("files cannot be more than {MOST_FILES}")).into());
    }
    // Actions that may open a page get as long as opening one.
    let usual =
        if matches!(given.action.as_str(), "wait" | "tab" | "back" | "forward" | "reload") { OPENING } else { USUAL };
    let timeout = timeout(args, options, usual)?;
    Ok(Op::Browse(Browse { target: place(args)?, uploads: given.uploads()?, ask: given.ask()?, timeout }))
}

fn browser_snapshot(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let ask = SnapshotAsk {
        max_chars: u32::try_from(max_chars(args)?).unwrap_or(u32::MAX),
        from: owned(args, "from")?,
        since: args::whole(args, "since", 1..=1 << 52)?,
        find: owned(args, "find")?,
        within: owned(args, "within")?,
        apart: false,
    };
    Ok(browse(args, Ask::Snapshot(ask), LOOKING)?)
}

pub(super) fn max_chars(args: &Args) -> Result<u64, FieldError> {
    Ok(args::whole(args, "max_chars", 1..=MOST_SNAPSHOT_CHARS)?.unwrap_or(SNAPSHOT_CHARS))
}

fn browser_screenshot(args: &Args, _: &Options) -> Result<Op, ArgError> {
    let full_page = args::flag(args, "full_page")?.unwrap_or_default();
    Ok(browse(args, Ask::Screenshot { at: owned(args, "target")?, full_page }, LOOKING)?)
}
