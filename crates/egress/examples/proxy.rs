//! The proxy on a port, to try clients with: `proxy 3128 public private=127.0.0.1:8000 pages.test=127.0.0.1`.
//! Denials go to stderr.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;

use egress::{Egress, EgressConfig, Policy, Table};

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let port: u16 = arguments.next().and_then(|port| port.parse().ok()).unwrap_or(3128);
    let mut config = EgressConfig::default();
    let mut table = Table { name: "example".into(), ..Table::default() };
    for argument in arguments {
        match argument.split_once('=') {
            Some(("private", address)) => table.private.push(address.into()),
            Some(("methods", methods)) => table.methods = methods.split(',').map(str::to_owned).collect(),
            Some((name, address)) => {
                config.hosts.insert(name.into(), address.parse().map_err(std::io::Error::other)?);
            }
            None => table.allow.push(argument),
        }
    }
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))?;
    let sink = Arc::new(|denial: &egress::Denial| eprintln!("{}", denial.sentence));
    let _gate = Egress::new(config)?.open(listener, "local", Policy::of(table), sink)?;
    tokio::signal::ctrl_c().await
}
