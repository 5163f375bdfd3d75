//! Tunnels opened by CONNECT and SOCKS: bytes to one target, inspected as far as possible.
//!
//! On port 80 a tunnel carries HTTP requests, which are judged one by one. If a tunnel carries TLS, its ClientHello
//! has to name the host that was asked for, which prevents fronting for another name at the same address. Port 443
//! has to carry TLS. Other ports that a policy allows may carry anything. On ports of this host's loopback, requests
//! are recognised and rewritten, whatever the port.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes, join, split};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connect::ProxyError;
use crate::gate::{Connection, ConnectionInfo, Visibility};
use crate::http;
use crate::limits::Flow;
use crate::loopback;
use crate::policy::DenyReason;
use crate::target::{Host, Target};
use crate::upstream_proxy::{Carries, Route};
use crate::wire::Wire;

const HTTP: u16 = 80;
const HTTPS: u16 = 443;
/// The first byte of a TLS ClientHello record.
const HANDSHAKE: u8 = 22;
/// Maximum length of a ClientHello. With the largest keys in use it has about 2 kB, so no client needs this much.
const MAX_GREETING: usize = 64 << 10;
const GREETING_TIMEOUT: Duration = Duration::from_secs(30);
/// A fatal TLS alert `access_denied`, which lets a client report something better than a lost connection.
const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];
const BUFFER: usize = 32 << 10;

pub(crate) enum Tunnel {
    /// A tunnel in which each request is judged.
    Requests(Target),
    /// A tunnel in which the proxy terminates TLS and judges each request.
    Intercepted(Target, String),
    Opaque(Box<Opaque>),
}

pub(crate) struct Opaque {
    what: String,
    info: ConnectionInfo,
    route: Route,
    upstream: Flow<TcpStream>,
}

/// Judges the target, and connects to it if the tunnel is opaque. `what` describes the request in denials.
pub(crate) async fn open(connection: &Connection, what: &str, target: Target) -> Result<Tunnel, ProxyError> {
    if target.port == HTTP {
        // Each request inside is judged and can be denied with a sentence, whereas many clients do not show why a
        // CONNECT was refused.
        return Ok(Tunnel::Requests(target));
    }
    if let Host::Name(name) = &target.host
        && connection.state.shared.interceptor.takes(&connection.state.tenant, name, target.port)
    {
        let requests = ConnectionInfo::new(target.clone(), Visibility::Requests);
        connection.cross(requests).map_err(|refusal| connection.deny(what, refusal))?;
        let name = name.clone();
        return Ok(Tunnel::Intercepted(target, name));
    }
    let info = ConnectionInfo::new(target, Visibility::Opaque);
    connection.cross(info.clone()).map_err(|refusal| connection.deny(what, refusal))?;
    let routes = connection.find(what, &info, Carries::Tunnel).await?;
    let (upstream, route) = connection.dial(what, info.clone(), &routes).await?;
    Ok(Tunnel::Opaque(Box::new(Opaque { what: what.to_owned(), info, route, upstream })))
}

/// Serves a tunnel until one side is done. The future is boxed because a tunnel may contain requests, which are
/// served by the same code as those outside, so the types are recursive.
pub(crate) fn run(
    connection: Arc<Connection>,
    client: Wire,
    tunnel: Tunnel,
) -> Pin<Box<dyn Future<Output = io::Result<()>> + Send>> {
    Box::pin(async move {
        let (target, tls, inside) = match tunnel {
            Tunnel::Requests(target) => (target, None, client),
            Tunnel::Intercepted(target, name) => {
                let inside =
                    connection.state.shared.interceptor.accept(&connection.state.tenant, client, &name).await?;
                (target, Some(name), inside)
            }
            Tunnel::Opaque(opaque) => return opaque.run(connection, client).await,
        };
        http::serve(connection, inside, Some(http::Fixed { target, tls })).await.map_err(io::Error::other)
    })
}

impl Opaque {
    async fn run(mut self, connection: Arc<Connection>, mut client: Wire) -> io::Result<()> {
        if let Some(first) = self.first(&mut client).await? {
            if self.info.target.host.is_this_host() && loopback::is_http(&first) {
                return self.requests(connection, first, client).await;
            }
            let greeting = match self.greeting(&connection, &mut client, first).await? {
                Ok(greeting) => greeting,
                Err(refusal) => {
                    connection.deny(&self.what, refusal);
                    return client.write_all(&ALERT).await;
                }
            };
            self.upstream.write_all(&greeting).await?;
        }
        copy_bidirectional_with_sizes(&mut client, &mut self.upstream, BUFFER, BUFFER).await.map(|_| ())
    }

    /// Serves a client whose first bytes are those of a request. Requests open their own connection, so this one is
    /// closed.
    async fn requests(self, connection: Arc<Connection>, first: Vec<u8>, client: Wire) -> io::Result<()> {
        let target = self.info.target;
        drop(self.upstream);
        let (read, write) = split(client);
        let client = join(io::Cursor::new(first).chain(read), write);
        http::serve(connection, client, Some(http::Fixed { target, tls: None })).await.map_err(io::Error::other)
    }

    /// Returns the first bytes from the client, or `None` if the server speaks first, as in SSH.
    async fn first(&mut self, client: &mut Wire) -> io::Result<Option<Vec<u8>>> {
        let (mut from_client, mut from_upstream) = (vec![0; BUFFER], vec![0; BUFFER]);
        if self.info.target.port == HTTPS {
            let n = timeout(GREETING_TIMEOUT, client.read(&mut from_client))
                .await
                .map_err(|_| io::ErrorKind::TimedOut)??;
            from_client.truncate(n);
            return Ok(Some(from_client));
        }
        tokio::select! {
            n = client.read(&mut from_client) => {
                from_client.truncate(n?);
                Ok(Some(from_client))
            }
            n = self.upstream.read(&mut from_upstream) => {
                client.write_all(&from_upstream[..n?]).await?;
                Ok(None)
            }
        }
    }

    /// Reads the ClientHello, if there is one, and returns all bytes read if they may be passed on.
    async fn greeting(
        &mut self,
        connection: &Connection,
        client: &mut Wire,
        mut read: Vec<u8>,
    ) -> io::Result<Result<Vec<u8>, DenyReason>> {
        if read.first() != Some(&HANDSHAKE) {
            return Ok(if self.info.target.port == HTTPS && !read.is_empty() { Err(not_tls()) } else { Ok(read) });
        }
        let reading = async {
            let mut acceptor = Acceptor::default();
            let mut new = read.clone();
            loop {
                let mut rest = new.as_slice();
                while !rest.is_empty() {
                    if acceptor.read_tls(&mut rest).is_err() {
                        return Ok(Err(not_tls()));
                    }
                    match acceptor.accept() {
                        Ok(None) => {}
                        Ok(Some(accepted)) => return Ok(Ok(accepted.client_hello().server_name().map(str::to_owned))),
                        Err(_) => return Ok(Err(not_tls())),
                    }
                }
                new.resize(BUFFER, 0);
                let n = client.read(&mut new).await?;
                new.truncate(n);
                read.extend_from_slice(&new);
                if n == 0 || read.len() > MAX_GREETING {
                    return Ok::<_, io::Error>(Err(not_tls()));
                }
            }
        };
        let named = timeout(GREETING_TIMEOUT, reading).await.map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(named.and_then(|name| self.judge_name(connection, name.as_deref())).map(|()| read))
    }

    /// Checks that the name in the ClientHello is the host that was asked for.
    fn judge_name(&mut self, connection: &Connection, name: Option<&str>) -> Result<(), DenyReason> {
        let Target { host, port } = self.info.target.clone();
        let Some(name) = name else {
            // Without a name, the server at the address decides which host it is, so the address itself has to be
            // allowed.
            let bare = match (&self.route, &host) {
                (Route::Direct(address), _) => Target { host: Host::Address(address.ip()), port },
                (_, Host::Address(_)) => self.info.target.clone(),
                (_, Host::Name(_)) => {
                    return Err(DenyReason {
                        rule: "the TLS greeting names nobody, and the upstream proxy chooses the address".into(),
                        remedy: format!("It has to name {host}"),
                    });
                }
            };
            return connection.state.judge(|policy| policy.asked(&bare)).map_err(|refusal| DenyReason {
                rule: format!("the TLS greeting names nobody, and {}", refusal.rule),
                ..refusal
            });
        };
        let named = Host::parse(name).map_err(|_| not_tls())?;
        match &host {
            _ if named == host => Ok(()),
            Host::Name(_) => Err(DenyReason {
                rule: format!("the TLS greeting is for {named}, the connection is for {host}"),
                remedy: "Both have to be the same".into(),
            }),
            Host::Address(_) => {
                self.info.route = Some(self.route.clone());
                self.info.name = Some(Target { host: named, port });
                connection.cross(self.info.clone())
            }
        }
    }
}

fn not_tls() -> DenyReason {
    DenyReason {
        rule: "what was sent is no TLS that can be read".into(),
        remedy: "On port 443, and where it looks like TLS, nothing else can pass".into(),
    }
}
