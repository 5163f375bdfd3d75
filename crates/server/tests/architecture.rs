//! The shape of the program, held: which crate may import which, who speaks MCP, where `unsafe` and the environment are.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Each crate and what of ours it may import. `testkit` is for tests only, so nobody may import it but as a dev-dependency.
const ARROWS: &[(&str, &[&str])] = &[
    ("sandpool-proto", &[]),
    ("sandpool-jail", &[]),
    ("sandpool-browser", &["sandpool-proto", "sandpool-text"]),
    ("sandpool-egress", &[]),
    ("sandpool-guest", &["sandpool-browser", "sandpool-jail", "sandpool-proto"]),
    ("sandpool-zygote", &["sandpool-jail"]),
    ("sandpool-sandbox", &["sandpool-jail"]),
    ("sandpool-text", &[]),
    ("sandpool-engine", &["sandpool-egress", "sandpool-proto", "sandpool-sandbox", "sandpool-text"]),
    ("sandpool-dialects", &["sandpool-engine", "sandpool-text"]),
    ("sandpool-runtimes", &["sandpool-engine", "sandpool-text"]),
    ("sandpool-mcp", &["sandpool-engine", "sandpool-text"]),
    ("sandpool-telemetry", &["sandpool-dialects", "sandpool-engine", "sandpool-mcp", "sandpool-text"]),
    (
        "sandpool-files",
        &["sandpool-dialects", "sandpool-engine", "sandpool-mcp", "sandpool-telemetry", "sandpool-text"],
    ),
    (
        "sandpool",
        &[
            "sandpool-dialects",
            "sandpool-egress",
            "sandpool-engine",
            "sandpool-files",
            "sandpool-mcp",
            "sandpool-runtimes",
            "sandpool-sandbox",
            "sandpool-telemetry",
            "sandpool-text",
        ],
    ),
    ("sandpool-bench", &[]),
    (
        "sandpool-testkit",
        &["sandpool-dialects", "sandpool-engine", "sandpool-guest", "sandpool-proto", "sandpool-sandbox"],
    ),
];

/// Libraries that only these crates may know.
const OWNED: &[(&str, &[&str])] = &[
    ("rmcp", &["sandpool", "sandpool-mcp"]),
    ("axum", &["sandpool", "sandpool-files", "sandpool-mcp"]),
    ("clap", &["sandpool", "sandpool-bench"]),
    ("oxc", &["sandpool-guest"]),
    ("landlock", &["sandpool-jail"]),
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// Of each crate of the workspace, the names of what it imports outside of tests.
#[allow(clippy::disallowed_methods, reason = "the test asks cargo")]
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline", "--locked"])
        .current_dir(workspace())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let name = |value: &serde_json::Value| value["name"].as_str().unwrap().to_owned();
    let packages = metadata["packages"].as_array().unwrap().iter();
    packages
        .map(|package| {
            let all = package["dependencies"].as_array().unwrap().iter();
            (name(package), all.filter(|one| one["kind"] != "dev").map(name).collect())
        })
        .collect()
}

#[test]
fn each_crate_imports_only_what_it_may() {
    let ours: BTreeMap<&str, &[&str]> = ARROWS.iter().copied().collect();
    let imports = imports();
    let known: Vec<&str> = imports.keys().map(String::as_str).collect();
    assert_eq!(known, ours.keys().copied().collect::<Vec<_>>(), "a crate is missing in the table, or gone");
    for (krate, imported) in &imports {
        let of_ours = imported.iter().map(String::as_str).filter(|name| ours.contains_key(name));
        let forbidden: Vec<&str> = of_ours.filter(|name| !ours[krate.as_str()].contains(name)).collect();
        assert_eq!(forbidden, Vec::<&str>::new(), "`{krate}` must not import these");
    }
}

#[test]
fn a_vocabulary_of_the_outside_is_known_in_one_crate_only() {
    for (krate, imported) in imports() {
        for (library, owners) in OWNED {
            assert!(
                !imported.contains(*library) || owners.contains(&krate.as_str()),
                "`{krate}` imports `{library}`, which belongs to {owners:?}"
            );
        }
    }
}

#[test]
fn unsafe_code_is_in_jail_and_zygote_and_nowhere_else() {
    let marks = ["unsafe {", "unsafe fn", "unsafe impl", "unsafe extern", "allow(unsafe_code"];
    let home = |path: &Path| {
        // The probe attacks a sandbox from inside with raw system calls; it is linked into nothing that is shipped.
        ["crates/jail/", "crates/zygote/", "crates/testkit/src/bin/probe/"].iter().any(|home| path.starts_with(home))
    };
    assert_eq!(files_with(&marks, home), Vec::<PathBuf>::new());
}

#[test]
fn the_environment_is_read_in_one_file() {
    let home = |path: &Path| {
        path == Path::new("crates/server/src/config/environment.rs")
            // The benchmark is a program of its own.
            || path == Path::new("crates/bench/src/subject.rs")
            || path.ends_with("build.rs")
            // Tests are told where the prepared runtimes are.
            || path.components().any(|part| part.as_os_str() == "tests")
    };
    assert_eq!(files_with(&["env::var(", "env::var_os(", "env::vars"], home), Vec::<PathBuf>::new());
}

/// A name that is searched for leads to few places.
#[test]
fn no_type_name_is_defined_in_more_than_three_places() {
    // Each tool and each command has arguments and an output.
    const EVERYWHERE: [&str; 2] = ["Args", "Output"];
    let mut places: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
    for (path, line) in production() {
        if let Some(name) = defined(&line) {
            places.entry(name).or_default().push(path);
        }
    }
    places.retain(|name, at| at.len() > 3 && !EVERYWHERE.contains(&name.as_str()));
    assert_eq!(places, BTreeMap::new(), "rename some of them; docs/glossary.md has the words");
}

/// An audit of a crate reads its public items. `scripts/measure` has the rule and its exceptions.
#[test]
#[allow(clippy::disallowed_methods, reason = "the test runs a script of this repository")]
fn what_is_public_is_used_by_another_crate() {
    let output = Command::new(workspace().join("scripts/measure")).arg("--public").output().unwrap();
    let (listed, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "make these private or `pub(crate)`:\n{listed}{errors}");
}

/// `docs/walk.md` names functions as `crate::module::Type::function`.
#[test]
fn what_the_walk_names_exists() {
    let page = std::fs::read_to_string(workspace().join("docs/walk.md")).unwrap();
    let crates = [
        "server",
        "files",
        "telemetry",
        "dialects",
        "mcp",
        "text",
        "engine",
        "proto",
        "guest",
        "jail",
        "sandbox",
        "egress",
    ];
    let (mut named, lines) = (0, production());
    for name in page.split('`').skip(1).step_by(2).filter(|name| !name.contains([' ', '{', '/'])) {
        let parts: Vec<&str> = name.split("::").collect();
        if parts.len() < 2 || !crates.contains(&parts[0]) {
            continue;
        }
        let modules: Vec<&str> = parts[1..].iter().copied().take_while(|part| is_module(part, &parts)).collect();
        let below = PathBuf::from("crates").join(parts[0]).join("src").join(modules.join("/"));
        let in_module = |path: &Path| path.starts_with(&below) || path.with_extension("") == below;
        for part in &parts[1 + modules.len()..] {
            let forms = [
                format!("fn {part}("),
                format!("fn {part}<"),
                format!("struct {part}"),
                format!("enum {part}"),
                format!("trait {part}"),
            ];
            let exists =
                lines.iter().any(|(path, line)| in_module(path) && forms.iter().any(|form| line.contains(form)));
            assert!(exists, "docs/walk.md: there is no `{part}` of `{name}` in {}", below.display());
            named += 1;
        }
    }
    assert!(named > 100, "{named}");
}

/// A part of a path is a module if a file or a directory of this name is there.
fn is_module(part: &str, parts: &[&str]) -> bool {
    let Some(at) = parts.iter().position(|other| other == &part) else { return false };
    let path = workspace().join("crates").join(parts[0]).join("src").join(parts[1..=at].join("/"));
    path.is_dir() || path.with_extension("rs").is_file()
}

/// The name of the type that this line defines, if it does. Types of traits' implementations are indented.
fn defined(line: &str) -> Option<String> {
    let mut words = line.trim_start().split([' ', '<', '(', ';', '{', ':', '=']).filter(|word| !word.is_empty());
    let mut word = words.next()?;
    if word == "pub" {
        word = words.find(|word| !word.ends_with(')') && !["crate", "super", "in"].contains(word))?;
    }
    let is_indented = line.starts_with(' ');
    let defines = ["struct", "enum", "trait"].contains(&word) || (word == "type" && !is_indented);
    let name = words.next().filter(|_| defines)?;
    name.starts_with(char::is_uppercase).then(|| name.to_owned())
}

/// The lines of code that are shipped: without tests, and without what is for development.
fn production() -> Vec<(PathBuf, String)> {
    let mut tested: BTreeSet<PathBuf> = BTreeSet::new();
    let is_shipped = |path: &Path| {
        path.components().nth(2).is_some_and(|part| part.as_os_str() == "src")
            && !path.starts_with("crates/testkit")
            && !path.ends_with("tests.rs")
    };
    let mut lines = Vec::new();
    for (path, line) in code().into_iter().filter(|(path, _)| is_shipped(path)) {
        // Tests stand at the end of a file.
        if line.starts_with("mod tests {") {
            tested.insert(path.clone());
        }
        if !tested.contains(&path) {
            lines.push((path, line));
        }
    }
    lines
}

/// W18: what a message tells the operator to set can be set.
#[test]
fn w18_a_setting_that_a_message_names_exists() {
    let of_tenants = ["calls_per_second"];
    let known = |key: &str| {
        server::config::settings::keys().any(|known| known == key || known.ends_with(&format!(".{key}")))
            || of_tenants.contains(&key)
    };
    let mut named = 0;
    for (path, line) in code().into_iter().filter(|(path, _)| path.components().any(|part| part.as_os_str() == "src")) {
        for (key, _) in line.split('`').skip(1).step_by(2).filter_map(|quoted| quoted.split_once(" = ")) {
            if key.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '.') {
                assert!(known(key), "{}: there is no setting `{key}`: {line}", path.display());
                named += 1;
            }
        }
    }
    assert!(named > 0);
}

/// Rust files below `crates/` that hold one of the marks outside a comment, but for those excused.
fn files_with(marks: &[&str], excused: impl Fn(&Path) -> bool) -> Vec<PathBuf> {
    let marked = |line: &str| marks.iter().any(|mark| line.contains(mark));
    let mut found: Vec<PathBuf> =
        code().into_iter().filter(|(path, line)| !excused(path) && marked(line)).map(|(path, _)| path).collect();
    found.sort();
    found.dedup();
    found
}

/// The lines of Rust below `crates/` that are no comments, with their files.
fn code() -> Vec<(PathBuf, String)> {
    let root = workspace();
    let mut todo = vec![root.join("crates")];
    let mut found = Vec::new();
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            let name = path.strip_prefix(&root).unwrap().to_owned();
            if entry.file_type().unwrap().is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs") && !name.ends_with("tests/architecture.rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                found.extend(code.map(|line| (name.clone(), line.to_owned())));
            }
        }
    }
    found
}
