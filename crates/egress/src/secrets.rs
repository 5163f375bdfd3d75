//! Secrets: values that code may use without ever seeing them. Each secret names the hosts that it may be sent to and
//! the header that carries it.

use std::fmt;
use std::net::IpAddr;

use zeroize::Zeroizing;

/// A value that code may use without ever seeing it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secret {
    /// Name of the environment variable that holds the placeholder.
    pub name: String,
    /// Hosts that the value is sent to: `name` or `*.name`, with `:port` unless the port is 443.
    pub hosts: Vec<String>,
    pub header: String,
    /// Header value for a request that does not have the header; `{}` stands for the secret value.
    pub format: Option<String>,
    /// Tenants whose sandboxes may use the secret; if empty, all tenants.
    pub tenants: Vec<String>,
    pub value: Value,
}

/// A secret value. It is never printed, and its memory is wiped when it is dropped.
#[derive(Clone, PartialEq, Eq)]
pub struct Value(Zeroizing<String>);

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Minimum length of a value. A shorter one would also match unrelated text.
const SHORTEST: usize = 8;
const LONGEST: usize = 8 << 10;

impl Value {
    /// Accepts text that can stand in a header, with or without a line ending. The error message does not contain the
    /// text.
    pub fn parse(text: String) -> Result<Self, &'static str> {
        let text = Zeroizing::new(text);
        let value = text.trim_end_matches(['\r', '\n']);
        if value.is_empty() {
            return Err("it is empty");
        }
        if !value.bytes().all(|b| matches!(b, b' '..=b'~')) || value.trim() != value {
            return Err("it is not one line of plain ASCII, so that it cannot stand in a header");
        }
        if value.len() < SHORTEST {
            return Err("it is shorter than 8 characters");
        }
        if value.len() > LONGEST {
            return Err("it is longer than 8 kB");
        }
        Ok(Self(Zeroizing::new(value.to_owned())))
    }

    /// Returns the value. Only the header of a request and the search of the response may use it.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// Variables that determine how programs run. A placeholder in one of them would break programs, or do worse.
const TAKEN: &[&str] = &["PATH", "HOME", "LANG", "USER", "SHELL", "TMPDIR", "PWD", "TERM", "IFS", "ENV"];
const TAKEN_BEGINNINGS: &[&str] = &["LD_", "LC_", "PYTHON", "NODE_", "NPM_", "PIP_", "SSL_", "BASH"];
const TAKEN_ENDINGS: &[&str] = &["_PROXY", "_CA_BUNDLE", "_CAINFO"];

/// Headers that determine where a message goes or ends. A value in one of them would change the request.
const FRAMING: &[&str] = &[
    "connection",
    "content-length",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

impl Secret {
    /// Checks the description of a secret and returns what is wrong with it.
    pub fn check(name: &str, hosts: &[String], header: &str, format: Option<&str>) -> Result<(), String> {
        let begins = |b: u8| b.is_ascii_uppercase() || b == b'_';
        if !name.bytes().next().is_some_and(begins) || !name.bytes().all(|b| begins(b) || b.is_ascii_digit()) {
            return Err(format!("`name` is that of an environment variable: `A-Z`, `0-9` and `_`, not `{name}`"));
        }
        let taken = TAKEN.contains(&name)
            || TAKEN_BEGINNINGS.iter().any(|start| name.starts_with(start))
            || TAKEN_ENDINGS.iter().any(|end| name.ends_with(end));
        if taken || name.len() > 100 {
            return Err(format!("`{name}` cannot be the name of a secret: programs use that variable themselves"));
        }
        if hosts.is_empty() {
            return Err("`hosts` is empty: it says whom the value may be sent to".into());
        }
        if let Some(wrong) = hosts.iter().find(|host| Pattern::parse(host).is_none()) {
            return Err(format!("`hosts`: `{wrong}` is not a name or `*.name`, with `:port` if it is not 443"));
        }
        let token = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        if header.is_empty() || header.len() > 100 || !header.bytes().all(token) {
            return Err(format!("`header`: `{header}` is not the name of a header"));
        }
        if FRAMING.contains(&header.to_ascii_lowercase().as_str()) {
            return Err(format!("`header`: `{header}` is for the connection and not for a secret"));
        }
        let fits = |format: &str| format.matches("{}").count() == 1 && format.bytes().all(|b| matches!(b, b' '..=b'~'));
        if format.is_some_and(|format| !fits(format)) {
            return Err("`format` has to have `{}` once, where the value goes: `Bearer {}`".into());
        }
        Ok(())
    }
}

/// A host and port that a secret may be sent to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    /// Host name in lower case; if [`Self::below`] is set, the part after `*.`.
    pub name: String,
    pub below: bool,
    pub port: u16,
}

impl Pattern {
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)?),
            None => (text, 443),
        };
        let (name, below) = host.strip_prefix("*.").map_or((host, false), |name| (name, true));
        // A wildcard below a top-level domain, such as `*.com`, would cover hosts of unrelated owners.
        let broad = below && !name.contains('.');
        let is_name = is_host_name(name) && name.parse::<IpAddr>().is_err() && !broad;
        is_name.then(|| Self { name: name.to_ascii_lowercase(), below, port })
    }

    /// Returns whether the pattern matches a host. The name has to be in lower case and without a trailing dot.
    pub(crate) fn matches(&self, host: &str, port: u16) -> bool {
        let matches = match self.below {
            true => host.strip_suffix(&self.name).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
            false => host == self.name,
        };
        matches && port == self.port
    }
}

/// Returns whether `name` can be the name of a host: labels of letters, digits, `-` and `_`.
pub fn is_host_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}
