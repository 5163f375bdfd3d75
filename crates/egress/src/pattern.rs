//! One entry of a policy table: a host and possibly a port.

use std::net::IpAddr;

use crate::address::Network;
use crate::loopback;
use crate::target::Host;

/// The hosts from which `pip` and `npm` download packages. An operator who uses a mirror adds its name to a table.
const PACKAGES: &[&str] = &["pypi.org", "files.pythonhosted.org", "registry.npmjs.org", "registry.yarnpkg.com"];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    /// The entry as the operator wrote it.
    pub text: String,
    host: HostPattern,
    port: Option<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum HostPattern {
    /// `*`: every name and every address.
    Any,
    /// `public`: every name and every public address.
    Public,
    /// `packages`: the hosts of the package registries.
    Packages,
    Name(String),
    /// `*.name`: every name below this one, but not the name itself.
    Under(String),
    Network(Network),
    /// `host`: the loopback of this host, by the name that sandboxes have for it.
    ThisHost,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Port {
    Every,
    One(u16),
}

impl Pattern {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let wrong = |why: &str| format!("`{}` {why}", text.escape_debug());
        let (host_text, port) = split(text).ok_or_else(|| wrong("has a port that is none"))?;
        let host = match host_text {
            "*" => HostPattern::Any,
            "public" => HostPattern::Public,
            "packages" => HostPattern::Packages,
            loopback::ENTRY => HostPattern::ThisHost,
            _ if host_text.contains("://") => return Err(wrong("is a URL; give the name of the host alone")),
            _ => match host_text.strip_prefix("*.") {
                Some(name) => match host(name).map_err(|why| wrong(&why))? {
                    Host::Name(name) => HostPattern::Under(name),
                    Host::Address(_) => {
                        return Err(wrong("has an address after `*.`; give a network, as in 10.0.0.0/8"));
                    }
                },
                None if host_text.contains('/') => HostPattern::Network(
                    Network::parse(host_text).ok_or_else(|| wrong("is not a network, as 10.0.0.0/8 is one"))?,
                ),
                None => match host(host_text).map_err(|why| wrong(&why))? {
                    host if host.is_this_host() => HostPattern::ThisHost,
                    Host::Name(name) => HostPattern::Name(name),
                    Host::Address(address) => HostPattern::Network(Network::of(address)),
                },
            },
        };
        Ok(Self { text: text.to_owned(), host, port })
    }

    /// Returns whether the entry is an address, a network or `*`, as opposed to a name or a preset.
    pub(crate) fn is_of_addresses(&self) -> bool {
        matches!(self.host, HostPattern::Network(_) | HostPattern::Any)
    }

    /// Returns whether the entry is the loopback of this host.
    pub(crate) fn is_this_host(&self) -> bool {
        self.host == HostPattern::ThisHost
    }

    /// Returns whether the entry stands for hosts that it does not name.
    pub(crate) fn is_wide(&self) -> bool {
        matches!(self.host, HostPattern::Any | HostPattern::Public)
    }

    /// Returns whether the entry names exactly one port.
    pub(crate) fn has_one_port(&self) -> bool {
        matches!(self.port, Some(Port::One(_)))
    }

    /// Returns whether the entry applies to this host.
    pub(crate) fn means(&self, host: &Host) -> bool {
        match (&self.host, host) {
            (HostPattern::Any, _) => true,
            (HostPattern::Public, host) => host.special().is_none(),
            (HostPattern::Packages, Host::Name(name)) => PACKAGES.contains(&name.as_str()),
            (HostPattern::Name(own), Host::Name(name)) => own == name,
            (HostPattern::ThisHost, host) => host.is_this_host(),
            (HostPattern::Under(parent), Host::Name(name)) => {
                name.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
            (_, Host::Address(address)) => self.covers(*address),
            (HostPattern::Network(_), Host::Name(_)) => false,
        }
    }

    /// Returns whether the entry is `*` or a network that contains this address.
    pub(crate) fn covers(&self, address: IpAddr) -> bool {
        match &self.host {
            HostPattern::Network(network) => network.contains(address),
            HostPattern::Any => true,
            _ => false,
        }
    }

    /// Returns whether the entry is `*` or exactly this address.
    pub(crate) fn is_just(&self, address: IpAddr) -> bool {
        matches!(&self.host, HostPattern::Network(network) if *network == Network::of(address))
            || self.host == HostPattern::Any
    }

    /// Returns whether the entry names this port, or `None` if it names no port.
    pub(crate) fn has_port(&self, port: u16) -> Option<bool> {
        self.port.map(|own| own == Port::Every || own == Port::One(port))
    }
}

fn host(text: &str) -> Result<Host, String> {
    if text.contains('*') {
        return Err("has a `*` that is not its first label".into());
    }
    Host::parse(text).map_err(|why| {
        format!("is none of a name, `*.name`, an address, a network, `public`, `packages`, `host:port`, `*`: {why}")
    })
}

/// Splits `name:port` and `[::1]:port`. A bare IPv6 address keeps all its colons.
fn split(text: &str) -> Option<(&str, Option<Port>)> {
    if let Some(rest) = text.strip_prefix('[')
        && let Some((address, port)) = rest.split_once(']')
    {
        return match port.strip_prefix(':') {
            Some(port) => Some((address, Some(read_port(port)?))),
            None if port.is_empty() => Some((address, None)),
            // `[fe80::]/10` is kept whole and then refused as a host name.
            None => Some((text, None)),
        };
    }
    match text.split_once(':') {
        Some((host, port)) if !port.contains(':') && !port.starts_with("//") => Some((host, Some(read_port(port)?))),
        _ => Some((text, None)),
    }
}

fn read_port(text: &str) -> Option<Port> {
    match text {
        "*" => Some(Port::Every),
        _ => text.parse().ok().filter(|port| *port != 0).map(Port::One),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn means(pattern: &str, host: &str) -> bool {
        Pattern::parse(pattern).unwrap().means(&Host::parse(host).unwrap())
    }

    #[test]
    fn n10_a_name_is_compared_label_by_label() {
        for host in ["example.com", "EXAMPLE.COM.", "ｅxample.com"] {
            assert!(means("example.com", host), "{host}");
        }
        for host in [
            "evil-example.com",
            "example.com.evil",
            "a.example.com",
            "example.co",
            "xample.com",
            "example.com.evil.com",
        ] {
            assert!(!means("example.com", host), "{host}");
        }
        for host in ["a.example.com", "a.b.example.com", "A.EXAMPLE.COM."] {
            assert!(means("*.example.com", host), "{host}");
        }
        for host in ["example.com", "evil-example.com", "evilexample.com", "a.example.com.evil", "1.2.3.4"] {
            assert!(!means("*.example.com", host), "{host}");
        }
        assert!(means("*.BÜCHER.de", "a.xn--bcher-kva.de"));
    }

    #[test]
    fn addresses_are_meant_by_networks_and_names_are_not() {
        assert!(means("8.8.8.0/24", "8.8.8.8"));
        assert!(means("8.8.8.8", "0x08080808"));
        assert!(means("2606:4700::/32", "[2606:4700::1]"));
        assert!(means("[2606:4700::1]:443", "[2606:4700::1]"));
        assert!(!means("8.8.8.0/24", "dns.google"));
        assert!(!means("0.0.0.0/0", "::1"));
    }

    #[test]
    fn presets() {
        assert!(means("public", "anything.test") && means("public", "8.8.8.8") && !means("public", "10.0.0.1"));
        assert!(means("packages", "pypi.org") && !means("packages", "evil.pypi.org") && !means("packages", "8.8.8.8"));
        assert!(means("*", "10.0.0.1") && means("*", "a.test"));
    }

    #[test]
    fn a_bad_entry_is_named_and_explained() {
        let why = |text| Pattern::parse(text).unwrap_err();
        assert_eq!(why("https://a.test/"), "`https://a.test/` is a URL; give the name of the host alone");
        assert_eq!(why("a.*.test"), "`a.*.test` has a `*` that is not its first label");
        assert_eq!(why("a.test:99999"), "`a.test:99999` has a port that is none");
        assert_eq!(why("10.0.0.0/33"), "`10.0.0.0/33` is not a network, as 10.0.0.0/8 is one");
        assert_eq!(why("*.10.0.0.1"), "`*.10.0.0.1` has an address after `*.`; give a network, as in 10.0.0.0/8");
        for text in ["", ":80", "*.", "a b", "[::1", "[fe80::]/10", "a.test:0", "a..test"] {
            assert!(Pattern::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn ports() {
        let port = |text: &str| Pattern::parse(text).unwrap().port;
        assert_eq!(port("a.test"), None);
        assert_eq!(port("a.test:8080"), Some(Port::One(8080)));
        assert_eq!(port("a.test:*"), Some(Port::Every));
        assert_eq!(port("10.0.0.0/8:22"), Some(Port::One(22)));
        assert_eq!(port("::1"), None);
        assert_eq!(port("[::1]:22"), Some(Port::One(22)));
    }
}
