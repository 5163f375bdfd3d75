//! What an agent reads of pages.

use std::time::Instant;

use proto::browser::{BrowseFailure, BrowseResult, BrowserAction, Snapshot, SnapshotAsk};

use crate::harness::{Browser, Pages};

const ALL: u32 = 20_000;

fn read(browser: &mut Browser, ask: SnapshotAsk) -> Snapshot {
    match browser.ok(BrowserAction::Snapshot(ask)) {
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
        "forms",
        "spa?view=list",
        "shadow",
        "frames",
        "tables",
        "infinite",
        "dialogs",
        "popups",
        "downloads",
        "files",
        "login",
        "canvas",
        "kinds",
        "hostile",
    ];
    for name in names {
        browser.open(&pages.url(name));
        if let Some(text) = [("spa?view=list", "Lisbon"), ("infinite", "20 messages")]
            .into_iter()
            .find_map(|(page, text)| (page == name).then_some(text))
        {
            browser.ok(BrowserAction::Wait { text: text.into(), gone: false });
        }
        let snapshot = read(&mut browser, whole());
        assert_eq!(snapshot.next, None);
        insta::assert_snapshot!(
            name.split('?').next().unwrap(),
            shown(&snapshot).replace(&pages.port.to_string(), "PORT")
        );
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

#[test]
fn a_page_is_read_in_parts_that_make_the_whole() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    for name in ["/list50", "/frames", "/tables"] {
        browser.open(&pages.url(name));
        let all = read(&mut browser, whole());
        let mut ask = SnapshotAsk { max_chars: 150, ..SnapshotAsk::default() };
        let mut parts = Vec::new();
        loop {
            let part = read(&mut browser, ask.clone());
            assert!(part.elements.chars().count() <= 150, "{}", part.elements);
            assert!(parts.len() < 200, "{parts:#?}");
            parts.push(part.elements);
            ask.from = part.next;
            if ask.from.is_none() {
                break;
            }
        }
        assert!(parts.len() > 2);
        assert_eq!(parts.join("\n"), all.elements);
    }
}

#[test]
fn reading_goes_on_although_the_page_has_changed() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/list50"));
    let first = read(&mut browser, SnapshotAsk { max_chars: 1500, ..SnapshotAsk::default() });
    let last = first.elements.lines().rfind(|line| line.contains("button")).unwrap().to_owned();
    // What came next is gone, and something came in at the top.
    browser.value(
        "{ const at = [...document.querySelectorAll('button')].findIndex(b => LAST.includes(`\"${b.textContent}\"`)); \
           const cards = document.querySelectorAll('.card'); cards[at + 1].remove(); cards[at + 2].remove(); \
           cards[0].before(Object.assign(document.createElement('li'), {textContent: 'New at the top'})); at }"
            .replace("LAST", &serde_json::to_string(&last).unwrap())
            .as_str(),
    );
    let number: usize = last.rsplit(' ').next().unwrap().trim_matches('"').parse().unwrap();
    let second = read(&mut browser, SnapshotAsk { max_chars: ALL, from: first.next, ..SnapshotAsk::default() });
    let buttons: Vec<_> = second.elements.lines().filter(|line| line.contains("button")).collect();
    assert!(buttons[0].contains(&format!("\"Buy {}\"", number + 3)), "{last}, then {}", buttons[0]);
    assert!(!second.elements.contains("New at the top"));

    let unknown = BrowserAction::Snapshot(SnapshotAsk { from: Some("after_999".into()), ..whole() });
    assert_eq!(browser.error(unknown).why, BrowseFailure::Invalid);
    let cut = read(&mut browser, SnapshotAsk { max_chars: 300, ..SnapshotAsk::default() });
    browser.open(&pages.url("/forms"));
    let old = BrowserAction::Snapshot(SnapshotAsk { from: cut.next, ..whole() });
    assert_eq!(browser.error(old).why, BrowseFailure::Stale);
}

#[test]
fn what_is_looked_for_is_shown_with_what_it_is_in() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/list50"));
    let found = read(&mut browser, SnapshotAsk { find: Some("buy 33".into()), ..whole() });
    insta::assert_snapshot!(renumbered(&found.elements), @r#"
    main
     list
      listitem
       [ref_1] button "Buy 33"
    "#);
    browser.open(&pages.url("/frames"));
    let found = read(&mut browser, SnapshotAsk { find: Some("\"Pay\"".into()), ..whole() });
    insta::assert_snapshot!(renumbered(&found.elements), @r#"
    main
     [ref_1] iframe "Payment"
      main
       [ref_2] button "Pay"
     [ref_3] iframe "Nested"
      main: "A frame in a frame:"
       [ref_4] iframe "Inner payment"
        main
         [ref_5] button "Pay"
    "#);
    let none = read(&mut browser, SnapshotAsk { find: Some("no such thing".into()), ..whole() });
    assert_eq!((none.elements.as_str(), none.next), ("", None));
}

#[test]
fn a_part_of_a_page_is_read_alone() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/tables"));
    let table = read(&mut browser, SnapshotAsk { within: Some("tbody tr:nth-child(3)".into()), ..whole() });
    insta::assert_snapshot!(renumbered(&table.elements), @r#"
    row
     rowheader "09:10"
     cell
      [ref_1] link "Göteborg" -> /tables?to=goteborg
     cell "1"
    "#);
    let several = BrowserAction::Snapshot(SnapshotAsk { within: Some("td".into()), ..whole() });
    let error = browser.error(several);
    assert_eq!(
        (error.why, error.message.as_str()),
        (BrowseFailure::Ambiguous, "`td` matches 9 elements; name one of them")
    );
}

#[test]
fn only_what_changed_is_shown() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/list50"));
    let before = read(&mut browser, whole());
    let nothing = read(&mut browser, SnapshotAsk { since: Some(before.number), ..whole() });
    assert_eq!((nothing.elements.as_str(), nothing.removed.as_slice()), ("", [].as_slice()));
    browser.click(&reference(&before, "\"Buy 7\""));
    browser.value("document.querySelectorAll('.card')[1].remove(); document.querySelectorAll('.card')[9].querySelector('p').textContent = 'Sold out'");
    let after = read(&mut browser, SnapshotAsk { since: Some(before.number), ..whole() });
    insta::assert_snapshot!(renumbered(&format!("{}\n---\n{}", after.elements, after.removed.join("\n"))), @r#"
    banner: "Fifty things"
     + status: "Cart: 1"
    main
     list
      listitem
       + [ref_1] button "Buy 7" focused
      listitem
       + "Sold out"
    ---
    status: "Cart: 0"
    [ref_2] link "Green Lamp 2" -> /list50#2
    "11.14 €"
    [ref_3] button "Buy 2"
    "A lamp for the house, in green."
    "A kettle for the house, in black."
    "#);

    // Of a part: what follows it is not new.
    let part = read(&mut browser, SnapshotAsk { max_chars: 2000, ..SnapshotAsk::default() });
    browser.value(
        "document.querySelector('.card').before(Object.assign(document.createElement('li'), {textContent: 'First'}))",
    );
    let after = read(&mut browser, SnapshotAsk { since: Some(part.number), ..whole() });
    insta::assert_snapshot!(after.elements, @r#"
    main
     list
      + listitem: "First"
    "#);
    assert_eq!(after.removed, Vec::<String>::new());

    let both = BrowserAction::Snapshot(SnapshotAsk { since: Some(part.number), find: Some("Buy".into()), ..whole() });
    assert_eq!(browser.error(both).why, BrowseFailure::Invalid);
    let unknown = read(&mut browser, SnapshotAsk { since: Some(999), ..whole() });
    assert_eq!(unknown.notes, ["snapshot 999 is not known any more: this is the whole page"]);
    browser.open(&pages.url("/login"));
    let other = read(&mut browser, SnapshotAsk { since: Some(before.number), ..whole() });
    assert_eq!(other.notes, [format!("the page is another one than in snapshot {}: this is the whole", before.number)]);
    assert!(other.elements.contains("Sign in"));
}

#[test]
fn text_and_elements_can_be_had_apart() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/forms"));
    let apart = read(&mut browser, SnapshotAsk { apart: Some(ALL), ..whole() });
    insta::assert_snapshot!("apart", format!("{}\n---\n{}", apart.text, renumbered(&apart.elements)));
    let short = read(&mut browser, SnapshotAsk { apart: Some(300), max_chars: 300, ..SnapshotAsk::default() });
    assert!(short.text.chars().count() + short.elements.chars().count() <= 300);
    assert!(short.next.is_some() && short.text_is_cut);
    browser.open(&pages.url("/hostile"));
    let apart = read(&mut browser, SnapshotAsk { apart: Some(ALL), ..whole() });
    assert!(!apart.text.contains("[ref_"), "{}", apart.text);
}

/// A page of one long text, a `pre`, ordinary text on several lines and a button with a long name.
const LONG: &str = "document.body.innerHTML = `<p>${'word '.repeat(2000)}</p><pre>  one\\n\\ttwo  three\\n\\n[ref_1] four</pre>\
                    <p>five\\n  six <b> seven</b><br> eight</p><button>${'n'.repeat(300)}</button><button>Last</button>`";

#[test]
fn the_asked_length_alone_limits_the_text() {
    let mut browser = Browser::start();
    browser.open("data:text/html,<title>Long</title>");
    browser.value(LONG);
    let apart = read(&mut browser, SnapshotAsk { apart: Some(ALL), ..whole() });
    let shown = "  one\n\ttwo  three\n\n[ref\\_1] four\nfive six seven\neight\n";
    let long = "word ".repeat(2000);
    let text = format!("{}\n{shown}{}\nLast", long.trim_end(), "n".repeat(300));
    assert_eq!((&*apart.text, apart.text_is_cut), (&*text, false));
    assert_eq!(apart.notes, ["names, values or options of 1 elements are shortened"]);
    // The text is cut, and the elements after it are read.
    let ask = SnapshotAsk { apart: Some(5_000), max_chars: 6_000, ..SnapshotAsk::default() };
    let cut = read(&mut browser, ask);
    assert_eq!((&*cut.text, cut.text_is_cut, cut.next), (&long[..5_000], true, None));
    assert!(cut.elements.ends_with("button \"Last\""), "{}", cut.elements);
}

#[test]
fn a_ref_stays_with_its_node() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/list50"));
    let before = read(&mut browser, whole());
    let buy = reference(&before, "\"Buy 3\"");
    browser.value("for (const card of [...document.querySelectorAll('.card')].reverse()) card.parentNode.append(card)");
    browser
        .value("[...document.querySelectorAll('button')].find(b => b.textContent === 'Buy 3').textContent = 'Order 3'");
    let after = read(&mut browser, whole());
    assert_eq!(reference(&after, "\"Order 3\""), buy);
    // Another node is another ref, wherever it stands.
    browser.value("{ const old = [...document.querySelectorAll('button')].find(b => b.textContent === 'Order 3'); old.outerHTML = old.outerHTML }");
    let replaced = read(&mut browser, whole());
    assert_ne!(reference(&replaced, "\"Order 3\""), buy);
    assert_eq!(browser.error(crate::harness::click(&buy)).why, BrowseFailure::Stale);
    // Nothing of it is to be seen in the page.
    assert_eq!(browser.value("document.documentElement.outerHTML.includes('ref_') || 'sandpool' in window"), "false");
    let other = reference(&replaced, "\"Buy 4\"");
    browser.open(&pages.url("/list50"));
    assert_eq!(browser.error(crate::harness::click(&other)).why, BrowseFailure::Stale);
    assert_eq!(browser.error(crate::harness::click("ref_99999")).why, BrowseFailure::Stale);
    assert_eq!(browser.error(crate::harness::click("ref_x")).why, BrowseFailure::Invalid);
    assert_eq!(browser.error(crate::harness::click("p[")).why, BrowseFailure::Invalid);
    assert_eq!(browser.error(crate::harness::click("#none")).why, BrowseFailure::NotFound);
}

/// B16: a page that replaces its buttons all the time. A click reaches the element of its ref, or none.
#[test]
fn a_stale_ref_never_hits_another_element() {
    const ROUNDS: u32 = 1000;
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/race"));
    for round in 1..=ROUNDS {
        let snapshot = read(&mut browser, whole());
        let word = if round % 2 == 1 { "\"Keep\"" } else { "\"Delete\"" };
        let old = reference(&snapshot, word);
        browser.value("render()");
        let error = browser.error(crate::harness::click(&old));
        assert_eq!(error.why, BrowseFailure::Stale, "{error:?}");
    }
    assert_eq!(browser.value("clicked.length"), "0");
    // At the last moment: after the look, before the click.
    for _ in 0..20 {
        let snapshot = read(&mut browser, whole());
        let button = snapshot.elements.lines().find(|line| line.contains(" button ")).unwrap().trim();
        browser.value("swap()");
        let error = browser.error(crate::harness::click(&button[1..button.find(']').unwrap()]));
        assert_eq!(error.why, BrowseFailure::NotReady, "{error:?}");
    }
    assert_eq!(browser.value("clicked.length"), "0");
    browser.click("#place button");
    assert_eq!(browser.value("clicked.length"), "1");
}

/// B13: pages without measure.
#[test]
fn a_page_without_measure_is_read_up_to_the_budget() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    for (name, text) in
        [("/big?n=20000", "Entry 1"), ("/text?n=4", "more characters"), ("/deep?n=1000", "At the bottom")]
    {
        let opened = browser.browse_within(BrowserAction::Open { url: pages.url(name) }, 60.0);
        assert!(opened.result.is_ok(), "{name}: {opened:?}");
        let snapshot = read(&mut browser, whole());
        assert!(snapshot.elements.chars().count() <= ALL as usize);
        assert!(snapshot.elements.contains(text), "{name}: {:.300}", snapshot.elements);
    }
    // So deep that Chromium's own layout runs out of its stack: that costs the page, and is said.
    let deeper = browser.browse_within(BrowserAction::Open { url: pages.url("/deep?n=20000") }, 60.0);
    assert_eq!(deeper.result.unwrap_err().why, BrowseFailure::Crashed);
    browser.open(&pages.url("/login"));
    assert!(read(&mut browser, whole()).elements.contains("Sign in"));
}

/// Frames of another site may have a process of their own: here they must.
#[test]
fn frames_in_other_processes_are_read_and_clicked_as_well() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start_isolating();
    browser.open(&pages.url("/frames"));
    let snapshot = read(&mut browser, whole());
    insta::assert_snapshot!("frames", shown(&snapshot));
    let pays: Vec<String> = snapshot
        .elements
        .lines()
        .filter(|line| line.contains("\"Pay\""))
        .map(|line| line.trim()[1..].split_once(']').unwrap().0.to_owned())
        .collect();
    for (pay, said) in pays.iter().zip(["Paid with ", "Nested: Paid with "]) {
        browser.click(pay);
        browser.ok(BrowserAction::Wait { text: said.into(), gone: false });
        assert_eq!(browser.text("#said"), said);
    }
}

#[test]
fn a_frame_that_does_not_answer_is_said_to_be_silent() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start_isolating();
    browser.open(&pages.url("/frames"));
    let stuck = pages.url_at("localhost", "/frames/stuck");
    browser.value(&format!(
        "new Promise(done => {{ const frame = document.querySelectorAll('iframe')[1]; \
         frame.onload = () => setTimeout(done, 300, 1); frame.src = '{stuck}' }})"
    ));
    let snapshot = read(&mut browser, whole());
    assert_eq!(snapshot.notes, ["a frame does not answer: what is in it is not shown"]);
    assert!(snapshot.elements.contains("\"Save address\"") && snapshot.elements.contains("\"Order\""));
    assert_eq!(browser.error(crate::harness::click("#nowhere")).why, BrowseFailure::NotFound);
}

/// What is behind a dialog of the page cannot be reached; what it says can.
#[test]
fn an_open_dialog_is_all_there_is() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/dialogs"));
    let page = read(&mut browser, whole());
    browser.click(&reference(&page, "\"Open a window of the page\""));
    let dialog = read(&mut browser, whole());
    insta::assert_snapshot!(shown(&dialog), @r#"
    dialog "Delete everything?"
     heading 2 "Delete everything?"
     [ref_1] button "Keep" focused
    note: a dialog is open: what is behind it cannot be reached and is not shown
    "#);
    browser.click(&reference(&dialog, "\"Keep\""));
    assert!(read(&mut browser, whole()).elements.contains("status: \"kept\""));
}

#[test]
fn what_is_in_shadow_trees_is_acted_on_by_its_ref() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    browser.open(&pages.url("/shadow"));
    let snapshot = read(&mut browser, whole());
    browser.type_text(&reference(&snapshot, "textbox \"Message\""), "hello");
    browser.click(&reference(&snapshot, "button \"Send\""));
    assert_eq!(browser.text("#said"), "Sent: hello");
    browser.click(&reference(&snapshot, "button \"Better\""));
    assert!(read(&mut browser, whole()).elements.contains("status: \"4\""));
    // A closed root, which the page's own scripts could not look into.
    browser.click(&reference(&snapshot, "button \"Inside the box\""));
    assert_eq!(browser.text("#said"), "The box was opened");
    // A selector reaches into the trees as well.
    browser.click("rating-stars");
    browser.click("fieldset button:last-child");
    assert!(read(&mut browser, whole()).elements.contains("status: \"5\""));
}
