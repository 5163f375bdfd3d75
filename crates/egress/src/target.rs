//! Parses the target of a request as browsers do, for which `0x7f.1` and `２１３０７０６４３３` are addresses.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

use crate::{address, loopback};

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Host {
    /// A host name in lower case and punycode, without a trailing dot.
    Name(String),
    Address(IpAddr),
}

impl Host {
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        if let Ok(address) = text.parse::<Ipv6Addr>() {
            return Ok(Self::Address(address.into()));
        }
        match url::Host::parse(text) {
            Ok(url::Host::Domain(name)) => Self::name(&name),
            Ok(url::Host::Ipv4(address)) => Ok(Self::Address(address.into())),
            Ok(url::Host::Ipv6(address)) => Ok(Self::Address(address.into())),
            Err(e) => Err(e.to_string()),
        }
    }

    fn name(text: &str) -> Result<Self, String> {
        let name = text.strip_suffix('.').unwrap_or(text);
        // The URL standard allows more characters, but no name that resolves contains them, and messages and headers
        // are safer without them.
        let is_part = |b: u8| b.is_ascii_alphanumeric() || b"-_".contains(&b);
        let is_label = |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(is_part);
        if name.len() > 253 || !name.split('.').all(is_label) {
            return Err("not a name of a host".into());
        }
        Ok(Self::Name(name.to_owned()))
    }

    /// Returns whether this is the name of the host that the sandboxes run on. It stands for the host's loopback.
    pub(crate) fn is_this_host(&self) -> bool {
        matches!(self, Self::Name(name) if name == loopback::NAME)
    }

    /// Describes why the host is not public, as far as that is known without resolving it.
    pub(crate) fn special(&self) -> Option<&'static str> {
        match self {
            Self::Name(_) if self.is_this_host() => Some("the loopback of this host"),
            Self::Name(_) => None,
            Self::Address(address) => address::special(*address),
        }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Address(IpAddr::V4(address)) => address.fmt(f),
            Self::Address(IpAddr::V6(address)) => write!(f, "[{address}]"),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Target {
    pub host: Host,
    pub port: u16,
}

impl Target {
    /// Parses `name:port`, as CONNECT sends it.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (host, port) = text.rsplit_once(':').ok_or("there is no port")?;
        let port = port.parse().ok().filter(|port| *port != 0).ok_or("not a port")?;
        Ok(Self { host: Host::parse(host)?, port })
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.host, self.port)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn n08_an_address_in_any_dress_is_an_address() {
        for text in "127.0.0.1 127.0.0.1. 2130706433 0177.0.0.1 0x7f.1 0x7f000001 127.1 0x7f.0x0.0x0.0x1 017700000001 \
                 127.0.1 １２７.０.０.１ ２１３０７０６４３３ 127。0。0。1 %31%32%37.0.0.1 ①②⑦.0.0.1"
            .split_whitespace()
        {
            assert_eq!(Host::parse(text), Ok(Host::Address("127.0.0.1".parse().unwrap())), "{text}");
        }
        for text in ["[::1]", "::1", "[0:0:0:0:0:0:0:1]"] {
            assert_eq!(Host::parse(text), Ok(Host::Address("::1".parse().unwrap())), "{text}");
        }
        for text in ["[::ffff:7f00:1]", "[::ffff:127.0.0.1]", "[64:ff9b::7f00:1]"] {
            assert_eq!(Host::parse(text).unwrap().special(), Some("a loopback address"), "{text}");
        }
    }

    #[test]
    fn what_is_neither_a_name_nor_an_address_is_refused() {
        for text in [
            "",
            ".",
            "a..b",
            "256.256.256.256",
            "1.2.3.4.5",
            "0x7f.1.x.09",
            "[::1",
            "[fe80::1%eth0]",
            "fe80::1%1",
            "a b",
            "a/b",
            "a@b",
            "a\0b",
            "a%00b",
            "a#b",
            "a?b",
            "a:b",
            "xn--a",
            "*.a.test",
            "a\"b.test",
            "a,b.test",
            "a'b.test",
        ] {
            assert!(Host::parse(text).is_err(), "{text:?} is {:?}", Host::parse(text));
        }
        assert!(Host::parse(&"a".repeat(64)).is_err());
    }

    #[test]
    fn names_are_compared_in_one_form() {
        for text in ["EXAMPLE.com", "example.com.", "ｅxample.com", "example%2Ecom", "exa\u{ad}mple.com"] {
            assert_eq!(Host::parse(text), Ok(Host::Name("example.com".into())), "{text}");
        }
        assert_eq!(Host::parse("bücher.de"), Ok(Host::Name("xn--bcher-kva.de".into())));
    }
}
