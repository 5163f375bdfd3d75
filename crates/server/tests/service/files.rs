//! Paths and file names that want to be elsewhere or something else, in every argument that is a path and below `/files/`.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dialects::Options;
use serde_json::{Map, Value, json};
use testkit::http::{Era, Mcp, Wire};

use crate::support::{Service, is_full, report};

/// Stands in files outside of where paths begin.
const OUTSIDE: &str = "what-lies-outside";
/// Is written wherever a path leads to.
const WRITTEN: &str = "what-was-written";

/// A07, A08, A12: traversal in the spellings that worked against others.
fn corpus() -> Vec<String> {
    let targets = [
        "etc/passwd",
        "tmp/outside.txt",
        "proc/self/environ",
        "proc/1/root/etc/passwd",
        "proc/self/cwd/../../tmp/outside.txt",
        "dev/shm/outside.txt",
        "workspace/../tmp/outside.txt",
        "data/../etc/passwd",
    ];
    let prefixes = [
        "../",
        "../../",
        "../../../../../../../../",
        "/",
        "//",
        "///",
        "/./",
        "/../",
        "./../",
        "a/../../",
        "a/b/../../../",
        "..\\",
        "..\\..\\",
        "\\",
        "%2e%2e/",
        "%2e%2e%2f",
        "..%2f",
        "%252e%252e%252f",
        "..%252f",
        "%c0%ae%c0%ae/",
        "..%c0%af",
        "....//",
        ".../",
        "..;/",
        "..//",
        ".//..//",
        "/workspace/../",
        "/workspace/..//",
        "/workspace/./../",
        "/workspace-evil/",
        "/workspace-evil/../",
        "/workspace../",
        "/workspaces/",
        "/works/",
        "/WORKSPACE/../",
        "/data/../",
        "/data-evil/",
        "link/",
        "root/",
        "link/../",
        "~/",
        "~root/",
        "$HOME/",
        "${HOME}/",
        "file:///",
        "file://localhost/",
        "C:/",
        "C:\\",
        "\\\\host\\",
        "/proc/self/root/",
        "/proc/self/fd/",
        "/dev/fd/",
        "\u{ff0e}\u{ff0e}/",
        "\u{2024}\u{2024}/",
        "..\u{2215}",
        ". ./",
        ".. /",
        " ../",
        "\t../",
        "..\0/",
    ];
    let suffixes = ["", ".", " ", "'", "\"", "/", "/.", "%00", "\0.png", "\n", "\r\n", "?x", "#x", ";x", "::$DATA"];
    let mut corpus = Vec::new();
    for (n, prefix) in prefixes.iter().enumerate() {
        for (m, target) in targets.iter().enumerate() {
            corpus.push(format!("{prefix}{target}{}", suffixes[(n + m) % suffixes.len()]));
        }
    }
    corpus.extend(suffixes.iter().map(|suffix| format!("link{suffix}")));
    corpus.extend(
        [".", "..", "", "/", "\0", "....", "a/..", "a//b", "con", "nul", "-", "root/etc/passwd", "deep"]
            .map(str::to_owned),
    );
    corpus.push("../".repeat(2000) + "etc/passwd");
    corpus.push("a/".repeat(2000) + &"../".repeat(2001) + "etc/passwd");
    corpus.push("x".repeat(5000));
    corpus
}

/// What code can put in the way: links out of the workspace, of every kind.
const PLANT: &str = "import os\n\
    for path in ('/tmp/outside.txt', '/dev/shm/outside.txt'):\n    open(path, 'w').write('what-lies-outside')\n\
    for name, to in (('link', '/tmp/outside.txt'), ('root', '/'), ('deep', 'root/tmp/outside.txt'), ('self', '/proc/self'), ('up', '..'), ('loop', 'loop')):\n\
    \x20   os.path.lexists(name) or os.symlink(to, name)\n\
    os.path.exists('fifo') or os.mkfifo('fifo')";

/// Nothing was written outside; where the workspace itself is is of no interest.
const SEARCH: &str = "import os\nfound = []\n\
    for top in ('/tmp', '/dev/shm', '/data', '/etc', '/home', '/root', '/var', '/opt', '/usr/local'):\n\
    \x20   for base, _, names in os.walk(top):\n\
    \x20       for name in names:\n\
    \x20           try:\n\
    \x20               path = os.path.join(base, name)\n\
    \x20               if os.path.isfile(path) and os.path.getsize(path) < 100 and 'what-was-written' in open(path).read(): found.append(path)\n\
    \x20           except (OSError, UnicodeDecodeError): pass\n\
    print(found, open('/tmp/outside.txt').read())";

/// A07, A08, A09: every tool that takes a path.
#[test]
fn no_path_leads_out_of_the_place_where_paths_begin() {
    let service = Service::start("paths");
    let mut canary = service.canary();
    let listing = |dir: &str| std::fs::read_dir(dir).unwrap().flatten().map(|e| e.file_name()).collect::<Vec<_>>();
    let host = ["/", "/etc", "/root"].map(listing);
    let corpus = corpus();
    assert!(corpus.len() >= 500);
    let places = [
        ("sandpool", "run_code"),
        ("agentrun", "run_code"),
        ("workbench", "code_run"),
        ("conversation", "sandbox.run_code"),
    ];
    let mut tried = 0;
    for dialect in dialects::all(&Options::default()) {
        let rows: Vec<_> = dialect
            .tools
            .iter()
            .flat_map(|row| {
                row.fields.iter().filter(|f| matches!(f.name, "path" | "filename")).map(move |f| (row, f.name))
            })
            .collect();
        if rows.is_empty() {
            continue;
        }
        let (_, run) = places.iter().find(|(id, _)| *id == dialect.id).expect("the test knows how to run code here");
        let mut blue = service.client("blue", dialect.id);
        let place: Map<String, Value> = match dialect.id {
            "agentrun" => json!({ "context_id": blue.good("create_context", json!({ "name": "p" }))["context_id"] }),
            "workbench" => json!({ "sandbox_id": blue.good("sandbox_create", json!({}))["sandbox_id"] }),
            "conversation" => json!({ "conversationId": "p" }),
            _ => json!({}),
        }
        .as_object()
        .unwrap()
        .clone();
        let run_code = |blue: &mut Mcp, code: &str| {
            let mut arguments = place.clone();
            arguments.insert("code".into(), code.into());
            if dialect.id != "agentrun" {
                arguments.insert("language".into(), "python".into());
            }
            blue.call(run, arguments.into()).to_string()
        };
        run_code(&mut blue, PLANT);
        for (row, field) in rows {
            // Each call of a conversation is a sandbox of its own.
            let step = if dialect.id == "conversation" && !is_full() { 20 } else { 1 };
            // Paths begin below these, too, for some tools of this dialect.
            let begins = |path: &&String| {
                dialect.id == "sandpool" && ["/tmp/", "/data/"].iter().any(|dir| path.starts_with(dir))
            };
            for path in corpus.iter().step_by(step).filter(|path| !begins(path) || path.contains("..")) {
                let mut arguments = place.clone();
                arguments.insert(field.into(), path.as_str().into());
                if row.fields.iter().any(|field| field.name == "content") {
                    let encoded = field == "filename";
                    let content = if encoded { BASE64_STANDARD.encode(WRITTEN) } else { WRITTEN.to_owned() };
                    arguments.insert("content".into(), content.into());
                }
                if row.name == "edit_file" {
                    arguments.insert("old_string".into(), "outside".into());
                    arguments.insert("new_string".into(), WRITTEN.into());
                }
                if row.name == "search_files" {
                    arguments.insert("text".into(), "lies".into());
                }
                let answer = blue.call(row.name, arguments.into()).to_string();
                for sign in [OUTSIDE, "root:x:0:0", "root:*:0:0", "PATH=", "panicked"] {
                    assert!(!answer.contains(sign), "{} {} {path:?}: {answer:.600}", dialect.id, row.name);
                }
                assert!(!answer.contains("-32603"), "{} {} {path:?}: {answer:.600}", dialect.id, row.name);
                tried += 1;
            }
        }
        // In a conversation what lies outside went with the call.
        if dialect.id != "conversation" {
            let found = run_code(&mut blue, SEARCH);
            assert!(found.contains(&format!("[] {OUTSIDE}")), "{}: {found}", dialect.id);
        }
        canary.sings(dialect.id);
    }
    assert_eq!(["/", "/etc", "/root"].map(listing), host, "something was made on the host");
    report(
        "A07",
        &format!("{} paths in every path argument of every tool, {tried} calls: none leads out", corpus.len()),
    );
    report("A08", "sibling prefixes (`/workspace-evil`): refused");
    report("A09", "symbolic links out of the workspace, in the middle and at the end: not followed out");
    below_files(&service, &corpus);
    canary.sings("paths");
    service.finish();
}

/// A12: the same below `/files/`, raw and encoded.
fn below_files(service: &Service, corpus: &[String]) {
    let mut blue = Mcp::new(&service.account("blue"), "sandpool", Era::Bare);
    blue.good("write_file", json!({ "path": "here.txt", "content": "here" }));
    let listed = blue.request("resources/list", json!({})).to_string();
    let link =
        listed.split('"').find(|part| part.ends_with("/here.txt") && part.starts_with("http")).unwrap().to_owned();
    let base = &link[link.find("/files/").unwrap()..link.len() - "here.txt".len()];
    let mut wire = Wire::open(service.address).unwrap();
    let mut get = |target: &str| {
        let answer = wire.ask("GET", target, &[], b"").unwrap();
        if answer.header("connection") == Some("close") || answer.status == 400 {
            wire = Wire::open(service.address).unwrap();
        }
        answer
    };
    assert_eq!(get(&format!("{base}here.txt")).text(), "here");
    let raw = |path: &str| -> String { path.chars().filter(|c| c.is_ascii_graphic()).collect() };
    let encoded = |path: &str| -> String { path.bytes().map(|byte| format!("%{byte:02x}")).collect() };
    let slashes = |path: &str| -> String { raw(path).replace('/', "%2f") };
    let twice = |path: &str| -> String { raw(path).replace('%', "%25").replace('.', "%252e").replace('/', "%252f") };
    let mut tried = 0;
    for path in corpus.iter().filter(|path| path.len() < 4000) {
        for path in [
            raw(path),
            encoded(path),
            slashes(path),
            twice(path),
            format!("here.txt/{}", raw(path)),
            format!("here.txt;{}", raw(path)),
        ] {
            let answer = get(&format!("{base}{path}"));
            let text = answer.text();
            // A name that only looks like a path may exist: the tools have written such names.
            assert!(
                [400, 404, 414, 431].contains(&answer.status)
                    || answer.status == 200 && text == WRITTEN
                    || text == "here",
                "{path}: {answer:?}"
            );
            assert!(!text.contains(OUTSIDE) && !text.contains("root:x:0"), "{path}: {text}");
            tried += 1;
        }
    }
    for directory in ["", ".", "./", "%2e", "self", "fifo", "root", "link", "loop", "up"] {
        assert_eq!(get(&format!("{base}{directory}")).status, 404, "{directory}");
    }
    report("A12", &format!("{tried} addresses below a link, raw and encoded once and twice: 404, no listing"));
}

/// A13: parts of a file.
#[test]
fn ranges_cost_nothing_and_names_are_only_names() {
    let service = Service::start("ranges");
    let mut canary = service.canary();
    let mut blue = service.client("blue", "conversation");
    let code = "import os\n\
        open('big.bin', 'wb').write(bytes(range(256)) * (16 << 12))\n\
        for name in ('page.html', 'pic.svg', 'a\"b.html', 'x\\r\\nSet-Cookie: a=1.html', '\u{56fe}.svg', '\u{e9}.csv', '\u{202e}gpj.exe', 'a;b=c.js', '%2e%2e%2f.txt', 'a b.xhtml', \"it's.xml\", '.htaccess', 'x' * 200, 'index.wasm', '\\x7f\\x01.txt'):\n\
        \x20   open(name, 'w').write('<script>alert(1)</script>')\n\
        open(b'\\xff\\xfe.txt', 'w').write('no text')";
    let answer = blue.good("sandbox.run_code", json!({ "conversationId": "r", "language": "python", "code": code }));
    let files: Vec<(String, String)> = answer["files"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|file| Some((file["name"].as_str()?.to_owned(), file["url"].as_str()?.to_owned())))
        .collect();
    let target = |url: &str| url[url.find("/files/").unwrap()..].to_owned();
    let big = target(&files.iter().find(|(name, _)| name == "big.bin").unwrap().1);
    let nobody = service.account("nobody");
    let memory = service.memory();
    let size = 16_u64 << 20;
    let get = |range: &str, more: &[(&str, &str)]| {
        nobody.ask("GET", &big, &[&[("range", range)], more].concat(), b"").unwrap()
    };
    let part = get("bytes=256-511", &[]);
    assert_eq!((part.status, part.body.len(), part.body[0]), (206, 256, 0));
    assert_eq!(part.header("content-range"), Some(format!("bytes 256-511/{size}").as_str()));
    assert_eq!(get("bytes=-1", &[]).body, [255]);
    let many: String = (0..3000).map(|n| format!("{n}-{n},")).collect();
    for range in [
        "bytes=0-0,1-1",
        "bytes=0-,0-,0-,0-",
        &format!("bytes={}", many.trim_end_matches(',')),
        "bytes=5-1",
        "lines=1-2",
        "bytes=a-b",
        "bytes=--1",
        "bytes=",
        "bytes=0-99999999999999999999",
    ] {
        let answer = get(range, &[]);
        assert!(
            [200, 206, 416].contains(&answer.status) && answer.body.len() as u64 <= size,
            "{range:.60}: {}",
            answer.status
        );
    }
    for range in [format!("bytes={size}-"), "bytes=99999999999-".into(), "bytes=-0".into()] {
        let answer = get(&range, &[]);
        assert_eq!(
            (answer.status, answer.header("content-range")),
            (416, Some(format!("bytes */{size}").as_str())),
            "{range}"
        );
    }
    let stale = get("bytes=0-9", &[("if-range", "\"other\"")]);
    assert_eq!((stale.status, stale.body.len() as u64), (200, size));
    let huge: String = (0..10_000).map(|n| format!("{n}-{n},")).collect();
    assert_eq!(get(&format!("bytes={huge}"), &[]).status, 431);
    let after = service.memory();
    assert!(after < memory + (48 << 10), "{memory} kB, then {after} kB");
    report(
        "A13",
        "thousands of ranges, overlapping, negative, beyond the end, stale: one part, the whole, or 416; memory flat",
    );

    // A14, A15: raw heads, one header a line, nothing that a page could make of them.
    assert!(files.len() >= 15, "{files:?}");
    for (name, url) in &files {
        let mut wire = Wire::open(service.address).unwrap();
        wire.send("GET", &target(url), &[("connection", "close")], b"").unwrap();
        let head = wire.head().unwrap();
        assert_eq!(head.status, 200, "{name}");
        let names: Vec<String> = head.headers.iter().map(|(name, _)| name.to_ascii_lowercase()).collect();
        assert!(!names.iter().any(|name| name == "set-cookie"), "{head:?}");
        let disposition = head.header("content-disposition").unwrap();
        assert!(
            disposition.starts_with("attachment; filename=\"") && disposition.contains("filename*=UTF-8''"),
            "{disposition}"
        );
        assert!(disposition.bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{disposition}");
        assert_eq!(head.header("x-content-type-options"), Some("nosniff"));
        assert!(head.header("content-security-policy").unwrap().contains("sandbox"));
    }
    report("A14", &format!("{} hostile file names in Content-Disposition: no header is split", files.len()));
    report("A15", "pages and pictures with scripts: attachment, nosniff, a policy that runs nothing");
    canary.sings("ranges");
    service.finish();
}
