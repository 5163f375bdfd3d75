//! Takes one snapshot: combines the walks through the frames of a page up to a budget, and records where to continue.

use std::time::{Duration, Instant};

use proto::browser::{BrowseError, BrowseFailure, Snapshot, SnapshotAsk};
use serde::Deserialize;
use serde_json::{Value, json};

use super::changes::{self, Taken};
use super::{Frame, OBJECTS, Reader, TabAccess, WorldError, called, error};

/// Time limit for all the walks of a snapshot.
const TIME: Duration = Duration::from_secs(3);
/// Maximum number of closed shadow roots that are opened in a snapshot.
const MAX_OPENED: u32 = 20;
/// Maximum number of positions to continue at that are remembered.
const MAX_STOPPED: usize = 32;
/// Maximum indentation of a line. The reader's script limits the depth of lines to less than that.
const MAX_DEPTH: usize = 500;
const MAX_BUDGET: u32 = 1_000_000;
/// Number of characters that are read of a page that the client does not know, before an action.
const UNKNOWN_BUDGET: u32 = 60_000;

/// A line of the outline, without its ref.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize)]
pub(super) struct OutlineLine {
    pub depth: usize,
    /// Number of the ref, or 0 for a line that cannot be acted on.
    pub number: u64,
    pub text: String,
}

impl OutlineLine {
    pub(super) fn shown(&self) -> String {
        let indent = " ".repeat(self.depth.min(MAX_DEPTH));
        match self.number {
            0 => format!("{indent}{}", self.text),
            number => format!("{indent}[ref_{number}] {}", self.text),
        }
    }
}

/// The result of a walk in one isolated world.
#[derive(Deserialize)]
struct WorldPart {
    lines: Vec<OutlineLine>,
    texts: Vec<String>,
    #[serde(rename = "textIsCut")]
    text_is_cut: bool,
    /// Number of lines in which a name or a value was shortened.
    shortened: u32,
    used: u32,
    canvases: u32,
    stop: Option<Stop>,
    blink: bool,
    modal: bool,
}

/// The reason why a walk is incomplete, and where it can continue.
#[derive(Deserialize)]
struct Stop {
    cursor: u64,
    /// Number of the element if the walk stopped at a frame. `depth` is then the depth of the frame, and `context`
    /// are the lines around it that are not written yet.
    frame: Option<u64>,
    #[serde(default)]
    depth: usize,
    #[serde(default)]
    context: Vec<OutlineLine>,
    /// Number of lines around this position that are already written.
    #[serde(default)]
    printed: u32,
    /// Number of the element if the walk stopped at one that may have a closed shadow root.
    host: Option<u64>,
    #[serde(default)]
    late: bool,
}

/// The position at which to continue in one isolated world.
#[derive(Debug, Clone)]
struct ReadCursor {
    world: String,
    within: Option<u64>,
    cursor: Option<u64>,
    /// True if the node at the cursor was already read.
    after: bool,
    printed: u32,
    depth: usize,
    context: Vec<OutlineLine>,
}

impl ReadCursor {
    fn top(frame: &Frame, depth: usize) -> Self {
        let world = frame.world.clone();
        Self { world, within: None, cursor: None, after: false, printed: 0, depth, context: Vec::new() }
    }
}

/// A snapshot that was cut: its positions in the nested frames, the innermost last, and its number.
#[derive(Debug, Clone)]
pub(super) struct CutSnapshot {
    cursors: Vec<ReadCursor>,
    number: u64,
}

/// A snapshot in progress.
struct Reading<'a> {
    ask: &'a SnapshotAsk,
    budget: u32,
    used: u32,
    lines: Vec<OutlineLine>,
    texts: Vec<String>,
    text_is_cut: bool,
    shortened: u32,
    canvases: u32,
    opened: u32,
    notes: Vec<String>,
    end: Instant,
}

impl Reader {
    /// Takes a snapshot of the page.
    pub(crate) async fn snapshot(&mut self, tab: &impl TabAccess, ask: &SnapshotAsk) -> Result<Snapshot, BrowseError> {
        let frames = tab.frames();
        let main = frames.first().ok_or_else(replaced)?.clone();
        if ask.since.is_some()
            && (ask.from.is_some() || ask.find.is_some() || ask.within.is_some() || ask.apart.is_some())
        {
            let message = "what changed can be told of the whole page alone, without any other choice";
            return Err(error(BrowseFailure::Invalid, message.into()));
        }
        let base = ask.since.and_then(|number| self.taken.iter().find(|taken| taken.number == number)).cloned();
        let mut reading = Reading::new(ask);
        if let Some(number) = ask.since {
            match &base {
                None => reading.notes.push(format!("snapshot {number} is not known any more: this is the whole page")),
                Some(base) if base.world != main.world => {
                    reading.notes.push(format!("the page is another one than in snapshot {number}: this is the whole"));
                }
                Some(base) => reading.budget = changes::budget(base),
            }
        }
        let base = base.filter(|base| base.world == main.world);
        let (mut cursors, earlier) = self.start(tab, ask, &main).await?;
        self.read(tab, &mut reading, &mut cursors).await?;

        self.count += 1;
        let number = self.count;
        let next = (!cursors.is_empty()).then(|| self.stop_at(CutSnapshot { cursors, number }));
        let mut lines = earlier;
        lines.extend(reading.lines.iter().cloned());
        let taken = Taken { number, world: main.world, lines, whole: next.is_none() };
        let mut snapshot = Snapshot { number, next, notes: reading.notes(), ..Snapshot::default() };
        match &base {
            Some(base) => changes::write(base, &taken, ask.max_chars as usize, &mut snapshot),
            None => snapshot.elements = shown(&reading.lines),
        }
        if base.is_none() {
            snapshot.text = reading.texts.join("\n");
            // The text ends where the elements end.
            snapshot.text_is_cut = reading.text_is_cut || (ask.apart.is_some() && snapshot.next.is_some());
        }
        // A snapshot of only a part of the page cannot serve as a base for comparison.
        if ask.find.is_none() && ask.within.is_none() && ask.apart.is_none() {
            changes::remember(&mut self.taken, taken);
        }
        Ok(snapshot)
    }

    /// Reads the page before an action, unless the client knows it already, so that [`Reader::changes`] can compare with it.
    pub(crate) async fn note_page(&mut self, tab: &impl TabAccess) {
        let Some(main) = tab.frames().into_iter().next() else { return };
        if self.known_page(&main).is_none()
            && let Ok(page) = self.read_page(tab, main, UNKNOWN_BUDGET).await
        {
            self.told = Some(page);
        }
    }

    /// Returns what changed since the client last knew the page, in at most about `max_chars` characters: the inner value
    /// is `None` if the client does not know the page, and the outer one if the page cannot be read.
    pub(crate) async fn changes(&mut self, tab: &impl TabAccess, max_chars: usize) -> Option<Option<String>> {
        let main = tab.frames().into_iter().next()?;
        let Some(base) = self.known_page(&main).cloned() else { return Some(None) };
        let now = self.read_page(tab, main, changes::budget(&base)).await.ok()?;
        let told = changes::told(&base, &now, max_chars);
        self.told = Some(now);
        Some(Some(told))
    }

    /// Returns the page as the client last knew it.
    fn known_page(&self, main: &Frame) -> Option<&Taken> {
        let shown = self.taken.iter().rev().find(|taken| taken.world == main.world);
        let told = self.told.as_ref().filter(|told| told.world == main.world);
        match (shown, told) {
            (Some(shown), Some(told)) if shown.number > told.number => Some(shown),
            (shown, told) => told.or(shown),
        }
    }

    async fn read_page(&mut self, tab: &impl TabAccess, main: Frame, budget: u32) -> Result<Taken, BrowseError> {
        let ask = SnapshotAsk { max_chars: budget, ..SnapshotAsk::default() };
        let (mut reading, mut cursors) = (Reading::new(&ask), vec![ReadCursor::top(&main, 0)]);
        self.read(tab, &mut reading, &mut cursors).await?;
        Ok(Taken { number: self.count, world: main.world, lines: reading.lines, whole: cursors.is_empty() })
    }

    /// Returns the positions to start at, and the lines that came before them.
    async fn start(
        &mut self,
        tab: &impl TabAccess,
        ask: &SnapshotAsk,
        main: &Frame,
    ) -> Result<(Vec<ReadCursor>, Vec<OutlineLine>), BrowseError> {
        if let Some(from) = &ask.from {
            let Some((_, stopped)) = self.stopped.iter().find(|(word, _)| word == from) else {
                let message = "this `next` is not known (any more); take a new snapshot";
                return Err(error(BrowseFailure::Invalid, message.into()));
            };
            let earlier = self.taken.iter().find(|taken| taken.number == stopped.number);
            return Ok((stopped.cursors.clone(), earlier.map(|taken| taken.lines.clone()).unwrap_or_default()));
        }
        if let Some(within) = &ask.within {
            let element = self.find(tab, within).await?;
            let at = ReadCursor { within: Some(element.number), ..ReadCursor::top(&element.frame, 0) };
            return Ok((vec![at], Vec::new()));
        }
        Ok((vec![ReadCursor::top(main, 0)], Vec::new()))
    }

    /// Walks until everything is read or the budget is used up. A later snapshot continues at the remaining `cursors`.
    async fn read(
        &mut self,
        tab: &impl TabAccess,
        reading: &mut Reading<'_>,
        cursors: &mut Vec<ReadCursor>,
    ) -> Result<(), BrowseError> {
        while let Some(mut at) = cursors.pop() {
            let frames = tab.frames();
            let Some(frame) = frames.iter().find(|frame| frame.world == at.world) else {
                if cursors.is_empty() && reading.lines.is_empty() {
                    return Err(replaced());
                }
                continue;
            };
            let part = match self.ask_frame::<WorldPart>(tab, frame, "walk", reading.walk(&at, cursors)).await {
                Ok(Some(part)) => part,
                Ok(None) if tab.frames().contains(frame) => {
                    reading.note("a frame does not answer: what is in it is not shown");
                    continue;
                }
                Ok(None) => continue,
                Err(WorldError::Gone) => return Err(replaced()),
                Err(failure) => return Err(failure.of("the page")),
            };
            let Some(stop) = reading.take(part, &mut at, cursors) else { continue };
            cursors.push(ReadCursor {
                cursor: Some(stop.cursor),
                after: stop.frame.is_some(),
                printed: stop.printed,
                ..at
            });
            if let Some(number) = stop.frame {
                match self.inside(tab, frame, number).await {
                    Some(inner) => {
                        cursors.push(ReadCursor { context: stop.context, ..ReadCursor::top(&inner, stop.depth) })
                    }
                    None => reading.note(&format!("the frame `ref_{number}` cannot be read")),
                }
            } else if let Some(number) = stop.host {
                reading.opened += 1;
                if reading.opened > MAX_OPENED || self.open(tab, frame, number).await.is_err() {
                    reading.note("an element with a closed shadow root cannot be read");
                }
            } else {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the frame that an element contains.
    async fn inside(&mut self, tab: &impl TabAccess, outer: &Frame, number: u64) -> Option<Frame> {
        let described = self.describe(tab, outer, number).await.ok()?;
        let id = described["node"]["frameId"].as_str()?;
        tab.frames().into_iter().find(|frame| frame.id == id)
    }

    /// Makes a closed shadow root known to the isolated world. Succeeds if there is none.
    async fn open(&mut self, tab: &impl TabAccess, frame: &Frame, number: u64) -> Result<(), WorldError> {
        let described = self.describe(tab, frame, number).await?;
        let root = &described["node"]["shadowRoots"][0]["backendNodeId"];
        if root.is_null() {
            return Ok(());
        }
        let params = json!({ "backendNodeId": root, "executionContextId": frame.context, "objectGroup": OBJECTS });
        let object = called(tab.call(&frame.session, "DOM.resolveNode", params).await)?;
        self.ask_of::<Value>(tab, frame, &object["object"]["objectId"], "show").await.map(drop)
    }

    async fn describe(&mut self, tab: &impl TabAccess, frame: &Frame, number: u64) -> Result<Value, WorldError> {
        let element = super::Element { frame: frame.clone(), number };
        let object = self.object(tab, &element).await.map_err(WorldError::Other)?;
        called(tab.call(&frame.session, "DOM.describeNode", json!({ "objectId": object, "depth": 0 })).await)
    }

    fn stop_at(&mut self, stopped: CutSnapshot) -> String {
        let word = format!("after_{}", stopped.number);
        if self.stopped.len() == MAX_STOPPED {
            self.stopped.pop_front();
        }
        self.stopped.push_back((word.clone(), stopped));
        word
    }
}

impl<'a> Reading<'a> {
    fn new(ask: &'a SnapshotAsk) -> Self {
        Self {
            ask,
            budget: ask.max_chars.clamp(1, MAX_BUDGET),
            used: 0,
            lines: Vec::new(),
            texts: Vec::new(),
            text_is_cut: false,
            shortened: 0,
            canvases: 0,
            opened: 0,
            notes: Vec::new(),
            end: Instant::now() + TIME,
        }
    }

    fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.texts.is_empty()
    }

    /// Returns the number of characters of the text so far, with the line breaks between its parts.
    fn text_used(&self) -> u32 {
        self.texts.iter().map(|text| u32::try_from(text.chars().count() + 1).unwrap_or(u32::MAX)).sum()
    }

    fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Returns the arguments of a walk.
    fn walk(&self, at: &ReadCursor, around: &[ReadCursor]) -> Value {
        let context = around.iter().chain([at]).flat_map(|at| &at.context).map(cost).sum();
        json!([{
            "budget": (self.budget - self.used).saturating_sub(context),
            "begun": !self.is_empty(),
            "ms": self.left().as_millis() as u64,
            "base": at.depth,
            "find": self.ask.find,
            "apart": self.ask.apart.map(|most| most.saturating_sub(self.text_used())),
            "within": at.within,
            "cursor": at.cursor,
            "after": at.after,
            "printed": at.printed,
        }])
    }

    /// Adds the result of a walk, preceded by the lines around it that were held back until something was found.
    fn take(&mut self, part: WorldPart, at: &mut ReadCursor, around: &mut [ReadCursor]) -> Option<Stop> {
        if !part.lines.is_empty() {
            for outer in 0..around.len() {
                let inner = around.get_mut(outer + 1).unwrap_or(at);
                let context = std::mem::take(&mut inner.context);
                if !context.is_empty() {
                    self.used += context.iter().map(cost).sum::<u32>();
                    self.lines.extend(context);
                    around[outer].printed = u32::MAX;
                }
            }
        }
        self.used = self.used.saturating_add(part.used).min(self.budget);
        self.lines.extend(part.lines);
        self.texts.extend(part.texts);
        self.text_is_cut |= part.text_is_cut;
        self.shortened += part.shortened;
        self.canvases += part.canvases;
        if !part.blink {
            self.note("roles and names are approximations: this browser does not tell those of its accessibility tree");
        }
        if part.modal {
            self.note("a dialog is open: what is behind it cannot be reached and is not shown");
        }
        if part.stop.as_ref().is_some_and(|stop| stop.late) {
            self.note("the page is very large: reading was stopped before its end");
        }
        part.stop
    }

    fn note(&mut self, note: &str) {
        if !self.notes.iter().any(|known| known == note) {
            self.notes.push(note.to_owned());
        }
    }

    fn notes(&mut self) -> Vec<String> {
        if self.canvases > 0 {
            self.note("what is drawn on a canvas cannot be read: look at a screenshot");
        }
        // The outline marks such places itself.
        if self.ask.apart.is_some() && self.shortened > 0 {
            self.note(&format!("names, values or options of {} elements are shortened", self.shortened));
        }
        std::mem::take(&mut self.notes)
    }
}

/// Returns the error of a snapshot whose page, or whose position in the page, no longer exists.
fn replaced() -> BrowseError {
    error(BrowseFailure::Stale, "the page has changed meanwhile; take a new snapshot".into())
}

pub(super) fn shown(lines: &[OutlineLine]) -> String {
    lines.iter().map(OutlineLine::shown).collect::<Vec<_>>().join("\n")
}

fn cost(line: &OutlineLine) -> u32 {
    line.shown().chars().count() as u32 + 1
}
