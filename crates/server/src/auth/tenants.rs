//! The tenants file, which contains names, hashes of tokens and quotas.
//!
//! ```toml
//! [[tenant]]
//! name = "blue"
//! token_sha256 = "…"        # printf %s "$TOKEN" | sha256sum; a list while a token is being replaced
//! quotas = { contexts = 20, runs = 4, memory_mb = 4096, calls_per_second = 10 }
//! network = "packages"      # a policy of the configuration file, which narrows what the sandboxes may reach
//! ```

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egress::Policy;
use engine::op::{Quota, Tenant};
use serde::Deserialize;
use text::hex;

use crate::config::Policies;
use crate::digest::sha256;

/// Quotas of one tenant; `None` means the operator's general limit.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default)]
pub(crate) struct Quotas {
    pub contexts: Option<usize>,
    /// Maximum number of runs that execute at once.
    pub runs: Option<usize>,
    /// Memory of all the tenant's sandboxes together.
    pub memory_mb: Option<u64>,
    pub calls_per_second: Option<f64>,
    /// Whether `get_volume_path` shows paths of this machine.
    pub show_host_paths: bool,
    /// Policy that narrows what the tenant's sandboxes may reach. In the file it is a key beside `quotas`.
    #[serde(skip)]
    pub network: Option<Policy>,
}

impl Quotas {
    /// Returns these quotas, with the general ones in place of those that are not set.
    pub(crate) fn or(&self, general: &Self) -> Self {
        Self {
            contexts: self.contexts.or(general.contexts),
            runs: self.runs.or(general.runs),
            memory_mb: self.memory_mb.or(general.memory_mb),
            calls_per_second: self.calls_per_second.or(general.calls_per_second),
            show_host_paths: self.show_host_paths || general.show_host_paths,
            network: self.network.clone().or_else(|| general.network.clone()),
        }
    }

    /// Returns the quotas that the engine enforces.
    pub(crate) fn for_engine(&self) -> Quota {
        Quota {
            contexts: self.contexts,
            runs: self.runs,
            memory_bytes: self.memory_mb.map(|mb| mb << 20),
            network: self.network.clone(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum TenantsError {
    #[error("cannot read the tenants file `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("the tenants file `{path}`: {why}")]
    Content { path: PathBuf, why: String },
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TenantEntry {
    pub name: String,
    digests: Vec<[u8; 32]>,
    pub quotas: Quotas,
}

#[derive(Debug, Default)]
pub(crate) struct Tenants(Vec<TenantEntry>);

/// The differences between two sets of tenants, by name. A tenant is removed when its last token is.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct TenantChanges {
    pub added: Vec<String>,
    pub removed: Vec<String>,
    /// Tenants that have a token now and had none. Until now, a subject of the identity provider may have had the name.
    pub claimed: Vec<String>,
    /// Tenants with another token, other quotas or another network.
    pub changed: Vec<(String, Vec<&'static str>)>,
}

/// Prefix of the tenant names of subjects whose own names cannot be used. No name in the file begins with it.
const HASHED: &str = "sub-";

impl Tenants {
    /// Reads the file. `subjects` says that an identity provider names tenants, too, so that an entry needs no token.
    pub(crate) fn read(path: &Path, subjects: bool, policies: &Policies) -> Result<Self, TenantsError> {
        let read = |source| TenantsError::Read { path: path.into(), source };
        let found = std::fs::metadata(path).map_err(read)?;
        if !found.is_file() {
            let why = "is not a regular file".into();
            return Err(TenantsError::Content { path: path.into(), why });
        }
        if found.mode() & 0o077 != 0 {
            tracing::warn!("the tenants file `{}` can be read by other users; `chmod 600` it", path.display());
        }
        let text = std::fs::read_to_string(path).map_err(read)?;
        Self::parse(&text, subjects, policies).map_err(|why| TenantsError::Content { path: path.into(), why })
    }

    pub(crate) fn parse(text: &str, subjects: bool, policies: &Policies) -> Result<Self, String> {
        let file: toml::Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
        known(&file, &["tenant"], "at the top")?;
        let tables = match file.get("tenant") {
            Some(toml::Value::Array(tables)) => tables,
            Some(_) => return Err("`tenant` is a list: each begins with `[[tenant]]`".into()),
            None => return Err("it has no `[[tenant]]`".into()),
        };
        let mut entries: Vec<TenantEntry> = Vec::with_capacity(tables.len());
        let mut digests = HashSet::new();
        for (number, table) in tables.iter().enumerate() {
            let entry = entry(table, number + 1, policies)?;
            if entry.digests.is_empty() && !subjects {
                return Err(format!("tenant `{}` has no `token_sha256`", entry.name));
            }
            if entries.iter().any(|other| other.name == entry.name) {
                return Err(format!("two tenants are named `{}`", entry.name));
            }
            if !entry.digests.iter().all(|digest| digests.insert(*digest)) {
                return Err(format!("a token of tenant `{}` is in the file twice", entry.name));
            }
            entries.push(entry);
        }
        Ok(Self(entries))
    }

    /// Returns how the tenants of `new` differ from these.
    pub(crate) fn changes(&self, new: &Self) -> TenantChanges {
        let find = |all: &Self, name: &str| all.0.iter().find(|entry| entry.name == name).cloned();
        let mut changes = TenantChanges::default();
        for old in &self.0 {
            // Without an entry, a subject of the identity provider has the general quotas.
            let absent = TenantEntry { name: old.name.clone(), digests: Vec::new(), quotas: Quotas::default() };
            let new = find(new, &old.name).unwrap_or(absent);
            if new.digests.is_empty() && !old.digests.is_empty() {
                changes.removed.push(old.name.clone());
                continue;
            }
            let quotas = |entry: &TenantEntry| Quotas { network: None, ..entry.quotas.clone() };
            let parts = [
                ("token", old.digests != new.digests),
                ("quotas", quotas(old) != quotas(&new)),
                ("network", old.quotas.network != new.quotas.network),
            ];
            let parts: Vec<_> = parts.into_iter().filter(|(_, differs)| *differs).map(|(part, _)| part).collect();
            changes.changed.extend((!parts.is_empty()).then(|| (old.name.clone(), parts)));
        }
        let is_new = |entry: &&TenantEntry| find(self, &entry.name).is_none();
        changes.added = new.0.iter().filter(is_new).map(|entry| entry.name.clone()).collect();
        let is_claimed = |entry: &&TenantEntry| !entry.digests.is_empty() && self.tokens_of(&entry.name) == 0;
        changes.claimed = new.0.iter().filter(is_claimed).map(|entry| entry.name.clone()).collect();
        changes
    }

    /// Returns the tenant with this hash. It compares every hash even after a match, so that the time does not reveal
    /// the position.
    pub(crate) fn by_digest(&self, digest: &[u8; 32]) -> Option<&TenantEntry> {
        let mut found = None;
        for entry in &self.0 {
            for known in &entry.digests {
                if super::same(known, digest) {
                    found = Some(entry);
                }
            }
        }
        found
    }

    /// Returns the names of the tenants with a token.
    pub(crate) fn with_tokens(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|entry| !entry.digests.is_empty()).map(|entry| entry.name.as_str())
    }

    /// Returns the tenant name for a subject of the identity provider. A subject that is not a valid name, or that
    /// equals the name of a tenant with a token or one of `reserved`, gets a name made from its hash.
    pub(crate) fn name_of_subject(&self, subject: &str, reserved: &BTreeSet<String>) -> String {
        let taken = reserved.contains(subject) || self.with_tokens().any(|name| name == subject);
        if check_name(subject).is_ok() && !taken {
            return subject.into();
        }
        format!("{HASHED}{}", hex(&sha256(subject)[..16]))
    }

    /// Returns the number of tokens of a tenant.
    pub(crate) fn tokens_of(&self, name: &str) -> usize {
        self.0.iter().find(|entry| entry.name == name).map_or(0, |entry| entry.digests.len())
    }

    pub(crate) fn quotas_of(&self, name: &str) -> Option<&Quotas> {
        self.0.iter().find(|entry| entry.name == name).map(|entry| &entry.quotas)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (&str, &Quotas)> {
        self.0.iter().map(|entry| (entry.name.as_str(), &entry.quotas))
    }
}

fn entry(value: &toml::Value, number: usize, policies: &Policies) -> Result<TenantEntry, String> {
    let wrong = |why: String| format!("tenant {number}: {why}");
    let table = value.as_table().ok_or_else(|| wrong("not a table".into()))?;
    known(table, &["name", "token_sha256", "quotas", "network"], &format!("in tenant {number}"))?;
    let name = table.get("name").and_then(toml::Value::as_str).ok_or_else(|| wrong("`name` is missing".into()))?;
    check_name(name).map_err(wrong)?;
    let wrong = |why: String| format!("tenant `{name}`: {why}");
    let digests = match table.get("token_sha256") {
        None => Vec::new(),
        Some(toml::Value::Array(list)) => list.iter().map(digest).collect::<Result<_, _>>().map_err(wrong)?,
        Some(one) => vec![digest(one).map_err(wrong)?],
    };
    let mut quotas = match table.get("quotas") {
        Some(quotas) => parse_quotas(quotas, &format!("in the quotas of tenant `{name}`"))?,
        None => Quotas::default(),
    };
    if let Some(network) = table.get("network") {
        let network = network.as_str().ok_or_else(|| wrong("`network` is the name of a policy".into()))?;
        let policy = policies.find(network).map_err(|why| wrong(format!("`network`: {why}")))?;
        quotas.network = Some(policy.clone());
    }
    Ok(TenantEntry { name: name.into(), digests, quotas })
}

fn parse_quotas(value: &toml::Value, location: &str) -> Result<Quotas, String> {
    const KEYS: &[&str] = &["contexts", "runs", "memory_mb", "calls_per_second", "show_host_paths"];
    let table = value.as_table().ok_or_else(|| format!("`quotas` is a table: {location}"))?;
    known(table, KEYS, location)?;
    for (key, value) in table {
        let fits = match key.as_str() {
            "show_host_paths" => value.is_bool(),
            "calls_per_second" => {
                let number = value.as_float().or_else(|| value.as_integer().map(|n| n as f64));
                number.is_some_and(|n| (0.001..=1e6).contains(&n))
            }
            _ => value.as_integer().is_some_and(|n| (1..=1 << 30).contains(&n)),
        };
        if !fits {
            return Err(format!("`{key} = {value}` is out of range {location}"));
        }
    }
    value.clone().try_into().map_err(|error: toml::de::Error| format!("{} {location}", error.message()))
}

pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-_.".contains(&b);
    if !(1..=64).contains(&name.len()) || !name.bytes().all(plain) {
        return Err("a name is 1 to 64 of the characters `a-z`, `0-9`, `-`, `_`, `.`".into());
    }
    if name == Tenant::local().0 || name.starts_with(HASHED) {
        return Err(format!(
            "the name `{name}` is taken: `{}` and names with `{HASHED}` are the server's",
            Tenant::local().0
        ));
    }
    Ok(())
}

fn digest(value: &toml::Value) -> Result<[u8; 32], String> {
    let wrong = "`token_sha256` is 64 hex digits: `printf %s \"$TOKEN\" | sha256sum`";
    let text = value.as_str().filter(|text| text.len() == 64 && text.is_ascii()).ok_or(wrong)?;
    let mut digest = [0; 32];
    for (byte, pair) in digest.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).map_err(|_| wrong)?;
        *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong)?;
    }
    if digest == sha256("") {
        return Err("`token_sha256` is the hash of an empty token".into());
    }
    Ok(digest)
}

/// Refuses an unknown key as a mistake and suggests the nearest known one.
fn known(table: &toml::Table, keys: &[&str], location: &str) -> Result<(), String> {
    let Some(unknown) = table.keys().find(|key| !keys.contains(&key.as_str())) else { return Ok(()) };
    let nearest = crate::config::nearest(unknown, keys.iter().copied()).unwrap_or_default();
    Err(format!("unknown key `{unknown}` {location}; did you mean `{nearest}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: &str = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    const B: &str = "E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B857";

    fn hex(text: &str) -> String {
        super::hex(&sha256(text))
    }

    #[test]
    fn a_file_of_tenants() {
        let text = format!(
            "[[tenant]]\nname = 'blue'\ntoken_sha256 = '{}'\n\n[[tenant]]\nname = 'green.2'\ntoken_sha256 = ['{}', '{}']\n\
             quotas = {{ contexts = 5, runs = 2, memory_mb = 512, calls_per_second = 0.5, show_host_paths = true }}\n\
             network = 'public'\n",
            hex("one"),
            hex("two").to_uppercase(),
            hex("three")
        );
        let tenants = Tenants::parse(&text, false, &Policies::default()).unwrap();
        let name = |token| tenants.by_digest(&sha256(token)).map(|entry| entry.name.as_str());
        assert_eq!([name("one"), name("two"), name("three")], [Some("blue"), Some("green.2"), Some("green.2")]);
        assert_eq!([name("four"), name(""), name(&hex("one"))], [None; 3]);
        assert_eq!(tenants.0[0].quotas, Quotas::default());
        let quotas = Quotas {
            contexts: Some(5),
            runs: Some(2),
            memory_mb: Some(512),
            calls_per_second: Some(0.5),
            show_host_paths: true,
            network: Some(Policies::default().find("public").unwrap().clone()),
        };
        assert_eq!(tenants.0[1].quotas, quotas);
        assert_eq!(
            quotas.for_engine(),
            Quota { contexts: Some(5), runs: Some(2), memory_bytes: Some(512 << 20), network: quotas.network.clone() }
        );
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named() {
        let tenant = |name: &str, rest: &str| format!("[[tenant]]\nname = '{name}'\n{rest}\n");
        let good = format!("token_sha256 = '{}'", hex("one"));
        let quotas = |quotas: &str| tenant("blue", &format!("{good}\nquotas = {{ {quotas} }}"));
        let cases = [
            (String::new(), "it has no `[[tenant]]`"),
            ("[tenant]\nname = 'blue'".into(), "`tenant` is a list: each begins with `[[tenant]]`"),
            ("[[tenants]]\n".into(), "unknown key `tenants` at the top; did you mean `tenant`?"),
            (
                tenant("blue", "token_sha265 = ''"),
                "unknown key `token_sha265` in tenant 1; did you mean `token_sha256`?",
            ),
            (
                quotas("call_per_second = 1"),
                "unknown key `call_per_second` in the quotas of tenant `blue`; did you mean `calls_per_second`?",
            ),
            (quotas("runs = 0"), "`runs = 0` is out of range in the quotas of tenant `blue`"),
            (
                quotas("calls_per_second = inf"),
                "`calls_per_second = inf` is out of range in the quotas of tenant `blue`",
            ),
            ("[[tenant]]\n".into(), "tenant 1: `name` is missing"),
            (tenant("Blue", &good), "tenant 1: a name is 1 to 64 of the characters `a-z`, `0-9`, `-`, `_`, `.`"),
            (
                tenant("local", &good),
                "tenant 1: the name `local` is taken: `local` and names with `sub-` are the server's",
            ),
            (
                tenant("sub-1", &good),
                "tenant 1: the name `sub-1` is taken: `local` and names with `sub-` are the server's",
            ),
            (tenant("blue", ""), "tenant `blue` has no `token_sha256`"),
            (
                tenant("blue", &format!("{good}\nnetwork = 'pubic'")),
                "tenant `blue`: `network`: there is no policy `pubic`; did you mean `public`?",
            ),
            (
                tenant("blue", "token_sha256 = 'hunter2'"),
                "tenant `blue`: `token_sha256` is 64 hex digits: `printf %s \"$TOKEN\" | sha256sum`",
            ),
            (
                tenant("blue", &format!("token_sha256 = '{A}'")),
                "tenant `blue`: `token_sha256` is the hash of an empty token",
            ),
            (tenant("blue", &good) + &tenant("blue", &format!("token_sha256 = '{B}'")), "two tenants are named `blue`"),
            (tenant("blue", &good) + &tenant("green", &good), "a token of tenant `green` is in the file twice"),
        ];
        for (text, why) in cases {
            assert_eq!(Tenants::parse(&text, false, &Policies::default()).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn a_subject_is_never_taken_for_a_tenant_with_a_token_or_for_the_local_one() {
        let text = format!(
            "[[tenant]]\nname = 'blue'\ntoken_sha256 = '{}'\n[[tenant]]\nname = 'alice'\nquotas = {{ contexts = 1 }}",
            hex("one")
        );
        let tenants = Tenants::parse(&text, true, &Policies::default()).unwrap();
        let none = BTreeSet::new();
        assert_eq!(tenants.name_of_subject("alice", &none), "alice");
        assert_eq!(tenants.quotas_of("alice").unwrap().contexts, Some(1));
        assert_eq!(tenants.name_of_subject("bob", &none), "bob");
        for subject in ["blue", "local", "sub-0123", "Alice", "auth0|5f7c8e", "../etc", "a b", "é", &"x".repeat(65)] {
            let name = tenants.name_of_subject(subject, &none);
            assert!(name.starts_with(HASHED) && name.len() == HASHED.len() + 32, "{name}");
        }
        assert_ne!(tenants.name_of_subject("a b", &none), tenants.name_of_subject("a  b", &none));
        // A tenant that had a token keeps its name, so that no subject finds what it left.
        assert!(tenants.name_of_subject("bob", &["bob".to_owned()].into()).starts_with(HASHED));
        // A name that gets a token is taken from the subject that may have it.
        let text = format!("{text}\ntoken_sha256 = '{}'", hex("two"));
        let claimed = tenants.changes(&Tenants::parse(&text, true, &Policies::default()).unwrap()).claimed;
        assert_eq!(claimed, ["alice"]);
    }
}
