//! What an agent reads of pages.

use std::time::Instant;

use proto::browser::{Browse, BrowseFailure, BrowseResult, Snapshot, SnapshotAsk};

use crate::harness::{Browser, Pages};

const ALL: u32 = 20_000;

fn read(browser: &mut Browser, ask: SnapshotAsk) -> Snapshot {
    match browser.ok(Browse::Snapshot(ask)) {
        BrowseResult::Snapshot(snapshot) => snapshot,
        other => panic!("{other:?}"),
    }
}

fn whole() -> SnapshotAsk {
    SnapshotAsk { max_chars: ALL, ..SnapshotAsk::default() }
}

/// Refs count from 1 on, however many were given out before.
fn renumbered(text: &str) -> String {
    let mut known: Vec<String> = Vec::new();
    let mut parts = text.split("[ref_");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (number, rest) = part.split_once(']').unwrap();
        let position = known.iter().position(|one| one == number).unwrap_or_else(|| {
            known.push(number.to_owned());
            known.len() - 1
        });
        out += &format!("[ref_{}]{rest}", position + 1);
    }
    out
}

fn shown(snapshot: &Snapshot) -> String {
    let notes: String = snapshot.notes.iter().map(|note| format!("\nnote: {note}")).collect();
    renumbered(&snapshot.elements) + &notes
}

/// The ref of the one line that has this text.
fn reference(snapshot: &Snapshot, text: &str) -> String {
    let mut lines = snapshot.elements.lines().filter(|line| line.contains(text));
    let line = lines.next().unwrap_or_else(|| panic!("no `{text}` in\n{}", snapshot.elements));
    assert!(lines.next().is_none(), "several `{text}` in\n{}", snapshot.elements);
    let (_, rest) = line.split_once('[').unwrap();
    rest.split_once(']').unwrap().0.to_owned()
}

#[test]
fn every_page_has_its_outline() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    let names = [
        "forms", "spa?view=list", "shadow", "frames", "tables", "infinite", "dialogs", "popups", "downloads", "files", "login",
        "canvas", "hostile",
    ];
    for name in names {
        browser.open(&pages.url(name));
        let snapshot = read(&mut browser, whole());
        assert_eq!(snapshot.next, None);
        insta::assert_snapshot!(name.split('?').next().unwrap(), shown(&snapshot).replace(&pages.port.to_string(), "PORT"));
    }
}

#[test]
fn a_list_costs_few_characters_and_little_time() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/list50"));
    for _ in 0..5 {
        let begun = Instant::now();
        let snapshot = read(&mut browser, whole());
        eprintln!("list50: {:?}, {} characters", begun.elapsed(), snapshot.elements.chars().count());
        // Playwright MCP needs more than this for the same page.
        assert!(snapshot.elements.chars().count() < 9_000);
    }
}
