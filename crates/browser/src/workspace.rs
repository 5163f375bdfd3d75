//! Pages from the sandbox's workspace. The browser may not read these files; the guest reads them for the driver, and
//! only below the directory of the page that the client opened last.
//!
//! The page gets a separate origin with a name that no other page can guess. The browser sends every request to that
//! name to the driver (DevTools' `Fetch` domain) in place of the network. The driver answers only the page itself. It
//! refuses what another origin requests, or leads the page to, even if that origin has learned the name.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::rc::Rc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use proto::browser::{FromDriver, ToDriver};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

use crate::cdp::Cdp;
use crate::state::{SharedState, TabState};

/// Maximum size of a file that is sent to the browser, which takes it in one message.
const MAX_FILE: u64 = 16 << 20;
/// Maximum number of requests that wait for their file.
const MAX_PAUSED: usize = 500;

/// The pages of the workspace that are open.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Directory that contains the files, as the client knows it.
    pub root: String,
    /// Name, in `root`, of the directory into which every page can save files.
    pub downloads: Option<String>,
    pub served: Option<Served>,
    /// Requests that were found to be allowed.
    pub queue: Option<mpsc::UnboundedSender<PausedFile>>,
    paused: usize,
}

/// A directory of the workspace, and the origin under which its files are served.
pub(crate) struct Served {
    host: String,
    /// Path below the workspace, empty for the workspace itself.
    directory: String,
    /// Address of the file that the client opened.
    pub page: String,
}

/// A request that waits for its file.
pub(crate) struct PausedFile {
    session: String,
    request: String,
    path: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct RequestPaused {
    pub request_id: String,
    request: PausedRequest,
    #[serde(default)]
    frame_id: String,
    #[serde(default)]
    resource_type: String,
    /// Request whose answer redirected to this one. The driver never redirects, so that was another origin.
    redirected_request_id: Option<String>,
}

#[derive(Deserialize)]
struct PausedRequest {
    url: String,
    method: String,
    #[serde(default)]
    headers: HashMap<String, String>,
}

impl Served {
    /// Serves the directory of a file of the workspace.
    pub(crate) fn new(path: &str) -> io::Result<Self> {
        let mut random = [0; 16];
        let mut filled = 0;
        while filled < random.len() {
            filled += rustix::rand::getrandom(&mut random[filled..], rustix::rand::GetRandomFlags::empty())?;
        }
        // With one label below the top-level domain, the name is a separate site, which shares no cookies with another.
        let host = format!("workspace-{:032x}.internal", u128::from_le_bytes(random));
        let (directory, name) = path.rsplit_once('/').unwrap_or(("", path));
        let page = format!("http://{host}/{}", escaped(name));
        Ok(Self { host, directory: directory.to_owned(), page })
    }

    /// Returns the parameters that make the browser ask the driver for requests to this origin.
    pub(crate) fn interception(&self) -> Value {
        json!({ "patterns": [{ "urlPattern": format!("http://{}/*", self.host), "requestStage": "Request" }] })
    }

    /// Returns the rest of an address of this origin.
    fn rest<'a>(&self, url: &'a str) -> Option<&'a str> {
        url.strip_prefix("http://")?.strip_prefix(&*self.host)?.strip_prefix('/')
    }
}

impl Workspace {
    /// Returns the address as the client knows it: `file:///workspace/report.html` for a file of the workspace.
    pub(crate) fn shown(&self, url: String) -> String {
        let Some((served, rest)) = self.served.as_ref().and_then(|served| Some((served, served.rest(&url)?))) else {
            return url;
        };
        let directory = escaped(&served.directory);
        let between = if directory.is_empty() { "" } else { "/" };
        format!("file://{}/{directory}{between}{rest}", self.root)
    }

    /// Returns a text of the browser with the name of the private origin replaced.
    pub(crate) fn shown_text(&self, text: String) -> String {
        match &self.served {
            Some(served) if text.contains(&served.host) => {
                text.replace(&format!("http://{}", served.host), &format!("file://{}/{}", self.root, served.directory))
            }
            _ => text,
        }
    }

    /// Decides about a request, and queues it if it is allowed. Returns whether it was.
    pub(crate) fn take(&mut self, session: &str, tab: &TabState, paused: RequestPaused) -> bool {
        let Some(path) = self.path_of(tab, &paused) else { return false };
        let Some(queue) = self.queue.as_ref().filter(|_| self.paused < MAX_PAUSED) else { return false };
        let file = PausedFile { session: session.to_owned(), request: paused.request_id, path };
        let queued = queue.send(file).is_ok();
        self.paused += usize::from(queued);
        queued
    }

    /// Returns the path, below the served directory, that a request is for, if the request is allowed.
    fn path_of(&self, tab: &TabState, paused: &RequestPaused) -> Option<String> {
        let served = self.served.as_ref()?;
        let rest = served.rest(&paused.request.url)?;
        if !matches!(paused.request.method.as_str(), "GET" | "HEAD") {
            return None;
        }
        // No page can choose this header: it names the document or the style sheet that makes the request. The answers
        // of the driver make the browser send it within the origin.
        let referrer = paused.request.headers.iter().find(|(name, _)| name.eq_ignore_ascii_case("referer"));
        let is_own = match referrer {
            Some((_, referrer)) => served.rest(referrer).is_some(),
            // The client navigates, or the tab returns to the file that the client opened. Every frame and every window
            // that the page opened can lead the tab somewhere without a referrer, so no other address is possible.
            None => {
                let is_url = |known: &str| known.split('#').next() == Some(&*paused.request.url);
                let returns = tab.moved > 0 && served.rest(&tab.url).is_some() && is_url(&served.page);
                let is_led = tab.led_to.as_deref().is_some_and(is_url) || returns;
                paused.is_document() && tab.is_root(&paused.frame_id) && is_led
            }
        };
        if !is_own || paused.redirected_request_id.is_some() {
            return None;
        }
        let path = text::percent_decoded(rest.split(['?', '#']).next().unwrap_or_default())?;
        let path = if path.is_empty() || path.ends_with('/') { path + "index.html" } else { path };
        let is_below = path.split('/').all(|part| !matches!(part, "" | "." | ".."));
        // A saved page is not one of the report beside it: every page can save one. It can be opened by itself.
        let is_download = self.downloads.as_ref().is_some_and(|downloads| Path::new(&path).starts_with(downloads));
        let is_saved = served.directory.is_empty() && is_download;
        (is_below && !path.contains('\0') && !(is_saved && paused.is_document())).then_some(path)
    }
}

impl RequestPaused {
    /// Returns whether the answer becomes a page, in a tab or in a frame.
    pub(crate) fn is_document(&self) -> bool {
        self.resource_type == "Document"
    }

    pub(crate) fn url(&self) -> &str {
        &self.request.url
    }
}

/// The driver's end of the exchange of files with the guest.
pub(crate) struct FileChannel {
    requests: mpsc::UnboundedSender<(u64, FromDriver)>,
    next: Cell<u64>,
    waiting: RefCell<Option<AwaitedPart>>,
}

struct AwaitedPart {
    number: u64,
    size: u64,
    answer: oneshot::Sender<Option<FilePart>>,
}

/// A part of a file, and the size of the whole.
struct FilePart {
    size: u64,
    bytes: Vec<u8>,
}

impl FileChannel {
    /// Returns the channel, and the requests that have to be sent to the guest.
    pub(crate) fn new() -> (Rc<Self>, mpsc::UnboundedReceiver<(u64, FromDriver)>) {
        let (requests, outgoing) = mpsc::unbounded_channel();
        (Rc::new(Self { requests, next: Cell::new(1), waiting: RefCell::new(None) }), outgoing)
    }

    async fn read(&self, path: &str, offset: u64) -> Option<FilePart> {
        let number = self.next.replace(self.next.get() + 1);
        let (answer, receiver) = oneshot::channel();
        *self.waiting.borrow_mut() = Some(AwaitedPart { number, size: 0, answer });
        self.requests.send((number, FromDriver::ReadFile { path: path.to_owned(), offset })).ok()?;
        receiver.await.ok()?
    }

    /// Takes a message of the guest about a file. Returns the message if it is about something else.
    pub(crate) fn take(&self, number: u64, message: ToDriver) -> Option<ToDriver> {
        let mut waiting = self.waiting.borrow_mut();
        match message {
            ToDriver::File { size } => {
                waiting.iter_mut().filter(|one| one.number == number).for_each(|one| one.size = size);
            }
            ToDriver::NoFile => {
                if let Some(awaited) = waiting.take_if(|one| one.number == number) {
                    let _ = awaited.answer.send(None);
                }
            }
            other => return Some(other),
        }
        None
    }

    /// Takes the bytes that follow a [`ToDriver::File`].
    pub(crate) fn take_bytes(&self, number: u64, bytes: Vec<u8>) {
        if let Some(awaited) = self.waiting.borrow_mut().take_if(|one| one.number == number) {
            let part = FilePart { size: awaited.size, bytes };
            let _ = awaited.answer.send(Some(part));
        }
    }
}

enum WholeFile {
    Bytes(Vec<u8>),
    TooLarge,
    Missing,
}

/// Answers the requests for files, one after the other.
pub(crate) async fn serve_files(
    cdp: Cdp,
    state: SharedState,
    files: Rc<FileChannel>,
    mut queue: mpsc::UnboundedReceiver<PausedFile>,
) {
    while let Some(PausedFile { session, request, path }) = queue.recv().await {
        let file = read_whole(&files, &path).await;
        state.change(|state| state.workspace.paused = state.workspace.paused.saturating_sub(1));
        let (code, kind, body) = match file {
            WholeFile::Bytes(bytes) => (200, content_type(&path), bytes),
            WholeFile::TooLarge => {
                let why =
                    format!("The file is larger than {MAX_FILE} bytes; serve it with an HTTP server of your own.");
                (413, TEXT, why.into_bytes())
            }
            WholeFile::Missing => (404, TEXT, MISSING.into()),
        };
        let headers: Vec<Value> = [("content-type", kind)]
            .iter()
            .chain(HEADERS)
            .map(|(name, value)| json!({ "name": name, "value": value }))
            .collect();
        let answer = json!({
            "requestId": request, "responseCode": code, "responseHeaders": headers, "body": BASE64.encode(body),
        });
        cdp.tell(Some(&session), "Fetch.fulfillRequest", answer);
    }
}

async fn read_whole(files: &FileChannel, path: &str) -> WholeFile {
    let mut bytes: Vec<u8> = Vec::new();
    loop {
        let Some(part) = files.read(path, bytes.len() as u64).await else { return WholeFile::Missing };
        if part.size > MAX_FILE || bytes.len() as u64 + part.bytes.len() as u64 > MAX_FILE {
            return WholeFile::TooLarge;
        }
        bytes.extend_from_slice(&part.bytes);
        if part.bytes.is_empty() || bytes.len() as u64 >= part.size {
            return WholeFile::Bytes(bytes);
        }
    }
}

const TEXT: &str = "text/plain; charset=utf-8";
const MISSING: &str = "There is no such file in the directory of the page. If the browser showed another address since the \
                       page was opened, open the page again.";

/// Headers of every answer. They keep the files in their origin even if a request of another one were answered: it
/// cannot read the answer, embed it or show it in a frame.
const HEADERS: &[(&str, &str)] = &[
    ("x-content-type-options", "nosniff"),
    ("cross-origin-resource-policy", "same-origin"),
    ("x-frame-options", "SAMEORIGIN"),
    ("referrer-policy", "same-origin"),
    ("cache-control", "no-store"),
];

/// Returns the type of a file by the end of its name.
fn content_type(path: &str) -> &'static str {
    let extension = path.rsplit_once('.').map_or("", |(_, extension)| extension).to_ascii_lowercase();
    match extension.as_str() {
        "html" | "htm" => "text/html; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "json" | "map" | "geojson" => "application/json; charset=utf-8",
        "txt" | "md" | "log" => TEXT,
        "csv" => "text/csv; charset=utf-8",
        "xml" => "text/xml; charset=utf-8",
        "svg" => "image/svg+xml",
        "png" => "image/png",
        "jpg" | "jpeg" => "image/jpeg",
        "gif" => "image/gif",
        "webp" => "image/webp",
        "avif" => "image/avif",
        "ico" => "image/x-icon",
        "pdf" => "application/pdf",
        "wasm" => "application/wasm",
        "woff" => "font/woff",
        "woff2" => "font/woff2",
        "ttf" => "font/ttf",
        "otf" => "font/otf",
        "mp3" => "audio/mpeg",
        "wav" => "audio/wav",
        "mp4" => "video/mp4",
        "webm" => "video/webm",
        _ => "application/octet-stream",
    }
}

/// Escapes a path for an address.
fn escaped(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => out.push(byte as char),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::downloads::Downloads;
    use crate::state::StateCell;

    const OTHER: &str = "http://evil.test/";

    /// Decides about a request of a tab that shows `shown`.
    fn decide(
        workspace: &Workspace,
        shown: &str,
        kind: &str,
        frame: &str,
        url: &str,
        referrer: Option<&str>,
    ) -> Option<String> {
        decide_led(workspace, shown, None, kind, frame, url, referrer)
    }

    /// Decides about a request of a tab that the client leads to `led_to`.
    fn decide_led(
        workspace: &Workspace,
        shown: &str,
        led_to: Option<&str>,
        kind: &str,
        frame: &str,
        url: &str,
        referrer: Option<&str>,
    ) -> Option<String> {
        let state = StateCell::new(Downloads::new("/", "/nowhere"));
        state.change(|state| {
            let tab = state.add_tab("root", "session", shown.into());
            let known = state.tabs.get_mut(&tab)?;
            (known.moved, known.led_to) = (1, led_to.map(str::to_owned));
            let headers = referrer.map(|referrer| ("Referer".to_owned(), referrer.to_owned())).into_iter().collect();
            let paused = RequestPaused {
                request_id: "1".into(),
                request: PausedRequest { url: url.into(), method: "GET".into(), headers },
                frame_id: frame.into(),
                resource_type: kind.into(),
                redirected_request_id: None,
            };
            workspace.path_of(&state.tabs[&tab], &paused)
        })
    }

    #[test]
    fn b29_only_the_page_itself_gets_files_of_its_directory() {
        let served = Served::new("site/index.html").unwrap();
        let own = served.page.clone();
        let origin = own.trim_end_matches("index.html").to_owned();
        let workspace = Workspace { root: "/workspace".into(), served: Some(served), ..Workspace::default() };
        let at = |path: &str| format!("{origin}{path}");
        // Its own resources, and its own pages in frames.
        for kind in ["Script", "Image", "Stylesheet", "Fetch", "XHR", "Font", "Document"] {
            let asked = decide(&workspace, &own, kind, "child", &at("a/b%20c.js?x#y"), Some(&own));
            assert_eq!(asked.as_deref(), Some("a/b c.js"), "{kind}");
            // Other origins, in the same tab or not, and those that keep themselves secret.
            for referrer in [Some(OTHER), Some(&*format!("{OTHER}{own}")), None] {
                assert_eq!(decide(&workspace, &own, kind, "child", &at("a.js"), referrer), None, "{kind} {referrer:?}");
                assert_eq!(
                    decide(&workspace, OTHER, kind, "child", &at("a.js"), referrer),
                    None,
                    "{kind} {referrer:?}"
                );
            }
        }
        // A navigation that names no referrer: the page's own, and the client's.
        assert!(decide(&workspace, &own, "Document", "root", &own, None).is_some());
        assert!(decide(&workspace, OTHER, "Document", "root", &own, None).is_none());
        let led = |kind, frame, url: &str, referrer| {
            decide_led(&workspace, OTHER, Some(&format!("{own}#part")), kind, frame, url, referrer).is_some()
        };
        assert!(led("Document", "root", &own, None));
        assert!(!led("Document", "root", &at("other.html"), None));
        assert!(!led("Document", "child", &own, None));
        assert!(!led("Image", "root", &own, None));
        assert!(!led("Document", "root", &own, Some(OTHER)));
        // Paths that lead elsewhere, and other names.
        for path in ["../a", "%2e%2e/a", "a/%2e%2e/%2e%2e/b", "a//b", "%2fetc/passwd", "a%00", "%ff", "./a"] {
            assert_eq!(decide(&workspace, &own, "Image", "root", &at(path), Some(&own)), None, "{path}");
        }
        assert_eq!(
            decide(&workspace, &own, "Document", "root", &at("a/"), Some(&own)).as_deref(),
            Some("a/index.html")
        );
        let longer = own.replace(".internal/", ".internal.evil.test/");
        assert_eq!(decide(&workspace, &own, "Image", "root", &longer, Some(&own)), None);
        assert_eq!(decide(&workspace, &own, "Image", "root", &own, Some(&longer)), None);
    }

    /// B32: a frame of another origin, or a window that the page opened, leads the tab to a file of its choice.
    #[test]
    fn b32_nobody_else_leads_the_page_to_another_file() {
        let served = Served::new("report.html").unwrap();
        let own = served.page.clone();
        let at = |path: &str| own.replace("report.html", path);
        let workspace = Workspace { served: Some(served), downloads: Some("downloads".into()), ..Workspace::default() };
        let go = |shown: &str, path: &str, referrer| {
            decide(&workspace, shown, "Document", "root", &at(path), referrer).is_some()
        };
        for path in ["other.html", "downloads/stage2.html", "report.html?x", "", "sub/report.html"] {
            assert!(!go(&own, path, None), "{path}");
            assert!(!go(&own, path, Some(OTHER)), "{path}");
        }
        // The way back to the file that the client opened, from another one.
        assert!(go(&at("other.html#x"), "report.html", None));
        assert!(!go(OTHER, "report.html", None));
        assert!(go(&own, "other.html", Some(&own)));
        // What a page saved is no page of the report, but may be a part of it.
        for kind in ["root", "child"] {
            assert_eq!(decide(&workspace, &own, "Document", kind, &at("downloads/a.html"), Some(&own)), None);
        }
        assert!(decide(&workspace, &own, "Image", "root", &at("downloads/a.png"), Some(&own)).is_some());
        assert!(go(&own, "downloads2/a.html", Some(&own)));
        let saved = Served::new("downloads/a.html").unwrap();
        let (own, workspace) = (saved.page.clone(), Workspace { served: Some(saved), ..workspace });
        assert!(decide(&workspace, &own, "Document", "root", &own.replace("a.html", "b.html"), Some(&own)).is_some());
        // A redirect brings the referrer of the page, not of the origin that redirects.
        let event = |redirected: Value| {
            let headers = json!({ "Referer": own });
            let request = json!({ "url": own, "method": "GET", "headers": headers });
            let event = json!({
                "requestId": "1.1", "request": request, "frameId": "root", "resourceType": "Document",
                "redirectedRequestId": redirected,
            });
            let state = StateCell::new(Downloads::new("/", "/nowhere"));
            state.change(|state| {
                let tab = state.add_tab("root", "session", own.clone());
                workspace.path_of(&state.tabs[&tab], &serde_json::from_value(event).unwrap())
            })
        };
        assert_eq!(event(Value::Null).as_deref(), Some("a.html"));
        assert_eq!(event("1.0".into()), None);
    }

    #[test]
    fn the_client_sees_the_path_of_a_file_not_the_private_origin() {
        let served = Served::new("my site/a b.html").unwrap();
        let (url, other) = (served.page.clone(), Served::new("").unwrap());
        assert_ne!(served.host, other.host);
        assert!(url.ends_with("/a%20b.html"), "{url}");
        let workspace = Workspace { root: "/workspace".into(), served: Some(served), ..Workspace::default() };
        assert_eq!(workspace.shown(url.clone()), "file:///workspace/my%20site/a%20b.html");
        assert_eq!(workspace.shown(OTHER.into()), OTHER);
        assert!(!workspace.shown_text(format!("[network] GET {url} → 200")).contains("internal"));
    }
}
