//! Compares snapshots with the browser's accessibility tree: roles and names have to match.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use proto::BrowserSpec;
use proto::browser::SnapshotAsk;
use serde_json::{Value, json};
use testkit::pages::Pages;

use super::{CallError, Frame, Reader, SCRIPT, TabAccess, WORLD};
use crate::cdp::{self, Cdp};
use crate::launch;

const CHROMIUM: &str = "/usr/lib/chromium/chromium-headless-shell";

/// A tab with one frame, without a driver.
struct Bare {
    cdp: Cdp,
    session: String,
    world: Rc<RefCell<Option<Frame>>>,
}

impl TabAccess for Bare {
    fn frames(&self) -> Vec<Frame> {
        self.world.borrow().iter().cloned().collect()
    }

    async fn call(&self, session: &str, method: &str, params: Value) -> Result<Value, CallError> {
        self.cdp.call(Some(session), method, params).await.map_err(|_| CallError::Refused)
    }
}

impl Bare {
    async fn ask(&self, method: &str, params: Value) -> Value {
        self.cdp.call(Some(&self.session), method, params).await.unwrap()
    }

    async fn new(cdp: &Cdp, world: Rc<RefCell<Option<Frame>>>, script: &str) -> Self {
        let target: Value = cdp.call(None, "Target.createTarget", json!({ "url": "about:blank" })).await.unwrap();
        let attach = json!({ "targetId": target["targetId"], "flatten": true });
        let attached: Value = cdp.call(None, "Target.attachToTarget", attach).await.unwrap();
        let session = attached["sessionId"].as_str().unwrap().to_owned();
        let bare = Self { cdp: cdp.clone(), session, world };
        bare.ask("Page.enable", json!({})).await;
        bare.ask("Accessibility.enable", json!({})).await;
        bare.ask("Runtime.enable", json!({})).await;
        let script = json!({ "source": script, "worldName": WORLD, "runImmediately": true });
        bare.ask("Page.addScriptToEvaluateOnNewDocument", script).await;
        bare
    }

    async fn open(&self, url: &str) {
        self.ask("Page.navigate", json!({ "url": url })).await;
        let loaded =
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', done))";
        self.ask("Runtime.evaluate", json!({ "expression": loaded, "awaitPromise": true })).await;
    }
}

/// Records the latest isolated world of the main frame.
fn notice(world: &RefCell<Option<Frame>>, event: &cdp::Event<'_>) {
    let Some(session) = event.session.filter(|_| event.method == "Runtime.executionContextCreated") else { return };
    let context = &event.params::<Value>().unwrap()["context"];
    let main = world.borrow().as_ref().map(|frame| frame.id.clone());
    if context["name"] == WORLD && main.is_none_or(|main| context["auxData"]["frameId"] == main) {
        *world.borrow_mut() = Some(Frame {
            id: context["auxData"]["frameId"].as_str().unwrap().to_owned(),
            parent: None,
            session: session.to_owned(),
            context: context["id"].as_u64().unwrap(),
            world: context["uniqueId"].as_str().unwrap().to_owned(),
        });
    }
}

/// Maps roles of the tree that ARIA has no word for to the words that snapshots use.
fn word(role: &str) -> &str {
    match role {
        "Date" => "date",
        "InputTime" => "time",
        "ColorWell" => "color",
        "DisclosureTriangle" => "summary",
        "Iframe" => "iframe",
        "Canvas" => "canvas",
        other => other,
    }
}

/// Roles that have no line in a snapshot.
const CLEAR: &[&str] = &[
    "generic",
    "none",
    "paragraph",
    "StaticText",
    "InlineTextBox",
    "LabelText",
    "Legend",
    "ListMarker",
    "LineBreak",
    "RootWebArea",
    "rowgroup",
    "caption",
    "strong",
    "MenuListPopup",
    "DescriptionList",
    "Details",
    "LayoutTable",
    "emphasis",
    "code",
    "Section",
    "Figcaption",
    "Figcaption",
];

/// Returns the role and name of each node of the tree, in order.
fn flattened(tree: &Value) -> Vec<(String, String)> {
    let nodes: HashMap<&str, &Value> =
        tree["nodes"].as_array().unwrap().iter().map(|node| (node["nodeId"].as_str().unwrap(), node)).collect();
    let mut out = Vec::new();
    let mut stack = vec![(tree["nodes"][0]["nodeId"].as_str().unwrap(), "")];
    while let Some((id, around)) = stack.pop() {
        let Some(node) = nodes.get(id) else { continue };
        let role = node["role"]["value"].as_str().unwrap_or_default();
        // The options of a closed list are part of its line, as the image is part of a link's; the parts of a date or
        // time field are internal to the browser.
        let is_part = matches!((around, role), ("MenuListPopup" | "Date" | "InputTime", _) | ("link", "image"));
        if node["ignored"] == false && !is_part && !CLEAR.contains(&role) {
            out.push((word(role).to_owned(), node["name"]["value"].as_str().unwrap_or_default().to_owned()));
        }
        let around = if ["MenuListPopup", "Date", "InputTime", "link"].contains(&role) { role } else { around };
        let children = node["childIds"].as_array().into_iter().flatten().rev();
        stack.extend(children.map(|child| (child.as_str().unwrap(), around)));
    }
    out
}

/// Returns the role and name of a line, or `None` for a line with text only.
fn parsed(line: &str) -> Option<(String, String)> {
    let line = line.trim_start();
    let line = line.strip_prefix('[').map_or(line, |rest| rest.split_once("] ").unwrap().1);
    let role = line.split([' ', ':']).next().unwrap();
    // An element that takes clicks or text has a line whatever its role is.
    if line.starts_with('"') || role == "generic" {
        return None;
    }
    let rest = line[role.len()..].trim_start_matches(|c: char| c == ' ' || c.is_ascii_digit());
    let name = rest.strip_prefix('"').and_then(|rest| rest.split_once('"')).map_or("", |(name, _)| name);
    Some((role.to_owned(), name.to_owned()))
}

/// Runs a test with a blank tab of a new browser, with `script` in its isolated worlds.
async fn with_tab(script: &str, test: impl AsyncFnOnce(&Bare)) {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("sandpool-tree-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let home = std::env::temp_dir().join(name).display().to_string();
    let spec = BrowserSpec {
        program: CHROMIUM.into(),
        shell: true,
        proxy: None,
        home: home.clone(),
        workspace: home.clone(),
        downloads: home.clone(),
        nssdb: None,
        fontconfig: None,
    };
    let mut chromium = launch::start(&spec).unwrap();
    let (cdp, writing) = Cdp::new(chromium.to);
    let world = Rc::new(RefCell::default());
    let events = (cdp.clone(), world.clone());
    let test = async { test(&Bare::new(&cdp, world, script).await).await };
    tokio::select! {
        () = test => {}
        () = writing => panic!("the browser closed its end"),
        () = events.0.pump(chromium.from, |event| notice(&events.1, &event)) => panic!("the browser ended"),
    }
    chromium.process.kill().await.unwrap();
    std::fs::remove_dir_all(home).unwrap();
}

fn whole() -> SnapshotAsk {
    SnapshotAsk { max_chars: 100_000, ..SnapshotAsk::default() }
}

#[tokio::test(flavor = "current_thread")]
async fn roles_and_names_are_those_of_the_accessibility_tree() {
    let pages = Pages::start().unwrap();
    let mut reader = Reader::default();
    with_tab(SCRIPT, async |tab| {
        for name in ["forms", "tables", "shadow", "list50", "login", "dialogs", "popups", "downloads", "kinds"] {
            tab.open(&pages.url(name)).await;
            let ours = reader.snapshot(tab, &whole()).await.unwrap();
            // The tree has no label in place of a hidden box; only snapshots show one.
            let lines = ours.elements.lines().filter(|line| !line.contains("] checkbox: "));
            let ours: Vec<_> = lines.filter_map(parsed).collect();
            let tree = flattened(&tab.ask("Accessibility.getFullAXTree", json!({})).await);
            let roles = |all: &[(String, String)]| all.iter().map(|(role, _)| role.clone()).collect::<Vec<_>>();
            assert_eq!(roles(&ours), roles(&tree), "{name}");
            for (ours, tree) in ours.iter().zip(&tree) {
                // A name that would only repeat the text below is left out.
                assert!(ours == tree || ours.1.is_empty(), "{name}: {ours:?} is {tree:?}");
            }
        }
    })
    .await;
}

/// Only the page holds its nodes, yet the refs denote the same nodes as long as these exist.
#[tokio::test(flavor = "current_thread")]
async fn refs_outlive_a_collection_of_garbage_and_hold_no_node() {
    let pages = Pages::start().unwrap();
    let mut reader = Reader::default();
    with_tab(SCRIPT, async |tab| {
        tab.open(&pages.url("list50")).await;
        let before = reader.snapshot(tab, &whole()).await.unwrap();
        tab.ask("HeapProfiler.enable", json!({})).await;
        for _ in 0..3 {
            tab.ask("HeapProfiler.collectGarbage", json!({})).await;
        }
        assert_eq!(reader.snapshot(tab, &whole()).await.unwrap().elements, before.elements);
        tab.ask("Runtime.evaluate", json!({ "expression": "document.querySelector('ul').remove()" })).await;
        let after = reader.snapshot(tab, &whole()).await.unwrap();
        for _ in 0..3 {
            tab.ask("HeapProfiler.collectGarbage", json!({})).await;
        }
        let world = tab.frames()[0].world.clone();
        let count = json!({ "expression": "sandpool.known()", "uniqueContextId": world, "returnByValue": true });
        let known = tab.ask("Runtime.evaluate", count).await["result"]["value"].as_u64().unwrap();
        assert_eq!(known, after.elements.matches("[ref_").count() as u64);
    })
    .await;
}

/// In a browser that provides neither roles nor names, they are derived from the page itself.
#[tokio::test(flavor = "current_thread")]
async fn without_the_browsers_word_roles_and_names_are_approximated() {
    let pages = Pages::start().unwrap();
    let mut reader = Reader::default();
    let silent = format!("delete Element.prototype.computedRole; delete Element.prototype.computedName;{SCRIPT}");
    let mut told = String::new();
    with_tab(SCRIPT, async |tab| {
        tab.open(&pages.url("forms")).await;
        told = reader.snapshot(tab, &whole()).await.unwrap().elements;
    })
    .await;
    let mut reader = Reader::default();
    with_tab(&silent, async |tab| {
        tab.open(&pages.url("forms")).await;
        let guessed = reader.snapshot(tab, &whole()).await.unwrap();
        assert_eq!(guessed.elements, told);
        assert!(guessed.notes[0].starts_with("roles and names are approximations"), "{:?}", guessed.notes);
    })
    .await;
}
