//! Reports what sandboxes may reach: the policies, and the secrets by name. The value of a secret is never shown.

use std::collections::BTreeMap;

use egress::{Policy, Table};
use sandbox::native::{Fact, FactState};

use super::fact;
use crate::cli::{CommandEnv, Failed, network};
use crate::config::{Network, UpstreamSource};

pub(crate) fn facts(context: &CommandEnv) -> Vec<Fact> {
    let config = &context.config.network;
    if config.dialects.is_empty() {
        let why = "sandboxes have no network except their own loopback";
        return vec![fact("policy", FactState::Off, why, "to allow some, set `network.default` in sandpool.toml")];
    }
    let mut facts: Vec<Fact> = of_dialects(config);
    facts.extend(config.sizes.iter().map(|(size, policy)| {
        fact("policy", FactState::On, format!("size `{}`, in addition: {}", size.name(), summary(policy)), "")
    }));
    facts.extend(
        config.secrets.iter().map(|secret| {
            fact("secret", FactState::On, format!("`{}` for {}", secret.name, secret.hosts.join(", ")), "")
        }),
    );
    facts.extend(
        config.upstream.as_ref().map(|upstream| fact("upstream proxy", FactState::On, of_upstream(upstream), "")),
    );
    if let Err(Failed(why)) = network::egress(&context.config) {
        facts.push(fact("secrets", FactState::Off, why, "correct the setting: no server starts with this one"));
    }
    if !config.secrets.is_empty() && network::certutil().is_none() {
        let why = "browsers in sandboxes cannot be told to trust the certificates that secrets need";
        facts.push(fact("certutil", FactState::Absent, why, "on Debian: apt-get install libnss3-tools"));
    }
    facts
}

/// Says through which proxy connections leave this machine, and which checks do not apply because of it.
fn of_upstream(upstream: &UpstreamSource) -> String {
    let name = match upstream {
        UpstreamSource::Given(proxy) => format!("{proxy:?}"),
        UpstreamSource::Environment => "what `HTTPS_PROXY` and `HTTP_PROXY` name".into(),
    };
    format!("connections leave through {name}; it resolves names, so that addresses behind names are not checked here")
}

/// Reports the policies of the dialects, with one line for all dialects that have the same policy.
fn of_dialects(config: &Network) -> Vec<Fact> {
    let mut by_policy: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (dialect, policy) in &config.dialects {
        by_policy.entry(summary(policy)).or_default().push(dialect);
    }
    by_policy
        .into_iter()
        .map(|(policy, dialects)| fact("policy", FactState::On, format!("{}: {policy}", dialects.join(", ")), ""))
        .collect()
}

/// Formats a policy, for example: `packages` and `corp` (allows *.corp.test and 3 more, denies 1, private
/// 10.1.2.3:8080).
fn summary(policy: &Policy) -> String {
    policy.tables.iter().map(|table| of_table(table)).collect::<Vec<_>>().join(" and ")
}

fn of_table(table: &Table) -> String {
    let Table { name, allow, deny, ports, methods, private, .. } = table;
    let mut parts = Vec::new();
    if *allow != [name.clone()] {
        parts.push(format!("allows {}", some(allow)));
    }
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    for (what, entries) in [("denies", deny), ("ports", &ports), ("methods", methods), ("private", private)] {
        if !entries.is_empty() {
            parts.push(format!("{what} {}", some(entries)));
        }
    }
    if parts.is_empty() { format!("`{name}`") } else { format!("`{name}` ({})", parts.join("; ")) }
}

/// Formats the first few entries and the number of the others.
fn some(entries: &[String]) -> String {
    const SHOWN: usize = 3;
    let shown = entries.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match entries.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_proxy_is_told_with_what_is_not_checked() {
        let proxy = egress::UpstreamProxy::parse("http://me:hunter2@proxy.test:3128").unwrap();
        let told = of_upstream(&UpstreamSource::Given(proxy));
        assert!(told.starts_with("connections leave through http://proxy.test:3128 with credentials; it"), "{told}");
        assert!(!told.contains("hunter2"), "{told}");
    }

    #[test]
    fn a_policy_is_told_in_a_line() {
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let preset = Table { name: "packages".into(), allow: texts(&["packages"]), ..Table::default() };
        let own = Table {
            name: "corp".into(),
            allow: texts(&["a.test", "b.test", "c.test", "d.test"]),
            deny: texts(&["*.evil.test"]),
            ports: vec![443],
            ..Table::default()
        };
        let both = Policy::of(preset).and(&Policy::of(own));
        assert_eq!(
            summary(&both),
            "`packages` and `corp` (allows a.test, b.test, c.test and 1 more; denies *.evil.test; ports 443)"
        );
    }
}
