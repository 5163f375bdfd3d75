//! The state of the browser: its tabs, their frames, what is in progress in them, and page events that were not
//! reported yet.
//!
//! Events change the state as they are read (see [`crate::events`]). Code that waits for something checks the state
//! again after each change. Everything that a page can add to is bounded.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;

use proto::browser::{MAX_HAPPENED, PageEvent};
use tokio::sync::Notify;

use crate::downloads::Downloads;
use crate::log::Log;
use crate::snapshot::Frame;
use crate::workspace::Workspace;

/// Maximum number of tabs. A page that opens more has them closed.
pub(crate) const MAX_TABS: usize = 16;
/// Maximum number of frames of a page that are tracked.
const MAX_FRAMES: usize = 1000;
/// Maximum number of requests of a page that are tracked.
const MAX_REQUESTS: usize = 2000;
/// Maximum number of previous documents of a page that are remembered.
const MAX_REPLACED: usize = 20;
/// Maximum number of undecided documents of a page that are tracked.
const MAX_UNDECIDED: usize = 100;

pub(crate) type SharedState = Rc<StateCell>;

/// The state, with a notification of its changes.
pub(crate) struct StateCell {
    state: RefCell<BrowserState>,
    changed: Notify,
}

impl StateCell {
    pub(crate) fn new(downloads: Downloads) -> SharedState {
        let state = BrowserState {
            tabs: BTreeMap::new(),
            shown: 0,
            next_tab: 1,
            creating: false,
            closed_popups: Vec::new(),
            sessions: HashMap::new(),
            happened: Vec::new(),
            left_out: 0,
            downloads,
            workspace: Workspace::default(),
            gone: false,
            clock: 0,
        };
        Rc::new(Self { state: RefCell::new(state), changed: Notify::new() })
    }

    pub(crate) fn borrow(&self) -> std::cell::Ref<'_, BrowserState> {
        self.state.borrow()
    }

    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut BrowserState) -> T) -> T {
        let changed = change(&mut self.state.borrow_mut());
        self.changed.notify_waiters();
        changed
    }

    /// Waits until `find` finds something in the state.
    pub(crate) async fn wait<T>(&self, mut find: impl FnMut(&BrowserState) -> Option<T>) -> T {
        loop {
            // The future is created before the check, so that no change after the check is missed.
            let changed = self.changed.notified();
            let found = find(&self.state.borrow());
            match found {
                Some(found) => return found,
                None => changed.await,
            }
        }
    }
}

pub(crate) struct BrowserState {
    pub tabs: BTreeMap<u32, TabState>,
    /// Number of the tab that is shown. The tab may already be closed.
    pub shown: u32,
    pub next_tab: u32,
    /// True while the driver itself creates a tab, which is allowed even at the maximum number of tabs.
    pub creating: bool,
    /// Addresses of popups that were closed because there were too many. They are reported in the next reply.
    pub closed_popups: Vec<String>,
    pub sessions: HashMap<Rc<str>, CdpSession>,
    happened: Vec<PageEvent>,
    left_out: u64,
    pub downloads: Downloads,
    pub workspace: Workspace,
    /// True once the browser's process has closed its end of the pipe.
    pub gone: bool,
    /// Number of events so far whose order may matter. Its values serve as moments in time.
    pub clock: u64,
}

/// The tab and target that a DevTools session belongs to.
pub(crate) struct CdpSession {
    pub tab: u32,
    pub target: Rc<str>,
}

pub(crate) struct TabState {
    pub target: Rc<str>,
    pub session: Rc<str>,
    pub url: String,
    pub title: String,
    /// True if the page has reported its title after loading.
    pub is_titled: bool,
    pub frames: BTreeMap<Rc<str>, FrameState>,
    /// True while the root frame is loading something.
    pub busy: bool,
    /// Loader of the document in the root frame; `stage` says how far that document has loaded.
    pub loader: String,
    /// Loaders of the previous documents, newest last.
    pub replaced: VecDeque<String>,
    pub stage: Stage,
    pub requests: HashMap<String, NetworkRequest>,
    pub log: Log,
    /// True if the process of the page has crashed.
    pub crashed: bool,
    pub born: u64,
    /// True if a page opened the tab.
    pub is_popup: bool,
    /// True if the tab is a popup that no reply has reported yet.
    pub is_unreported: bool,
    /// The moment at which the root frame got its current document.
    pub moved: u64,
    /// Address to which the client's current action leads the tab.
    pub led_to: Option<String>,
    /// Loader and HTTP status of the last response to a request for a document.
    pub answered: (String, u16),
    /// Documents by their loader, from the response of their host until a frame shows them or a download saves them.
    /// The browser aborts the navigation first and reports the download some time later.
    pub undecided: HashMap<String, UndecidedDocument>,
}

pub(crate) struct UndecidedDocument {
    pub frame: String,
    /// The moment of the response.
    pub answered: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    Started,
    Interactive,
    Loaded,
}

pub(crate) struct FrameState {
    pub parent: Option<Rc<str>>,
    pub session: Rc<str>,
    pub world: Option<IsolatedWorld>,
    /// The moment at which the frame was added.
    pub born: u64,
}

/// Our isolated world in a frame.
#[derive(Clone)]
pub(crate) struct IsolatedWorld {
    pub context: u64,
    pub unique: String,
}

pub(crate) struct NetworkRequest {
    pub born: u64,
    /// Method and address, such as `GET https://…`.
    pub line: String,
    /// True if the end of the request is not worth waiting for, as with a stream or a beacon.
    pub lasting: bool,
    pub status: Option<u16>,
}

impl BrowserState {
    pub(crate) fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    pub(crate) fn tab_of(&mut self, session: &str) -> Option<&mut TabState> {
        let tab = self.sessions.get(session)?.tab;
        self.tabs.get_mut(&tab)
    }

    /// Returns the tab that is shown, or a neighbour of it if that tab is closed.
    pub(crate) fn shown(&self) -> Option<u32> {
        let before = self.tabs.range(..=self.shown).next_back();
        before.or_else(|| self.tabs.iter().next()).map(|(&tab, _)| tab)
    }

    pub(crate) fn add_tab(&mut self, target: &str, session: &str, url: String) -> u32 {
        let number = self.next_tab;
        self.next_tab += 1;
        let target: Rc<str> = target.into();
        let session: Rc<str> = session.into();
        let root = FrameState { parent: None, session: session.clone(), world: None, born: self.tick() };
        self.sessions.insert(session.clone(), CdpSession { tab: number, target: target.clone() });
        let tab = TabState {
            frames: BTreeMap::from([(target.clone(), root)]),
            target,
            session,
            url,
            title: String::new(),
            is_titled: false,
            busy: false,
            loader: String::new(),
            replaced: VecDeque::new(),
            stage: Stage::Loaded,
            requests: HashMap::new(),
            log: Log::default(),
            crashed: false,
            born: self.clock,
            is_popup: false,
            is_unreported: false,
            moved: 0,
            led_to: None,
            answered: Default::default(),
            undecided: HashMap::new(),
        };
        self.tabs.insert(number, tab);
        number
    }

    pub(crate) fn forget_tab(&mut self, tab: u32) {
        if self.tabs.remove(&tab).is_some_and(|tab| !tab.undecided.is_empty()) {
            // A tab that was opened only for a download closes itself.
            self.downloads.expect(self.clock);
        }
        self.sessions.retain(|_, session| session.tab != tab);
    }

    /// Returns whether a response that arrived after `moment` may still become a download.
    pub(crate) fn is_undecided_since(&self, moment: u64) -> bool {
        self.tabs.values().any(|tab| tab.undecided.values().any(|document| document.answered > moment))
    }

    /// Records that the document of a frame is being saved instead of shown.
    pub(crate) fn decide_download(&mut self, frame: &str) {
        self.tabs.values_mut().for_each(|tab| tab.undecided.retain(|_, document| document.frame != frame));
    }

    pub(crate) fn frames(&self, tab: u32) -> Vec<Frame> {
        type KnownFrame<'a> = (&'a Rc<str>, &'a FrameState);
        let Some(tab) = self.tabs.get(&tab) else { return Vec::new() };
        let mut children: HashMap<Option<&Rc<str>>, Vec<KnownFrame<'_>>> = HashMap::new();
        for (id, frame) in &tab.frames {
            children.entry(frame.parent.as_ref()).or_default().push((id, frame));
        }
        children.values_mut().for_each(|frames| frames.sort_by_key(|(_, frame)| std::cmp::Reverse(frame.born)));
        // Iterative instead of recursive, because the page determines how deeply its frames are nested.
        let mut found = Vec::new();
        let mut ahead = children.remove(&None).unwrap_or_default();
        while let Some((id, frame)) = ahead.pop() {
            if let Some(IsolatedWorld { context, unique }) = frame.world.clone() {
                let parent = frame.parent.as_deref().map(str::to_owned);
                let (id, session) = (id.to_string(), frame.session.to_string());
                found.push(Frame { id, parent, session, context, world: unique });
            }
            ahead.extend(children.remove(&Some(id)).unwrap_or_default());
        }
        found
    }

    pub(crate) fn happened(&mut self, what: PageEvent) {
        if self.happened.len() < MAX_HAPPENED - 1 {
            self.happened.push(what);
        } else {
            self.left_out += 1;
        }
    }

    pub(crate) fn note(&mut self, text: impl Into<String>) {
        let note = PageEvent::Note { text: text.into() };
        if !self.happened.contains(&note) {
            self.happened(note);
        }
    }

    /// Returns the page events that no reply has reported yet.
    pub(crate) fn take_happened(&mut self) -> Vec<PageEvent> {
        let popups: Vec<PageEvent> = self
            .tabs
            .iter_mut()
            .filter_map(|(number, tab)| std::mem::take(&mut tab.is_unreported).then_some((*number, tab)))
            .map(|(number, tab)| {
                let url = self.workspace.shown(shorten(&tab.url, MAX_URL));
                PageEvent::Popup { tab: number, url }
            })
            .collect();
        let closed: Vec<PageEvent> =
            std::mem::take(&mut self.closed_popups).into_iter().map(|url| PageEvent::PopupClosed { url }).collect();
        popups.into_iter().chain(closed).for_each(|what| self.happened(what));
        let mut happened = std::mem::take(&mut self.happened);
        match std::mem::take(&mut self.left_out) {
            0 => {}
            more => happened.push(PageEvent::Note { text: format!("and `{more}` more events of this kind") }),
        }
        happened
    }
}

/// Maximum length of an address, wherever it is used.
pub(crate) const MAX_URL: usize = 2000;

impl TabState {
    pub(crate) fn add_frame(&mut self, id: &str, parent: Option<&str>, session: &Rc<str>, born: u64) {
        if let Some(frame) = self.frames.get_mut(id) {
            frame.parent = parent.map(Into::into);
        } else if self.frames.len() < MAX_FRAMES {
            let frame = FrameState { parent: parent.map(Into::into), session: session.clone(), world: None, born };
            self.frames.insert(id.into(), frame);
        }
    }

    /// Removes a frame and all frames in it.
    pub(crate) fn remove_frame(&mut self, id: &str) {
        let mut gone: Vec<Rc<str>> = vec![id.into()];
        while let Some(id) = gone.pop() {
            self.frames.remove(&id);
            gone.extend(self.frames.iter().filter(|(_, f)| f.parent.as_ref() == Some(&id)).map(|(id, _)| id.clone()));
        }
    }

    pub(crate) fn remove_frames_in(&mut self, id: &str) {
        let inside: Vec<Rc<str>> = self
            .frames
            .iter()
            .filter(|(_, frame)| frame.parent.as_deref() == Some(id))
            .map(|(id, _)| id.clone())
            .collect();
        inside.iter().for_each(|id| self.remove_frame(id));
    }

    /// Records that the root frame has another document.
    pub(crate) fn replace(&mut self, loader: &str) {
        if self.replaced.len() == MAX_REPLACED {
            self.replaced.pop_front();
        }
        self.replaced.push_back(std::mem::replace(&mut self.loader, loader.to_owned()));
    }

    pub(crate) fn is_root(&self, frame: &str) -> bool {
        self.frames.get(frame).is_some_and(|frame| frame.parent.is_none())
    }

    pub(crate) fn add_request(&mut self, id: String, request: NetworkRequest) {
        if self.requests.len() < MAX_REQUESTS {
            self.requests.insert(id, request);
        }
    }

    /// Records the response to a request for a document. A response without content never becomes a download.
    pub(crate) fn add_answer(&mut self, loader: String, frame: String, status: u16, answered: u64) {
        if !matches!(status, 204 | 205) && self.undecided.len() < MAX_UNDECIDED {
            self.undecided.insert(loader.clone(), UndecidedDocument { frame, answered });
        }
        self.answered = (loader, status);
    }

    /// Returns the HTTP status of the response that brought the current document.
    pub(crate) fn status(&self) -> Option<u16> {
        let (loader, status) = &self.answered;
        (*loader == self.loader).then_some(*status)
    }

    /// Returns whether requests that began at or after `moment` are still running.
    pub(crate) fn is_asking_since(&self, moment: u64) -> bool {
        self.requests.values().any(|request| !request.lasting && request.born >= moment)
    }
}

/// Returns a text of at most `most` characters unchanged, and the beginning of a longer one with an ellipsis.
pub(crate) fn shorten(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}
