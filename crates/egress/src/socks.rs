//! SOCKS5 for protocols other than HTTP. It supports the CONNECT command without a password, and nothing else.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::connect::ProxyError;
use crate::gate::Connection;
use crate::limits::Flow;
use crate::resolve::ResolveError;
use crate::target::{Host, Target};
use crate::tunnel;

pub(crate) const VERSION: u8 = 5;
const NO_PASSWORD: u8 = 0;
const NO_METHOD: u8 = 0xff;
const CONNECT: u8 = 1;
const SUCCEEDED: u8 = 0;
const FAILED: u8 = 1;
const NOT_ALLOWED: u8 = 2;
const HOST_UNREACHABLE: u8 = 4;
const REFUSED: u8 = 5;
const EXPIRED: u8 = 6;
const NO_SUCH_COMMAND: u8 = 7;
const NO_SUCH_ADDRESS: u8 = 8;

const GREETING_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) async fn serve(connection: Arc<Connection>, mut client: Flow<TcpStream>) -> io::Result<()> {
    let asked = timeout(GREETING_TIMEOUT, greet(&mut client)).await.map_err(|_| io::ErrorKind::TimedOut)??;
    let target = match asked {
        Ok(target) => target,
        Err(code) => return reply(&mut client, code).await,
    };
    match tunnel::open(&connection, &format!("SOCKS5 {target}"), target).await {
        Ok(tunnel) => {
            reply(&mut client, SUCCEEDED).await?;
            tunnel::run(connection, Box::new(client), tunnel).await
        }
        Err(error) => reply(&mut client, code(&error)).await,
    }
}

fn code(error: &ProxyError) -> u8 {
    match error {
        ProxyError::Denied(_) => NOT_ALLOWED,
        ProxyError::Unresolved(ResolveError::NotFound(_)) => HOST_UNREACHABLE,
        ProxyError::Unreachable(..) | ProxyError::Upstream(_) => REFUSED,
        ProxyError::Unresolved(ResolveError::TimedOut(_)) | ProxyError::TimedOut(_) | ProxyError::UpstreamTimedOut => {
            EXPIRED
        }
        ProxyError::Malformed(_) | ProxyError::Busy => FAILED,
    }
}

async fn reply(client: &mut Flow<TcpStream>, code: u8) -> io::Result<()> {
    client.write_all(&[VERSION, code, 0, 1, 0, 0, 0, 0, 0, 0]).await
}

/// Returns the target that the client asks for, or the code to refuse the request with.
async fn greet(client: &mut Flow<TcpStream>) -> io::Result<Result<Target, u8>> {
    let mut head = [0; 2];
    client.read_exact(&mut head).await?;
    let mut methods = vec![0; usize::from(head[1])];
    client.read_exact(&mut methods).await?;
    if !methods.contains(&NO_PASSWORD) {
        client.write_all(&[VERSION, NO_METHOD]).await?;
        return Err(io::ErrorKind::Unsupported.into());
    }
    client.write_all(&[VERSION, NO_PASSWORD]).await?;
    let mut request = [0; 4];
    client.read_exact(&mut request).await?;
    let [VERSION, command, _, kind] = request else { return Err(io::ErrorKind::InvalidData.into()) };
    let host = match kind {
        1 => Ok(Host::Address(Ipv4Addr::from_bits(client.read_u32().await?).into())),
        4 => Ok(Host::Address(Ipv6Addr::from_bits(client.read_u128().await?).into())),
        3 => {
            let mut name = vec![0; usize::from(client.read_u8().await?)];
            client.read_exact(&mut name).await?;
            String::from_utf8(name).ok().and_then(|name| Host::parse(&name).ok()).ok_or(HOST_UNREACHABLE)
        }
        _ => return Ok(Err(NO_SUCH_ADDRESS)),
    };
    let port = client.read_u16().await?;
    Ok(match (command, host) {
        (CONNECT, Ok(host)) if port != 0 => Ok(Target { host, port }),
        (CONNECT, Ok(_)) => Err(FAILED),
        (CONNECT, Err(code)) => Err(code),
        _ => Err(NO_SUCH_COMMAND),
    })
}
