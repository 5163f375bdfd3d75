//! HTTP/1.1 through the proxy. Every request is parsed, judged and written anew, so that the proxy and the host
//! cannot interpret it differently.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::ext::ReasonPhrase;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::uri::Authority;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode, Uri, Version, server};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, copy_bidirectional};

use crate::connect::ProxyError;
use crate::denial::plain;
use crate::gate::{Connection, ConnectionInfo, Visibility};
use crate::loopback;
use crate::policy::DenyReason;
use crate::target::{Host, Target};
use crate::tunnel;
use crate::upstream::IdleUpstream;

/// Header that marks a response as a denial by the proxy and not a response of the host.
const DENIED: &str = "x-sandpool-denied";

/// Timeout for the head of a request, and for the pause between two requests.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
pub(crate) const MAX_HEADERS: usize = 128;
pub(crate) const MAX_HEAD: usize = 64 << 10;

type Body = BoxBody<Bytes, hyper::Error>;
type Reply = Result<Response<Body>, ProxyError>;

/// The fixed destination of all requests inside a tunnel.
#[derive(Clone)]
pub(crate) struct Fixed {
    pub target: Target,
    /// Name of the host if the proxy terminates TLS. The proxy then opens TLS to the host under this name.
    pub tls: Option<String>,
}

pub(crate) async fn serve<S>(connection: Arc<Connection>, stream: S, fixed: Option<Fixed>) -> hyper::Result<()>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let own = Arc::new((fixed, IdleUpstream::default()));
    let service = service_fn(move |request| {
        let (connection, own) = (Arc::clone(&connection), Arc::clone(&own));
        async move { Ok::<_, Infallible>(reply(connection, request, own.0.as_ref(), &own.1).await) }
    });
    server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(MAX_HEADERS)
        .max_buf_size(MAX_HEAD)
        .auto_date_header(false)
        .preserve_header_case(true)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades()
        .await
}

async fn reply(
    connection: Arc<Connection>,
    request: Request<Incoming>,
    fixed: Option<&Fixed>,
    idle: &IdleUpstream,
) -> Response<Body> {
    let state = Arc::clone(&connection.state);
    let reply = match fixed {
        None if request.method() == Method::CONNECT => tunnel(connection, request).await,
        Some(_) if request.method() == Method::CONNECT => {
            Err(ProxyError::Malformed("there is a tunnel already, and no other can be opened inside it".into()))
        }
        _ => forward(&connection, request, fixed, idle).await,
    };
    match reply {
        Ok(response) => response,
        Err(error) => {
            state.meter.refusal().await;
            failure_response(&error)
        }
    }
}

/// Renders an error as a response. The sentence is also the reason phrase, because many clients show nothing else when
/// a CONNECT fails.
fn failure_response(error: &ProxyError) -> Response<Body> {
    let sentence = error.to_string();
    let mut response = Response::new(text(format!("{sentence}\n")));
    *response.status_mut() = error.status();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"));
    if let ProxyError::Denied(_) = error {
        response.headers_mut().insert(DENIED, HeaderValue::from_static("1"));
    }
    if let Ok(reason) = ReasonPhrase::try_from(sentence) {
        response.extensions_mut().insert(reason);
    }
    response
}

/// Renders an error as the bytes of a response, for a client whose request is not read.
pub(crate) fn raw_response(error: &ProxyError) -> Vec<u8> {
    let (status, text) = (error.status(), format!("{error}\n"));
    let denied = if let ProxyError::Denied(_) = error { format!("{DENIED}: 1\r\n") } else { String::new() };
    format!(
        "HTTP/1.1 {status}\r\n{denied}Content-Type: text/plain\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
        text.len(),
    )
    .into_bytes()
}

fn text(text: String) -> Body {
    Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed()
}

async fn tunnel(connection: Arc<Connection>, request: Request<Incoming>) -> Reply {
    let authority = request.uri().authority().map(|authority| authority.as_str()).unwrap_or_default();
    let malformed =
        |why| ProxyError::Malformed(format!("CONNECT needs a name and a port, not `{}`: {why}", plain(authority, 80)));
    let target = Target::parse(authority).map_err(malformed)?;
    let tunnel = tunnel::open(&connection, &format!("CONNECT {target}"), target).await?;
    let upgrade = hyper::upgrade::on(request);
    let own = Arc::clone(&connection);
    connection.spawn(async move {
        let Ok(upgraded) = upgrade.await else { return };
        if let Err(e) = tunnel::run(own, Box::new(TokioIo::new(upgraded)), tunnel).await {
            tracing::debug!(error = %e, "a tunnel ended");
        }
    });
    Ok(Response::new(text(String::new())))
}

async fn forward(
    connection: &Arc<Connection>,
    mut request: Request<Incoming>,
    fixed: Option<&Fixed>,
    idle: &IdleUpstream,
) -> Reply {
    let (target, name) = destination(connection, &request, fixed)?;
    if !is_only_chunked(request.headers()) {
        return Err(ProxyError::Malformed("`chunked` is the only coding of a transfer that is understood here".into()));
    }
    let scheme = if fixed.is_some_and(|fixed| fixed.tls.is_some()) { "https" } else { "http" };
    let what = what(request.method(), request.uri().path(), scheme, &target);
    let this_host = target.host.is_this_host();
    let host = if this_host {
        host_value(scheme, &Target { host: Host::Name(loopback::LOCALHOST.into()), port: target.port })?
    } else {
        host_value(scheme, name.as_ref().unwrap_or(&target))?
    };
    if let Some(rule) = loopback::foreign_page(request.headers()).filter(|_| this_host) {
        let remedy = format!("Open the page by its own address, http://{target}/");
        return Err(connection.deny(&what, DenyReason { rule, remedy }));
    }
    let upgrading = is_websocket(request.headers());
    let inside = if upgrading { Visibility::Opaque } else { Visibility::Method(request.method().clone()) };
    let info = ConnectionInfo { name, ..ConnectionInfo::new(target.clone(), inside) };
    connection.cross(info.clone()).map_err(|refusal| connection.deny(&what, refusal))?;
    let downstream = upgrading.then(|| hyper::upgrade::on(&mut request));
    let mut request = rewrite(request, host, upgrading)?;
    if this_host {
        loopback::rewrite_request(request.headers_mut());
    }
    let tls = fixed.and_then(|fixed| fixed.tls.as_deref());
    let (interceptor, tenant) = (&connection.state.shared.interceptor, &connection.state.tenant);
    let injected = tls.map(|name| interceptor.inject(tenant, name, target.port, request.headers_mut()));
    let (response, masked) = idle.send(connection, &what, info, tls, request).await?;
    let unusable = |why| ProxyError::Unreachable(target.to_string(), why);
    if !is_only_chunked(response.headers()) {
        return Err(unusable("its answer comes in a coding that was not asked for"));
    }
    let mut response = match injected.or(masked) {
        None => response.map(|body| body.boxed()),
        Some(injected) => injected.clean(response).map_err(unusable)?.map(|body| body.boxed()),
    };
    if response.status() == StatusCode::SWITCHING_PROTOCOLS {
        let downstream = downstream.ok_or_else(|| unusable("it changed the protocol"))?;
        let upstream = hyper::upgrade::on(&mut response);
        let own = Arc::clone(connection);
        connection.spawn(async move {
            let _own = own;
            if let (Ok(down), Ok(up)) = (downstream.await, upstream.await) {
                let _ = copy_bidirectional(&mut TokioIo::new(down), &mut TokioIo::new(up)).await;
            }
        });
    } else {
        remove_hop_headers(response.headers_mut());
    }
    if this_host {
        loopback::rewrite_response(response.headers_mut());
    }
    // Only the proxy may set this header.
    response.headers_mut().remove(DENIED);
    Ok(response)
}

/// Returns whether a message has no transfer coding other than `chunked`. Other codings apply to one hop only and
/// cannot be forwarded.
fn is_only_chunked(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(header::TRANSFER_ENCODING);
    codings.iter().all(|coding| coding.as_bytes().eq_ignore_ascii_case(b"chunked"))
}

/// Determines the target of a request. Also returns the name in its `Host` header if the target of the tunnel is an
/// address, because the name may then differ from the target.
fn destination(
    connection: &Connection,
    request: &Request<Incoming>,
    fixed: Option<&Fixed>,
) -> Result<(Target, Option<Target>), ProxyError> {
    let malformed =
        |why: String| ProxyError::Malformed(format!("the proxy cannot tell whom this request is for: {why}"));
    let uri = request.uri();
    let asked = match (uri.scheme_str(), uri.authority()) {
        (Some("http"), Some(authority)) => target(authority, 80),
        (Some(scheme), _) if fixed.is_none() => {
            Err(format!("a request for {} has to come through CONNECT", plain(scheme, 20)))
        }
        _ => host_header(request.headers(), fixed.map_or(80, |fixed| fixed.target.port)),
    };
    let asked = asked.map_err(malformed)?;
    let Some(Fixed { target, .. }) = fixed else { return Ok((asked, None)) };
    match &target.host {
        _ if asked.host == target.host => Ok((target.clone(), None)),
        Host::Address(_) => Ok((target.clone(), Some(Target { host: asked.host, port: target.port }))),
        Host::Name(_) => {
            let rule = format!("the request is for {}, the connection is for {}", asked.host, target.host);
            Err(connection
                .deny(&format!("CONNECT {target}"), DenyReason { rule, remedy: "Both have to be the same".into() }))
        }
    }
}

fn host_header(headers: &HeaderMap, usual: u16) -> Result<Target, String> {
    let mut hosts = headers.get_all(header::HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return Err("it has not one `Host`".into()) };
    let authority = host.to_str().ok().and_then(|text| text.parse::<Authority>().ok());
    target(&authority.ok_or("its `Host` is none")?, usual)
}

fn target(authority: &Authority, usual: u16) -> Result<Target, String> {
    let (host, whole) = (authority.host(), authority.as_str());
    // The host follows the user information, if there is any, and only the port may follow the host.
    let port = match whole.rsplit('@').next().and_then(|whole| whole.strip_prefix(host)) {
        Some("" | ":") => usual,
        Some(port) => port.trim_start_matches(':').parse().ok().filter(|port| *port != 0).ok_or("not a port")?,
        None => return Err("not a host".into()),
    };
    Ok(Target { host: Host::parse(host)?, port })
}

/// Describes a request for use in denials. The query is omitted, because it may contain secrets.
fn what(method: &Method, path: &str, scheme: &str, target: &Target) -> String {
    format!("{} {scheme}://{}{}", plain(method.as_str(), 20), authority(scheme, target), plain(path, 60))
}

/// Returns the host, with its port unless that is the default port of the scheme.
pub(crate) fn authority(scheme: &str, target: &Target) -> String {
    match (scheme, target.port) {
        ("http", 80) | ("https", 443) => target.host.to_string(),
        _ => target.to_string(),
    }
}

fn host_value(scheme: &str, target: &Target) -> Result<HeaderValue, ProxyError> {
    HeaderValue::try_from(authority(scheme, target))
        .map_err(|_| ProxyError::Malformed("the host cannot stand in a header".into()))
}

/// Returns whether a request asks for a WebSocket. Other upgrades are dropped, which every server has to tolerate:
/// with HTTP/2, a client could ask for other hosts on the same connection.
fn is_websocket(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, token: &str| {
        headers
            .get_all(name)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.split(',').any(|part| part.trim().eq_ignore_ascii_case(token)))
    };
    has(header::CONNECTION, "upgrade") && has(header::UPGRADE, "websocket")
}

/// Rewrites a request for the host: only the path in the request line, the checked name in `Host`, and no header that
/// was meant for the proxy.
fn rewrite(
    mut request: Request<Incoming>,
    host: HeaderValue,
    upgrading: bool,
) -> Result<Request<Incoming>, ProxyError> {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
    let path = if path.is_empty() { "/" } else { path };
    *request.uri_mut() =
        Uri::try_from(path).map_err(|_| ProxyError::Malformed("the path of the request is none".into()))?;
    *request.version_mut() = Version::HTTP_11;
    let headers = request.headers_mut();
    remove_hop_headers(headers);
    headers.remove(header::EXPECT);
    headers.insert(header::HOST, host);
    if upgrading {
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    }
    Ok(request)
}

/// Removes the hop-by-hop headers, which must not be forwarded.
fn remove_hop_headers(headers: &mut HeaderMap) {
    // If a message has both headers, its `Content-Length` cannot be trusted.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    // A client must not remove the length or the host by naming them in `Connection`.
    let protected = [header::CONTENT_LENGTH, header::HOST, header::TRANSFER_ENCODING];
    for name in named.iter().filter(|name| !protected.contains(name)) {
        headers.remove(name);
    }
    for name in [
        header::CONNECTION,
        HeaderName::from_static("keep-alive"),
        header::PROXY_AUTHENTICATE,
        header::PROXY_AUTHORIZATION,
        HeaderName::from_static("proxy-connection"),
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        headers.remove(name);
    }
}
