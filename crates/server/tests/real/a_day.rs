//! Replays docs/a-day.md through the built server: the page's commands, its calls, and the parts of answers that it shows.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use testkit::client::Client;
use testkit::http::Wire;

use crate::support::{StateDir, program};

/// One line of the page that is replayed, with its number.
enum Step {
    /// `$ sandpool stdio …`: the client starts the server, or restarts it.
    Start(Vec<String>),
    /// `$ curl -T FILE LINK`: the user sends a file to the link of the last answer that had one.
    Upload(String),
    /// `$ …`: the user does something in the directory in which the server is started.
    Shell(String),
    /// `> TOOL {…}` and the parts of the answer after `<`.
    Call { tool: String, arguments: String, parts: Vec<String> },
}

fn steps(page: &str) -> Vec<(usize, Step)> {
    let (mut steps, mut in_block) = (Vec::new(), false);
    for (number, line) in (1..).zip(page.lines()) {
        if line.starts_with("```") {
            in_block = !in_block;
        } else if let Some(command) = line.strip_prefix("$ ").filter(|_| in_block) {
            steps.push((number, command_step(command)));
        } else if let Some(call) = line.strip_prefix("> ").filter(|_| in_block) {
            let (tool, arguments) = call.split_once(' ').unwrap_or((call, "{}"));
            let (tool, arguments) = (tool.to_owned(), arguments.to_owned());
            steps.push((number, Step::Call { tool, arguments, parts: Vec::new() }));
        } else if in_block {
            let Some((_, Step::Call { arguments, parts, .. })) = steps.last_mut() else {
                panic!("line {number} belongs to no call")
            };
            match line.strip_prefix("< ") {
                Some(part) => parts.push(part.to_owned()),
                None => arguments.push_str(line),
            }
        }
    }
    steps
}

fn command_step(command: &str) -> Step {
    let words: Vec<&str> = command.split(' ').collect();
    match words[..] {
        ["sandpool", "stdio", ref rest @ ..] => Step::Start(rest.iter().map(|word| (*word).to_owned()).collect()),
        ["curl", "-T", file, _] => Step::Upload(file.to_owned()),
        _ => Step::Shell(command.to_owned()),
    }
}

/// Starts the server as the page says, with a state directory of the test's own. Directories of root cannot be given to code
/// for writing, so root gives them away first.
fn start(directory: &Path, arguments: &[String]) -> Client {
    if rustix::process::geteuid().is_root() {
        shell(directory, "chown -R 1000:1000 shop");
    }
    let mut command = program();
    command.current_dir(directory).arg("stdio").args(arguments).arg("--state-dir").arg(directory.join("state"));
    Client::start(command)
}

#[allow(clippy::disallowed_methods, reason = "the page's commands are the user's")]
fn shell(directory: &Path, command: &str) {
    let ended = Command::new("sh").args(["-ec", command]).current_dir(directory).status().unwrap();
    assert!(ended.success(), "{command}: {ended}");
}

fn upload(file: &Path, link: &str) {
    let rest = link.strip_prefix("http://").unwrap_or_else(|| panic!("{link}"));
    let (host, path) = rest.split_once('/').unwrap();
    let mut wire = Wire::open(host.parse().unwrap()).unwrap();
    let bytes = std::fs::read(file).unwrap();
    let answer = wire.ask("PUT", &format!("/{path}"), &[("host", host)], &bytes).unwrap();
    assert!((200..300).contains(&answer.status), "{}: {}", answer.status, answer.text());
}

/// Replaces `{{member}}` by that member of the last answer that had it.
fn filled(text: &str, members: &BTreeMap<String, String>) -> String {
    members.iter().fold(text.to_owned(), |text, (name, value)| text.replace(&format!("{{{{{name}}}}}"), value))
}

#[test]
fn the_day_of_the_documentation_happens_as_it_is_told() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/a-day.md");
    let steps = steps(&std::fs::read_to_string(page).unwrap());
    assert!(steps.len() > 10, "the page tells too little: {}", steps.len());
    let day = StateDir::new("a-day");
    let mut client: Option<Client> = None;
    let mut members: BTreeMap<String, String> = BTreeMap::new();
    for (line, step) in steps {
        match step {
            Step::Start(arguments) => {
                if let Some(client) = client.take() {
                    assert!(client.finish().success(), "line {line}");
                }
                client = Some(start(&day.0, &arguments));
            }
            Step::Upload(file) => upload(&day.0.join(file), &members["url"]),
            Step::Shell(command) => shell(&day.0, &command),
            Step::Call { tool, arguments, parts } => {
                let arguments: Value = serde_json::from_str(&filled(&arguments, &members))
                    .unwrap_or_else(|error| panic!("line {line}: {error}"));
                let answer = client.as_mut().expect("a server was started").call(&tool, arguments);
                let text = answer.0.to_string();
                for part in &parts {
                    // Blocks hold text, in which quotes are escaped once more.
                    let escaped = part.replace('\\', "\\\\").replace('"', "\\\"");
                    assert!(text.contains(part) || text.contains(&escaped), "line {line}: no {part} in {text}");
                }
                for (name, value) in answer.facts().as_object().into_iter().flatten() {
                    if let Some(value) = value.as_str() {
                        members.insert(name.clone(), value.to_owned());
                    }
                }
            }
        }
    }
    assert!(client.expect("a server was started").finish().success());
}
