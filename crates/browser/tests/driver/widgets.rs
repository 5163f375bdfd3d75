//! Things as real pages make them, which no plain form has.

use proto::browser::{BrowseResult, SnapshotAsk};
use proto::{BrowseFailure, BrowserAction};

use crate::harness::{Browser, click, failed};

fn page(browser: &mut Browser, html: &str) {
    browser.open("about:blank");
    let html = serde_json::to_string(&format!("<!doctype html><meta charset=utf-8>{html}")).unwrap();
    browser.value(&format!("document.open(); document.write({html}); document.close(); 0"));
}

fn outline(browser: &mut Browser) -> String {
    match browser.ok(BrowserAction::Snapshot(SnapshotAsk { max_chars: 10_000, ..SnapshotAsk::default() })) {
        BrowseResult::Snapshot(snapshot) => snapshot.elements,
        other => panic!("{other:?}"),
    }
}

/// The ref on the line with this text.
fn ref_of(outline: &str, text: &str) -> String {
    let line = outline.lines().find(|line| line.contains(text) && line.contains("[ref_"));
    let line = line.unwrap_or_else(|| panic!("no ref for `{text}` in\n{outline}"));
    line.split(['[', ']']).nth(1).unwrap().to_owned()
}

const COUNT: &str = "onclick='this.dataset.n = 1 + +(this.dataset.n ?? 0)'";

/// What is in the window by its numbers, but not to be seen in what it is scrolled in or under what lies over it, is scrolled to.
#[test]
fn what_is_scrolled_away_or_under_a_bar_is_brought_out() {
    let mut browser = Browser::start();
    page(
        &mut browser,
        &format!(
            "<style>html {{ scroll-behavior: smooth }} body {{ margin: 0 }}</style>
             <header style='position:fixed;top:0;left:0;right:0;height:120px;background:red'>Head</header>
             <div style='margin-top:150px;height:100px;overflow:auto;scroll-behavior:smooth'>
               <div style='height:300px'></div><button id=inner {COUNT}>Inner</button><div style='height:300px'></div>
             </div>
             <div style='height:900px'></div><button id=under {COUNT}>Under</button><div style='height:3000px'></div>
             <footer style='position:sticky;bottom:0;height:100px;background:blue'>Foot</footer>"
        ),
    );
    browser.click("#inner");
    assert_eq!(browser.value("inner.dataset.n"), "\"1\"");
    for (n, top) in ["0", "under.offsetTop - 50", "under.offsetTop - innerHeight + 60", "5000"].iter().enumerate() {
        browser.value(&format!("scrollTo({{top: {top}, behavior: 'instant'}})"));
        browser.click("#under");
        assert_eq!(browser.value("+under.dataset.n"), (n + 1).to_string(), "{top}");
    }
}

#[test]
fn what_is_turned_zoomed_or_part_of_a_picture_is_hit() {
    let mut browser = Browser::start();
    page(
        &mut browser,
        &format!(
            "<body style='zoom:1.5'><div style='transform:scale(.5) rotate(20deg);transform-origin:0 0;margin-left:200px'><button id=a {COUNT}>A</button></div>
             <div style='zoom:2'><button id=b {COUNT}>B</button></div><div style='height:2000px'></div>
             <button id=c {COUNT} style='transform:rotate(45deg);width:300px;height:4px'></button>
             <img usemap='#map' width=200 height=100 src='data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAA='>
             <map name=map><area id=d {COUNT} coords='0,0,50,100' href='javascript:0'><area id=e {COUNT} shape=circle coords='150,50,20' href='javascript:0'></map>
             <iframe style='zoom:1.3;transform:scale(.7);border:7px solid;padding:9px' srcdoc='<button id=f onclick=\"parent.f = 1\">F</button>'></iframe>"
        ),
    );
    for id in ["a", "b", "c", "d", "e"] {
        browser.click(&format!("#{id}"));
        assert_eq!(browser.value(&format!("{id}.dataset.n")), "\"1\"", "{id}");
    }
    browser.click("#f");
    assert_eq!(browser.value("window.f"), "1");
}

/// A box that is hidden and drawn by other means is clicked where it is drawn; a link in its label is not clicked in its place.
#[test]
fn boxes_under_their_labels_are_read_and_clicked() {
    let mut browser = Browser::start();
    page(
        &mut browser,
        "<style>.x input {display:none} .v input {visibility:hidden;position:absolute} .y input {opacity:0;position:absolute;width:0;height:0}
         .z input {position:absolute;clip:rect(0 0 0 0);width:1px;height:1px;margin:-1px;overflow:hidden}
         .w {position:relative;display:inline-block} .w input {opacity:0} .w span {position:absolute;inset:0;background:blue}</style>
         <p class=x><input type=checkbox id=one><label for=one>One box</label></p>
         <p class=v><label><input type=checkbox id=two> Two box</label></p>
         <p class=y><label><input type=checkbox id=three> Three box</label></p>
         <p class=z><label><input type=radio name=r id=four> Four box</label></p>
         <p><label class=w><input type=checkbox id=five aria-label='Five box'><span>.</span></label></p>
         <p class=x><label><input type=checkbox id=six>I <a href='javascript:left = 1'>accept all of the terms and the whole small print</a></label></p>",
    );
    let seen = outline(&mut browser);
    for (id, name) in [("one", "One"), ("two", "Two"), ("three", "Three"), ("four", "Four"), ("five", "Five")] {
        let at = ref_of(&seen, &format!("{name} box"));
        for at in [at, format!("#{id}")] {
            browser.value(&format!("{id}.checked = false"));
            browser.click(&at);
            assert_eq!(browser.value(&format!("{id}.checked")), "true", "{id} {at}\n{seen}");
        }
    }
    assert!(outline(&mut browser).contains("checkbox checked: \"One box\""), "{}", outline(&mut browser));
    browser.click("#six");
    assert_eq!(browser.value("[six.checked, typeof left]"), "[true,\"undefined\"]");
}

/// What the browser itself would draw over the page takes no click that is meant for the page.
#[test]
fn lists_and_pickers_do_not_swallow_the_next_click() {
    let mut browser = Browser::start();
    page(
        &mut browser,
        &format!(
            "<select id=s><option>a<option id=o>b</select><input type=date id=d><input type=color id=c>
             <input list=l id=i><datalist id=l><option>x<option>y</datalist>
             <div style='height:300px'></div><button id=b {COUNT}>B</button><select size=3 id=m><option>p<option id=q>q</select>
             <details><summary>More</summary><p>Inside</p></details>"
        ),
    );
    for (n, at) in ["#s", "#d", "#c", "#i"].iter().enumerate() {
        browser.click(at);
        browser.click("#b");
        assert_eq!(browser.value("+b.dataset.n"), (n + 1).to_string(), "{at}");
    }
    let closed = failed(browser.browse_within(click("#o"), 0.5), BrowseFailure::NotReady);
    assert!(closed.ends_with("it is in a closed list; select it there"), "{closed}");
    browser.click("#q");
    assert_eq!(browser.value("m.value"), "\"q\"");
    browser.click("summary");
    assert_eq!(browser.value("document.querySelector('details').open"), "true");
}

#[test]
fn fields_that_do_something_with_what_is_typed_get_it() {
    let mut browser = Browser::start();
    page(
        &mut browser,
        "<input id=short maxlength=4><input id=mask oninput=\"this.value = this.value.replace(/[^0-9]/g, '').replace(/(...)(?=.)/g, '$1-')\">
         <input id=controlled><div contenteditable><p id=inner>old</p></div><div id=plain contenteditable=plaintext-only>old</div>
         <input id=otp1 maxlength=1 oninput='otp2.focus()'><input id=otp2 maxlength=1 oninput='otp3.focus()'><input id=otp3 maxlength=1>
         <label id=label>Fixed <input id=fixed readonly value=x></label><input id=kept><input id=shy onfocus='this.blur()'>
         <input id=secret type=password><script>
           // As React keeps a field: what the page itself sets is no change.
           const own = Object.getOwnPropertyDescriptor(HTMLInputElement.prototype, 'value');
           let known = '';
           Object.defineProperty(controlled, 'value', {get() { return own.get.call(this) }, set(v) { known = v; own.set.call(this, v) }});
           controlled.oninput = () => { if (controlled.value !== known) state = known = controlled.value };
         </script>",
    );
    for (id, text, holds) in [
        ("short", "123456", "1234"),
        ("mask", "123456789", "123-456-789"),
        ("controlled", "Ada", "Ada"),
        ("inner", "new", "new"),
        ("plain", "new\ntext", "new\ntext"),
    ] {
        browser.type_text(&format!("#{id}"), text);
        let holds = serde_json::to_string(holds).unwrap();
        assert_eq!(browser.value(&format!("{id}.value ?? {id}.innerText")), holds, "{id}");
    }
    assert_eq!(browser.value("state"), "\"Ada\"");
    let type_in = |at: &str, text: &str| BrowserAction::Type {
        at: at.into(),
        text: text.into(),
        append: false,
        submit: false,
        keys: true,
    };
    browser.ok(type_in("#otp1", "123"));
    assert_eq!(browser.value("otp1.value + otp2.value + otp3.value"), "\"123\"");
    // What does not take the text leaves it to nobody else.
    browser.type_text("#kept", "kept");
    for at in ["#label", "#shy"] {
        failed(browser.browse_within(type_in(at, "hunter2"), 2.0), BrowseFailure::NotReady);
    }
    assert_eq!(browser.value("kept.value + fixed.value + shy.value"), "\"keptx\"");
    browser.type_text("#secret", "hunter2");
    let told = format!("{:?} {}", browser.browse(BrowserAction::Log { max_lines: 100 }), outline(&mut browser));
    assert!(!told.contains("hunter2"), "{told}");
}

/// A window that closes itself ends no request in a wait.
#[test]
fn a_page_that_closes_itself_is_told() {
    const BUTTONS: &str = "<button id=now onclick=window.close()>Now</button><button id=soon onclick=setTimeout(window.close.bind(window),300)>Soon</button>";
    let mut browser = Browser::start();
    page(
        &mut browser,
        &format!(
            "<button id=opens onclick=\"window.open('about:blank').document.write('{BUTTONS}')\">Opens</button>
             <button id=shuts onclick=\"window.open('about:blank').close()\">Shuts</button>
             <a id=apart href='about:blank' target=_blank rel=noopener>Apart</a>"
        ),
    );
    let begun = std::time::Instant::now();
    let opens = BrowserAction::Wait { text: "Opens".into(), gone: false };
    assert_eq!(browser.click("#opens").page.unwrap().tabs, 2);
    browser.click("#now");
    browser.ok(opens.clone());
    browser.click("#opens");
    browser.click("#soon");
    failed(browser.browse(opens.clone()), BrowseFailure::Stale);
    browser.ok(opens);
    browser.click("#opens");
    let closed = browser.browse(BrowserAction::Evaluate { expression: "window.close(); new Promise(() => 0)".into() });
    failed(closed, BrowseFailure::Stale);
    browser.click("#shuts");
    let apart = browser.click("#apart").page.unwrap();
    assert_eq!((&*apart.url, apart.tabs), ("about:blank", 2));
    assert!(begun.elapsed() < std::time::Duration::from_secs(50), "{:?}", begun.elapsed());
}

/// A reading that nobody waited for gave out refs; another element never has one of them.
#[test]
fn refs_of_an_abandoned_reading_are_nobody_elses() {
    let mut browser = Browser::start();
    page(&mut browser, &format!("<button id=a {COUNT}>A</button>"));
    browser.value("setTimeout(() => { const end = Date.now() + 3000; while (Date.now() < end); }); 0");
    let late = BrowserAction::Snapshot(SnapshotAsk { max_chars: 10_000, ..SnapshotAsk::default() });
    failed(browser.browse_within(late, 1.0), BrowseFailure::TimedOut);
    browser.value(&format!("document.body.insertAdjacentHTML('afterbegin', `<button id=b {COUNT}>B</button>`)"));
    let seen = outline(&mut browser);
    assert_ne!(ref_of(&seen, "\"A\""), ref_of(&seen, "\"B\""));
    browser.click(&ref_of(&seen, "\"A\""));
    assert_eq!(browser.value("[a.dataset.n, b.dataset.n]"), "[\"1\",null]");
}
