//! The same story of each dialect (`tests/transcripts/<dialect>.json`) through the built server in five ways: over stdio and HTTP,
//! in both eras of the protocol, and by plain POST. What differs from run to run is masked; then all five are equal, and equal to
//! the snapshot. Only links are text in the answers to a plain POST, because the oldest revision has no blocks for them.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use serde::Deserialize;
use serde_json::{Value, json};
use testkit::host::StateDir;
use testkit::http::{Era, Mcp};

use crate::mask::Mask;
use crate::serve::Serve;
use crate::ways::{PLAIN_POST, Stdio, Way};

const DIALECTS: [&str; 5] = ["agentrun", "conversation", "microsandbox", "sandpool", "workbench"];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Step {
    call: String,
    /// Arguments; `{{name.member}}` is a member of an earlier answer, `{{way}}` the name of the way.
    with: Value,
    /// What later steps call the answer.
    #[serde(rename = "as", default)]
    name: Option<String>,
    /// Asked again until the answer has this in it.
    #[serde(default)]
    until: Option<String>,
    /// What depends on whether calls belong together.
    #[serde(default)]
    only: Option<Only>,
}

#[derive(Deserialize, Clone, Copy, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Only {
    Connected,
    Unconnected,
}

fn story(dialect: &str) -> Vec<Step> {
    let path = format!("{}/tests/transcripts/{dialect}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// What was said at each step; nothing where a step was not for this way.
struct Told {
    way: &'static str,
    steps: Vec<Option<String>>,
}

fn tell(way: &mut dyn Way, story: &[Step]) -> Told {
    let (mut answers, mut mask) = (BTreeMap::new(), Mask::default());
    let mut calls = Calls::default();
    let mut steps = Vec::new();
    for step in story {
        let fits = match step.only {
            None => true,
            Some(only) => (only == Only::Connected) == way.is_connected(),
        };
        steps.push(fits.then(|| {
            let arguments = fill(&step.with, way.name(), &answers);
            let answer = ask(way, step, &arguments);
            if let Some(name) = &step.name {
                answers.insert(name.clone(), testkit::client::object_of(&answer["result"]));
            }
            calls.note(&step.call, &answer);
            mask.text(&shown(step, &arguments, answer)).replace(way.name(), "<way>")
        }));
    }
    calls.check(way);
    Told { way: way.name(), steps }
}

fn ask(way: &mut dyn Way, step: &Step, arguments: &Value) -> Value {
    loop {
        let answer = way.request("tools/call", json!({ "name": step.call, "arguments": arguments }));
        if step.until.as_ref().is_none_or(|text| answer.to_string().contains(text)) {
            return answer;
        }
        assert_eq!(answer["result"]["isError"], false, "{answer}");
    }
}

fn fill(value: &Value, way: &str, answers: &BTreeMap<String, Value>) -> Value {
    match value {
        Value::String(text) => {
            let mut filled = text.replace("{{way}}", way);
            while let Some((before, rest)) = filled.split_once("{{") {
                let (path, after) = rest.split_once("}}").unwrap_or_else(|| panic!("{text}"));
                let (name, member) = path.split_once('.').unwrap_or_else(|| panic!("{text}"));
                let value = answers[name][member].as_str().unwrap_or_else(|| panic!("{path}: {answers:?}"));
                filled = format!("{before}{value}{after}");
            }
            filled.into()
        }
        Value::Object(members) => {
            members.iter().map(|(name, value)| (name.clone(), fill(value, way, answers))).collect()
        }
        other => other.clone(),
    }
}

/// As a person reads it: the call, each block, what stands beside them.
fn shown(step: &Step, arguments: &Value, mut answer: Value) -> String {
    let only = match step.only {
        None => "",
        Some(Only::Connected) => " (where calls belong to a connection)",
        Some(Only::Unconnected) => " (where they do not)",
    };
    let mut text = format!("> {} {arguments}{only}\n", step.call);
    if let Some(error) = answer.get("error") {
        text += &format!("error {}: {}\n", error["code"], error["message"].as_str().unwrap());
        return text;
    }
    let result = answer["result"].as_object_mut().unwrap_or_else(|| panic!("neither result nor error: {text}"));
    // Only the modern revision says what kind of result it is.
    assert!(result.remove("resultType").is_none_or(|kind| kind == "complete"));
    let blocks = result.remove("content").unwrap_or_else(|| panic!("no content: {text}"));
    for block in blocks.as_array().unwrap() {
        match block["type"].as_str().unwrap() {
            "text" => text += &format!("{}\n--\n", block["text"].as_str().unwrap().trim_end_matches('\n')),
            "image" => {
                let is_png = block["data"].as_str().unwrap().starts_with("iVBORw0KGgo");
                text += &format!("image {}, {}\n--\n", block["mimeType"], if is_png { "a PNG" } else { "?" });
            }
            _ => text += &format!("{block}\n--\n"),
        }
    }
    text + &answer["result"].to_string() + "\n"
}

/// Which tools were called, and how it went.
#[derive(Default)]
struct Calls {
    good: BTreeSet<String>,
    bad: BTreeSet<String>,
}

impl Calls {
    fn note(&mut self, tool: &str, answer: &Value) {
        let is_good = answer["result"]["isError"] == false;
        let set = if is_good { &mut self.good } else { &mut self.bad };
        set.insert(tool.to_owned());
    }

    /// A story has each tool of its dialect, going well and going wrong, where it can.
    fn check(&self, way: &mut dyn Way) {
        let list = way.request("tools/list", json!({}));
        for tool in list["result"]["tools"].as_array().unwrap() {
            let name = tool["name"].as_str().unwrap();
            let cannot_go_wrong = tool["inputSchema"]["properties"].as_object().is_none_or(|fields| fields.is_empty());
            assert!(self.good.contains(name), "{name} never succeeds");
            assert!(cannot_go_wrong || name == "sandbox_create" || self.bad.contains(name), "{name} never fails");
        }
    }
}

/// What a plain POST is answered where the others are answered this.
fn with_links_as_text(said: &str) -> String {
    const END: &str = "\n--\n";
    let link = |block: &str| serde_json::from_str::<Value>(block).ok().filter(|block| block["type"] == "resource_link");
    let blocks: Vec<&str> = said.split(END).collect();
    let Some((members, blocks)) = blocks.split_last() else { return said.to_owned() };
    let texts: Vec<&str> = blocks.iter().copied().filter(|block| link(block).is_none()).collect();
    let mut text = String::new();
    for block in blocks {
        text += &match link(block) {
            None => (*block).to_owned(),
            Some(link) => {
                let (name, kind, uri) =
                    (&link["name"], link["mimeType"].as_str().unwrap(), link["uri"].as_str().unwrap());
                let is_shown = texts.iter().any(|text| text.contains(uri));
                let address = if is_shown { String::new() } else { format!(": {uri}") };
                format!("{name} ({kind}, {} bytes){address}", link["size"])
            }
        };
        text += END;
    }
    text + members
}

/// Every step that several ways took gave the same.
fn agreed(told: &[Told]) -> String {
    let mut text = String::new();
    for step in 0..told[0].steps.len() {
        let mut takers = told.iter().filter_map(|told| Some((told.way, told.steps[step].as_ref()?)));
        let (first, said) = takers.next().unwrap_or_else(|| panic!("nobody took step {step}"));
        for (way, other) in takers {
            let said = if way == PLAIN_POST { &with_links_as_text(said) } else { said };
            assert!(said == other, "{first} and {way} differ in step {step}:\n{said}\n{other}");
        }
        text += said;
        text.push('\n');
    }
    text
}

#[test]
fn every_dialect_tells_the_same_story_in_every_way() {
    let server = Serve::start("transcripts-http", &[]);
    let state = StateDir::new("transcripts-stdio");
    let over_stdio = |dialect: &str, story: &[Step]| {
        [false, true].map(|is_modern| {
            let mut way = Stdio::start(&state, dialect, "", is_modern);
            let told = tell(&mut way, story);
            assert!(way.client.finish().success());
            told
        })
    };
    let over_http = |dialect: &str, story: &[Step]| {
        let eras = [Era::Legacy("2025-11-25"), Era::Modern, Era::Bare];
        eras.map(|era| tell(&mut Mcp::new(&server.account(), dialect, era), story))
    };
    for dialect in DIALECTS {
        let story = story(dialect);
        let told = thread::scope(|scope| {
            let http = scope.spawn(|| over_http(dialect, &story));
            let stdio = over_stdio(dialect, &story);
            stdio.into_iter().chain(http.join().unwrap()).collect::<Vec<_>>()
        });
        insta::with_settings!({ omit_expression => true, prepend_module_to_snapshot => false, snapshot_path => "../transcripts" }, {
            insta::assert_snapshot!(dialect, agreed(&told));
        });
    }
    assert!(server.finish().success());
}
