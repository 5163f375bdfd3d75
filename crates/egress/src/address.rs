//! Recognizes the addresses that sandboxes may not reach by default: those that are not public, and those of this
//! host.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::LazyLock;

use rustix::io::Errno;

/// A range of addresses that share a prefix of `bits` bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Network {
    address: IpAddr,
    bits: u8,
}

impl Network {
    pub(crate) fn new(address: IpAddr, bits: u8) -> Option<Self> {
        (bits <= width(address)).then_some(Self { address, bits })
    }

    pub(crate) fn of(address: IpAddr) -> Self {
        Self { address, bits: width(address) }
    }

    /// Parses a network such as `10.0.0.0/8` or `fe80::/10`, or a single address.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.split_once('/') {
            Some((address, bits)) => Self::new(address.parse().ok()?, bits.parse().ok()?),
            None => Some(Self::of(text.parse().ok()?)),
        }
    }

    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        let shift = u32::from(width(self.address) - self.bits);
        match (self.address, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                (network.to_bits() ^ address.to_bits()).checked_shr(shift).unwrap_or(0) == 0
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => {
                (network.to_bits() ^ address.to_bits()).checked_shr(shift).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

fn width(address: IpAddr) -> u8 {
    if address.is_ipv4() { 32 } else { 128 }
}

pub(crate) const METADATA: &str = "the cloud's metadata address";

/// Networks that are not public, each with its description. The first match wins, so specific entries come first.
const SPECIAL: &[(&str, &str)] = &[
    // Clouds hand out credentials at these addresses to any process on the right machine.
    ("169.254.169.254", METADATA),
    ("169.254.170.2", METADATA),
    ("100.100.100.200", METADATA),
    ("168.63.129.16", METADATA),
    ("192.0.0.192", METADATA),
    ("fd00:ec2::254", METADATA),
    ("fd20:ce::254", METADATA),
    ("0.0.0.0/8", "an unspecified address"),
    ("10.0.0.0/8", "a private address"),
    ("100.64.0.0/10", "a carrier's private address"),
    ("127.0.0.0/8", "a loopback address"),
    ("169.254.0.0/16", "a link-local address"),
    ("172.16.0.0/12", "a private address"),
    ("192.0.0.0/24", "an address for protocols"),
    ("192.0.2.0/24", "an address for documentation"),
    ("192.88.99.0/24", "an address for relays"),
    ("192.168.0.0/16", "a private address"),
    ("198.18.0.0/15", "an address for benchmarks"),
    ("198.51.100.0/24", "an address for documentation"),
    ("203.0.113.0/24", "an address for documentation"),
    ("224.0.0.0/4", "a multicast address"),
    ("255.255.255.255", "the broadcast address"),
    ("240.0.0.0/4", "a reserved address"),
    ("::", "an unspecified address"),
    ("::1", "a loopback address"),
    ("fc00::/7", "a private address"),
    ("fe80::/10", "a link-local address"),
    ("fec0::/10", "a site-local address"),
    ("ff00::/8", "a multicast address"),
    ("2001:db8::/32", "an address for documentation"),
    ("3fff::/20", "an address for documentation"),
    ("100::/64", "an address that discards"),
    ("5f00::/16", "an address for segment routing"),
    // These contain an IPv4 address. Code can always ask for that IPv4 address directly, so refusing them loses
    // nothing.
    ("::ffff:0:0/96", "an IPv4 address in disguise"),
    ("::ffff:0:0:0/96", "an IPv4 address in disguise"),
    ("::/96", "an IPv4 address in disguise"),
    ("64:ff9b::/96", "an IPv4 address in disguise"),
    ("64:ff9b:1::/48", "an IPv4 address in disguise"),
    ("2002::/16", "an IPv4 address in disguise"),
    ("2001::/32", "an IPv4 address in disguise"),
    ("2001::/23", "an address for protocols"),
];

static NETWORKS: LazyLock<Vec<(Network, &'static str)>> =
    LazyLock::new(|| SPECIAL.iter().filter_map(|(network, words)| Some((Network::parse(network)?, *words))).collect());

/// Networks from which transparent proxies hand out addresses in place of the real ones ("fake IP"). The first is
/// reserved for benchmarks, and the second lies in the half of the private networks that nobody may use yet.
static FAKE: LazyLock<Vec<Network>> =
    LazyLock::new(|| ["198.18.0.0/15", "fc00::/18"].into_iter().filter_map(Network::parse).collect());

/// Returns whether a transparent proxy may have handed out this address in place of a real one.
pub(crate) fn is_fake(address: IpAddr) -> bool {
    FAKE.iter().any(|network| network.contains(address))
}

/// Describes why an address is not public. Returns `None` for a public address.
pub(crate) fn special(address: IpAddr) -> Option<&'static str> {
    if let Some(inner) = embedded(address)
        && let Some(words) = special(IpAddr::V4(inner))
    {
        return Some(words);
    }
    NETWORKS.iter().find(|(network, _)| network.contains(address)).map(|(_, words)| *words)
}

/// Returns the IPv4 address that a translator or a tunnel would derive from this address.
pub(crate) fn embedded(address: IpAddr) -> Option<Ipv4Addr> {
    let IpAddr::V6(address) = address else { return None };
    let bits = address.to_bits();
    let low = |shift: u32| Ipv4Addr::from_bits((bits >> shift) as u32);
    match address.segments() {
        // `::` and `::1` contain no IPv4 address.
        [0, 0, 0, 0, 0, 0, _, _] if bits > 1 => Some(low(0)),
        [0, 0, 0, 0, 0, 0xffff, _, _] | [0, 0, 0, 0, 0xffff, 0, _, _] | [0x64, 0xff9b, 0, 0, 0, 0, _, _] => {
            Some(low(0))
        }
        // The position of the IPv4 address in the local-use prefix varies; at the end is the usual one.
        [0x64, 0xff9b, 1, ..] => Some(low(0)),
        [0x2002, ..] => Some(low(80)),
        [0x2001, 0, ..] => Some(Ipv4Addr::from_bits(!low(0).to_bits())),
        _ => None,
    }
}

/// Returns whether an address belongs to this host. Public addresses count as well, because services that listen on
/// every interface are reachable through them.
///
/// Asks the Linux kernel every time, because addresses come and go: for a packet to a local address, the Linux kernel
/// chooses that same address as the source. Nothing is sent. If the Linux kernel cannot answer at all (for example,
/// when the process is out of descriptors), the address counts as local.
pub(crate) fn is_own(address: IpAddr) -> bool {
    let any: IpAddr = if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let source = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(SocketAddr::new(address, 9))?;
        socket.local_addr()
    });
    match source {
        Ok(source) => source.ip() == address,
        // These errors mean that there is no route to the address, or no support for its address family.
        Err(e) => !matches!(
            Errno::from_io_error(&e),
            Some(
                Errno::NETUNREACH
                    | Errno::HOSTUNREACH
                    | Errno::NETDOWN
                    | Errno::ADDRNOTAVAIL
                    | Errno::AFNOSUPPORT
                    | Errno::ACCESS
                    | Errno::INVAL
            )
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(address: &str) -> Option<&'static str> {
        special(address.parse().unwrap())
    }

    #[test]
    fn every_row_is_a_network() {
        assert_eq!(NETWORKS.len(), SPECIAL.len());
    }

    #[test]
    fn n03_no_ipv4_address_but_a_public_one_is_public() {
        for address in
            "0.0.0.0 0.1.2.3 10.0.0.0 10.255.255.255 100.64.0.0 100.127.255.255 127.0.0.1 127.255.0.1 169.254.0.1 \
                 169.254.169.254 172.16.0.0 172.31.255.255 192.0.0.1 192.0.2.1 192.168.0.1 192.168.255.255 198.18.0.0 \
                 198.19.255.255 198.51.100.7 203.0.113.7 224.0.0.1 239.255.255.255 240.0.0.1 255.255.255.255 \
                 168.63.129.16 100.100.100.200"
                .split_whitespace()
        {
            assert!(words(address).is_some(), "{address}");
        }
        for address in "1.1.1.1 8.8.8.8 9.255.255.255 11.0.0.0 100.63.255.255 100.128.0.0 126.255.255.255 128.0.0.0 \
                 169.253.255.255 169.255.0.0 172.15.255.255 172.32.0.0 192.0.1.0 192.167.255.255 192.169.0.0 \
                 198.17.255.255 198.20.0.0 223.255.255.255"
            .split_whitespace()
        {
            assert_eq!(words(address), None, "{address}");
        }
    }

    #[test]
    fn n04_no_ipv6_address_but_a_public_one_is_public() {
        for address in ":: ::1 ::2 ::7f00:1 ::ffff:127.0.0.1 ::ffff:8.8.8.8 ::ffff:0:127.0.0.1 64:ff9b::7f00:1 \
                 64:ff9b::8.8.8.8 64:ff9b:1::a00:1 2002:7f00:1:: 2002:808:808::1 2001:0:4136:e378:8000:63bf:3fff:fdd2 \
                 2001:db8::1 3fff::1 fc00::1 fd00:ec2::254 fdff::1 fe80::1 febf::1 fec0::1 ff02::1 100::1 2001:2::1"
            .split_whitespace()
        {
            assert!(words(address).is_some(), "{address}");
        }
        for address in ["2606:4700:4700::1111", "2001:4860:4860::8888", "2a00:1450::1", "2003::1", "2001:200::1"] {
            assert_eq!(words(address), None, "{address}");
        }
    }

    #[test]
    fn a_disguise_is_named_after_what_is_in_it() {
        assert_eq!(words("::ffff:169.254.169.254"), Some("the cloud's metadata address"));
        assert_eq!(words("64:ff9b::a9fe:a9fe"), Some("the cloud's metadata address"));
        assert_eq!(words("2002:a00:1::"), Some("a private address"));
        assert_eq!(words("2001:0:1:2:3:4:80ff:fffe"), Some("a loopback address"));
        assert_eq!(words("2002:808:808::"), Some("an IPv4 address in disguise"));
    }

    #[test]
    fn the_hosts_own_addresses_are_known_and_others_are_not() {
        assert!(is_own("127.0.0.1".parse().unwrap()));
        assert!(!is_own("192.0.2.77".parse().unwrap()));
    }
}
