//! `pip install` and `npm install` in a sandbox: from registries of our own, through the proxy, into the sandbox's own volume.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::json;
use testkit::client::Client;
use testkit::host::StateDir;

use crate::support::stdio_of;

/// Ends with the test.
pub struct Registry {
    child: Child,
    pub port: u16,
}

impl Registry {
    #[allow(clippy::disallowed_methods, reason = "the test's own registry")]
    pub fn start() -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real/registry.py");
        let mut child = Command::new("python3").arg(script).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { port: line.trim().parse().unwrap(), child }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Server {
    client: Client,
    port: u16,
}

impl Server {
    /// Everything that the call gave back.
    fn run(&mut self, context: &str, language: &str, code: &str) -> String {
        let code = code.replace("REGISTRY", &format!("http://registry.test:{}", self.port));
        let arguments = json!({ "code": code, "language": language, "context": context, "timeout": 60 });
        self.client.call("run_code", arguments).0.to_string()
    }

    fn python(&mut self, context: &str, code: &str) -> String {
        self.run(context, "python", code)
    }

    fn context(&mut self) -> String {
        self.client.call("create_context", json!({})).field("context")
    }
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }
}

const PIP: &str = "--index-url REGISTRY/simple --trusted-host registry.test";

#[test]
fn packages_are_installed_into_the_contexts_own_layer() {
    let (state, registry) = (StateDir::new("packages"), Registry::start());
    let settings = format!(
        "[network]\ndefault = 'registry'\n[network.hosts]\n'registry.test' = '127.0.0.1'\n\
         [network.policy.registry]\nallow = ['registry.test:{port}']\nprivate = ['127.0.0.1:{port}']\n",
        port = registry.port
    );
    let client = Client::start(stdio_of("sandpool", &state.0, &settings));
    let mut server = Server { client, port: registry.port };
    let context = server.context();

    // At once, in the cell that installs it; what the runtime has is not fetched.
    let installed = server.python(
        &context,
        &format!("%pip install {PIP} tinypack\nimport tinypack; print(tinypack.value, tinypack.__file__)"),
    );
    has(&installed, &["already satisfied: numpy", "installed tinypack-1.0", "of the wheel /tmp/.packages/"]);
    // By the shell too; and another version of what the runtime has.
    let upgraded = server.python(&context, &format!("!pip install {PIP} openpyxl==99.0"));
    has(&upgraded, &["Not uninstalling openpyxl", "Successfully installed openpyxl-99.0"]);
    let shell = "!tinypack-says; python -c 'import openpyxl, tinypack; print(openpyxl.__version__, tinypack.value)'";
    has(&server.python(&context, shell), &["said", "99.0 of the wheel"]);

    // A kernel that comes after, which would be a fork of one that has imported much.
    server.python(&context, "import os; os._exit(3)");
    let after = "import openpyxl, tinypack; print(openpyxl.__version__, tinypack.value)";
    has(&server.python(&context, after), &["99.0 of the wheel"]);

    let npm = "require('child_process').execSync('npm install --registry REGISTRY/npm tinynode 2>&1 && npx tinynode-says').toString() + require('tinynode')";
    has(&server.run(&context, "javascript", npm), &["added 1 package", "said", "of the tarball"]);

    // Nobody else has any of it.
    let other = server.context();
    let seen = server.python(&other, "import openpyxl; print(openpyxl.__version__)\nimport tinypack");
    has(&seen, &["ModuleNotFoundError"]);
    assert!(!seen.contains("99.0"), "{seen}");

    // What the policy does not allow is said in its own words.
    let denied = server.python(&other, "!pip install --index-url https://pypi.test/simple tinypack");
    has(&denied, &["pypi.test", "was denied", "[network.policy.registry] allow"]);
}

#[test]
fn without_a_network_pip_says_so() {
    let state = StateDir::new("no-packages");
    let client = Client::start(stdio_of("sandpool", &state.0, ""));
    let mut server = Server { client, port: 0 };
    let context = server.context();
    let refused = server.python(&context, "%pip install tinypack");
    has(&refused, &["Network access is off", "network.default", "No matching distribution found for tinypack"]);
}
