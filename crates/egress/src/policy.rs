//! Policies: the operator's tables of what may be reached. Every table that applies has to allow a request.
//!
//! A request is judged twice: first by the name or address that was asked for, before it is resolved, so that a name
//! that is not allowed is never looked up; then by the address that is about to be connected to.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use crate::pattern::Pattern;
use crate::target::{Host, Target};
use crate::upstream_proxy::{Route, is_local};
use crate::{address, loopback};

/// Ports that an entry of `allow` opens if neither the entry nor its table names one. Port 25 is deliberately absent.
const USUAL_PORTS: [u16; 2] = [80, 443];
/// Maximum number of simultaneous connections if no table sets one. A browser uses half of them.
const USUAL_CONNECTIONS: u32 = 64;
const USUAL_CONNECTIONS_PER_SECOND: u32 = 200;

/// Name of the table that `--network-allow` creates.
pub const COMMAND_LINE: &str = "command-line";
/// Presets that `network.default` and the operator's tables may refer to. No table may have one of these names.
pub const PRESETS: [&str; 2] = ["public", "packages"];
pub const OFF: &str = "off";
/// Names of tables that cannot be edited, only replaced.
pub const BUILT_IN: [&str; 4] = [OFF, PRESETS[0], PRESETS[1], COMMAND_LINE];
const IN_PLACE: &str = "The operator can allow it in sandpool.toml by a policy in place of this one";

/// A list of tables, all of which have to allow a request. The realm, the size, the tenant and the call may each
/// contribute a table, and none of them can widen what another one allows. Without any table, nothing is allowed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Policy {
    pub tables: Vec<Arc<Table>>,
}

/// One table as an operator writes it: `[network.policy.<name>]`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Table {
    /// Name of the table, as it appears in denials.
    pub name: String,
    /// Allowed hosts: names, `*.name` (every name below, but not the name itself), addresses, networks, `*`, each
    /// optionally with `:port` or `:*`; also `public` and `packages`. Addresses and networks only allow requests that
    /// name an address; a name has to be allowed as a name. `host:port` allows one port of this host's loopback, which
    /// no other entry does.
    pub allow: Vec<String>,
    /// Denied hosts; these take precedence over `allow`. An address or a network also applies to names that resolve
    /// to it. An entry without a port denies every port.
    pub deny: Vec<String>,
    /// Ports for entries of `allow` that name no port; if empty, 80 and 443.
    pub ports: Vec<u16>,
    /// Allowed HTTP methods; if empty, all of them. If any are listed, traffic that the proxy cannot see into is
    /// denied: TLS that it does not terminate, and other protocols.
    pub methods: Vec<String>,
    /// Addresses and networks that are otherwise refused: private, loopback, link-local and the host's own. Each
    /// entry makes an address reachable for the names and addresses in `allow`. An entry with a port opens that port
    /// only.
    pub private: Vec<String>,
    /// Maximum number of simultaneous connections; 64 if no table sets it. Further connections wait briefly and are
    /// then denied.
    pub max_connections: Option<u32>,
    /// Maximum number of bytes, in both directions together, over the life of the sandbox.
    pub max_bytes: Option<u64>,
    /// Maximum transfer rate; faster traffic is slowed down.
    pub bytes_per_second: Option<u64>,
    /// Maximum rate of new connections; 200 if no table sets it. Further connections wait.
    pub connections_per_second: Option<u32>,
}

impl Table {
    /// Checks that the table can be parsed. The error names the entry that is wrong.
    pub fn check(&self) -> Result<(), String> {
        Rules::new(self).map(|_| ())
    }

    /// Returns the name for use in sentences, such as `policy "packages"`.
    fn title(&self) -> String {
        format!("policy \"{}\"", self.name)
    }

    /// Describes what the operator has to add to the configuration so that a request is allowed.
    fn remedy(&self, key: &str, value: &str) -> String {
        match self.name.as_str() {
            COMMAND_LINE if key == "allow" => format!("The operator can allow it by `{value}` in --network-allow"),
            name if BUILT_IN.contains(&name) => format!("{IN_PLACE}: [network.policy.<name>] {key} = [\"{value}\"]"),
            name => {
                format!("The operator can allow it in sandpool.toml: [network.policy.{name}] {key} = [\"{value}\"]")
            }
        }
    }

    /// Describes which setting the operator has to change where an entry has to be removed or a number raised.
    fn change(&self, key: &str) -> String {
        match self.name.as_str() {
            name if BUILT_IN.contains(&name) => format!("{IN_PLACE}: [network.policy.<name>] {key}"),
            name => format!("The operator can allow it in sandpool.toml, by a change of [network.policy.{name}] {key}"),
        }
    }
}

impl Policy {
    pub fn of(table: Table) -> Self {
        Self { tables: vec![Arc::new(table)] }
    }

    /// Combines two policies into one that allows what both allow.
    #[must_use]
    pub fn and(mut self, other: &Self) -> Self {
        self.tables.extend(other.tables.iter().cloned());
        self
    }

    pub fn check(&self) -> Result<(), String> {
        self.tables.iter().try_for_each(|table| table.check())
    }
}

/// The reason why a request is not allowed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DenyReason {
    /// The rule, such as `policy "corp" denies "*.evil.test"`.
    pub rule: String,
    /// The remedy that the operator has: a sentence without its full stop.
    pub remedy: String,
}

/// A number that the operator set, with the name of the table that it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Limit<T> {
    pub value: T,
    table: String,
}

impl<T> Limit<T> {
    /// Returns the reason for a denial because more than `most` was requested.
    pub(crate) fn refusal(&self, most: &str, key: &str) -> DenyReason {
        let table = Table { name: self.table.clone(), ..Table::default() };
        DenyReason { rule: format!("{} allows no more than {most}", table.title()), remedy: table.change(key) }
    }
}

/// The effective limits: for each one, the lowest value in any table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EgressLimits {
    pub connections: Limit<u32>,
    pub connections_per_second: u32,
    pub bytes: Option<Limit<u64>>,
    pub bytes_per_second: Option<u64>,
}

/// A parsed policy, ready to decide.
#[derive(Debug, Default)]
pub(crate) struct CompiledPolicy {
    rules: Vec<Rules>,
    /// True if the call asked for no network, so that nothing is allowed.
    off: bool,
    /// True if names may lead to the addresses of a resolver that answers with others than the real ones.
    fake_ip_dns: bool,
}

#[derive(Debug)]
struct Rules {
    table: Table,
    allow: Vec<Pattern>,
    deny: Vec<Pattern>,
    private: Vec<Pattern>,
}

/// The reason why an address is not generally reachable.
#[derive(Clone, Copy)]
struct Special {
    label: &'static str,
    /// True if the address has to be listed itself. An operator who allows a network around it means the other
    /// addresses in that network.
    only_exact: bool,
}

impl Special {
    /// Classifies an address by its value alone.
    fn of(address: IpAddr) -> Option<Self> {
        address::special(address).map(|label| Self { label, only_exact: label == address::METADATA })
    }

    /// Classifies an address, also checking whether it belongs to this host.
    fn of_this_host(address: IpAddr) -> Option<Self> {
        let own = || address::is_own(address).then_some(Self { label: "an address of this host", only_exact: true });
        match Self::of(address) {
            Some(special) if special.only_exact || address.is_loopback() => Some(Self { only_exact: true, ..special }),
            special => own().or(special),
        }
    }
}

/// The kind of entry that opened a port.
#[derive(PartialEq, Eq)]
enum PortRule {
    ByAllow,
    /// An entry of `private` names the port. The address then has to match such an entry.
    ByPrivate,
}

impl Rules {
    fn new(table: &Table) -> Result<Self, String> {
        let name = &table.name;
        if name.len() > 64 || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_') {
            return Err(format!("`{}` is no name for a policy: letters, digits, `-` and `_`", name.escape_debug()));
        }
        let read = |key: &str, entries: &[String]| {
            let read = |entry: &String| Pattern::parse(entry).map_err(|why| format!("policy `{name}`, `{key}`: {why}"));
            entries.iter().map(read).collect::<Result<Vec<_>, _>>()
        };
        let rules = Self {
            allow: read("allow", &table.allow)?,
            deny: read("deny", &table.deny)?,
            private: read("private", &table.private)?,
            table: table.clone(),
        };
        if let Some(entry) = rules.private.iter().find(|entry| !entry.is_of_addresses()) {
            return Err(format!("policy `{name}`, `private`: `{}` is neither an address nor a network", entry.text));
        }
        if let Some(entry) = rules.allow.iter().find(|entry| entry.is_this_host() && !entry.has_one_port()) {
            let why = "stands for the loopback of this host and needs one port, as in `host:3000`";
            return Err(format!("policy `{name}`, `allow`: `{}` {why}", entry.text));
        }
        if table.ports.contains(&0) {
            return Err(format!("policy `{name}`, `ports`: 0 is none"));
        }
        if let Some(method) = table.methods.iter().find(|m| hyper::Method::from_bytes(m.as_bytes()).is_err()) {
            return Err(format!("policy `{name}`, `methods`: `{}` is none", method.escape_debug()));
        }
        for (key, zero) in [
            ("max_connections", table.max_connections == Some(0)),
            ("connections_per_second", table.connections_per_second == Some(0)),
            ("kb_per_second", table.bytes_per_second == Some(0)),
        ] {
            if zero {
                return Err(format!("policy `{name}`, `{key}`: 0 lets nothing through; leave the network off instead"));
            }
        }
        Ok(rules)
    }

    fn usual_port(&self, port: u16) -> bool {
        if self.table.ports.is_empty() { USUAL_PORTS.contains(&port) } else { self.table.ports.contains(&port) }
    }

    fn denied(&self, host: &Host, port: u16) -> Result<(), DenyReason> {
        // An IPv4 address inside the address is checked as well.
        let inner = match host {
            Host::Address(address) => address::embedded(*address).map(|inner| Host::Address(inner.into())),
            Host::Name(_) => None,
        };
        let means = |entry: &Pattern| entry.means(host) || inner.as_ref().is_some_and(|inner| entry.means(inner));
        match self.deny.iter().find(|entry| means(entry) && entry.has_port(port).unwrap_or(true)) {
            None => Ok(()),
            Some(entry) => Err(DenyReason {
                rule: format!("{} denies \"{}\"", self.table.title(), entry.text),
                remedy: self.table.change("deny"),
            }),
        }
    }

    /// Checks whether the port is open for this host, and returns the kind of entry that opened it.
    fn opened(&self, host: &Host, port: u16) -> Result<PortRule, DenyReason> {
        let this_host = host.is_this_host();
        // The loopback of this host has to be listed explicitly: `*` stands for other hosts only.
        let means = |entry: &&Pattern| entry.means(host) && entry.is_this_host() == this_host;
        let mut named = false;
        for entry in self.allow.iter().filter(means) {
            named = true;
            if entry.has_port(port).unwrap_or_else(|| self.usual_port(port)) {
                return Ok(PortRule::ByAllow);
            }
        }
        if named && !this_host && self.private.iter().any(|entry| entry.has_port(port) == Some(true)) {
            return Ok(PortRule::ByPrivate);
        }
        let what = match (named, host) {
            (true, _) => format!("port {port}"),
            (false, Host::Name(_)) => "this name".into(),
            (false, Host::Address(_)) => "this address".into(),
        };
        let entry = if this_host {
            format!("{}:{port}", loopback::ENTRY)
        } else if self.usual_port(port) {
            host.to_string()
        } else {
            format!("{host}:{port}")
        };
        Err(DenyReason {
            rule: format!("{} does not allow {what}", self.table.title()),
            remedy: self.table.remedy("allow", &entry),
        })
    }

    fn asked(&self, target: &Target) -> Result<(), DenyReason> {
        // This check comes first: a request for a private address is denied for that reason even if other rules deny
        // it too, because this is the rule that the client needs to know about.
        if let Host::Address(address) = target.host {
            self.reachable(&target.host, SocketAddr::new(address, target.port), Special::of(address))?;
        }
        self.denied(&target.host, target.port)?;
        self.opened(&target.host, target.port).map(|_| ())
    }

    fn method(&self, method: &str) -> Result<(), DenyReason> {
        if self.table.methods.is_empty() || self.table.methods.iter().any(|own| own.eq_ignore_ascii_case(method)) {
            return Ok(());
        }
        Err(DenyReason {
            rule: format!("{} does not allow the method {method}", self.table.title()),
            remedy: self.table.remedy("methods", method),
        })
    }

    fn opaque(&self) -> Result<(), DenyReason> {
        if self.table.methods.is_empty() {
            return Ok(());
        }
        let mut rule = format!("{} allows only the methods {}", self.table.title(), self.table.methods.join(", "));
        let _ = write!(rule, ", and what is inside this connection cannot be seen");
        Err(DenyReason { rule, remedy: self.table.change("methods") })
    }

    /// Returns whether an entry of `private` covers the address and the port.
    fn lists(&self, address: IpAddr, port: u16, special: Special) -> bool {
        let covers = |entry: &Pattern| if special.only_exact { entry.is_just(address) } else { entry.covers(address) };
        self.private.iter().any(|entry| covers(entry) && entry.has_port(port).unwrap_or(true))
    }

    /// Checks the address against `private`. `special` is the reason why the address is not public, if it is not.
    fn reachable(&self, host: &Host, address: SocketAddr, special: Option<Special>) -> Result<(), DenyReason> {
        let (ip, port) = (address.ip(), address.port());
        // The IPv4 address that a translator would derive from it has to be allowed as well.
        let inner = address::embedded(ip).map(IpAddr::V4);
        let is_hidden =
            |inner: IpAddr| Special::of_this_host(inner).is_some_and(|special| !self.lists(inner, port, special));
        match special {
            Some(special) if !self.lists(ip, port, special) || inner.is_some_and(is_hidden) => {
                let label = special.label;
                // The sandbox must not learn which address a name of the operator's network has.
                let (rule, value) = match host {
                    Host::Address(_) => (
                        format!("{} is {label}", host),
                        Target { host: host.clone(), port: address.port() }.to_string(),
                    ),
                    Host::Name(_) => (format!("{host} leads to {label}"), format!("<its address>:{}", address.port())),
                };
                Err(DenyReason {
                    rule: format!("{rule}, which {} does not list", self.table.title()),
                    remedy: self.table.remedy("private", &value),
                })
            }
            _ => Ok(()),
        }
    }

    fn connected(&self, target: &Target, address: SocketAddr, special: Option<Special>) -> Result<(), DenyReason> {
        // An entry of `allow` opened this port of the host's loopback, which therefore need not be in `private`.
        if !(target.host.is_this_host() && loopback::ADDRESSES.contains(&address.ip())) {
            self.reachable(&target.host, address, special)?;
        }
        self.denied(&Host::Address(address.ip()), address.port())?;
        if self.opened(&target.host, target.port)? == PortRule::ByAllow {
            return Ok(());
        }
        let by_private = |entry: &Pattern| entry.covers(address.ip()) && entry.has_port(address.port()) == Some(true);
        if self.private.iter().any(by_private) {
            return Ok(());
        }
        Err(self.closed_port(target))
    }

    fn closed_port(&self, target: &Target) -> DenyReason {
        DenyReason {
            rule: format!("{} does not allow port {}", self.table.title(), target.port),
            remedy: self.table.remedy("allow", &target.to_string()),
        }
    }

    /// Checks a name that an upstream proxy resolves.
    fn relayed(&self, target: &Target, name: &str) -> Result<(), DenyReason> {
        if self.opened(&target.host, target.port)? == PortRule::ByPrivate {
            return Err(self.closed_port(target));
        }
        self.local_name(target, name, "upstream")
    }

    /// Checks a name whose real address another proxy finds, and not this server. That proxy would find names for local
    /// use in its own network, or on its own machine.
    fn local_name(&self, target: &Target, name: &str, proxy: &str) -> Result<(), DenyReason> {
        let is_listed = || self.allow.iter().any(|entry| entry.means(&target.host) && !entry.is_wide());
        if is_local(name) && !is_listed() {
            return Err(DenyReason {
                rule: format!(
                    "{name} is a name of the {proxy} proxy's own network, which {} does not list",
                    self.table.title()
                ),
                remedy: self.table.remedy("allow", &target.to_string()),
            });
        }
        Ok(())
    }
}

impl CompiledPolicy {
    pub(crate) fn new(policy: &Policy, fake_ip_dns: bool) -> Result<Self, String> {
        let rules = policy.tables.iter().map(|table| Rules::new(table)).collect::<Result<_, _>>()?;
        Ok(Self { rules, off: false, fake_ip_dns })
    }

    /// Returns a policy that allows nothing, because a call asked for no network.
    pub(crate) fn off() -> Self {
        Self { off: true, ..Self::default() }
    }

    pub(crate) fn limits(&self) -> EgressLimits {
        let tables = || self.rules.iter().map(|rules| &rules.table);
        let first = tables().next().map(|table| table.name.clone()).unwrap_or_default();
        let connections = tables().filter_map(|t| Some(Limit { value: t.max_connections?, table: t.name.clone() }));
        let bytes = tables().filter_map(|t| Some(Limit { value: t.max_bytes?, table: t.name.clone() }));
        let usual = Limit { value: USUAL_CONNECTIONS, table: first };
        EgressLimits {
            connections: connections.min_by_key(|limit| limit.value).unwrap_or(usual),
            connections_per_second: tables()
                .filter_map(|t| t.connections_per_second)
                .min()
                .unwrap_or(USUAL_CONNECTIONS_PER_SECOND),
            bytes: bytes.min_by_key(|limit| limit.value),
            bytes_per_second: tables().filter_map(|t| t.bytes_per_second).min(),
        }
    }

    fn every(&self, judge: impl Fn(&Rules) -> Result<(), DenyReason>) -> Result<(), DenyReason> {
        if self.off {
            return Err(DenyReason {
                rule: "this call asked for no network".into(),
                remedy: "The call can ask for one".into(),
            });
        }
        if self.rules.is_empty() {
            return Err(DenyReason {
                rule: "there is no policy that allows anything".into(),
                remedy: "The operator can give this tool set a `network` in sandpool.toml".into(),
            });
        }
        self.rules.iter().try_for_each(judge)
    }

    /// Checks whether the target may be requested, and its name looked up.
    pub(crate) fn asked(&self, target: &Target) -> Result<(), DenyReason> {
        self.every(|rules| rules.asked(target))
    }

    pub(crate) fn method(&self, method: &str) -> Result<(), DenyReason> {
        self.every(|rules| rules.method(method))
    }

    /// Checks whether traffic may pass that the proxy cannot see into.
    pub(crate) fn opaque(&self) -> Result<(), DenyReason> {
        self.every(Rules::opaque)
    }

    /// Checks whether the proxy may connect to `address` for this target.
    pub(crate) fn connected(&self, target: &Target, address: SocketAddr) -> Result<(), DenyReason> {
        let fake_name = match &target.host {
            Host::Name(name) if self.fake_ip_dns && address::is_fake(address.ip()) => Some(name),
            _ => None,
        };
        let special = Special::of_this_host(address.ip()).filter(|special| special.only_exact || fake_name.is_none());
        self.every(|rules| {
            rules.connected(target, address, special)?;
            fake_name.map_or(Ok(()), |name| rules.local_name(target, name, "transparent"))
        })
    }

    /// Checks whether the proxy may use this way to the target. An upstream proxy resolves names itself, so that only
    /// an address that was asked for can be checked.
    pub(crate) fn routed(&self, target: &Target, route: &Route) -> Result<(), DenyReason> {
        match (route, &target.host) {
            (Route::Direct(address), _) => self.connected(target, *address),
            (_, Host::Address(ip)) => self.connected(target, SocketAddr::new(*ip, target.port)),
            (_, Host::Name(name)) => self.every(|rules| rules.relayed(target, name)),
        }
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
