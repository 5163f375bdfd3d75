//! The documents, held: tests, files, rows of the catalogue, functions and links that they name exist.

mod settings;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Pages that programs write, and pages of other times: their words are not looked up, only their links.
const NOT_OURS: [&str; 2] = ["CHANGELOG.md", "docs/hostile.md"];

#[test]
fn every_test_that_a_document_cites_exists() {
    let (tests, code) = (Tests::read(), Code::read());
    let (mut cited, mut wrong) = (0, Vec::new());
    for page in pages() {
        for cell in page.cells() {
            let (mut last, mut row) = (None, None);
            // `some_name_…` explains how tests are named.
            for (before, token) in cell.tokens().into_iter().filter(|(_, token)| !token.contains("some_name")) {
                row = probed(before).or(row.filter(|_| !before.contains(';')));
                let Some(citation) = Citation::parse(token, last.as_ref(), cell.names_tests(), &tests) else {
                    if cell.names_tests() && !code.has(row, token) {
                        wrong.push(format!("{}:{}: nothing is called `{token}`", page.name, cell.line));
                    }
                    continue;
                };
                (cited, row) = (cited + 1, None);
                if !tests.has(&citation) {
                    wrong.push(format!("{}:{}: there is no test `{token}`", page.name, cell.line));
                }
                last = Some(citation);
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(cited > 500, "{cited}");
}

#[test]
fn a_made_up_citation_is_found() {
    let (tests, code) = (Tests::read(), Code::read());
    let has = |token: &str, last: Option<&Citation>| {
        Citation::parse(token, last, true, &tests).is_some_and(|citation| tests.has(&citation))
    };
    for real in
        ["engine::runs a_guest_silent_past_…", "jail cgroup::tests", "server::http protocol::", "real data::w26_…"]
    {
        assert!(has(real, None), "{real}");
    }
    for made_up in [
        "engine::runs a_guest_that_sings_…",
        "engine::songs a_guest_silent_past_…",
        "engine a_guest_silent_past_…",
        "jail cgroup::songs",
        "server::http songs::",
        "real sings_…",
        "a_guest_that_sings_…",
    ] {
        assert!(!has(made_up, None), "{made_up}");
    }
    let last = Citation::parse("server::http protocol::", None, true, &tests);
    assert!(has("sessions::a_foreign_session_…", last.as_ref()));
    assert!(!has("a_guest_silent_past_…", last.as_ref()), "another binary's");
    assert!(code.has(probed("probe K01: "), "userns") && !code.has(probed(", probe K02: "), "userns"));
    assert!(code.has(probed("probe "), "userns") && !code.has(probed("probe "), "sings"));
    assert!(code.has(None, "make bench") && !code.has(None, "make songs") && !code.has(None, "sings_loudly"));
}

#[test]
fn every_row_that_a_document_cites_is_in_the_catalogue() {
    let catalogue = pages().into_iter().find(|page| page.name == "docs/hostile-catalogue.md").unwrap();
    let rows: BTreeSet<&str> = catalogue.text.lines().filter_map(|line| line.strip_prefix("| ")?.get(..3)).collect();
    let is_row = |word: &&str| {
        word.len() == 3
            && word.starts_with(['K', 'R', 'G', 'X', 'A', 'N', 'B', 'F', 'S', 'W'])
            && word[1..].chars().all(|c| c.is_ascii_digit())
    };
    let mut cited = 0;
    for page in pages() {
        // The findings of the audits have numbers that look the same.
        for cell in page.cells().iter().filter(|cell| cell.title != "audit") {
            for row in words_of(&cell.text).filter(is_row) {
                assert!(rows.contains(row), "{}:{}: the catalogue has no row {row}", page.name, cell.line);
                cited += 1;
            }
        }
    }
    assert!(cited > 400, "{cited}");
}

#[test]
fn every_file_that_a_document_names_exists() {
    let root = workspace();
    let (mut named, mut wrong) = (0, Vec::new());
    for page in pages() {
        for cell in page.cells() {
            for (_, token) in cell.tokens() {
                let Some(path) = named_file(token) else { continue };
                named += 1;
                if !path.iter().any(|path| root.join(path).exists()) {
                    wrong.push(format!("{}:{}: there is no `{token}`", page.name, cell.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(named > 200, "{named}");
}

/// Names such as `Tenancies::of` and `egress::Gate`; `docs/walk.md` has a stricter test.
#[test]
fn every_function_and_type_that_a_document_names_exists() {
    let code = Code::read();
    let is_word = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_alphanumeric() || c == '_');
    let (mut named, mut wrong) = (0, Vec::new());
    for page in pages() {
        for cell in page.cells().into_iter().filter(|cell| !cell.names_tests()) {
            for (_, token) in cell.tokens() {
                let parts: Vec<&str> = token.trim_end_matches("()").split("::").collect();
                if parts.len() < 2 || !parts.iter().copied().all(is_word) {
                    continue;
                }
                named += 1;
                let is_example = *token == *"crate::module::Type::function";
                if !is_example && parts.iter().any(|part| !code.defined.contains(*part)) {
                    wrong.push(format!("{}:{}: nothing is called `{token}`", page.name, cell.line));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(named > 150, "{named}");
}

#[test]
fn every_link_of_a_document_leads_somewhere() {
    let root = workspace();
    let mut headings: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
    let (mut links, mut wrong) = (0, Vec::new());
    for page in all_pages() {
        for (number, target) in page.links() {
            let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = match file {
                "" => root.join(&page.name),
                file => root.join(&page.name).parent().unwrap().join(file),
            };
            links += 1;
            let found = path.canonicalize().is_ok_and(|path| {
                anchor.is_empty() || headings.entry(path.clone()).or_insert_with(|| anchors(&path)).contains(anchor)
            });
            if !found {
                wrong.push(format!("{}:{number}: `{target}` leads nowhere", page.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(links > 200, "{links}");
}

#[test]
fn every_decision_is_on_the_map_and_in_the_index_under_its_title() {
    let pages = all_pages();
    let text = |name: &str| &pages.iter().find(|page| page.name == name).unwrap().text;
    let (index, map) = (text("docs/decisions/README.md"), text("ARCHITECTURE.md"));
    let mut count = 0;
    for page in &pages {
        let Some(file) = page.name.strip_prefix("docs/decisions/").filter(|file| *file != "README.md") else {
            continue;
        };
        let number = &file[..3];
        let heading = page.text.lines().next().unwrap();
        let title = heading.strip_prefix(&format!("# {number}. ")).unwrap_or_else(|| panic!("{file}: {heading}"));
        assert!(
            index.contains(&format!("- [{number}]({file}) {title}\n")),
            "the index does not list {file} as `{title}`"
        );
        assert!(map.contains(&format!("[{number}](docs/{})", &page.name[5..])), "ARCHITECTURE.md does not link {file}");
        for part in ["\n## Context\n", "\n## Decision\n", "\n## Consequences\n"] {
            assert!(page.text.contains(part), "{file} has no `{}`", part.trim());
        }
        count += 1;
    }
    assert!(count > 30, "{count}");
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

/// A document of the repository.
struct Page {
    /// Its path from the root.
    name: String,
    text: String,
}

/// A cell of a table, or a paragraph: a citation in it may continue the one before.
struct Cell {
    line: usize,
    text: String,
    /// The title of its column; nothing for a paragraph.
    title: String,
}

fn all_pages() -> Vec<Page> {
    let files = files_below(&workspace(), "md");
    let read = |(name, text)| Page { name, text };
    files.into_iter().filter(|(name, _)| !name.contains("/fixtures/")).map(read).collect()
}

fn pages() -> Vec<Page> {
    all_pages().into_iter().filter(|page| !NOT_OURS.contains(&page.name.as_str())).collect()
}

impl Page {
    fn cells(&self) -> Vec<Cell> {
        let (mut cells, mut fenced, mut columns) = (Vec::<Cell>::new(), false, Vec::new());
        let mut continues = false;
        for (number, line) in self.text.lines().enumerate() {
            let line_number = number + 1;
            fenced ^= line.trim_start().starts_with("```");
            if fenced || line.trim().is_empty() {
                continues = false;
                columns.clear();
            } else if let Some(row) = line.strip_prefix('|') {
                let row: Vec<&str> = row.trim_end().trim_end_matches('|').split('|').map(str::trim).collect();
                if columns.is_empty() {
                    columns.clone_from(&row);
                }
                cells.extend(row.iter().enumerate().map(|(column, text)| Cell {
                    line: line_number,
                    text: (*text).to_owned(),
                    title: columns.get(column).copied().unwrap_or_default().to_owned(),
                }));
                continues = false;
            } else if let Some(cell) = cells.last_mut().filter(|_| continues) {
                cell.text += "\n";
                cell.text += line;
            } else {
                cells.push(Cell { line: line_number, text: line.to_owned(), title: String::new() });
                continues = true;
            }
        }
        cells
    }

    /// Targets of relative links, with the numbers of their lines.
    fn links(&self) -> Vec<(usize, &str)> {
        let lines = self.text.lines().enumerate();
        let targets = lines.flat_map(|(number, line)| {
            let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
            targets.map(move |(target, _)| (number + 1, target))
        });
        targets.filter(|(_, target)| !target.contains("://") && !target.contains(' ')).collect()
    }
}

impl Cell {
    /// Whether this is a column of tests, where every quoted word has to be found.
    fn names_tests(&self) -> bool {
        ["checked by", "check", "test"].contains(&self.title.as_str())
    }

    /// What stands in backticks, each with the text before it.
    fn tokens(&self) -> Vec<(&str, &str)> {
        let parts: Vec<&str> = self.text.split('`').collect();
        parts.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
    }
}

/// The anchors of a page, as GitHub makes them of headings.
fn anchors(path: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(path).unwrap();
    let (mut fenced, mut anchors) = (false, BTreeSet::new());
    for line in text.lines() {
        fenced ^= line.starts_with("```");
        anchors.extend(line.split("<a id=\"").skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        let Some(heading) = line.strip_prefix('#').filter(|_| !fenced) else { continue };
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        anchors.insert(kept.map(|c| if c == ' ' { '-' } else { c }).collect());
    }
    anchors
}

/// Where a file may be that a document names, if the word is the name of a file.
fn named_file(token: &str) -> Option<Vec<PathBuf>> {
    if token.contains(['<', '*', ' ', '…', '{', '$', ':', '`']) {
        return None;
    }
    let (first, rest) = token.split_once('/')?;
    if ["crates", "scripts", "tests", "docs", "contrib", ".ci", ".config", ".github"].contains(&first) {
        return Some(vec![token.into()]);
    }
    let krate = Path::new("crates").join(first);
    let is_source = !first.is_empty() && workspace().join(&krate).is_dir() && !rest.is_empty();
    // `engine/context.rs` stands for `crates/engine/src/context.rs`, and `guest/kernels` for `crates/guest/kernels`.
    is_source
        .then(|| vec![krate.join("src").join(rest), krate.join("src").join(format!("{rest}.rs")), krate.join(rest)])
}

/// Crate and binary of a test; unit tests have no binary.
type Home = (String, Option<String>);

/// A test, or several with the beginning of their names, or a whole module or binary.
#[derive(Clone)]
struct Citation {
    /// Where the test is, if the document says so.
    home: Option<Home>,
    /// Modules and name; `…` stands for anything.
    path: String,
}

impl Citation {
    /// Reads a quoted word as SPECIFICATION.md explains; `None` if it is none of these forms.
    fn parse(token: &str, last: Option<&Self>, names_tests: bool, tests: &Tests) -> Option<Self> {
        let (first, path) = token.split_once(' ').unwrap_or((token, ""));
        let (krate, binary) = first.split_once("::").map_or((first, None), |(krate, binary)| (krate, Some(binary)));
        let cites = |home: (&str, Option<&str>)| {
            let home = Some((home.0.to_owned(), home.1.map(str::to_owned)));
            Some(Self { home, path: path.to_owned() })
        };
        let is_path =
            |path: &str| !path.contains([' ', '/', '(', '.', '-']) && (path.contains("::") || path.contains('_'));
        if ["real", "service"].contains(&first) {
            return cites(("server", Some(first)));
        }
        if tests.crates.contains(krate) {
            let is_binary =
                binary.is_some_and(|binary| tests.binaries.contains(&(krate.to_owned(), binary.to_owned())));
            match binary {
                Some(binary) if is_binary || is_path(path) => return cites((krate, Some(binary))),
                None if is_path(path) => return cites((krate, None)),
                _ => {}
            }
        }
        let is_whole_name = token.matches('_').count() > 2 && last.is_some();
        let is_test = token.ends_with("_…") || (names_tests && (token.contains("::") || is_whole_name));
        let continues = is_path(token) && is_test && token.chars().all(|c| !c.is_uppercase());
        continues.then(|| Self { home: last.and_then(|last| last.home.clone()), path: token.to_owned() })
    }
}

/// Every test of the workspace: crate, binary, and modules with the name.
struct Tests {
    crates: BTreeSet<String>,
    binaries: BTreeSet<(String, String)>,
    all: Vec<(Home, Vec<String>)>,
}

impl Tests {
    fn read() -> Self {
        let files = files_below(&workspace().join("crates"), "rs");
        let split = |name: &str| name.split('/').map(|part| part.trim_end_matches(".rs").to_owned()).collect();
        let files: Vec<(Vec<String>, String)> = files.into_iter().map(|(name, text)| (split(&name), text)).collect();
        let crates = files.iter().map(|(path, _)| path[0].clone()).collect();
        let is_root =
            |path: &[String]| path[1] == "tests" && (path.len() == 3 || (path.len() == 4 && path[3] == "main"));
        let roots: Vec<_> = files.iter().filter(|(path, _)| is_root(path)).collect();
        let binaries: BTreeSet<_> = roots.iter().map(|(path, _)| (path[0].clone(), path[2].clone())).collect();
        let mut all = Vec::new();
        for (path, text) in &files {
            let (krate, kind, below) = (&path[0], &path[1], &path[2..]);
            let modules = |from: usize| -> Vec<String> {
                let named = |part: &&String| !["main", "mod", "lib"].contains(&part.as_str());
                below[from..].iter().filter(named).cloned().collect()
            };
            let homes: Vec<(Option<String>, Vec<String>)> = match kind.as_str() {
                "src" => vec![(None, modules(0))],
                "tests" if binaries.contains(&(krate.clone(), below[0].clone())) => {
                    vec![(Some(below[0].clone()), modules(1))]
                }
                // A module that several binaries have.
                "tests" => {
                    let of_crate = roots.iter().filter(|(root, _)| root[0] == *krate);
                    let with = of_crate.filter(|(_, text)| text.contains(&format!("mod {};", below[0])));
                    with.map(|(root, _)| (Some(root[2].clone()), modules(0))).collect()
                }
                _ => Vec::new(),
            };
            for name in tests_of(text) {
                let with_name = |modules: &[String]| modules.iter().chain(&name).cloned().collect();
                all.extend(homes.iter().map(|(home, modules)| ((krate.clone(), home.clone()), with_name(modules))));
            }
        }
        Self { crates, binaries, all }
    }

    fn has(&self, citation: &Citation) -> bool {
        let pattern = citation.path.trim_end_matches("::");
        let mut candidates =
            self.all.iter().filter(|(home, _)| citation.home.as_ref().is_none_or(|cited| cited == home));
        // A document may leave out the first modules; without a name it means all tests of a module.
        candidates.any(|(_, path)| {
            let ends = |from: usize| (from + 1..=path.len()).map(move |to| (from, to));
            let mut parts = (0..path.len()).flat_map(ends);
            pattern.is_empty() || parts.any(|(from, to)| matches(pattern, &path[from..to].join("::")))
        })
    }
}

/// The tests in a file, with the modules around them.
fn tests_of(text: &str) -> Vec<Vec<String>> {
    let (mut tests, mut modules, mut is_test) = (Vec::new(), Vec::<(usize, String)>::new(), false);
    for line in text.lines() {
        let code = line.trim_start();
        let indent = line.len() - code.len();
        let name = |after: &str| {
            let (_, rest) = code.split_once(after)?;
            Some(rest.split(|c: char| !c.is_alphanumeric() && c != '_').next()?.to_owned())
        };
        if ["mod ", "pub(crate) mod "].iter().any(|opens| code.starts_with(opens)) && code.ends_with('{') {
            modules.extend(name("mod ").map(|name| (indent, name)));
        } else if code == "}" && modules.last().is_some_and(|(opened, _)| *opened == indent) {
            modules.pop();
        } else if code.starts_with("#[test]") || code.starts_with("#[tokio::test") {
            is_test = true;
        } else if is_test && let Some(name) = name("fn ") {
            tests.push(modules.iter().map(|(_, module)| module.clone()).chain([name]).collect());
            is_test = false;
        }
    }
    tests
}

fn matches(pattern: &str, text: &str) -> bool {
    let mut parts = pattern.split('…');
    let Some(mut rest) = text.strip_prefix(parts.next().unwrap_or_default()) else { return false };
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    for part in parts {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

/// The text of everything that is no document.
struct Code {
    probe: String,
    kernels: String,
    makefile: String,
    words: BTreeSet<String>,
    /// Names of functions, types, variants and modules.
    defined: BTreeSet<String>,
}

impl Code {
    fn read() -> Self {
        let root = workspace();
        let (mut words, mut defined) = (BTreeSet::new(), BTreeSet::new());
        let extensions = ["rs", "py", "cjs", "js", "toml", "snap"];
        let below = |ext| files_below(&root.join("crates"), ext);
        let makefile = std::fs::read_to_string(root.join("Makefile")).unwrap();
        let manifest = std::fs::read_to_string(root.join("Cargo.toml")).unwrap();
        for (name, text) in extensions.into_iter().flat_map(below).chain([(String::new(), manifest)]) {
            // The name of a snapshot is that of its file.
            words.extend(name.split(['/', '.']).flat_map(|part| part.split("__")).map(str::to_owned));
            defined.extend(name.split(['/', '.']).map(str::to_owned));
            // The names that this file makes up.
            if name.ends_with("documents/main.rs") {
                continue;
            }
            defined.extend(text.lines().flat_map(definitions).map(str::to_owned));
            words.extend(words_of(&text).map(str::to_owned));
        }
        let probe = std::fs::read_to_string(root.join("crates/testkit/src/probe.rs")).unwrap();
        let kernels =
            files_below(&root.join("crates/guest/kernels/tests"), "py").into_iter().map(|(_, text)| text).collect();
        Self { probe, kernels, makefile, words, defined }
    }

    /// Whether a word in a column of tests stands for something that is no test of Rust: an attempt of the probe in this row,
    /// a target of make, a file, a case of the kernels, or a name in the code.
    fn has(&self, row: Option<&str>, token: &str) -> bool {
        let exists = |path: &Path| workspace().join(path).exists();
        match row {
            Some("") => return self.probe.contains(&format!("\"{token}\"")),
            Some(row) => return self.probe.contains(&format!("attempt(\"{row}\", \"{token}\"")),
            None => {}
        }
        if let Some(target) = token.strip_prefix("make ") {
            return self.makefile.contains(&format!("\n{target}:"));
        }
        if let Some(paths) = named_file(token) {
            return paths.iter().any(|path| exists(path));
        }
        let is_case = self.kernels.contains(token) || self.kernels.contains(&token.replace(' ', "_"));
        let is_file = exists(Path::new(token)) || exists(&Path::new("crates/guest").join(token));
        is_case || is_file || words_of(token).all(|word| self.words.contains(word))
    }
}

/// The row of the probe that a text announces; empty if it announces attempts without their row.
fn probed(before: &str) -> Option<&str> {
    let (_, after) = before.rsplit_once("probe ")?;
    Some(words_of(after).find(|word| *word != "row").unwrap_or_default())
}

fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty())
}

/// What a line of Rust or Python defines: the word after a keyword, or a variant.
fn definitions(line: &str) -> Option<&str> {
    const KEYWORDS: [&str; 10] = ["fn", "struct", "enum", "trait", "type", "const", "static", "mod", "def", "class"];
    let mut words = words_of(line);
    let first = words.next()?;
    if first.starts_with(char::is_uppercase) && line.starts_with(' ') {
        return Some(first);
    }
    [first].into_iter().chain(words.by_ref()).find(|word| KEYWORDS.contains(word))?;
    words.next()
}

/// The files below a directory whose names end like this, by their paths from there. What was built is not among them.
fn files_below(directory: &Path, extension: &str) -> Vec<(String, String)> {
    let (mut todo, mut found) = (vec![directory.to_owned()], Vec::new());
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                if !["target", ".git", "node_modules"].iter().any(|skipped| path.ends_with(skipped)) {
                    todo.push(path);
                }
            } else if path.extension().is_some_and(|ext| ext == extension) {
                let text = std::fs::read_to_string(&path).unwrap();
                found.push((path.strip_prefix(directory).unwrap().to_str().unwrap().to_owned(), text));
            }
        }
    }
    found.sort();
    found
}

/// Rules and dashboards name metrics that a server has.
#[test]
fn every_metric_that_a_deployment_file_names_exists() {
    let root = workspace();
    let read = |path: &str| std::fs::read_to_string(root.join(path)).unwrap();
    let page = read("crates/telemetry/src/snapshots/telemetry__metrics__tests__the_whole_page.snap");
    let exist: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let deployment = ["deploy/prometheus/sandpool.rules.yml", "deploy/grafana/sandpool.json"];
    for path in deployment.into_iter().chain(["docs/operating.md", "docs/operating-reference.md"]) {
        let text = read(path);
        let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
        let metrics = words.filter(|word| word.starts_with("sandpool_") || word.starts_with("process_"));
        let base = |word: &str| word.strip_suffix("_bucket").unwrap_or(word).to_owned();
        let wrong: Vec<&str> = metrics.clone().filter(|word| !exist.contains(&*base(word))).collect();
        assert!(metrics.count() > 5 && wrong.is_empty(), "{path}: {wrong:?}");
    }
}

/// A dashboard that is no JSON is loaded by nobody.
#[test]
fn the_dashboard_is_json_with_queries() {
    let text = std::fs::read_to_string(workspace().join("deploy/grafana/sandpool.json")).unwrap();
    let dashboard: serde_json::Value = serde_json::from_str(&text).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() > 5);
    for panel in panels {
        assert!(panel["targets"][0]["expr"].as_str().is_some_and(|query| query.contains("sandpool_")), "{panel}");
    }
}
