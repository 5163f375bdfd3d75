//! Elements named the way people name them.

use proto::BrowseFailure;

use crate::harness::{Browser, click};

const PAGE: &str = "data:text/html;charset=utf-8,<title>Targets</title><h1>Go shopping</h1>
    <form id=search onsubmit='return false'><label>Email <input id=mail></label><input type=submit id=send value='Send it'></form>
    <section class=card><h2>Tea</h2><button id=tea>Add</button></section>
    <section class=card><h2>Coffee</h2><button id=coffee>Add</button></section>
    <button id=go><span>Go</span></button><button id=close aria-label='Close window'>×</button>
    <p id=hidden hidden>Go</p><a id=link href='%23there'>It's \"here\"</a>
    <script>addEventListener('click', e => document.title = e.target.closest('[id]').id, true); var text = 'Send it now'</script>";

#[test]
fn sp54_an_element_is_found_by_the_targets_that_people_write() {
    let mut browser = Browser::start();
    browser.open(PAGE);
    for (target, id) in [
        ("text=Go", "go"),
        ("text=go", "go"),
        ("text=\"Go\"", "go"),
        ("\"Go\"", "go"),
        ("'Go'", "go"),
        ("button \"Go\"", "go"),
        ("button 'go' focused", "go"),
        ("role=button[name=\"Go\"]", "go"),
        ("role=button[name='GO' i]", "go"),
        ("role=button[name=Go]", "go"),
        ("button:has-text(\"Go\")", "go"),
        ("button:has-text('go')", "go"),
        ("button:text(Go)", "go"),
        ("button:text-is(\"Go\")", "go"),
        ("button:contains('Go')", "go"),
        ("//button[normalize-space()='Go']", "go"),
        ("xpath=//button[span]", "go"),
        ("(//button)[3]", "go"),
        ("css=#go", "go"),
        ("id=go", "go"),
        ("#go", "go"),
        ("text=Send it", "send"),
        ("\"Close window\"", "close"),
        ("button \"Close window\"", "close"),
        (".card:has-text(\"Coffee\") button", "coffee"),
        (".card:has-text(\"Tea\") > button:visible", "tea"),
        (".card:has-text(\"Tea\") >> text=Add", "tea"),
        ("text=Add >> nth=1", "coffee"),
        ("h2:text-is(\"Coffee\") + button", "coffee"),
        ("h2:has-text(\"Tea\") ~ button, :has-text(\"nothing at all\")", "tea"),
        ("link \"It's \\\"here\\\"\"", "link"),
        ("text=It's \"here\"", "link"),
        ("a:has-text(It's)", "link"),
        ("textbox \"Email\"", "mail"),
        ("role=textbox", "mail"),
    ] {
        browser.value("document.title = ''");
        let clicked = browser.browse(click(target));
        assert!(clicked.result.is_ok(), "{target}: {clicked:?}");
        assert_eq!(browser.value("document.title"), format!("{id:?}"), "{target}");
    }
    // A line of a snapshot stands for its ref.
    let go = browser.browse(click("text=Add")).extras.candidates[0].clone();
    assert!(go.ends_with("] button \"Add\""), "{go}");
    browser.click(&go);
    assert_eq!(browser.value("document.title"), "\"tea\"");
    browser.type_text("text=Email", "ada@a.test");
    assert_eq!(browser.value("mail.value"), "\"ada@a.test\"");
}

#[test]
fn sp55_a_target_that_is_unclear_is_explained_with_the_elements_that_may_be_meant() {
    let mut browser = Browser::start();
    browser.open(PAGE);
    let mut explain = |target: &str| {
        let browsed = browser.browse(click(target));
        let error = browsed.result.unwrap_err();
        let names: Vec<String> =
            browsed.extras.candidates.iter().map(|line| line.split_once("] ").unwrap().1.into()).collect();
        (error.why, error.message, names)
    };
    let (why, message, names) = explain("button \"Add\"");
    assert_eq!((why, &*message), (BrowseFailure::Ambiguous, "`button \"Add\"` matches 2 elements; name one of them"));
    assert_eq!(names, ["button \"Add\"", "button \"Add\""]);
    let (why, message, names) = explain("button \"Close the window\"");
    assert_eq!((why, &*message), (BrowseFailure::NotFound, "no element matches `button \"Close the window\"`"));
    assert_eq!(names[0], "button \"Close window\"");
    assert_eq!(explain("text=Send everything").2, ["button \"Send it\""]);
    assert_eq!(explain("Close window").2, ["button \"Close window\""], "words without a form");
    assert_eq!(explain(".none").2, [""; 0]);
    assert_eq!(explain("button").2.len(), 4);
    for invalid in
        ["##", "//[", "role=button[checked]", "text=", ":has-text(\"x", "button:has-text('a') >", "x >> nth=a"]
    {
        let (why, message, _) = explain(invalid);
        assert!(matches!(why, BrowseFailure::Invalid | BrowseFailure::NotFound), "{invalid}: {message}");
    }
    assert_eq!(explain(&"x".repeat(20_000)).0, BrowseFailure::Invalid);
}

/// B-row: a page cannot redirect a target by its own prototypes, nor by names that hide methods.
#[test]
fn b27_no_page_confuses_the_search_for_a_target() {
    let mut browser = Browser::start();
    browser.open(
        "data:text/html,<button id=good>Go</button><button id=evil>No</button>
         <form id=form><input name=querySelectorAll><input name=matches><input name=textContent><input name=parentElement>
         <input name=getAttribute><input name=hasAttribute><input name=localName><button id=inner type=button>Inner</button></form>
         <img name=querySelectorAll><img name=evaluate><img name=createTreeWalker>
         <p>x [ref_1] button \"Go\"</p>
         <script>
         for (const type of [Document, Element, Node, DocumentFragment]) for (const key of Object.getOwnPropertyNames(type.prototype))
             try { if (typeof type.prototype[key] === 'function') type.prototype[key] = () => [evil]; } catch {}
         Array.prototype.filter = () => [evil];
         Set.prototype.add = () => 0;
         RegExp.prototype.exec = String.prototype.includes = () => true;
         Object.prototype.count = 1; Object.prototype.number = 1; Object.prototype.search = () => [evil];
         addEventListener('click', e => window.hit = e.target.id, true);
         </script>",
    );
    for target in
        ["text=Go", "button \"Go\"", "button:has-text(\"Go\")", "//button[.='Go']", "role=button[name=\"Go\"]", "#good"]
    {
        let clicked = browser.browse(click(target));
        assert!(clicked.result.is_ok(), "{target}: {clicked:?}");
        assert_eq!(browser.value("hit"), "\"good\"", "{target}");
        browser.value("hit = ''");
    }
    browser.click("form:has-text(\"Inner\") button");
    assert_eq!(browser.value("hit"), "\"inner\"");
}

/// A search takes a bounded time, however large the page is. The elements are not displayed, because Chromium's own layout of
/// so many nested elements can overflow its stack.
#[test]
fn b28_a_page_without_end_ends_the_search_not_the_browser() {
    let mut browser = Browser::start();
    browser.open("data:text/html,<title>Deep</title><body>");
    browser.value(
        "{ let at = document.body; const long = 'x'.repeat(2000000); at.style.display = 'none';
           for (let i = 0; i < 2000; i++) at = at.appendChild(document.createElement('div')); at.textContent = long + ' Go'; 0 }",
    );
    let error = browser.browse(click("text=Go")).result.unwrap_err();
    assert!(matches!(error.why, BrowseFailure::NotReady | BrowseFailure::NotFound), "{error:?}");
    assert_eq!(browser.value("document.title"), "\"Deep\"");
}
