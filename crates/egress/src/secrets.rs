//! Values that code may use and never sees: where each may go, and in which header.

use std::fmt;
use std::net::IpAddr;

use zeroize::Zeroizing;

/// A value that code may use and never sees.
#[derive(Debug, Clone)]
pub struct Secret {
    /// The environment variable that has the placeholder.
    pub name: String,
    /// Whom it is sent to: `name`, `*.name`, each with `:port` if it is not 443.
    pub hosts: Vec<String>,
    pub header: String,
    /// What a request without the header gets; `{}` is the value.
    pub format: Option<String>,
    /// Whose sandboxes may use it; empty is everybody's.
    pub tenants: Vec<String>,
    pub value: Value,
}

/// Never printed, and wiped when it is let go of.
#[derive(Clone)]
pub struct Value(Zeroizing<String>);

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(secret)")
    }
}

/// Shorter, it would be found in texts that have nothing to do with it.
const SHORTEST: usize = 8;
const LONGEST: usize = 8 << 10;

impl Value {
    /// What can stand in a header, with or without the end of a line. What is wrong is said without it.
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

    /// For the request's header and the answer's check; nowhere else.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// Variables that decide how programs run: a placeholder there would break them, or do worse.
const TAKEN: &[&str] = &["PATH", "HOME", "LANG", "USER", "SHELL", "TMPDIR", "PWD", "TERM", "IFS", "ENV"];
const TAKEN_BEGINNINGS: &[&str] = &["LD_", "LC_", "PYTHON", "NODE_", "NPM_", "PIP_", "SSL_", "BASH"];
const TAKEN_ENDINGS: &[&str] = &["_PROXY", "_CA_BUNDLE", "_CAINFO"];

/// Headers that say where a message goes or ends: a value there would change the request.
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
    /// What is wrong with how a secret is described.
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

/// Where a secret may go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    /// In small letters; what follows `*.` if [`Self::below`].
    pub name: String,
    pub below: bool,
    pub port: u16,
}

impl Pattern {
    pub fn parse(text: &str) -> Option<Self> {
        let (host, port) = match text.rsplit_once(':') {
            Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)?),
            None => (text, 443),
        };
        let (name, below) = host.strip_prefix("*.").map_or((host, false), |name| (name, true));
        // Every name of `com` is nobody's.
        let broad = below && !name.contains('.');
        let is_name = is_host_name(name) && name.parse::<IpAddr>().is_err() && !broad;
        is_name.then(|| Self { name: name.to_ascii_lowercase(), below, port })
    }

    /// Of a name in small letters without a dot at its end.
    pub fn matches(&self, host: &str, port: u16) -> bool {
        let matches = match self.below {
            true => host.strip_suffix(&self.name).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.')),
            false => host == self.name,
        };
        matches && port == self.port
    }
}

/// Whether this can be the name of a host: labels of letters, digits, `-` and `_`.
pub fn is_host_name(name: &str) -> bool {
    let label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
            && !label.starts_with('-')
            && !label.ends_with('-')
    };
    name.len() <= 253 && name.split('.').all(label)
}
