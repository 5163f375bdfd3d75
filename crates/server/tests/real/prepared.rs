//! What `sandpool setup` prepares: the packages, the pictures of charts, the font, and packages that the operator adds.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use testkit::client::{Client, ToolResult};

use crate::packages::Registry;
use crate::support::{StateDir, stdio_of};

fn start(state: &StateDir) -> Client {
    Client::start(stdio_of("sandpool", &state.0, ""))
}

/// Runs a cell, once the server is ready.
fn python(client: &mut Client, code: &str) -> ToolResult {
    let mut run = || client.call("run_code", json!({ "code": code, "timeout": 120 }));
    let ran = (0..20).map(|_| run()).find(|ran| ran.json()["status"] != "not_run");
    ran.expect("the server becomes ready")
}

/// The last value of a cell that must succeed and print nothing to stderr.
fn value(client: &mut Client, code: &str) -> String {
    let ran = python(client, code);
    assert_eq!((ran.json()["success"].as_bool(), ran.json()["stderr"].as_str()), (Some(true), Some("")), "{}", ran.0);
    ran.field("result")
}

fn data(image: &Value) -> &str {
    image["data"].as_str().unwrap()
}

/// The names of the files to which an answer links.
fn linked(ran: &ToolResult) -> Vec<&str> {
    let blocks = ran.0["content"].as_array().unwrap().iter().filter(|block| block["type"] == "resource_link");
    blocks.map(|block| block["name"].as_str().unwrap()).collect()
}

#[test]
fn the_packages_that_people_expect_are_there() {
    let state = StateDir::new("expected");
    let mut client = start(&state);
    let frame = "import pandas as pd, io\ndf = pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})\n";
    let markdown = value(&mut client, &format!("{frame}df.to_markdown(index=False)"));
    assert_eq!(markdown, "'|   a | b   |\\n|----:|:----|\\n|   1 | x   |\\n|   2 | y   |'");
    let parquet = "df.to_parquet('t.parquet'); pd.read_parquet('t.parquet').values.tolist() == df.values.tolist()";
    assert_eq!(value(&mut client, parquet), "True");
    let html = "pd.read_html(io.StringIO(df.style.to_html()))[0].shape, pd.read_html(io.StringIO(df.to_html()), flavor='bs4')[0].shape";
    assert_eq!(value(&mut client, html), "((2, 3), (2, 3))");
    let learn = "from sklearn.linear_model import LinearRegression\nround(LinearRegression().fit([[1], [2]], [2, 4]).coef_[0], 6)";
    assert_eq!(value(&mut client, learn), "np.float64(2.0)");
    let modules = "import altair, bs4, html5lib, jinja2, lxml, plotly, psycopg2, seaborn, tqdm\npsycopg2.extensions.quote_ident.__name__";
    assert_eq!(value(&mut client, modules), "'quote_ident'");

    let javascript = "import Papa from 'papaparse';\nimport csv from 'csv-parser';\nconst postgres = require('postgres');\n\
                      [Papa.parse('a,b').data[0][1], typeof csv, typeof postgres, (await import('postgres')).default.name]";
    let ran = client.call("run_code", json!({ "code": javascript, "language": "javascript" }));
    assert_eq!(ran.field("result"), "[ 'b', 'function', 'function', 'Postgres' ]", "{}", ran.0);
    assert!(client.finish().success());
}

#[test]
fn charts_come_back_as_pictures_and_as_pages() {
    let state = StateDir::new("charts");
    let mut client = start(&state);
    // Whatever directory the code changes to.
    let altair = "import os, altair as alt, pandas as pd\nos.chdir('/tmp')\n\
                  alt.Chart(pd.DataFrame({'a': ['中', '文'], 'b': [1, 2]})).mark_bar().encode(x='a', y='b')";
    let ran = python(&mut client, altair);
    assert_eq!((ran.images().len(), linked(&ran)), (1, vec!["chart-1.html"]), "{}", ran.0);
    let vega =
        "{'data': {'values': [{'a': 1}]}, 'mark': 'point', 'encoding': {'x': {'field': 'a', 'type': 'quantitative'}}}";
    let ran = python(&mut client, &format!("display({{'application/vnd.vegalite.v5+json': {vega}}}, raw=True)"));
    assert_eq!((ran.images().len(), linked(&ran)), (1, vec!["chart-2.html"]), "{}", ran.0);
    let drawing = "from IPython.display import SVG\ndef drawn(text):\n    \
                   return SVG(f'<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"60\" height=\"60\"><text y=\"40\" font-size=\"40\">{text}</text></svg>')\n\
                   display(drawn('中'), drawn('글'))\ndrawn('語')";
    let ran = python(&mut client, drawing);
    let different: BTreeSet<&str> = ran.images().into_iter().map(data).collect();
    let pages = vec!["chart-3.html", "chart-4.html", "chart-5.html"];
    assert_eq!((different.len(), linked(&ran)), (3, pages), "{}", ran.0);

    let plotly = "import plotly.graph_objects as go\nfig = go.Figure(go.Bar(x=['</script>', '中文'], y=[1, 2]))\nfig";
    let ran = python(&mut client, plotly);
    assert_eq!(linked(&ran), ["chart-6.html"], "{}", ran.0);
    if Path::new("/usr/lib/chromium/chromium-headless-shell").exists() {
        assert_eq!(ran.images().len(), 1, "{}", ran.0);
        let shown = python(&mut client, "fig.update_layout(width=400, height=300).show()");
        assert_eq!(shown.images().len(), 1, "{}", shown.0);
        let size = "import base64, struct\nstruct.unpack('>II', base64.b64decode('DATA')[16:24])"
            .replace("DATA", data(shown.images()[0]));
        assert_eq!(value(&mut client, &size), "(400, 300)");
    }
    // Without a browser there is a page and a sentence.
    let ran = python(&mut client, "os.environ['SANDPOOL_CHROMIUM'] = ''\nfig");
    let text = "[chart in /workspace/chart-8.html; no picture: a picture of a plotly chart needs Chromium, which this sandbox does not have]";
    assert_eq!((ran.images().len(), linked(&ran)), (0, vec!["chart-8.html"]), "{}", ran.0);
    assert_eq!(ran.json()["displays"], json!([{ "text": text }]), "{}", ran.0);
    let pages = "sum('<html' in open(f'/workspace/chart-{n}.html').read() for n in range(1, 9))";
    assert_eq!(value(&mut client, pages), "8");
    assert!(client.finish().success());
}

#[test]
fn chinese_japanese_and_korean_are_shown_in_figures_and_screenshots() {
    let state = StateDir::new("fonts");
    let mut client = start(&state);
    // A missing glyph would be the same box for each of them. seaborn chooses fonts of its own.
    let figures = "import io, matplotlib.pyplot as plt, seaborn\nseaborn.set_theme()\ndef drawn(text):\n    figure = plt.figure(figsize=(1, 1))\n    \
                   figure.text(0, 0, text, size=40)\n    file = io.BytesIO()\n    figure.savefig(file)\n    plt.close(figure)\n    return file.getvalue()\n\
                   len({drawn(text) for text in '中国語ひ한글'})";
    assert_eq!(value(&mut client, figures), "6");
    if !Path::new("/usr/lib/chromium/chromium-headless-shell").exists() {
        return;
    }
    let serve = "echo '<title>page</title>' > page.html; exec python3 -m http.server 8000 --bind 127.0.0.1";
    client.call("run_command", json!({ "command": serve, "background": true }));
    let there = "until echo > /dev/tcp/127.0.0.1/8000; do sleep 0.1; done 2>/dev/null";
    client.call("run_command", json!({ "command": there }));
    let opened = client.call("browser_open", json!({ "url": "http://127.0.0.1:8000/page.html", "timeout": 120 }));
    assert!(!opened.is_error(), "{}", opened.0);
    let drawn = "(() => { const drawn = (text) => { const canvas = document.createElement('canvas'); canvas.width = canvas.height = 40;\
                 const at = canvas.getContext('2d'); at.font = '32px sans-serif'; at.fillText(text, 2, 34); return canvas.toDataURL(); };\
                 return new Set([...'中国語ひ한글'].map(drawn)).size; })()";
    let counted = client.call("browser_act", json!({ "action": "evaluate", "expression": drawn }));
    assert_eq!(counted.json()["value"].to_string().trim_matches('"'), "6", "{}", counted.0);
    // The same in the text of a page, as a screenshot shows it. The last character is in no font.
    let mut pictures = BTreeSet::new();
    for c in "中国語ひ한글\u{10fffd}".chars() {
        let write = format!(
            "document.body.innerHTML = '<p id=text style=\"font: 40px sans-serif; margin: 0; width: 60px; height: 60px\">{c}</p>'"
        );
        let written = client.call("browser_act", json!({ "action": "evaluate", "expression": write }));
        assert!(!written.is_error(), "{}", written.0);
        let shown = client.call("browser_screenshot", json!({ "target": "#text" }));
        assert_eq!(shown.images().len(), 1, "{}", shown.0);
        pictures.insert(data(shown.images()[0]).to_owned());
    }
    assert_eq!(pictures.len(), 7);
    assert!(client.finish().success());
}

/// A directory of runtimes with what the tests use, by hard links, so that adding to it changes nothing for other tests.
struct Runtimes(PathBuf);

impl Runtimes {
    #[allow(clippy::disallowed_methods, reason = "the test copies the runtime it uses")]
    fn copied(name: &str) -> Self {
        let prepared = std::env::var_os("SANDPOOL_TEST_PYTHON").expect("SANDPOOL_TEST_PYTHON");
        let store = Path::new(&prepared).ancestors().nth(3).unwrap();
        let copy = store.with_file_name(format!("runtimes-{name}-{}", std::process::id()));
        let copied = Command::new("cp").arg("-al").arg(store).arg(&copy).status().unwrap();
        assert!(copied.success());
        Self(copy)
    }

    fn settings(&self) -> String {
        self.warm("warm = false")
    }

    fn warm(&self, setting: &str) -> String {
        format!("[runtimes]\ndir = '{}'\n{setting}\n", self.0.display())
    }

    /// `sandpool setup` with npm's packages from the registry, and Python's from where this machine has them.
    #[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
    fn command(&self, state: &StateDir, registry: &Registry, arguments: &[&str]) -> Command {
        let config = state.0.join("setup.toml");
        std::fs::write(&config, self.settings()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandpool"));
        command.arg("setup").args(arguments).arg("--config").arg(config);
        command.env("NPM_CONFIG_REGISTRY", format!("http://127.0.0.1:{}/npm/", registry.port));
        command
    }

    fn setup(&self, state: &StateDir, registry: &Registry, arguments: &[&str]) -> Output {
        let mut command = self.command(state, registry, arguments);
        command.env("PIP_INDEX_URL", format!("http://127.0.0.1:{}/simple", registry.port)).output().unwrap()
    }
}

impl Drop for Runtimes {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn an_added_package_is_installed_alone_and_stays_until_it_is_removed() {
    let (state, registry, runtimes) = (StateDir::new("added"), Registry::start(), Runtimes::copied("added"));
    let says = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();
    let added = runtimes.setup(&state, &registry, &["--add", "tinypack"]);
    let log = says(&added);
    assert!(added.status.success(), "{log}");
    assert!(log.contains("`tinypack` were added and are not pinned") && !log.contains("MB"), "{log}");
    // A name that no registry has, and what is no name, change nothing.
    for (name, why) in [("no-such-package", "No matching distribution"), ("./tinypack", "is not the name of a package")]
    {
        let refused = runtimes.setup(&state, &registry, &["--add", name]);
        assert!(!refused.status.success() && says(&refused).contains(why), "{}", says(&refused));
    }
    let again = runtimes.setup(&state, &registry, &[]);
    assert!(again.status.success() && !says(&again).contains("tinypack"), "{}", says(&again));

    let import = "import subprocess, tinypack, pandas\n(tinypack.value, subprocess.run('tinypack-says', capture_output=True, text=True).stdout)";
    let mut client = Client::start(stdio_of("sandpool", &state.0, &runtimes.settings()));
    assert_eq!(value(&mut client, import), "('of the wheel', 'said\\n')");
    assert!(client.finish().success());

    let removed = runtimes.setup(&state, &registry, &["--remove", "tinypack"]);
    assert!(removed.status.success(), "{}", says(&removed));
    let mut client = Client::start(stdio_of("sandpool", &state.0, &runtimes.settings()));
    let ran = python(&mut client, "import tinypack");
    assert_eq!(ran.json()["error"]["name"], "ModuleNotFoundError", "{}", ran.0);
    assert!(client.finish().success());
}

/// The path at which the runtime was prepared does not exist in the sandbox.
#[test]
fn pip_and_other_scripts_of_a_copied_runtime_work() {
    let (state, runtimes) = (StateDir::new("copied"), Runtimes::copied("copied"));
    let mut client = Client::start(stdio_of("sandpool", &state.0, &runtimes.settings()));
    for command in ["pip --version", "f2py -v", "python -m pip --version"] {
        let ran = client.call("run_command", json!({ "command": command }));
        assert_eq!(ran.json()["success"], true, "{command}: {}", ran.0);
    }
    let ran = python(&mut client, "%pip --version");
    assert!(ran.field("stdout").starts_with("pip "), "{}", ran.0);
    assert!(client.finish().success());
}

#[test]
fn w65_code_of_an_added_package_runs_only_in_sandboxes() {
    let (state, registry, runtimes) = (StateDir::new("start"), Registry::start(), Runtimes::copied("start"));
    let added = runtimes.setup(&state, &registry, &["--add", "startpack"]);
    assert!(added.status.success(), "{}", String::from_utf8_lossy(&added.stderr));
    let settings = runtimes.warm("warm = true\npreload = ['pandas', 'startpack']");
    let mut client = Client::start(stdio_of("sandpool", &state.0, &settings));
    // The kernel is a fork; the package was opened once, by the kernel itself and its confined user.
    let code = "import os, sys\nforked = 'pandas' in sys.modules, 'startpack' in sys.modules\nimport startpack\n\
                (forked, sys.startpack == [(os.getuid(), os.getpid())], startpack.value)";
    assert_eq!(value(&mut client, code), "((True, False), True, 'of the wheel')");
}

/// The packages of a preset are pinned with hashes, so that they come from where `make test` got those of the other preset.
#[test]
fn the_slim_preset_and_a_package_for_javascript_are_set_up_and_the_size_is_shown_first() {
    let (state, registry, runtimes) = (StateDir::new("slim"), Registry::start(), Runtimes::copied("slim"));
    let arguments = ["--preset", "slim", "--add", "npm:tinynode"];
    let output = runtimes.command(&state, &registry, &arguments).output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let (before, after) = log.split_once("downloads at most ").unwrap_or_else(|| panic!("{log}"));
    assert!(!before.contains("/5]") && after.contains("/5]"), "it is said before the first step: {log}");
    let megabytes = after.split_once(" MB (preset `slim`)").and_then(|(number, _)| number.parse::<u32>().ok());
    assert!(megabytes.is_some_and(|number| number > 10), "{log}");
    let again = runtimes.command(&state, &registry, &[]).output().unwrap();
    let log = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(again.status.success() && !log.contains("downloads") && !log.contains("installing"), "{log}");

    let mut client = Client::start(stdio_of("sandpool", &state.0, &runtimes.settings()));
    assert_eq!(value(&mut client, "import numpy, pandas\npandas.Series([1, 2]).sum() == 3"), "np.True_");
    let ran = python(&mut client, "import sklearn");
    assert_eq!(ran.json()["error"]["name"], "ModuleNotFoundError", "{}", ran.0);
    let ran = client.call("run_code", json!({ "code": "require('tinynode')", "language": "javascript" }));
    assert_eq!(ran.field("result"), "'of the tarball'", "{}", ran.0);
    let ran = client.call("run_command", json!({ "command": "tinynode-says" }));
    assert_eq!(ran.field("stdout"), "said\n", "{}", ran.0);
    assert!(client.finish().success());
}
