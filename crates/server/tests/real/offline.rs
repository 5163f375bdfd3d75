//! What a result says about the network: once why there is none, and once what was denied.

use serde_json::json;
use testkit::client::{Client, ToolResult};

use crate::support::{StateDir, stdio_of};

const OFF: &str = "Network access is off: the operator gives sandboxes none; `network.default` in sandpool.toml or \
                   `--network-allow` changes that.";

fn run(client: &mut Client, language: &str, code: &str) -> ToolResult {
    client.call("run_code", json!({ "code": code, "language": language, "timeout": 120 }))
}

#[test]
fn a_run_that_fails_without_a_network_says_so_once_and_how_to_get_one() {
    let state = StateDir::new("offline");
    let mut client = Client::start(stdio_of("sandpool", &state.0, ""));
    for (language, code) in [
        ("python", "import urllib.request\nurllib.request.urlopen('https://example.com')"),
        ("python", "import requests\nrequests.get('https://example.com')"),
        ("python", "import socket\nsocket.create_connection(('192.0.2.1', 80))"),
        ("python", "%pip install no-such-package-at-all"),
        ("javascript", "await fetch('https://example.com')"),
        ("bash", "curl -sS https://example.com"),
        ("bash", "pip install no-such-package-at-all"),
        ("bash", "npm install no-such-package-at-all"),
    ] {
        let failed = run(&mut client, language, code);
        assert!(failed.is_error(), "{code}: {}", failed.0);
        assert!(failed.field("note").ends_with(OFF), "{code}: {}", failed.0);
        let text = failed.0["content"][0]["text"].as_str().unwrap();
        assert_eq!(text.matches("network.default").count(), 1, "{code}: {text}");
    }
    for (language, code) in [
        ("python", "1 / 0"),
        ("python", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9')"),
        ("javascript", "await fetch('http://127.0.0.1:9/')"),
    ] {
        let failed = run(&mut client, language, code);
        assert!(failed.is_error() && failed.json().get("note").is_none(), "{code}: {}", failed.0);
    }
    assert!(client.finish().success());
}

#[test]
fn a_denial_is_stated_once_however_often_a_program_repeats_it() {
    let state = StateDir::new("denied");
    let mut client = Client::start(stdio_of("sandpool", &state.0, "[network]\nallow = [\"a.test\"]\n"));
    for (language, code) in [
        ("python", "import requests\nrequests.get('https://evil.test/')"),
        ("python", "import requests\nprint(requests.get('http://evil.test/').text)"),
        ("python", "import urllib.request\nurllib.request.urlopen('https://evil.test/')"),
        ("javascript", "await (await fetch('http://evil.test/')).text()"),
        ("bash", "curl -sSi http://evil.test/"),
    ] {
        let answer = run(&mut client, language, code);
        let text = answer.0["content"][0]["text"].as_str().unwrap();
        assert_eq!(text.matches("does not allow this name").count(), 1, "{code}: {text}");
        assert_eq!(answer.json()["denied"].as_array().map(Vec::len), Some(1), "{code}: {text}");
    }
    assert!(client.finish().success());
}
