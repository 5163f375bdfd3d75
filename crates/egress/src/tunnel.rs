//! What CONNECT and SOCKS open: bytes to one target, looked at as far as that is possible.
//!
//! On port 80 there are requests, which are judged one by one. Where there is TLS, its greeting has to be for the name that was asked for
//! (a front for another name at the same address is refused); on port 443 there has to be TLS. Other ports that a policy has may carry
//! anything.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, copy_bidirectional_with_sizes};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connect::Stop;
use crate::gate::{Connection, ConnectionInfo, Visibility};
use crate::http;
use crate::limits::Flow;
use crate::policy::DenyReason;
use crate::target::{Host, Target};
use crate::wire::Wire;

const HTTP: u16 = 80;
const HTTPS: u16 = 443;
/// The first byte of a TLS greeting.
const HANDSHAKE: u8 = 22;
/// A greeting with the largest keys there are has some 2 kB; this is what nobody needs.
const LONGEST_GREETING: usize = 64 << 10;
const GREETING: Duration = Duration::from_secs(30);
/// Fatal, `access_denied`: so that a client says something better than that the connection was lost.
const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 49];
const BUFFER: usize = 32 << 10;

pub enum Tunnel {
    /// Each request inside is judged.
    Requests(Target),
    /// The same, and TLS ends here.
    Intercepted(Target, String),
    Opaque(Box<Opaque>),
}

pub struct Opaque {
    what: String,
    crossing: ConnectionInfo,
    address: SocketAddr,
    upstream: Flow<TcpStream>,
}

/// Judges, and connects where it is known what to connect to. `what` is for sentences.
pub async fn open(connection: &Connection, what: &str, target: Target) -> Result<Tunnel, Stop> {
    if target.port == HTTP {
        // Requests inside are judged each, and can be answered with a sentence, which a refused CONNECT does not show everywhere.
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
    let crossing = ConnectionInfo::new(target, Visibility::Opaque);
    connection.cross(crossing.clone()).map_err(|refusal| connection.deny(what, refusal))?;
    let addresses = connection.find(what, &crossing).await?;
    let (upstream, address) = connection.dial(what, crossing.clone(), &addresses).await?;
    Ok(Tunnel::Opaque(Box::new(Opaque { what: what.to_owned(), crossing, address, upstream })))
}

/// Serves it until one side is done. Boxed, because what is inside may be requests, which are served as those outside are.
pub fn run(
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
            Tunnel::Opaque(opaque) => return opaque.run(&connection, client).await,
        };
        http::serve(connection, inside, Some(http::Fixed { target, tls })).await.map_err(io::Error::other)
    })
}

impl Opaque {
    async fn run(mut self, connection: &Connection, mut client: Wire) -> io::Result<()> {
        if let Some(first) = self.first(&mut client).await? {
            let greeting = match self.greeting(connection, &mut client, first).await? {
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

    /// What the client says first; nothing if the other side speaks before it, as with SSH.
    async fn first(&mut self, client: &mut Wire) -> io::Result<Option<Vec<u8>>> {
        let (mut from_client, mut from_upstream) = (vec![0; BUFFER], vec![0; BUFFER]);
        if self.crossing.target.port == HTTPS {
            let n = timeout(GREETING, client.read(&mut from_client)).await.map_err(|_| io::ErrorKind::TimedOut)??;
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

    /// All that has been read, if it may be passed on.
    async fn greeting(
        &mut self,
        connection: &Connection,
        client: &mut Wire,
        mut read: Vec<u8>,
    ) -> io::Result<Result<Vec<u8>, DenyReason>> {
        if read.first() != Some(&HANDSHAKE) {
            return Ok(if self.crossing.target.port == HTTPS && !read.is_empty() { Err(not_tls()) } else { Ok(read) });
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
                if n == 0 || read.len() > LONGEST_GREETING {
                    return Ok::<_, io::Error>(Err(not_tls()));
                }
            }
        };
        let named = timeout(GREETING, reading).await.map_err(|_| io::ErrorKind::TimedOut)??;
        Ok(named.and_then(|name| self.judge_name(connection, name.as_deref())).map(|()| read))
    }

    /// Whether the name in a TLS greeting is what was asked for.
    fn judge_name(&mut self, connection: &Connection, name: Option<&str>) -> Result<(), DenyReason> {
        let Target { host, port } = self.crossing.target.clone();
        let Some(name) = name else {
            // Without a name the server at that address decides who it is: the address has to be allowed itself.
            let bare = Target { host: Host::Address(self.address.ip()), port };
            return connection.state.judge(|judge| judge.asked(&bare)).map_err(|refusal| DenyReason {
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
                self.crossing.address = Some(self.address);
                self.crossing.name = Some(Target { host: named, port });
                connection.cross(self.crossing.clone())
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
