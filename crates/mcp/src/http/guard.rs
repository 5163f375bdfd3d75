//! Decides which hosts the server answers to and which origins may send requests. This is the defence against web pages
//! that reach the server through a host name under their control.
//!
//! The checks have no side effects and are the same for every route.

use std::net::{IpAddr, SocketAddr};

use axum::body::Body;
use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS, HOST, HeaderValue, ORIGIN,
    VARY,
};
use http::request::Parts;
use http::uri::Authority;
use http::{HeaderMap, Response, StatusCode};

use super::{HttpOptions, empty};

const METHODS: &str = "GET, POST, DELETE, OPTIONS";
const HEADERS: &str = "Content-Type, Accept, Authorization, Mcp-Session-Id, MCP-Protocol-Version, Mcp-Method, Mcp-Name, \
                       Last-Event-ID";

/// The hosts and origins that the server accepts.
pub(super) struct Guard {
    hosts: Vec<Name>,
    any_host: bool,
    origins: Vec<Origin>,
    any_origin: bool,
    cors: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct Name {
    /// Host name in lower case, or an address; an IPv6 address has no brackets.
    host: String,
    port: Option<u16>,
}

#[derive(Debug, PartialEq, Eq)]
struct Origin {
    scheme: String,
    name: Name,
}

/// The reason why a request is rejected before it is dispatched.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestRefusal {
    pub status: StatusCode,
    pub why: &'static str,
}

/// The CORS headers of an answer: none, for any origin, or for one origin.
pub(super) enum Cors {
    None,
    Anyone,
    One(HeaderValue),
}

/// Rejects malformed hosts and origins; see [`HttpOptions::check`].
pub(super) fn check(options: &HttpOptions) -> Result<(), String> {
    let is_host = |text: &&String| *text == "*" || Name::parse(text).is_some();
    let is_origin = |text: &&String| *text == "*" || Origin::parse(text).is_some();
    match (options.allowed_hosts.iter().find(|t| !is_host(t)), options.allowed_origins.iter().find(|t| !is_origin(t))) {
        (Some(host), _) => {
            Err(format!("`serve.allowed_hosts`: `{host}` is not a host name such as `sandbox.example.com`"))
        }
        (_, Some(origin)) => {
            Err(format!("`serve.allowed_origins`: `{origin}` is not an origin such as `https://app.example.com`"))
        }
        (None, None) => Ok(()),
    }
}

impl Guard {
    pub(super) fn new(options: &HttpOptions) -> Self {
        let listed = &options.allowed_origins;
        Self {
            hosts: options.allowed_hosts.iter().filter_map(|host| Name::parse(host)).collect(),
            any_host: options.allowed_hosts.iter().any(|host| host == "*"),
            origins: listed.iter().filter_map(|origin| Origin::parse(origin)).collect(),
            any_origin: !options.open
                && (listed.iter().any(|origin| origin == "*") || (listed.is_empty() && options.cors)),
            cors: options.cors,
        }
    }

    /// Checks the host and the origin of a request. `local` is the address that the client connected to. It is always
    /// accepted as host, because a page cannot make a browser send an address as host and reach another machine with
    /// it.
    pub(super) fn check(&self, parts: &Parts, local: SocketAddr) -> Result<Cors, RequestRefusal> {
        let mut hosts = parts.headers.get_all(HOST).iter();
        let (Some(host), None) = (hosts.next(), hosts.next()) else {
            return Err(RequestRefusal { status: StatusCode::BAD_REQUEST, why: "exactly one Host header is needed" });
        };
        let named = [host.to_str().ok(), parts.uri.authority().map(Authority::as_str)];
        let is_served = |text: &str| Name::parse(text).is_some_and(|name| self.serves(&name, local));
        if named[0].is_none() || !named.into_iter().flatten().all(is_served) {
            return Err(RequestRefusal {
                status: StatusCode::FORBIDDEN,
                why: "this Host is not served here; see `--allowed-hosts`",
            });
        }
        self.origin(&parts.headers, local)
    }

    fn serves(&self, name: &Name, local: SocketAddr) -> bool {
        self.any_host || self.is_ours(name, local)
    }

    fn is_ours(&self, name: &Name, local: SocketAddr) -> bool {
        let address = name.host.parse::<IpAddr>().ok().map(|ip| ip.to_canonical());
        name.host == "localhost"
            || address.is_some_and(|ip| ip.is_loopback() || ip == local.ip().to_canonical())
            || self.hosts.iter().any(|ours| ours.host == name.host && (ours.port.is_none() || ours.port == name.port))
    }

    fn origin(&self, headers: &HeaderMap, local: SocketAddr) -> Result<Cors, RequestRefusal> {
        let Some(given) = headers.get(ORIGIN) else {
            return Ok(if self.cors && self.any_origin { Cors::Anyone } else { Cors::None });
        };
        let one = headers.get_all(ORIGIN).iter().count() == 1;
        let origin = given.to_str().ok().and_then(Origin::parse);
        let is_allowed = |origin: &Origin| {
            if self.origins.is_empty() {
                matches!(origin.scheme.as_str(), "http" | "https") && self.is_ours(&origin.name, local)
            } else {
                self.origins.contains(origin)
            }
        };
        if !one || !(self.any_origin || origin.as_ref().is_some_and(is_allowed)) {
            return Err(RequestRefusal {
                status: StatusCode::FORBIDDEN,
                why: "this Origin is not allowed; see `--allowed-origins`",
            });
        }
        Ok(match (self.cors, self.any_origin) {
            (false, _) => Cors::None,
            (true, true) => Cors::Anyone,
            (true, false) => Cors::One(given.clone()),
        })
    }

    /// Returns the answer to a preflight request, or `None` if `cors` is off.
    pub(super) fn preflight(&self, parts: &Parts) -> Option<Response<Body>> {
        if !self.cors {
            return None;
        }
        let asked = parts.headers.get(ACCESS_CONTROL_REQUEST_HEADERS).and_then(|value| value.to_str().ok());
        let repeated = asked.unwrap_or_default().split(',').map(str::trim);
        let arguments =
            repeated.filter(|name| name.get(..10).is_some_and(|start| start.eq_ignore_ascii_case("mcp-param-")));
        let allowed = [HEADERS].into_iter().chain(arguments).collect::<Vec<_>>().join(", ");
        let mut response = empty(StatusCode::NO_CONTENT);
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static(METHODS));
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HeaderValue::from_str(&allowed).ok()?);
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
        Some(response)
    }
}

impl Cors {
    pub(super) fn apply(self, headers: &mut HeaderMap) {
        let origin = match self {
            Self::None => return,
            Self::Anyone => HeaderValue::from_static("*"),
            Self::One(origin) => {
                headers.append(VARY, HeaderValue::from_static("Origin"));
                origin
            }
        };
        headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("Mcp-Session-Id"));
    }
}

impl Name {
    fn parse(text: &str) -> Option<Self> {
        let authority: Authority = text.trim().parse().ok()?;
        if authority.as_str().contains('@') {
            return None;
        }
        let host = authority.host();
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let port = match authority.port() {
            Some(port) => Some(port.as_str().parse().ok()?),
            None => None,
        };
        Some(Self { host: host.to_ascii_lowercase(), port })
    }
}

impl Origin {
    /// Returns `None` for `null` and for anything else that is not of the form `scheme://host[:port]`.
    fn parse(text: &str) -> Option<Self> {
        let (scheme, rest) = text.trim().split_once("://")?;
        let scheme = scheme.to_ascii_lowercase();
        let mut name = Name::parse(rest)?;
        name.port = name.port.or(match scheme.as_str() {
            "http" => Some(80),
            "https" => Some(443),
            _ => None,
        });
        Some(Self { scheme, name })
    }
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;

    fn outcome(options: &HttpOptions, host: &str, origin: Option<&str>) -> String {
        let mut request = Request::post("/mcp").header(HOST, host);
        if let Some(origin) = origin {
            request = request.header(ORIGIN, origin);
        }
        let (parts, ()) = request.body(()).unwrap().into_parts();
        match Guard::new(options).check(&parts, "192.0.2.7:8775".parse().unwrap()) {
            Err(refusal) => refusal.status.as_u16().to_string(),
            Ok(Cors::None) => "silent".into(),
            Ok(Cors::Anyone) => "*".into(),
            Ok(Cors::One(origin)) => origin.to_str().unwrap().into(),
        }
    }

    #[test]
    fn by_default_only_loopback_names_and_the_address_itself_are_served() {
        let options = HttpOptions::default();
        for host in ["localhost", "LOCALHOST:8775", "127.0.0.1:1", "[::1]:8775", "127.3.2.1", "192.0.2.7:8775"] {
            assert_eq!(outcome(&options, host, None), "silent", "{host}");
        }
        for host in
            ["evil.example", "localhost.evil.com", "localhost@evil.com", "192.0.2.8", "10.0.0.1:8775", "a b", "::1"]
        {
            assert_eq!(outcome(&options, host, None), "403", "{host}");
        }
    }

    #[test]
    fn foreign_origins_are_refused() {
        let options = HttpOptions::default();
        for origin in
            ["null", "file://", "http://localhost.evil.com", "http://evil.example", "localhost", "", "ftp://localhost"]
        {
            assert_eq!(outcome(&options, "localhost", Some(origin)), "403", "{origin}");
        }
        for origin in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5173"] {
            assert_eq!(outcome(&options, "localhost", Some(origin)), "silent", "{origin}");
        }
    }

    #[test]
    fn configured_hosts_are_served_and_may_ask() {
        let allowed_hosts = vec!["sandpool.example".into(), "other.example:8443".into()];
        let options = HttpOptions { allowed_hosts, ..HttpOptions::default() };
        assert_eq!(outcome(&options, "sandpool.example:99", Some("https://sandpool.example")), "silent");
        assert_eq!(outcome(&options, "other.example:8443", None), "silent");
        assert_eq!(outcome(&options, "other.example", None), "403");
        let any = HttpOptions { allowed_hosts: vec!["*".into()], ..HttpOptions::default() };
        assert_eq!(outcome(&any, "whatever.example", None), "silent");
        assert_eq!(outcome(&any, "rebound.example", Some("http://rebound.example")), "403");
    }

    #[test]
    fn what_is_no_host_or_origin_is_named() {
        let check = |hosts: &[&str], origins: &[&str]| {
            let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
            let (allowed_hosts, allowed_origins) = (owned(hosts), owned(origins));
            HttpOptions { allowed_hosts, allowed_origins, ..HttpOptions::default() }.check()
        };
        assert_eq!(check(&["*", "a.example", "a.example:80", "[::1]:80"], &["*", "https://a.example:8443"]), Ok(()));
        let wrong =
            |text| Err(format!("`serve.allowed_origins`: `{text}` is not an origin such as `https://app.example.com`"));
        for origin in ["app.example", "https://app.example/", "null", ""] {
            assert_eq!(check(&[], &[origin]), wrong(origin));
        }
        let wrong = "`serve.allowed_hosts`: `https://a.example` is not a host name such as `sandbox.example.com`";
        assert_eq!(check(&["https://a.example"], &[]), Err(wrong.into()));
    }

    #[test]
    fn cross_origin_answers_go_to_anyone_or_to_those_listed() {
        let cors = HttpOptions { cors: true, ..HttpOptions::default() };
        assert_eq!(outcome(&cors, "localhost", Some("https://anyone.example")), "*");
        assert_eq!(outcome(&cors, "localhost", Some("null")), "*");
        let open = HttpOptions { open: true, ..cors.clone() };
        assert_eq!(outcome(&open, "localhost", Some("https://anyone.example")), "403");
        assert_eq!(outcome(&open, "localhost", Some("http://localhost:3000")), "http://localhost:3000");
        let wild = HttpOptions { allowed_origins: vec!["*".into()], ..open };
        assert_eq!(outcome(&wild, "localhost", Some("https://anyone.example")), "403", "without a token");
        assert_eq!(outcome(&HttpOptions { open: false, ..wild }, "localhost", Some("https://anyone.example")), "*");
        let narrow = HttpOptions { allowed_origins: vec!["https://app.example".into()], ..cors };
        assert_eq!(outcome(&narrow, "localhost", Some("https://app.example")), "https://app.example");
        assert_eq!(outcome(&narrow, "localhost", Some("https://app.example:443")), "https://app.example:443");
        assert_eq!(outcome(&narrow, "localhost", Some("http://app.example")), "403");
        assert_eq!(outcome(&narrow, "localhost", Some("http://localhost:3000")), "403");
    }
}
