//! Reads pages as an outline with a `ref_N` for each element that can be acted on, and finds these elements again.
//!
//! All reading is done by scripts in an isolated world of each frame (`js/`), which a page can neither see nor
//! change. The number of a ref is used only once in the life of the driver, across all frames and tabs, so the ref of
//! a removed element never denotes another one.

mod changes;
mod read;
#[cfg(test)]
mod tree_test;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use proto::browser::{BrowseError, BrowseFailure};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Name of the isolated world. Before its page runs, each DevTools session gets `Page.addScriptToEvaluateOnNewDocument`
/// with this name, [`SCRIPT`] and `runImmediately`.
pub(crate) const WORLD: &str = "sandpool";

pub(crate) const SCRIPT: &str = concat!(
    include_str!("js/refs.js"),
    include_str!("js/find.js"),
    include_str!("js/ready.js"),
    include_str!("js/names.js"),
    include_str!("js/targets.js"),
    include_str!("js/walk.js")
);

/// Group of the remote objects that requests leave in the browser. They have to be released after each request.
pub(crate) const OBJECTS: &str = "sandpool";

/// A frame of a tab, with its isolated world as reported by `Runtime.executionContextCreated` (`name == WORLD`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Frame {
    pub id: String,
    pub parent: Option<String>,
    /// DevTools session of the process that the frame is in.
    pub session: String,
    /// The `id` of the isolated world; `world` is its `uniqueId`.
    pub context: u64,
    pub world: String,
}

/// Access to a tab, as the reader needs it. Frames that have no isolated world yet are left out.
pub(crate) trait TabAccess {
    /// Returns the frames, the main frame first and parents before their children.
    fn frames(&self) -> Vec<Frame>;

    /// Sends one command and awaits its answer, within the time of the current request.
    async fn call(&self, session: &str, method: &str, params: Value) -> Result<Value, CallError>;
}

#[derive(Debug)]
pub(crate) enum CallError {
    /// The browser refused the command, for example because there is no such context or node.
    Refused,
    /// The browser did not answer, or is gone.
    Failed(BrowseError),
}

/// An element that was found. It may be gone by the time it is used, which is then reported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Element {
    pub frame: Frame,
    pub number: u64,
}

/// The conditions that an action requires of its element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// The element is visible, enabled, not moving, in view, and not covered by another element.
    Click,
    /// The element is visible, enabled, not moving, in view and not read-only; it may be covered.
    Type,
    /// The element is visible and in view.
    Seen,
    /// The element exists.
    Any,
}

impl Need {
    fn word(self) -> &'static str {
        match self {
            Self::Click => "click",
            Self::Type => "type",
            Self::Seen => "seen",
            Self::Any => "any",
        }
    }
}

/// The point to act at, in CSS pixels of the tab's viewport, for `Input` events of the tab's first session. The size
/// is that of the element.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(crate) struct Point {
    pub x: f64,
    pub y: f64,
    pub width: f64,
    pub height: f64,
}

/// Reads pages and assigns the numbers of refs. A driver has one.
#[derive(Debug)]
pub(crate) struct Reader {
    next: u64,
    /// Ranges of numbers by first number, each with its end and the isolated world that it was given to.
    given: BTreeMap<u64, (u64, String)>,
    /// The last snapshots, for comparison; `count` is the number of all snapshots taken.
    taken: VecDeque<changes::Taken>,
    count: u64,
    /// The page as the client last knew it from a report of changes. Its number is that of the snapshot before it.
    told: Option<changes::Taken>,
    /// The positions at which snapshots were cut, by the token that continues there.
    stopped: VecDeque<(String, read::CutSnapshot)>,
    /// Lines that name the elements that the last target may have meant, if it did not match exactly one.
    candidates: Vec<String>,
}

/// Timeout for a frame that is busy. An idle frame answers within milliseconds.
const FRAME_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum length of a target.
const MAX_TARGET: usize = 10_000;
/// Maximum number of elements that are named for a target that does not match exactly one.
const MAX_CANDIDATES: usize = 5;

/// Number of ref numbers that are reserved for an isolated world during one call. If the call is abandoned, the
/// isolated world keeps all of them.
const BLOCK: u64 = 10_000_000;

/// Maximum number of ranges that are remembered. When the oldest is dropped, its refs are forgotten.
const MAX_RANGES: usize = 100_000;

impl Default for Reader {
    fn default() -> Self {
        Self {
            next: 1,
            given: BTreeMap::new(),
            taken: VecDeque::new(),
            count: 0,
            told: None,
            stopped: VecDeque::new(),
            candidates: Vec::new(),
        }
    }
}

impl Reader {
    /// Finds the element of a `ref_N`, or the one that any other target matches in the main frame or else in the first
    /// frame with a match. A line of an outline, such as `[ref_3] button "Go"`, denotes its ref.
    pub(crate) async fn find(&mut self, tab: &impl TabAccess, at: &str) -> Result<Element, BrowseError> {
        let frames = tab.frames();
        self.candidates.clear();
        if at.len() > MAX_TARGET {
            let message = format!("a target has at most `{MAX_TARGET}` bytes");
            return Err(error(BrowseFailure::Invalid, message));
        }
        let at = at.trim();
        let in_line = at.strip_prefix("[ref_").and_then(|line| line.split_once(']')).map(|(number, _)| number);
        if let Some(number) = in_line.or_else(|| at.strip_prefix("ref_")) {
            let Ok(number) = number.parse() else {
                return Err(error(BrowseFailure::Invalid, format!("`{}` is not a ref", shown(at))));
            };
            let frame = self.frame_of(&frames, number).ok_or_else(|| gone(at))?;
            let element = Element { frame, number };
            self.ask::<Value>(tab, &element.frame, "alive", json!([number])).await.map_err(|failure| failure.of(at))?;
            return Ok(element);
        }
        for frame in frames {
            let found = self.ask_frame(tab, &frame, "find", json!([at])).await.map_err(|failure| failure.of(at))?;
            let Some(Found { count, number, mut candidates }) = found else { continue };
            match count {
                0 => self.candidates.append(&mut candidates),
                _ => self.candidates = candidates,
            }
            self.candidates.truncate(MAX_CANDIDATES);
            match (count, number) {
                (1, Some(number)) => return Ok(Element { frame, number }),
                (0, _) | (_, None) => {}
                (count, _) => {
                    let message = format!("`{}` matches {count} elements; name one of them", shown(at));
                    return Err(error(BrowseFailure::Ambiguous, message));
                }
            }
        }
        Err(error(BrowseFailure::NotFound, format!("no element matches `{}`", shown(at))))
    }

    /// Returns the elements that the last target may have meant, if it did not match exactly one.
    pub(crate) fn take_candidates(&mut self) -> Vec<String> {
        std::mem::take(&mut self.candidates)
    }

    /// Waits for at most `wait` until the element meets the conditions, and scrolls it into view.
    pub(crate) async fn ready(
        &mut self,
        tab: &impl TabAccess,
        element: &Element,
        need: Need,
        wait: Duration,
    ) -> Result<Point, BrowseError> {
        let at = format!("ref_{}", element.number);
        let args = json!([element.number, need.word(), wait.as_millis() as u64]);
        let mut point: Point = self.ask(tab, &element.frame, "ready", args).await.map_err(|failure| failure.of(&at))?;
        if need == Need::Any {
            return Ok(point);
        }
        let frames = tab.frames();
        let mut inner = element.frame.clone();
        while let Some(outer) = parent(&frames, &inner) {
            let owner = self.owner(tab, &inner, &outer).await.map_err(|failure| failure.of(&at))?;
            let args = json!([owner, point.x, point.y, need.word()]);
            let through: FrameOffset =
                self.ask(tab, &outer, "through", args).await.map_err(|failure| failure.of(&at))?;
            (point.x, point.y) = (through.x, through.y);
            inner = outer;
        }
        Ok(point)
    }

    /// Returns whether the element's document has noticed the pointer since the element was found ready.
    pub(crate) async fn has_felt_pointer(&mut self, tab: &impl TabAccess, element: &Element) -> bool {
        self.ask::<bool>(tab, &element.frame, "felt", json!([])).await.unwrap_or(true)
    }

    /// Checks, after a click on an element that was ready, that the element was still there. If it was not, nothing
    /// else was clicked.
    pub(crate) async fn hit(&mut self, tab: &impl TabAccess, element: &Element) -> Result<(), BrowseError> {
        match self.ask::<Value>(tab, &element.frame, "hit", json!([])).await {
            // The page navigated to another document.
            Ok(_) | Err(WorldError::Gone) => Ok(()),
            Err(failure) => Err(failure.of(&format!("ref_{}", element.number))),
        }
    }

    /// Calls `function`, which is `(element, ...args) => …`, in the element's isolated world and returns its result by
    /// value. Promises are awaited.
    pub(crate) async fn apply<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        element: &Element,
        function: &str,
        args: &[Value],
    ) -> Result<T, BrowseError> {
        let at = format!("ref_{}", element.number);
        let args: String = args.iter().map(|arg| format!(", {arg}")).collect();
        let body = format!("sandpool.calls.apply = number => ({function})(sandpool.node(number){args});");
        self.run(tab, &element.frame, &body, "apply", json!([element.number])).await.map_err(|failure| failure.of(&at))
    }

    /// Returns the element as a remote object, for commands that need one (`DOM.setFileInputFiles`,
    /// `Page.captureScreenshot`'s box).
    pub(crate) async fn object(&mut self, tab: &impl TabAccess, element: &Element) -> Result<String, BrowseError> {
        let at = format!("ref_{}", element.number);
        let expression = format!("sandpool.node({})", element.number);
        let params = json!({
            "expression": expression, "uniqueContextId": element.frame.world, "objectGroup": OBJECTS,
        });
        let answer = called(tab.call(&element.frame.session, "Runtime.evaluate", params).await);
        let answer = answer.map_err(|failure| failure.of(&at))?;
        answer["result"]["objectId"].as_str().map(str::to_owned).ok_or_else(|| gone(&at))
    }

    /// Returns whether a text is visible on the page now, in any of its frames.
    pub(crate) async fn has_text(&mut self, tab: &impl TabAccess, text: &str) -> Result<bool, BrowseError> {
        for frame in tab.frames() {
            match self.ask_frame(tab, &frame, "has", json!([text])).await {
                Ok(Some(true)) => return Ok(true),
                Ok(_) => {}
                Err(failure) => return Err(failure.of("the page")),
            }
        }
        Ok(false)
    }

    fn frame_of(&self, frames: &[Frame], number: u64) -> Option<Frame> {
        let (_, (end, world)) = self.given.range(..=number).next_back()?;
        (number < *end).then(|| frames.iter().find(|frame| frame.world == *world))?.cloned()
    }

    /// Returns the number of the element that contains a frame, in the isolated world of the outer frame.
    async fn owner(&mut self, tab: &impl TabAccess, inner: &Frame, outer: &Frame) -> Result<u64, WorldError> {
        let params = json!({ "frameId": inner.id });
        let owner = called(tab.call(&outer.session, "DOM.getFrameOwner", params).await)?;
        let params = json!({ "backendNodeId": owner["backendNodeId"], "executionContextId": outer.context, "objectGroup": OBJECTS });
        let object = called(tab.call(&outer.session, "DOM.resolveNode", params).await)?;
        self.ask_of(tab, outer, &object["object"]["objectId"], "number").await
    }

    /// Asks about a node that is identified by a remote object instead of a number.
    async fn ask_of<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        frame: &Frame,
        object: &Value,
        name: &str,
    ) -> Result<T, WorldError> {
        let (first, last) = self.reserve(&frame.world);
        let params = json!({
            "objectId": object,
            "functionDeclaration": format!("function () {{ return sandpool.ask({first}, {last}, '{name}', this); }}"),
            "returnByValue": true,
            "awaitPromise": true,
        });
        let answer = tab.call(&frame.session, "Runtime.callFunctionOn", params).await;
        self.taken(tab, frame, first, answer)
    }

    /// Asks one frame of a page. Returns `None` if the frame is gone or does not answer, unless it is the main frame,
    /// which may use all the time of the request.
    async fn ask_frame<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        frame: &Frame,
        name: &str,
        args: Value,
    ) -> Result<Option<T>, WorldError> {
        let is_page = frame.parent.is_none();
        let timeout = if is_page { Duration::MAX } else { FRAME_TIMEOUT };
        match tokio::time::timeout(timeout, self.ask(tab, frame, name, args)).await {
            Ok(Ok(answer)) => Ok(Some(answer)),
            Ok(Err(WorldError::Gone)) if !is_page => Ok(None),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Ok(None),
        }
    }

    async fn ask<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        frame: &Frame,
        name: &str,
        args: Value,
    ) -> Result<T, WorldError> {
        self.run(tab, frame, "", name, args).await
    }

    async fn run<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        frame: &Frame,
        before: &str,
        name: &str,
        args: Value,
    ) -> Result<T, WorldError> {
        let args: String = args.as_array().into_iter().flatten().map(|arg| format!(", {arg}")).collect();
        let (first, last) = self.reserve(&frame.world);
        let params = json!({
            "expression": format!("{before}sandpool.ask({first}, {last}, '{name}'{args})"),
            "uniqueContextId": frame.world,
            "returnByValue": true,
            "awaitPromise": true,
        });
        let answer = tab.call(&frame.session, "Runtime.evaluate", params).await;
        self.taken(tab, frame, first, answer)
    }

    /// Parses the answer of an isolated world, and takes back the reserved numbers that it has not used.
    fn taken<T: DeserializeOwned>(
        &mut self,
        tab: &impl TabAccess,
        frame: &Frame,
        first: u64,
        answer: Result<Value, CallError>,
    ) -> Result<T, WorldError> {
        let answer = called(answer).inspect_err(|_| {
            if !tab.frames().iter().any(|one| one.world == frame.world) {
                // The isolated world is gone, so none of its numbers are shown, whatever it has used.
                self.give_back(first, first);
            }
        })?;
        if let Some(thrown) = answer.get("exceptionDetails") {
            let text = thrown["exception"]["description"].as_str().or(thrown["text"].as_str()).unwrap_or("unknown");
            return Err(WorldError::Other(error(
                BrowseFailure::Threw,
                text.lines().next().unwrap_or_default().to_owned(),
            )));
        }
        let answer = &answer["result"]["value"];
        if let Some(next) = answer["next"].as_u64() {
            self.give_back(first, next);
        }
        if let Some(why) = answer["why"].as_str() {
            let message = answer["message"].as_str().unwrap_or_default().to_owned();
            return Err(match why {
                "stale" => WorldError::Gone,
                "invalid" => WorldError::Invalid(message),
                _ => WorldError::NotReady(message),
            });
        }
        serde_json::from_value(answer["value"].clone()).map_err(|e| {
            WorldError::Other(error(BrowseFailure::NoBrowser, format!("the page's reader answered wrongly: {e}")))
        })
    }

    /// Reserves numbers for an isolated world before it is asked. It may use them even after the call was abandoned,
    /// and if two elements had the same number, a click could hit the wrong one.
    fn reserve(&mut self, world: &str) -> (u64, u64) {
        let (first, last) = (self.next, self.next + BLOCK);
        match self.given.last_entry() {
            Some(mut given) if given.get().1 == world => given.get_mut().0 = last,
            _ => drop(self.given.insert(first, (last, world.to_owned()))),
        }
        self.next = last;
        if self.given.len() > MAX_RANGES {
            self.given.pop_first();
        }
        (first, last)
    }

    /// Takes back the unused numbers, from `next` on, of the last reservation, which began at `first`.
    fn give_back(&mut self, first: u64, next: u64) {
        if self.next != first + BLOCK || !(first..self.next).contains(&next) {
            return;
        }
        self.next = next;
        let Some(mut given) = self.given.last_entry() else { return };
        given.get_mut().0 = next;
        if *given.key() == next {
            given.remove();
        }
    }
}

#[derive(Deserialize)]
struct Found {
    count: u64,
    number: Option<u64>,
    candidates: Vec<String>,
}

#[derive(Deserialize)]
struct FrameOffset {
    x: f64,
    y: f64,
}

/// The failures of a call into an isolated world.
enum WorldError {
    Gone,
    Invalid(String),
    NotReady(String),
    Other(BrowseError),
}

impl WorldError {
    fn of(self, at: &str) -> BrowseError {
        match self {
            Self::Gone => gone(at),
            Self::Invalid(message) => error(BrowseFailure::Invalid, message),
            Self::NotReady(reason) => error(BrowseFailure::NotReady, format!("`{}` is not ready: {reason}", shown(at))),
            Self::Other(error) => error,
        }
    }
}

/// Converts the result of a command. A refusal means that the isolated world, and with it the node, is gone.
fn called(answer: Result<Value, CallError>) -> Result<Value, WorldError> {
    answer.map_err(|failure| match failure {
        CallError::Refused => WorldError::Gone,
        CallError::Failed(error) => WorldError::Other(error),
    })
}

fn parent(frames: &[Frame], frame: &Frame) -> Option<Frame> {
    let parent = frame.parent.as_ref()?;
    frames.iter().find(|frame| frame.id == *parent).cloned()
}

fn gone(at: &str) -> BrowseError {
    error(BrowseFailure::Stale, format!("`{}` is not on the page (any more); take a new snapshot", shown(at)))
}

fn error(why: BrowseFailure, message: String) -> BrowseError {
    BrowseError { why, message }
}

/// Shortens a locator for use in a message.
fn shown(at: &str) -> &str {
    &at[..at.floor_char_boundary(120)]
}
