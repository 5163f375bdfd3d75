//! What pages do to the driver: the `B` rows of the hostile table that need no sandbox.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use proto::browser::{BrowseResult, PageEvent, TabAsk, ToDriver};
use proto::{BrowseFailure, BrowserAction};
use rustix::process::Signal;

use crate::harness::{Browser, Pages, click, dialogs, failed};

/// B01, B03.
#[test]
fn no_page_gets_at_files_or_the_browsers_own_pages() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    for url in [
        "file:///etc/passwd",
        "chrome://version",
        "devtools://devtools/bundled/inspector.html",
        "view-source:http://127.0.0.1/",
    ] {
        let error = browser.error(BrowserAction::Open { url: url.into() });
        assert_eq!(error.why, BrowseFailure::Navigation, "{error:?}");
        let tried = browser.browse(BrowserAction::Open { url: pages.url(&format!("/redirect/to?url={url}")) });
        assert!(tried.result.is_err(), "{url}: {tried:?}");
        browser.open(&pages.url("/forms"));
        for script in [
            format!("location = '{url}'"),
            format!("window.open('{url}')"),
            format!("document.body.innerHTML = '<a href=\"{url}\">x</a>'; document.querySelector('a').click()"),
            format!("document.body.innerHTML = '<iframe src=\"{url}\"></iframe>'"),
            format!("document.body.innerHTML = '<meta http-equiv=refresh content=\"0;url={url}\">'"),
        ] {
            browser.browse(BrowserAction::Evaluate { expression: format!("{script}; 0") });
            // The browser refuses some of these at its own time.
            browser.browse(BrowserAction::Wait { text: "root:".into(), gone: true });
            let BrowseResult::Tabs { tabs } = browser.ok(BrowserAction::Tab { tab: TabAsk::List }) else { panic!() };
            for tab in tabs {
                let scheme = tab.url.split(':').next().unwrap().to_owned();
                assert!(["http", "about", "chrome-error"].contains(&&*scheme), "{script}: {tab:?}");
                if tab.tab > 1 {
                    browser.browse(BrowserAction::Tab { tab: TabAsk::Close { tab: tab.tab } });
                }
            }
            browser.browse(BrowserAction::Open { url: pages.url("/forms") });
        }
    }
    // A blank page is nobody's, and no more trusted.
    browser.open("about:blank");
    for url in ["file:///etc/passwd", "chrome://version"] {
        browser.browse(BrowserAction::Evaluate { expression: format!("location = '{url}'; 0") });
        browser.browse(BrowserAction::Wait { text: "root:".into(), gone: true });
        let BrowseResult::Tabs { tabs } = browser.ok(BrowserAction::Tab { tab: TabAsk::List }) else { panic!() };
        assert!(tabs.iter().all(|tab| !tab.url.starts_with("file") && !tab.url.starts_with("chrome:")), "{tabs:?}");
    }
}

/// B06.
#[test]
fn dialogs_are_answered_and_told() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/dialogs"));
    let mut press = |name: &str| {
        let done = browser.browse_within(
            BrowserAction::Evaluate {
                expression: format!(
                    "[...document.querySelectorAll('button')].find(b => b.textContent === '{name}').click()"
                ),
            },
            20.0,
        );
        assert!(done.result.is_ok(), "{name}: {done:?}");
        (dialogs(&done.happened), browser.text("#said"))
    };
    assert_eq!(press("Alert"), (vec!["alert: Watch out".into()], "alert over".into()));
    assert_eq!(press("Confirm"), (vec!["confirm: Are you sure?".into()], "confirm: false".into()));
    assert_eq!(press("Prompt"), (vec!["prompt: Your name?".into()], "prompt: null".into()));
    assert_eq!(press("Print").1, "printed");
    let begun = Instant::now();
    let (told, said) = press("A thousand alerts");
    assert_eq!((told.len(), &*said), (49, "all over"));
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
}

/// B06: what a click opens does not hold up the click, and leaving is never refused.
#[test]
fn a_click_that_opens_a_dialog_returns_and_a_guarded_page_is_left() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/dialogs"));
    let clicked = browser.click("section button:nth-of-type(1)");
    assert_eq!(dialogs(&clicked.happened), ["alert: Watch out"]);
    browser.click("section button:nth-of-type(6)");
    let left = browser.open(&pages.url("/forms"));
    assert_eq!(left.page.unwrap().url, pages.url("/forms"));
    assert_eq!(dialogs(&left.happened).len(), 1, "{:?}", left.happened);
}

/// B06: in a frame with a process of its own, and while a page is being left.
#[test]
fn dialogs_of_frames_are_answered_too() {
    let pages = Pages::start().unwrap();
    let mut browser = Browser::start_isolating();
    browser.open(&pages.url("/forms"));
    let other = pages.url_at("localhost", "/dialogs");
    browser.value(&format!(
        "new Promise(done => {{ const frame = document.createElement('iframe'); frame.width = 800; frame.height = 600; \
         frame.src = '{other}'; frame.onload = () => done(0); document.body.prepend(frame) }})"
    ));
    let clicked = browser.click("section button:nth-of-type(1)");
    assert_eq!(dialogs(&clicked.happened), ["alert: Watch out"]);
    browser.click("section button:nth-of-type(6)");
    let left = browser.open(&pages.url("/tables"));
    assert_eq!(left.page.unwrap().url, pages.url("/tables"));
    // A frame that goes away while it is asked.
    browser.open(&pages.url("/frames"));
    browser.value("setInterval(() => document.querySelectorAll('iframe').forEach(f => { const c = f.cloneNode(); f.replaceWith(c) }), 5)");
    for _ in 0..8 {
        let read = browser.browse_within(BrowserAction::Snapshot(Default::default()), 5.0);
        assert!(read.result.is_ok() || read.result.is_err_and(|error| error.why == BrowseFailure::Stale));
        let clicked = browser.browse_within(click("#pay"), 0.5);
        assert!(clicked.page.is_some(), "{clicked:?}");
    }
    browser.open(&pages.url("/forms"));
}

/// B09.
#[test]
fn a_storm_of_windows_ends_at_the_limit() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/popups"));
    let stormed = browser.browse(click("section button:nth-of-type(2)"));
    let page = stormed.page.unwrap();
    assert!(page.tabs <= 16, "{page:?}");
    assert!(stormed.happened.len() <= 50);
    assert!(
        stormed.happened.iter().any(|what| matches!(what, PageEvent::PopupClosed { .. })),
        "{:?}",
        stormed.happened
    );
    browser.open(&pages.url("/forms"));
    let BrowseResult::Tabs { tabs } = browser.ok(BrowserAction::Tab { tab: TabAsk::List }) else { panic!() };
    assert!(tabs.len() <= 16);
}

/// B10, B20.
#[test]
fn a_page_that_never_comes_to_rest_is_not_waited_for() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let begun = Instant::now();
    browser.open(&pages.url("/busy"));
    browser.click("#press");
    assert_eq!(browser.text("#said"), "Pressed");
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    browser.open(
        "data:text/html,<script>setInterval(() => history.pushState(0, '', '%23' + Math.random()), 1)</script>Hi",
    );
    let stuck = browser.browse_within(BrowserAction::Open { url: pages.url("/broken/stuck") }, 1.0);
    failed(stuck, BrowseFailure::TimedOut);
    let slow = browser.browse_within(BrowserAction::Open { url: pages.url("/slow?ms=20000") }, 1.0);
    failed(slow, BrowseFailure::TimedOut);
    browser.open(&pages.url("/forms"));
    // This step is the last one: a refresh that has begun when the next page is opened may replace that page.
    let refreshed = browser.browse_within(BrowserAction::Open { url: pages.url("/refresh") }, 3.0);
    assert!(refreshed.page.is_some());
}

/// B11.
#[test]
fn after_a_crash_the_next_call_has_a_page() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/forms"));
    let pid = renderer(&browser);
    let call = browser.send(&ToDriver::Browse {
        ask: BrowserAction::Evaluate { expression: "new Promise(() => 0)".into() },
        after_ms: 20_000,
        uploads: None,
        changes: 0,
    });
    kill(pid);
    let crashed = browser.browsed(call);
    assert!(crashed.happened.contains(&PageEvent::Crashed { url: pages.url("/forms") }), "{crashed:?}");
    failed(crashed, BrowseFailure::Crashed);
    browser.open(&pages.url("/tables"));
    // And one that crashes while nobody looks.
    kill(renderer(&browser));
    let next = browser.browse(BrowserAction::Wait { text: "x".into(), gone: true });
    // Whether it was seen before the call or in it.
    assert!(next.result.is_ok() || next.result.is_err_and(|error| error.why == BrowseFailure::Crashed));
    assert!(next.happened.contains(&PageEvent::Crashed { url: pages.url("/tables") }), "{:?}", next.happened);
    // Opening an address works at once, however late the word of the death comes.
    for path in ["/forms", "/tables", "/forms", "/tables"] {
        browser.open(&pages.url(path));
        kill(renderer(&browser));
    }
    browser.open(&pages.url("/tables"));
}

/// W36: the call that finds the browser hung is told that it is gone, so that the next one has another.
#[test]
fn w36_a_browser_that_hangs_costs_one_call() {
    let mut browser = Browser::start();
    let process = main_process(&browser);
    signal(process, Signal::STOP);
    let hung = browser.browse_within(BrowserAction::Evaluate { expression: "1".into() }, 1.0);
    assert_eq!(hung.page, None);
    assert_eq!(failed(hung, BrowseFailure::NoBrowser), "it did not answer any more, and was ended");
    // One that has ended and is not yet waited for has no command line any more.
    let until = Instant::now() + Duration::from_secs(60);
    while !cmdline(process).is_empty() {
        assert!(Instant::now() < until, "it is still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// B11.
#[test]
fn a_browser_that_is_killed_is_told_and_ends_the_driver() {
    let mut browser = Browser::start();
    let call = browser.send(&ToDriver::Browse {
        ask: BrowserAction::Evaluate { expression: "new Promise(() => 0)".into() },
        after_ms: 20_000,
        uploads: None,
        changes: 0,
    });
    kill(main_process(&browser));
    let killed = browser.browsed(call);
    assert_eq!(killed.page, None);
    assert_eq!(failed(killed, BrowseFailure::NoBrowser), "the browser ended: signal: 9 (SIGKILL)");
    assert_eq!(browser.end().unwrap_err().to_string(), "the browser ended: signal: 9 (SIGKILL)");
}

#[test]
fn an_endless_loop_ends_with_the_time_and_the_page_lives_on() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/forms"));
    browser.value("window.kept = 1");
    let looped = browser.browse_within(BrowserAction::Evaluate { expression: "for (;;);".into() }, 1.0);
    failed(looped, BrowseFailure::TimedOut);
    assert_eq!(browser.value("kept"), "1");
    browser.value("document.body.innerHTML = '<button onclick=\"for (;;);\">Loop</button>'");
    failed(browser.browse_within(click("button"), 1.5), BrowseFailure::TimedOut);
    assert_eq!(browser.value("kept"), "1");
}

#[test]
fn a_request_is_cancelled() {
    let mut browser = Browser::start();
    let ask = BrowserAction::Evaluate { expression: "new Promise(() => 0)".into() };
    let call = browser.send(&ToDriver::Browse { ask, after_ms: 60_000, uploads: None, changes: 0 });
    browser.send_as(call, &ToDriver::Cancel);
    failed(browser.browsed(call), BrowseFailure::Cancelled);
    assert_eq!(browser.value("1 + 1"), "2");
}

#[test]
fn downloads_get_safe_names_and_are_told() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let path = |happened: &[PageEvent]| match happened {
        [PageEvent::Download { path: Some(path), error: None, size, .. }] => (path.clone(), *size),
        other => panic!("{other:?}"),
    };
    browser.open(&pages.url("/downloads"));
    let report = browser.click("a[href$='report.csv']");
    assert_eq!(path(&report.happened), ("downloads/report.csv".into(), 27));
    let again = browser.browse(BrowserAction::Open { url: pages.url("/download/report.csv") });
    assert_eq!((again.result, path(&again.happened).0), (Ok(BrowseResult::Done), "downloads/report (1).csv".into()));
    let elsewhere = browser.click("a[href$='traversal']");
    let (name, _) = path(&elsewhere.happened);
    assert!(name.starts_with("downloads/") && !name.contains("../"), "{name}");
    assert_eq!(path(&browser.click("#blob").happened).0, "downloads/notes.txt");
    let broken = browser.click("a[href$='broken.bin']");
    assert!(matches!(&broken.happened[..], [PageEvent::Download { path: None, error: Some(_), .. }]), "{broken:?}");
    let left = browser.downloads_left(4);
    assert_eq!(left.len(), 4, "{left:?}");
    let mode = std::fs::metadata(browser.home.join("downloads/report.csv")).unwrap();
    assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o644);
}

/// W35: what would not leave enough of the disk free is cancelled, told, and gone.
#[test]
fn w35_a_download_without_end_is_broken_off_and_leaves_nothing() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    let mut happened = browser.browse(BrowserAction::Open { url: pages.url("/download/endless.bin") }).happened;
    let until = Instant::now() + Duration::from_secs(60);
    while happened.is_empty() && Instant::now() < until {
        happened = browser.browse(BrowserAction::Log { max_lines: 1 }).happened;
    }
    let [PageEvent::Download { path: None, error: Some(error), .. }] = &happened[..] else { panic!("{happened:?}") };
    assert!(error.starts_with("downloads may take half of the disk that is free"), "{error}");
    assert_eq!(browser.downloads_left(0), Vec::<String>::new());
    // Another one is not the worse for it.
    let next = browser.browse(BrowserAction::Open { url: pages.url("/download/report.csv") });
    assert!(matches!(&next.happened[..], [PageEvent::Download { path: Some(_), .. }]), "{next:?}");
}

/// B08.
#[test]
fn nothing_that_a_page_asks_for_is_granted_or_waited_for() {
    let (pages, mut browser) = (Pages::start().unwrap(), Browser::start());
    browser.open(&pages.url("/forms"));
    let state = |name: &str| format!("navigator.permissions.query({{name: '{name}'}}).then(p => p.state, e => 'none')");
    for name in ["geolocation", "notifications", "camera", "microphone", "clipboard-read", "midi"] {
        let state = browser.value(&state(name));
        assert!(["\"denied\"", "\"prompt\"", "\"none\""].contains(&&*state), "{name}: {state}");
    }
    for ask in [
        "new Promise(f => navigator.geolocation.getCurrentPosition(() => f('yes'), () => f('no')))",
        "Notification.requestPermission().then(p => p === 'granted' ? 'yes' : 'no')",
        "navigator.mediaDevices.getUserMedia({video: true}).then(() => 'yes', () => 'no')",
    ] {
        let asked = browser.browse_within(BrowserAction::Evaluate { expression: ask.into() }, 5.0);
        assert!(
            !matches!(&asked.result, Ok(BrowseResult::Value { json, .. }) if json.contains("yes")),
            "{ask}: {asked:?}"
        );
    }
    browser.value("location = 'mailto:a@b.test'; 0");
    browser.value("location = 'unknown-scheme:x'; 0");
    assert_eq!(browser.value("1"), "1");
}

/// B08: a name and a password are asked for; nobody is there to give them.
#[test]
fn a_page_behind_a_password_is_an_answer() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Basic realm=x\r\ncontent-type: text/html";
            let _ = write!(stream, "{head}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno");
        }
    });
    let mut browser = Browser::start();
    let opened = browser.browse_within(BrowserAction::Open { url }, 10.0);
    let told = PageEvent::Note { text: "the server answered with status `401`".into() };
    assert_eq!((opened.result, opened.happened), (Ok(BrowseResult::Done), vec![told]));
}

/// B19: no address of the sandbox is told to a page.
#[test]
fn a_page_learns_no_address_by_way_of_web_rtc() {
    let mut browser = Browser::start();
    browser.open("data:text/html,x");
    let gathered = browser.value(
        "new Promise(done => {
            const found = [];
            const way = new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:1'}]});
            way.onicecandidate = e => e.candidate ? found.push(e.candidate.candidate) : done(found.filter(c => c));
            way.createDataChannel('x');
            way.createOffer().then(o => way.setLocalDescription(o));
        })",
    );
    assert_eq!(gathered, "[]");
}

/// B13: memory of the driver is bounded, whatever a page writes.
#[test]
fn a_flood_of_messages_is_bounded() {
    let mut browser = Browser::start();
    browser.open("data:text/html,x");
    browser.value("for (let i = 0; i < 2000; i++) console.log('line ' + i, 'x'.repeat(1000)); 0");
    let BrowseResult::Log { lines, dropped } = browser.ok(BrowserAction::Log { max_lines: 5000 }) else { panic!() };
    assert!(lines.len() <= 1000 && dropped >= 1000, "{} {dropped}", lines.len());
    assert!(lines.iter().all(|line| line.len() < 5000));
}

/// B15: what pages keep goes with the browser; the next one in the same place begins with nothing.
#[test]
fn a_new_browser_knows_nothing_of_the_last_one() {
    const KEEP: &str = "(async () => {
        localStorage.a = document.cookie = 'a=1; max-age=9999';
        await new Promise(done => { const asked = indexedDB.open('a'); asked.onsuccess = asked.onerror = done; });
        await (await caches.open('a')).put('/a', new Response('a'));
        const root = await navigator.storage.getDirectory();
        await root.getFileHandle('a', {create: true});
        return 0;
    })()";
    const KEPT: &str = "(async () => {
        const root = await navigator.storage.getDirectory();
        return [localStorage.length, document.cookie, (await indexedDB.databases()).length, (await caches.keys()).length,
            (await navigator.serviceWorker.getRegistrations()).length, (await Array.fromAsync(root.keys())).length];
    })()";
    let worker = Worker::serve();
    let mut first = Browser::start();
    first.open(&worker.url);
    first.value(KEEP);
    first.value(
        "navigator.serviceWorker.register('/worker.js').then(() => navigator.serviceWorker.ready).then(() => 0)",
    );
    assert_eq!(first.value(KEPT), "[1,\"a=1\",1,1,1,1]");
    first.open("about:blank");
    first.open(&worker.url);
    assert_eq!(first.value("navigator.serviceWorker.controller !== null"), "true");
    let home = first.home.join("home").display().to_string();
    first.end().unwrap();
    let mut second = Browser::start_with(|spec| spec.home = home);
    second.open(&worker.url);
    assert_eq!(second.value(KEPT), "[0,\"\",0,0,0,0]");
}

/// A site with a service worker.
struct Worker {
    url: String,
}

impl Worker {
    fn serve() -> Self {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut asked = [0; 4096];
                let length = stream.read(&mut asked).unwrap_or_default();
                let is_worker = asked[..length].starts_with(b"GET /worker.js");
                let (kind, body) =
                    if is_worker { ("text/javascript", "onfetch = () => 0") } else { ("text/html", "<p>Hello</p>") };
                let head = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {}", body.len());
                let _ = write!(stream, "{head}\r\nconnection: close\r\n\r\n{body}");
            }
        });
        Self { url }
    }
}

/// B04, B25: no port, no helper for crashes, and nothing left when the driver ends.
#[test]
fn the_browser_leaves_with_its_driver() {
    let mut browser = Browser::start();
    let pid = main_process(&browser);
    let pids = family(pid);
    let names: Vec<String> = pids.iter().map(|pid| cmdline(*pid)).collect();
    assert!(pids.len() >= 3, "{names:?}");
    assert!(names.iter().all(|name| !name.contains("crashpad")), "{names:?}");
    assert!(names[0].contains("--remote-debugging-pipe") && !names[0].contains("--remote-debugging-port"));
    browser.end().unwrap();
    let begun = Instant::now();
    while pids.iter().any(|pid| !cmdline(*pid).is_empty()) {
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{:?}",
            pids.iter().map(|p| cmdline(*p)).collect::<Vec<_>>()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Of the test itself; its home is in its arguments.
fn main_process(browser: &Browser) -> u32 {
    let home = browser.home.display().to_string();
    let ours = |pid: &u32| {
        let line = cmdline(*pid);
        line.contains(&home) && !line.contains("--type=")
    };
    processes().into_iter().find(ours).unwrap()
}

fn renderer(browser: &Browser) -> u32 {
    let pages = |pid: &u32| cmdline(*pid).contains("--type=renderer");
    family(main_process(browser)).into_iter().rfind(pages).unwrap()
}

/// A process and all below it.
fn family(pid: u32) -> Vec<u32> {
    let mut family = vec![pid];
    let all = processes();
    let mut next = 0;
    while next < family.len() {
        let parent = family[next];
        family.extend(all.iter().filter(|pid| parent_of(**pid) == Some(parent)));
        next += 1;
    }
    family
}

fn processes() -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let mut pids: Vec<u32> = entries.filter_map(|e| e.ok()?.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

fn cmdline(pid: u32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default().replace('\0', " ")
}

fn kill(pid: u32) {
    signal(pid, Signal::KILL);
}

fn signal(pid: u32, signal: Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}
