//! The upstream proxy: a proxy of the operator's network through which connections leave, because there is no other way
//! out. It resolves names itself, so that only names, ports and literal addresses can be checked here.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, StatusCode, Uri};
use percent_encoding::percent_decode_str;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use url::Url;
use zeroize::Zeroizing;

use crate::connect::ProxyError;
use crate::limits::Bucket;
use crate::pattern::Pattern;
use crate::target::{Host, Target};
use crate::vault::{InjectedSecrets, ask_for_searchable};
use crate::{address, http, lock};

/// Maximum length of the head of an answer to CONNECT.
const MAX_ANSWER: usize = 16 << 10;
/// Number of failures per second that are logged, because code in a sandbox can cause any number of them.
const LOGGED_PER_SECOND: f64 = 0.1;
const LOGGED_AT_ONCE: f64 = 3.0;

/// One upstream proxy with its credentials, which are never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct UpstreamProxy {
    target: Target,
    authorization: Option<HeaderValue>,
}

/// The upstream proxies of a server, and the hosts that are reached without them.
#[derive(Debug, Clone, Default)]
pub struct Upstreams {
    /// Proxy for requests in plain HTTP.
    pub http: Option<UpstreamProxy>,
    /// Proxy for everything else, which passes through tunnels.
    pub https: Option<UpstreamProxy>,
    /// Hosts that are reached directly, written as the entries of a policy.
    pub except: Vec<String>,
}

impl Upstreams {
    /// Checks that the exceptions can be parsed. The error names the entry that is wrong.
    pub fn check(&self) -> Result<(), String> {
        self.except.iter().try_for_each(|entry| Pattern::parse(entry).map(|_| ()))
    }
}

impl fmt::Debug for UpstreamProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let credentials = if self.has_credentials() { " with credentials" } else { "" };
        write!(f, "http://{}{credentials}", self.target)
    }
}

impl UpstreamProxy {
    /// Parses `http://host:port`, possibly with `user:password@` before the host. The error does not repeat the text.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        const FORM: &str = "an upstream proxy is given as `http://host:port`";
        let url = Url::parse(text).map_err(|_| FORM)?;
        if url.scheme() == "https" {
            return Err("the connection to an upstream proxy is plain HTTP: `http://host:port`, not `https://`");
        }
        if url.scheme() != "http"
            || !matches!(url.path(), "" | "/")
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(FORM);
        }
        let host = url.host_str().and_then(|host| Host::parse(host).ok()).ok_or(FORM)?;
        let port = url.port_or_known_default().filter(|port| *port != 0).ok_or(FORM)?;
        let proxy = Self { target: Target { host, port }, authorization: None };
        if url.username().is_empty() && url.password().is_none() {
            return Ok(proxy);
        }
        let decoded = |text: &str| percent_decode_str(text).decode_utf8().map(|text| Zeroizing::new(text.into_owned()));
        let user = decoded(url.username()).map_err(|_| FORM)?;
        let password = decoded(url.password().unwrap_or_default()).map_err(|_| FORM)?;
        proxy.with_credentials(format!("{}:{}", *user, *password))
    }

    /// Adds credentials in the form `user:password`, with or without a line ending. The error does not repeat them.
    pub fn with_credentials(self, text: String) -> Result<Self, &'static str> {
        let text = Zeroizing::new(text);
        let pair = text.trim_end_matches(['\r', '\n']);
        if pair.split_once(':').is_none_or(|(user, _)| user.is_empty()) || pair.chars().any(char::is_control) {
            return Err("credentials are one line with `user:password`");
        }
        let encoded = Zeroizing::new(STANDARD.encode(pair));
        let value = HeaderValue::from_str(&format!("Basic {}", *encoded));
        let mut value = value.map_err(|_| "the credentials cannot stand in a header")?;
        value.set_sensitive(true);
        Ok(Self { authorization: Some(value), ..self })
    }

    pub fn has_credentials(&self) -> bool {
        self.authorization.is_some()
    }

    pub(crate) fn host(&self) -> &Host {
        &self.target.host
    }

    pub(crate) fn port(&self) -> u16 {
        self.target.port
    }

    /// Asks the proxy for a tunnel to `target`. Afterwards `stream` carries the bytes of the tunnel.
    pub(crate) async fn open_tunnel(&self, stream: &mut TcpStream, target: &Target) -> Result<(), ProxyError> {
        let lost = |_| ProxyError::Upstream("it closed the connection".into());
        let mut request = Zeroizing::new(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n").into_bytes());
        if let Some(value) = &self.authorization {
            request.extend_from_slice(b"Proxy-Authorization: ");
            request.extend_from_slice(value.as_bytes());
            request.extend_from_slice(b"\r\n");
        }
        request.extend_from_slice(b"\r\n");
        stream.write_all(&request).await.map_err(lost)?;
        let head = read_head(stream).await?;
        match status(&head) {
            Some(status) if status.is_success() => Ok(()),
            Some(status) => Err(self.refused(target, status)),
            None => Err(ProxyError::Upstream("its answer is not HTTP".into())),
        }
    }

    /// Turns a request for the host into a request for the proxy, which forwards it.
    pub(crate) fn address<B>(&self, target: &Target, request: &mut Request<B>) -> Result<(), ProxyError> {
        if request.method().as_str().eq_ignore_ascii_case(Method::TRACE.as_str()) {
            // The proxy could answer it itself, with the credentials that it was sent.
            return Err(ProxyError::Malformed("TRACE does not pass through the upstream proxy of this server".into()));
        }
        // `*` of OPTIONS is no path, and would become a part of the host.
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let path = if path == "*" { "/" } else { path };
        *request.uri_mut() = Uri::try_from(format!("http://{}{path}", http::authority("http", target)))
            .map_err(|_| ProxyError::Malformed("the path of the request is none".into()))?;
        let headers = request.headers_mut();
        // With this header, the proxy and not the host would answer some requests.
        headers.remove(header::MAX_FORWARDS);
        if let Some(value) = &self.authorization {
            headers.insert(header::PROXY_AUTHORIZATION, value.clone());
            ask_for_searchable(headers);
        }
        Ok(())
    }

    /// Returns what to mask in answers that the proxy forwards.
    pub(crate) fn masked(&self) -> InjectedSecrets {
        let value = self.authorization.as_ref().and_then(|value| value.to_str().ok());
        InjectedSecrets::only(value.and_then(|value| value.strip_prefix("Basic ")).unwrap_or_default())
    }

    /// Describes why the proxy does not open a tunnel, or does not forward a request.
    pub(crate) fn refused(&self, target: &Target, status: StatusCode) -> ProxyError {
        ProxyError::Upstream(match status {
            StatusCode::PROXY_AUTHENTICATION_REQUIRED if self.has_credentials() => {
                "it does not accept the credentials in `network.upstream_credentials` (status 407)".into()
            }
            StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
                "it asks for credentials, which the operator can set by `network.upstream_credentials` (status 407)"
                    .into()
            }
            status => format!("it refused the connection to {target} with status {}", status.as_u16()),
        })
    }
}

/// Reads the head of an answer and nothing after it, which belongs to the tunnel.
async fn read_head(stream: &mut TcpStream) -> Result<Vec<u8>, ProxyError> {
    let lost = |_| ProxyError::Upstream("it closed the connection".into());
    let (mut head, mut seen) = (Vec::new(), vec![0; 4 << 10]);
    loop {
        let n = stream.peek(&mut seen).await.map_err(lost)?;
        if n == 0 {
            return Err(ProxyError::Upstream("it closed the connection".into()));
        }
        let read = head.len();
        head.extend_from_slice(&seen[..n]);
        let end = head.windows(4).position(|bytes| bytes == b"\r\n\r\n").map(|at| at + 4);
        head.truncate(end.unwrap_or(head.len()));
        let taken = head.len() - read;
        stream.read_exact(&mut seen[..taken]).await.map_err(lost)?;
        if end.is_some() {
            return Ok(head);
        }
        if head.len() > MAX_ANSWER {
            return Err(ProxyError::Upstream("its answer is too long".into()));
        }
    }
}

fn status(head: &[u8]) -> Option<StatusCode> {
    let line = head.split(|b| *b == b'\r').next()?;
    let rest = line.strip_prefix(b"HTTP/1.1 ").or_else(|| line.strip_prefix(b"HTTP/1.0 "))?;
    StatusCode::from_bytes(rest.get(..3)?).ok()
}

/// The kind of traffic on a connection, which decides how it passes through an upstream proxy.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Requests in plain HTTP, which an upstream proxy forwards one by one.
    Requests,
    /// Plain HTTP that has to pass as it is: a WebSocket, or a `Host` other than the target.
    HttpTunnel,
    /// Everything else.
    Tunnel,
}

/// The way to a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Route {
    Direct(SocketAddr),
    /// A tunnel through an upstream proxy.
    Tunnel(Arc<UpstreamProxy>),
    /// Requests that an upstream proxy forwards.
    Forward(Arc<UpstreamProxy>),
}

/// The upstream proxies in the form that decides.
#[derive(Debug)]
pub(crate) struct Routes {
    http: Option<Arc<UpstreamProxy>>,
    https: Option<Arc<UpstreamProxy>>,
    except: Vec<Pattern>,
    logged: Mutex<Bucket>,
}

impl Routes {
    pub(crate) fn new(upstreams: Upstreams) -> Result<Self, String> {
        Ok(Self {
            http: upstreams.http.map(Arc::new),
            https: upstreams.https.map(Arc::new),
            except: upstreams.except.iter().map(|entry| Pattern::parse(entry)).collect::<Result<_, _>>()?,
            logged: Mutex::new(Bucket::new(LOGGED_PER_SECOND, LOGGED_AT_ONCE)),
        })
    }

    pub(crate) fn has_proxies_of(&self, other: &Self) -> bool {
        self.http == other.http && self.https == other.https && self.except == other.except
    }

    /// Returns whether the target is an upstream proxy. Whoever could speak with it could ask it for any address.
    pub(crate) fn is_proxy(&self, target: &Target) -> bool {
        [&self.http, &self.https].into_iter().flatten().any(|proxy| proxy.target == *target)
    }

    /// Returns the way through an upstream proxy, or `None` if the target is reached directly. An address that is not
    /// public always is: a proxy would reach another machine by it, or itself.
    pub(crate) fn upstream(&self, target: &Target, carries: Carries) -> Option<Route> {
        let Target { host, port } = target;
        let is_near = match host {
            Host::Address(ip) => address::special(*ip).is_some() || address::is_own(*ip),
            Host::Name(_) => host.is_this_host(),
        };
        let is_excepted = |entry: &Pattern| entry.means(host) && entry.has_port(*port).unwrap_or(true);
        if is_near || self.except.iter().any(is_excepted) {
            return None;
        }
        match carries {
            Carries::Requests => self.http.clone().map(Route::Forward),
            Carries::HttpTunnel => self.http.clone().map(Route::Tunnel),
            Carries::Tunnel => self.https.clone().map(Route::Tunnel),
        }
    }

    /// Logs a failure of an upstream proxy, but not every one.
    pub(crate) fn log(&self, proxy: &UpstreamProxy, error: &ProxyError) {
        if lock(&self.logged).try_take() {
            tracing::warn!(?proxy, "{error}");
        }
    }
}

/// Names of networks for their own use. An upstream proxy would find them in its own network, or on its own machine.
const LOCAL_NAMES: &[&str] = &[
    "localhost",
    "local",
    "localdomain",
    "internal",
    "home.arpa",
    "lan",
    "corp",
    "home",
    "intranet",
    "private",
    "consul",
];

/// Returns whether a name has a meaning only inside a network: one without a dot, or below a name for local use.
pub(crate) fn is_local(name: &str) -> bool {
    let is_below = |local: &str| name.strip_suffix(local).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
    !name.contains('.') || LOCAL_NAMES.iter().any(|local| is_below(local))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_upstream_is_an_http_address_and_its_credentials_are_never_shown() {
        let proxy = UpstreamProxy::parse("http://user%40corp:pass%3aword@Proxy.Corp.test:3128/").unwrap();
        assert_eq!(format!("{proxy:?}"), "http://proxy.corp.test:3128 with credentials");
        let sent = proxy.authorization.as_ref().and_then(|value| value.to_str().ok()).unwrap();
        assert_eq!(sent, format!("Basic {}", STANDARD.encode("user@corp:pass:word")));
        assert_eq!(UpstreamProxy::parse("http://10.0.0.1").unwrap().target.to_string(), "10.0.0.1:80");
        for text in
            ["", "proxy.test:3128", "socks5://a.test:1", "https://s3cret:pw@a.test", "http://", "http://a.test/s3cret"]
        {
            let why = UpstreamProxy::parse(text).unwrap_err();
            assert!(!why.contains("s3cret"), "{text}: {why}");
        }
        for text in ["", "s3cret", ":s3cret", "s3cret:a\nb"] {
            let why = UpstreamProxy::parse("http://a.test").unwrap().with_credentials(text.into()).unwrap_err();
            assert!(!why.contains("s3cret"), "{text}: {why}");
        }
    }

    #[test]
    fn names_of_a_network_of_its_own_are_told_from_public_ones() {
        for name in [
            "localhost",
            "a.localhost",
            "wiki",
            "metadata.google.internal",
            "printer.local",
            "a.home.arpa",
            "router.lan",
        ] {
            assert!(is_local(name), "{name}");
        }
        for name in ["a.test", "localhost.example", "notlocal.example", "xlocal.com", "arpa.homes"] {
            assert!(!is_local(name), "{name}");
        }
    }
}
