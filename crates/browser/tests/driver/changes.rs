//! What an action reports about the page that it changed.

use proto::BrowserAction;
use proto::browser::{BrowseResult, SnapshotAsk};

use crate::harness::{Browser, Pages, click};

const PAGE: &str = "data:text/html,<title>List</title><h1>Tea</h1><ul id=list><li>green</li></ul>
    <button id=add onclick=\"list.innerHTML += '<li>black</li>'\">Add</button>
    <button id=drop onclick=\"list.firstElementChild.remove()\">Drop</button>
    <button id=none>None</button><button id=many onclick=\"for (let i = 0; i < 999; i++) list.innerHTML += '<li>tea ' + i + '</li>'\">Many</button>
    <button id=ask onclick=\"dialog.showModal()\">Ask</button><dialog id=dialog><p>Sure?</p></dialog><a href=about:blank>Away</a>";

#[test]
fn sp56_an_action_reports_what_it_changed() {
    let mut browser = Browser::start();
    browser.open(PAGE);
    // The page was never shown to the client: what the action itself changes is reported.
    let added = browser.changed(click("#add"), 1500).unwrap();
    assert!(added.contains("+ listitem \"black\"") || added.contains("black"), "{added}");
    assert!(!added.contains("green") && !added.contains("Tea"), "only what changed: {added}");
    let dropped = browser.changed(click("#drop"), 1500).unwrap();
    assert!(dropped.lines().any(|line| line.starts_with("- ") && line.contains("green")), "{dropped}");
    // The same button again: nothing but its own effect.
    browser.changed(click("#none"), 1500);
    assert_eq!(browser.changed(click("#none"), 1500).as_deref(), Some("(nothing)"));
    // A report counts from what the client has seen last, which includes what the page did by itself meanwhile.
    browser.value("document.querySelector('h1').textContent = 'Coffee'");
    let meanwhile = browser.changed(click("#none"), 1500).unwrap();
    assert!(meanwhile.contains("Coffee"), "{meanwhile}");
    browser.value("document.querySelector('h1').textContent = 'Cocoa'");
    browser.ok(BrowserAction::Snapshot(SnapshotAsk { max_chars: 20_000, ..SnapshotAsk::default() }));
    assert_eq!(browser.changed(click("#none"), 1500).as_deref(), Some("(nothing)"), "the snapshot has shown it");
    let asked = browser.changed(click("#ask"), 1500).unwrap();
    assert!(asked.contains("+ dialog") && asked.contains("Sure?"), "{asked}");
}

#[test]
fn sp56_a_report_of_changes_is_bounded_and_can_be_left_out() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(PAGE);
    assert_eq!(browser.changed(click("#add"), 0), None);
    let many = browser.changed(click("#many"), 1500).unwrap();
    assert!(many.chars().count() <= 1600 && many.contains("tea 3"), "{}: {many}", many.len());
    assert!(many.ends_with("(more changed than is shown here)"), "{many}");
    assert_eq!(browser.changed(click("a"), 1500).as_deref(), Some("(another page)"));
    // The numbers of snapshots, and what `since` compares with, are the client's alone.
    browser.open(&pages.url("/forms"));
    let mut snapshot = |since| match browser.ok(BrowserAction::Snapshot(SnapshotAsk {
        max_chars: 20_000,
        since,
        ..SnapshotAsk::default()
    })) {
        BrowseResult::Snapshot(snapshot) => snapshot,
        other => panic!("{other:?}"),
    };
    let first = snapshot(None);
    assert_eq!(first.number, 1);
    let none = BrowserAction::Scroll { at: None, right: 0, down: 10 };
    for _ in 0..20 {
        assert_eq!(browser.changed(none.clone(), 1500).as_deref(), Some("(nothing)"));
    }
    let mut snapshot = |since| match browser.ok(BrowserAction::Snapshot(SnapshotAsk {
        max_chars: 20_000,
        since,
        ..SnapshotAsk::default()
    })) {
        BrowseResult::Snapshot(snapshot) => snapshot,
        other => panic!("{other:?}"),
    };
    let again = snapshot(Some(1));
    assert_eq!((again.number, &*again.elements, again.notes), (2, "", Vec::new()));
}
