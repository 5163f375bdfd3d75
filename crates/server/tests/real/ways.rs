//! The ways to a server: over stdio and HTTP, in both eras of the protocol, and by plain POST.

use serde_json::{Value, json};
use testkit::client::Client;
use testkit::host::StateDir;
use testkit::http::{Era, Mcp};

use crate::support::stdio_of;

/// The name of the way without a revision.
pub const PLAIN_POST: &str = "way-http-bare";

/// One way to a server.
pub trait Way {
    fn name(&self) -> &'static str;
    /// Whether the server can tell that two calls come from the same client.
    fn is_connected(&self) -> bool;
    fn request(&mut self, method: &str, params: Value) -> Value;
}

pub struct Stdio {
    pub client: Client,
    is_modern: bool,
}

impl Stdio {
    pub fn start(state: &StateDir, dialect: &str, settings: &str, is_modern: bool) -> Self {
        let command = stdio_of(dialect, &state.0, settings);
        let client = if is_modern { Client::connect(command) } else { Client::start(command) };
        Self { client, is_modern }
    }
}

impl Way for Stdio {
    fn name(&self) -> &'static str {
        if self.is_modern { "way-stdio-modern" } else { "way-stdio-legacy" }
    }

    fn is_connected(&self) -> bool {
        true
    }

    fn request(&mut self, method: &str, mut params: Value) -> Value {
        if self.is_modern {
            params["_meta"] = json!({
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
                "io.modelcontextprotocol/clientInfo": { "name": "testkit", "version": "0" },
            });
        }
        self.client.request(method, params)
    }
}

impl Way for Mcp {
    fn name(&self) -> &'static str {
        match self.era {
            Era::Modern => "way-http-modern",
            Era::Legacy(_) => "way-http-legacy",
            Era::Bare => PLAIN_POST,
        }
    }

    fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    fn request(&mut self, method: &str, params: Value) -> Value {
        Self::request(self, method, params)
    }
}

/// What a tool answered.
pub struct Said {
    pub text: String,
    /// The object of the answer.
    pub facts: Value,
    pub blocks: Vec<Value>,
}

impl dyn Way + '_ {
    /// Whether it failed, and what it says.
    pub fn result(&mut self, tool: &str, arguments: Value) -> (bool, Said) {
        let answer = self.request("tools/call", json!({ "name": tool, "arguments": arguments }));
        let result = &answer["result"];
        let blocks = result["content"].as_array().unwrap_or_else(|| panic!("{} {tool}: {answer}", self.name())).clone();
        let text = blocks[0]["text"].as_str().unwrap_or_default().to_owned();
        (result["isError"] == true, Said { text, facts: testkit::client::object_of(result), blocks })
    }

    /// A call that has to go well.
    pub fn good(&mut self, tool: &str, arguments: Value) -> Said {
        let (is_error, said) = self.result(tool, arguments.clone());
        assert!(!is_error, "{} {tool} {arguments}: {}", self.name(), said.text);
        said
    }

    /// A call that has to fail, with what it says.
    pub fn bad(&mut self, tool: &str, arguments: Value) -> Said {
        let (is_error, said) = self.result(tool, arguments.clone());
        assert!(is_error, "{} {tool} {arguments}: {}", self.name(), said.text);
        said
    }
}
