//! What an agent does with pages.

use std::time::Instant;

use crate::harness::{Browser, Pages, click};

#[test]
fn pages_are_opened_clicked_and_typed_into() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start();
    assert!(browser.version.starts_with("HeadlessChrome/"), "{}", browser.version);
    let time = |what: &str, begun: Instant| eprintln!("{what} {:?}", begun.elapsed());
    let begun = Instant::now();
    let opened = browser.open(&pages.url("/list50"));
    time("first goto", begun);
    assert_eq!(opened.page.unwrap().url, pages.url("/list50"));
    for _ in 0..5 {
        let begun = Instant::now();
        browser.open(&pages.url("/list50"));
        time("warm goto", begun);
    }
    for _ in 0..5 {
        let begun = Instant::now();
        browser.browse(click("button"));
        time("click (ambiguous)", begun);
    }
}
