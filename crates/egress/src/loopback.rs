//! Ports of the host's own loopback, which the operator opens one by one with entries such as `host:3000`.
//!
//! Inside a sandbox they have the name [`NAME`], because `localhost` is there the sandbox itself. The servers behind
//! them are usually development servers, which refuse every `Host` and `Origin` but their own. The proxy therefore
//! writes requests as if they came from a browser on the host, and changes the addresses in the answers back.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use hyper::HeaderMap;
use hyper::header::{self, HeaderName, HeaderValue};

use crate::denial::plain;

/// Name of the host in entries of policies.
pub(crate) const ENTRY: &str = "host";
/// Name of the host in requests of a sandbox. No resolver is asked for it.
pub const NAME: &str = "host.sandpool.internal";
/// Addresses that stand behind the name, in the order in which they are tried.
pub(crate) const ADDRESSES: [IpAddr; 2] = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
/// Name of the host as its own servers know it.
pub(crate) const LOCALHOST: &str = "localhost";

/// Names under which a server on the host refers to itself.
const OWN_NAMES: [&str; 3] = [LOCALHOST, "127.0.0.1", "[::1]"];
const SCHEMES: [&str; 2] = ["http://", "https://"];

/// Returns why a request that a page of another site caused is refused. The server on the host cannot refuse it, because
/// the request has the server's own `Host`. Pages of the host and of the sandbox itself may send requests, and so may
/// programs, which name no page.
pub(crate) fn foreign_page(headers: &HeaderMap) -> Option<String> {
    let pages = [header::ORIGIN, header::REFERER].into_iter().flat_map(|name| headers.get_all(name));
    let pages: Vec<&str> = pages.map(|page| page.to_str().unwrap_or_default()).collect();
    let is_own = |page: &str| [NAME].iter().chain(&OWN_NAMES).any(|own| renamed(page, own, own).is_some());
    if let Some(page) = pages.iter().find(|page| !is_own(page)) {
        let site = page.split('/').take(3).collect::<Vec<_>>().join("/");
        return Some(format!("the request comes from a page of another site ({})", plain(&site, 80)));
    }
    let crosses = headers.get_all("sec-fetch-site").iter().any(|value| value == "cross-site");
    (pages.is_empty() && crosses).then(|| "the request comes from a page of another site".into())
}

/// Replaces the sandbox's name of the host with `localhost` in the headers that name the page behind a request.
pub(crate) fn rewrite_request(headers: &mut HeaderMap) {
    rename(headers, &[header::ORIGIN, header::REFERER], &[NAME], LOCALHOST);
}

/// Replaces the host's own names with the sandbox's name of the host in the headers of an answer that name the next
/// page, or the page that may read the answer.
pub(crate) fn rewrite_response(headers: &mut HeaderMap) {
    rename(headers, &[header::LOCATION, header::ACCESS_CONTROL_ALLOW_ORIGIN], &OWN_NAMES, NAME);
}

fn rename(headers: &mut HeaderMap, names: &[HeaderName], from: &[&str], to: &str) {
    for name in names {
        let Some(value) = headers.get(name).and_then(|value| value.to_str().ok()) else { continue };
        let Some(renamed) = from.iter().find_map(|from| renamed(value, from, to)) else { continue };
        if let Ok(renamed) = HeaderValue::try_from(renamed) {
            headers.insert(name, renamed);
        }
    }
}

/// Replaces the host of an absolute URL. Returns `None` if the URL has another host, or user information.
fn renamed(url: &str, from: &str, to: &str) -> Option<String> {
    let scheme = SCHEMES.into_iter().find(|scheme| url.starts_with(scheme))?;
    let rest = url[scheme.len()..].strip_prefix(from)?;
    let (authority, _) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    let port = authority.strip_prefix(':').unwrap_or(authority);
    let has_only_port =
        port.bytes().all(|b| b.is_ascii_digit()) && (authority.is_empty() || authority.starts_with(':'));
    has_only_port.then(|| format!("{scheme}{to}{rest}"))
}

/// Returns whether the first bytes of a connection begin a request of HTTP/1.
pub(crate) fn is_http(first: &[u8]) -> bool {
    let method = first.split(|b| *b == b' ').next().unwrap_or_default();
    (3..=16).contains(&method.len()) && method.len() < first.len() && method.iter().all(u8::is_ascii_uppercase)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_host_of_a_url_is_renamed() {
        for (url, expected) in [
            (
                "http://localhost:3000/a?b=http://localhost",
                Some("http://host.sandpool.internal:3000/a?b=http://localhost"),
            ),
            ("https://localhost", Some("https://host.sandpool.internal")),
            ("http://localhost?x", Some("http://host.sandpool.internal?x")),
            ("http://localhost.evil.test:3000/", None),
            ("http://localhost:3000@evil.test/", None),
            ("http://localhost:pw@evil.test/", None),
            ("http://localhostile/", None),
            ("/localhost", None),
            ("*", None),
            ("null", None),
        ] {
            assert_eq!(renamed(url, LOCALHOST, NAME).as_deref(), expected, "{url}");
        }
        assert_eq!(renamed("http://[::1]:80/", "[::1]", NAME).as_deref(), Some("http://host.sandpool.internal:80/"));
    }

    #[test]
    fn a_request_is_told_from_other_bytes() {
        for (first, expected) in [
            (b"GET / HTTP/1.1\r\n".as_slice(), true),
            (b"OPTIONS * HTTP/1.1", true),
            (b"GET", false),
            (b"\x16\x03\x01", false),
            (b"\0\0\0\x08\x04\xd2\x16\x2f", false),
            (b"ping ", false),
            (b" GET", false),
            (b"", false),
        ] {
            assert_eq!(is_http(first), expected, "{first:?}");
        }
    }
}
