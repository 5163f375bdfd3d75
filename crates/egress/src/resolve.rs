//! Where a name is. Asked for each request anew, and only here: what is found is checked and connected to, never looked up again.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::target::Host;

const PATIENCE: Duration = Duration::from_secs(10);
/// Each is a thread that waits for the system's resolver, which has no way to be interrupted.
const AT_ONCE: usize = 256;
/// So that the slow names of one sandbox do not stop the others.
pub const AT_ONCE_EACH: usize = 8;
/// Of an answer, which whoever has the name can make as long as he likes.
const MOST: usize = 16;

#[derive(Debug)]
pub struct Resolver {
    hosts: BTreeMap<Host, IpAddr>,
    places: Arc<Semaphore>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Lost {
    #[error("the name {0} was not found")]
    NotFound(String),
    #[error("nobody could say in time where {0} is")]
    TimedOut(String),
}

impl Resolver {
    /// `hosts` are the operator's own.
    pub fn new(hosts: &BTreeMap<String, IpAddr>) -> io::Result<Self> {
        let read = |(name, address): (&String, &IpAddr)| match Host::parse(name) {
            Ok(host @ Host::Name(_)) => Ok((host, *address)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("`{}` is not a name of a host", name.escape_debug()),
            )),
        };
        Ok(Self { hosts: hosts.iter().map(read).collect::<Result<_, _>>()?, places: Arc::new(Semaphore::new(AT_ONCE)) })
    }

    /// `each` has [`AT_ONCE_EACH`] places, and belongs to a sandbox.
    pub async fn addresses(&self, host: &Host, each: &Arc<Semaphore>) -> Result<Vec<IpAddr>, Lost> {
        if let Some(address) = self.hosts.get(host) {
            return Ok(vec![*address]);
        }
        match host {
            Host::Address(address) => Ok(vec![*address]),
            Host::Name(name) => {
                timeout(PATIENCE, self.ask(name, each)).await.unwrap_or_else(|_| Err(Lost::TimedOut(name.clone())))
            }
        }
    }

    async fn ask(&self, name: &str, each: &Arc<Semaphore>) -> Result<Vec<IpAddr>, Lost> {
        let lost = || Lost::NotFound(name.to_owned());
        let own = Arc::clone(each).acquire_owned().await.map_err(|_| lost())?;
        let all = Arc::clone(&self.places).acquire_owned().await.map_err(|_| lost())?;
        let asked = name.to_owned();
        let answer = tokio::task::spawn_blocking(move || {
            // Held until the resolver is done, even if nobody waits for it any more.
            let _places = (own, all);
            (asked.as_str(), 0).to_socket_addrs()
        });
        let mut addresses = Vec::new();
        for address in answer.await.map_err(|_| lost())?.map_err(|_| lost())?.map(|found| found.ip()) {
            if addresses.len() < MOST && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.is_empty() { Err(lost()) } else { Ok(addresses) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_operators_own_names_come_first_however_they_are_written() {
        let hosts = BTreeMap::from([("Pages.Test.".to_owned(), "127.0.0.7".parse().unwrap())]);
        let resolver = Resolver::new(&hosts).unwrap();
        let each = Arc::new(Semaphore::new(1));
        let found = resolver.addresses(&Host::parse("pages.test").unwrap(), &each).await;
        assert_eq!(found, Ok(vec!["127.0.0.7".parse().unwrap()]));
        let address = resolver.addresses(&Host::parse("10.1").unwrap(), &each).await;
        assert_eq!(address, Ok(vec!["10.0.0.1".parse().unwrap()]));
        let none = resolver.addresses(&Host::parse("no-such-name.invalid").unwrap(), &each).await;
        assert!(none.is_err());
        let error =
            Resolver::new(&BTreeMap::from([("10.0.0.1".to_owned(), "127.0.0.1".parse().unwrap())])).unwrap_err();
        assert_eq!(error.to_string(), "`10.0.0.1` is not a name of a host");
    }
}
