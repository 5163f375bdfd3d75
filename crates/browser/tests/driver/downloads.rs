//! A download is reported with the action that caused it, however the page starts it.

use proto::browser::PageEvent;

use crate::harness::{Browser, Pages};

fn saved(happened: &[PageEvent]) -> Vec<String> {
    let path = |event: &PageEvent| match event {
        PageEvent::Download { path: Some(path), error: None, .. } => Some(path.clone()),
        _ => None,
    };
    happened.iter().filter_map(path).collect()
}

#[test]
fn sp53_a_download_is_reported_with_the_action_that_caused_it() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/list50"));
    browser.value(
        "document.body.innerHTML = `<a id=slow href=/download/slow.csv>Slow</a>
            <a id=tab target=_blank href=/download/report.csv>Tab</a><a id=kept download href=/download/report.csv>Kept</a>
            <button id=script onclick=\"location = '/download/report.csv'\">Script</button>
            <button id=inner onclick=\"document.querySelector('iframe').src = '/download/report.csv'\">Frame</button><iframe></iframe>`; 0",
    );
    assert_eq!(saved(&browser.click("#slow").happened), ["downloads/slow.csv"], "the end of it is waited for");
    assert_eq!(saved(&browser.click("#kept").happened), ["downloads/report.csv"]);
    assert_eq!(saved(&browser.click("#script").happened), ["downloads/report (1).csv"]);
    assert_eq!(saved(&browser.click("#inner").happened), ["downloads/report (2).csv"]);
    assert_eq!(saved(&browser.click("#tab").happened), ["downloads/report (3).csv"]);
}
