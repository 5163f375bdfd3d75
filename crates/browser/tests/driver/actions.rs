//! What an agent does with pages.

use proto::browser::{BrowseResult, PageEvent, TabAsk};
use proto::{BrowseFailure, BrowserAction};

use crate::harness::{Browser, Pages, click, failed};

#[test]
fn a_page_is_opened_and_another_one_is_gone_back_from() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    assert!(browser.version.starts_with("HeadlessChrome/"), "{}", browser.version);
    let page = browser.open(&pages.url("/forms")).page.unwrap();
    assert_eq!((page.url, page.tab, page.tabs), (pages.url("/forms"), 1, 1));
    let title = page.title;
    assert!(!title.is_empty());
    browser.open(&pages.url("/tables"));
    let back = browser.browse(BrowserAction::Back);
    assert_eq!((back.result, back.page.unwrap().title), (Ok(BrowseResult::Done), title));
    browser.ok(BrowserAction::Forward);
    assert_eq!(browser.browse(BrowserAction::Reload).page.unwrap().url, pages.url("/tables"));
    let nowhere = browser.error(BrowserAction::Forward);
    assert_eq!((nowhere.why, &*nowhere.message), (BrowseFailure::Navigation, "there is no page after this one"));
}

#[test]
fn a_page_that_cannot_be_opened_is_told_in_the_browsers_words() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let mut message = |path: &str| browser.error(BrowserAction::Open { url: pages.url(path) }).message;
    assert!(message("/broken/close").ends_with("net::ERR_EMPTY_RESPONSE"));
    assert!(message("/broken/garbage").contains("net::ERR_"));
    assert!(message("/redirect/loop").ends_with("net::ERR_TOO_MANY_REDIRECTS"));
    assert!(message("/favicon.ico").ends_with("shows no page: net::ERR_ABORTED"));
    let opened = browser.open(&pages.url("/broken/500"));
    assert_eq!(opened.happened, [PageEvent::Note { text: "the server answered with status `500`".into() }]);
    browser.open(&pages.url("/redirect"));
    assert_eq!(browser.browse(BrowserAction::Log { max_lines: 0 }).page.unwrap().url, pages.url("/forms"));
}

#[test]
fn what_a_click_changes_is_there_when_it_returns() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/spa"));
    // A click that asks the server and shows the answer, which takes 80 ms.
    browser.open("data:text/html,<button onclick=\"fetch('data:,x').then(() => said.textContent = 'now')\">Go</button><p id=said>");
    browser.click("button");
    assert_eq!(browser.text("#said"), "now");
    browser.open(&pages.url("/list50"));
    browser.value(
        "document.body.innerHTML = `<div style='height: 3000px'></div>
            <button onclick=\"fetch('/api/items').then(a => a.json()).then(a => said.textContent = a)\">Items</button><p id=said></p>
            <a href=/forms>Forms</a>`",
    );
    browser.click("button");
    assert_eq!(browser.text("#said"), "Lisbon,Oslo,Kyoto");
    let gone = browser.click("a");
    assert_eq!(gone.page.unwrap().url, pages.url("/forms"));
    assert_eq!(browser.value("document.readyState"), "\"complete\"");
}

#[test]
fn an_element_that_cannot_be_clicked_says_why() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html,<body style=margin:0><button id=a disabled>A</button><button id=b hidden>B</button>
         <button id=c>C</button><div id=cover style='position:absolute;inset:0'></div>
         <button class=two>1</button><button class=two>2</button>",
    );
    let mut message = |at: &str| {
        let error = browser.browse_within(click(at), 3.0).result.unwrap_err();
        (error.why, error.message)
    };
    assert_eq!(message("#a").0, BrowseFailure::NotReady);
    assert!(message("#a").1.ends_with("it is disabled"), "{:?}", message("#a"));
    assert!(message("#b").1.ends_with("it is hidden"), "{:?}", message("#b"));
    assert!(message("#c").1.ends_with("it is covered by div#cover"), "{:?}", message("#c"));
    assert_eq!(message(".two").0, BrowseFailure::Ambiguous);
    assert_eq!(message(".none").0, BrowseFailure::NotFound);
    assert_eq!(message("ref_999").0, BrowseFailure::Stale);
    assert_eq!(message("##").0, BrowseFailure::Invalid);
}

#[test]
fn an_element_that_is_on_its_way_is_waited_for() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html,<script>setTimeout(() => {
            document.body.innerHTML = '<button disabled onclick=\"this.textContent = 1\">0</button>';
            setTimeout(() => document.querySelector('button').disabled = false, 200);
        }, 200)</script><body>",
    );
    browser.click("button");
    assert_eq!(browser.text("button"), "1");
}

#[test]
fn text_goes_into_every_kind_of_field() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html;charset=utf-8,<input id=text value=old><input id=number type=number value=1><input id=date type=date>
         <textarea id=area>old</textarea><div id=rich contenteditable><b>old</b> text</div><input id=check type=checkbox>
         <label id=label>Name <input id=named></label><input id=email type=email value=a@b>
         <p id=log></p><script>
         addEventListener('input', e => log.textContent += e.target.id + ' ');
         addEventListener('keydown', e => log.textContent += e.key + ' ');
         </script>",
    );
    let value = |browser: &mut Browser, id: &str| browser.value(&format!("{id}.value ?? {id}.textContent"));
    for (id, text) in
        [("text", "héllo 世界"), ("number", "42"), ("date", "2026-11-16"), ("area", "two\nlines"), ("rich", "new")]
    {
        browser.type_text(&format!("#{id}"), text);
        assert_eq!(value(&mut browser, id), serde_json::to_string(text).unwrap(), "{id}");
    }
    browser.type_text("#label", "Ada");
    assert_eq!(value(&mut browser, "named"), "\"Ada\"");
    browser.type_text("#text", "");
    assert_eq!(value(&mut browser, "text"), "\"\"");
    let append = |at: &str, text: &str, keys| BrowserAction::Type {
        at: at.into(),
        text: text.into(),
        append: true,
        submit: false,
        keys,
    };
    browser.ok(append("#area", " more", false));
    assert_eq!(value(&mut browser, "area"), "\"two\\nlines more\"");
    browser.ok(append("#email", ".c", false));
    assert_eq!(value(&mut browser, "email"), "\"a@b.c\"");
    browser.ok(append("#number", "7", false));
    assert_eq!(value(&mut browser, "number"), "\"427\"");
    browser.value("log.textContent = ''");
    browser.ok(append("#text", "aB", true));
    browser.ok(BrowserAction::Press { key: "Control+A".into(), at: None });
    browser.ok(BrowserAction::Press { key: "Backspace".into(), at: None });
    assert_eq!(browser.text("#log"), "a text B text a Backspace text ");
    assert_eq!(value(&mut browser, "text"), "\"\"");
    let wrong = browser.error(BrowserAction::Type {
        at: "#check".into(),
        text: "x".into(),
        append: false,
        submit: false,
        keys: false,
    });
    assert_eq!(wrong.why, BrowseFailure::NotReady);
    assert_eq!(browser.error(BrowserAction::Press { key: "Hyper".into(), at: None }).why, BrowseFailure::Invalid);
}

#[test]
fn a_form_is_filled_and_sent() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/login"));
    browser.type_text("[name=user]", "ada");
    let submit = BrowserAction::Type {
        at: "[name=password]".into(),
        text: "lovelace".into(),
        append: false,
        submit: true,
        keys: false,
    };
    let sent = browser.browse(submit);
    assert_eq!(sent.page.unwrap().url, pages.url("/account"));
}

#[test]
fn options_are_selected_by_value_or_by_what_they_show() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html,<select id=one onchange='log.textContent += value'><option value=a>First<option value=b>Second</select>
         <select id=many multiple><option>x<option>y<option>z</select><p id=log>",
    );
    let select = |at: &str, options: &[&str]| BrowserAction::Select {
        at: at.into(),
        options: options.iter().map(|&o| o.into()).collect(),
    };
    browser.ok(select("#one", &["b"]));
    browser.ok(select("#one", &["First"]));
    browser.ok(select("#many", &["x", "z"]));
    assert_eq!(browser.text("#log"), "ba");
    assert_eq!(browser.value("[...many.selectedOptions].map(o => o.value)"), r#"["x","z"]"#);
    let missing = browser.error(select("#one", &["c"]));
    assert!(missing.message.ends_with("it has no option c; it has First, Second"), "{missing:?}");
}

#[test]
fn files_are_uploaded_from_their_directory_alone() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let uploads = browser.home.join("uploads");
    std::fs::create_dir(&uploads).unwrap();
    std::fs::write(uploads.join("a.txt"), "hello").unwrap();
    browser.open(&pages.url("/files"));
    let upload = |name: &str| BrowserAction::Upload { at: "#one".into(), files: vec![name.into()] };
    let done = browser.browse_with(upload("a.txt"), 5.0, Some(&uploads));
    assert_eq!(done.result, Ok(BrowseResult::Done));
    assert!(browser.text("#chosen").ends_with("a.txt5hello"));
    for name in ["../secret", "/etc/passwd", "..", ""] {
        failed(browser.browse_with(upload(name), 5.0, Some(&uploads)), BrowseFailure::Invalid);
    }
    failed(browser.browse(upload("a.txt")), BrowseFailure::Invalid);
    let asked = browser.click("button");
    assert!(matches!(&asked.happened[..], [PageEvent::Note { text }] if text.contains("upload")), "{asked:?}");
}

#[test]
fn tabs_are_made_shown_and_closed() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let tab = |tab: TabAsk| BrowserAction::Tab { tab };
    let shown = |result: BrowseResult| match result {
        BrowseResult::Tabs { tabs } => tabs.iter().map(|t| (t.tab, t.shown)).collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    browser.open(&pages.url("/forms"));
    let made = browser.browse(tab(TabAsk::New { url: Some(pages.url("/tables")) }));
    assert_eq!(made.page.unwrap().url, pages.url("/tables"));
    assert_eq!(shown(made.result.unwrap()), [(1, false), (2, true)]);
    let selected = browser.browse(tab(TabAsk::Select { tab: 1 }));
    assert_eq!(selected.page.unwrap().url, pages.url("/forms"));
    assert_eq!(shown(browser.ok(tab(TabAsk::Close { tab: 1 }))), [(2, true)]);
    assert_eq!(shown(browser.ok(tab(TabAsk::Close { tab: 2 }))), [(3, true)]);
    assert_eq!(browser.error(tab(TabAsk::Select { tab: 1 })).why, BrowseFailure::Invalid);
}

#[test]
fn what_was_clicked_to_be_seen_is_shown() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/popups"));
    let popped = browser.click("a[target]");
    let page = popped.page.unwrap();
    assert_eq!((page.url, page.tab, page.tabs), (pages.url("/tables"), 2, 2));
    assert_eq!(popped.happened, [PageEvent::Popup { tab: 2, url: pages.url("/tables") }]);
}

#[test]
fn expressions_are_evaluated_in_the_page() {
    let mut browser = Browser::start();
    browser.open("data:text/html,<script>window.mine = {a: [1, 'x']}</script>");
    assert_eq!(browser.value("mine"), r#"{"a":[1,"x"]}"#);
    assert_eq!(browser.value("Promise.resolve(2)"), "2");
    assert_eq!(browser.value("await new Promise(f => setTimeout(f, 10, 3))"), "3");
    assert_eq!(browser.value("(async () => { await null; return 4 })()"), "4");
    assert_eq!(browser.value("() => mine.a.length"), "2");
    assert_eq!(browser.value("undefined"), "null");
    assert_eq!(browser.value("NaN"), "\"NaN\"");
    let thrown = browser.error(BrowserAction::Evaluate { expression: "throw new TypeError('no')".into() });
    assert_eq!(thrown.why, BrowseFailure::Threw);
    assert!(thrown.message.starts_with("TypeError: no"), "{thrown:?}");
    // HOSTILE B13: a value that is far too large.
    let long = browser.ok(BrowserAction::Evaluate { expression: "'x'.repeat(1e6)".into() });
    assert!(matches!(long, BrowseResult::Value { json, truncated: true } if json.len() == 200_000));
    let longer = browser.error(BrowserAction::Evaluate { expression: "'x'.repeat(68e6)".into() });
    assert_eq!(longer.message, "the value is too large to be shown");
}

#[test]
fn pictures_are_of_the_window_an_element_or_the_whole_page() {
    let mut browser = Browser::start();
    browser.open("data:text/html,<body style='margin:0;height:3000px'><div style='margin:100px;width:50px;height:40px;background:red'>");
    let mut size = |at: Option<&str>, full_page| match browser
        .ok(BrowserAction::Screenshot { at: at.map(Into::into), full_page })
    {
        BrowseResult::Screenshot { width, height, clipped, png } => {
            assert!(png.starts_with("iVBOR"));
            (width, height, clipped)
        }
        other => panic!("{other:?}"),
    };
    let window = size(None, false);
    assert_eq!((window.0, window.2), (1280, false));
    assert_eq!(size(Some("div"), false), (50, 40, false));
    assert_eq!(size(None, true), (1280, 3100, false));
    // HOSTILE B21: a page of 100,000 pixels.
    browser.value("document.body.style.height = '100000px'");
    let whole = browser.ok(BrowserAction::Screenshot { at: None, full_page: true });
    assert!(matches!(whole, BrowseResult::Screenshot { height: 16_384, clipped: true, .. }));
}

#[test]
fn the_log_has_what_the_page_wrote_and_asked_for() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/list50"));
    browser
        .value("console.log('one', 2, {a: 3}); console.error('two'); setTimeout(() => nothing()); fetch('/missing')");
    browser.ok(BrowserAction::Wait { text: "Buy 1".into(), gone: false });
    let missing = format!("[network] GET {} → 404", pages.url("/missing"));
    let begun = std::time::Instant::now();
    let lines = loop {
        let BrowseResult::Log { lines, .. } = browser.ok(BrowserAction::Log { max_lines: 10 }) else { panic!() };
        // The network is told of from another process than the page.
        if lines.contains(&missing) || begun.elapsed() > std::time::Duration::from_secs(10) {
            break lines;
        }
    };
    let has = |line: &str| lines.iter().any(|one| one.starts_with(line));
    assert!(has("[log] one 2 Object") && has("[error] two"), "{lines:#?}");
    assert!(has("[exception] ReferenceError: nothing is not defined"), "{lines:#?}");
    assert!(has(&missing), "{lines:#?}");
}

#[test]
fn a_text_is_waited_for() {
    let mut browser = Browser::start();
    browser.open("data:text/html,<p id=p>Loading<script>setTimeout(() => p.textContent = 'Here', 300)</script>");
    browser.ok(BrowserAction::Wait { text: "Here".into(), gone: false });
    browser.ok(BrowserAction::Wait { text: "Loading".into(), gone: true });
    let never = browser.browse_within(BrowserAction::Wait { text: "Never".into(), gone: false }, 3.0);
    assert_eq!(failed(never, BrowseFailure::TimedOut), "`Never` is not on the page");
}

#[test]
fn scrolling_moves_what_is_to_be_moved() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html,<body style='margin:0'><div id=box style='height:100vh;overflow:auto'><div style='height:5000px'>
         <p style='padding-top:4000px' id=deep>Deep</p></div></div>",
    );
    browser.ok(BrowserAction::Scroll { at: None, right: 0, down: 300 });
    assert_eq!(browser.value("box.scrollTop"), "300");
    browser.ok(BrowserAction::Scroll { at: Some("#deep".into()), right: 0, down: 0 });
    assert_ne!(browser.value("box.scrollTop"), "300");
    browser.value("box.onmouseover = () => document.title = 'over'");
    assert_eq!(browser.browse(BrowserAction::Hover { at: "#deep".into() }).page.unwrap().title, "over");
}

#[test]
fn text_goes_into_frames_whichever_process_they_are_in() {
    let pages = Pages::start().unwrap();
    for mut browser in [Browser::start(), Browser::start_isolating()] {
        browser.open(&pages.url("/frames"));
        for (at, text, button, said) in
            [("#street", "Main 1", "#save", "Saved: Main 1"), ("#card", "42", "#pay", "Paid with 42")]
        {
            browser.type_text(at, "before");
            browser.type_text(at, text);
            browser.click(button);
            browser.ok(BrowserAction::Wait { text: said.into(), gone: false });
        }
        let keys =
            BrowserAction::Type { at: "#card".into(), text: "7".into(), append: true, submit: false, keys: true };
        browser.ok(keys);
        browser.click("#pay");
        browser.ok(BrowserAction::Wait { text: "Paid with 427".into(), gone: false });
        let picture = browser.ok(BrowserAction::Screenshot { at: Some("#pay".into()), full_page: false });
        assert!(
            matches!(picture, BrowseResult::Screenshot { width, height, .. } if width < 200 && height < 100),
            "{picture:?}"
        );
    }
}
