//! Resolves names, anew for each request. No other module resolves a name: the addresses that are found here are
//! checked and connected to, and never looked up again.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Resource, getrlimit};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use crate::dns::{LookupError, System};
use crate::target::Host;
use crate::{lock, loopback};

/// Timeout of a look-up, including the wait for its permits.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of simultaneous look-ups of one sandbox. Its slow names must not block the tenant's other sandboxes.
pub(crate) const LOOKUPS_PER_SANDBOX: usize = 8;
/// One tenant may have at most one part in this many of all permits.
const SHARES: usize = 8;
/// Maximum number of addresses used from an answer, which the owner of a name can make arbitrarily long.
const MAX_ADDRESSES: usize = 16;

#[derive(Debug)]
pub(crate) struct Resolver {
    hosts: BTreeMap<Host, IpAddr>,
    system: System,
    permits: Arc<LookupPermits>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(crate) enum ResolveError {
    #[error("the name {0} was not found")]
    NotFound(String),
    #[error("nobody could say in time where {0} is")]
    TimedOut(String),
}

impl Resolver {
    /// Creates a resolver. `hosts` are the names that the operator resolves statically.
    pub(crate) fn new(hosts: &BTreeMap<String, IpAddr>) -> io::Result<Self> {
        Self::with(hosts, Arc::new(LookupPermits::new(max_lookups())))
    }

    /// Returns a resolver with other names, which shares the permits of this one.
    pub(crate) fn with_hosts(&self, hosts: &BTreeMap<String, IpAddr>) -> io::Result<Self> {
        Self::with(hosts, Arc::clone(&self.permits))
    }

    pub(crate) fn has_hosts_of(&self, other: &Self) -> bool {
        self.hosts == other.hosts
    }

    fn with(hosts: &BTreeMap<String, IpAddr>, permits: Arc<LookupPermits>) -> io::Result<Self> {
        let read = |(name, address): (&String, &IpAddr)| match Host::parse(name) {
            Ok(host) if host.is_this_host() => {
                let why = format!("`{}` is reserved for the loopback of this host", loopback::NAME);
                Err(io::Error::new(io::ErrorKind::InvalidInput, why))
            }
            Ok(host @ Host::Name(_)) => Ok((host, *address)),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("`{}` is not a name of a host", name.escape_debug()),
            )),
        };
        Ok(Self { hosts: hosts.iter().map(read).collect::<Result<_, _>>()?, system: System::default(), permits })
    }

    /// Returns whether the operator assigned an address to this name.
    pub(crate) fn is_fixed(&self, host: &Host) -> bool {
        self.hosts.contains_key(host)
    }

    /// Returns the addresses of a host. `sandbox_permits` has [`LOOKUPS_PER_SANDBOX`] permits and belongs to one
    /// sandbox of `tenant`.
    pub(crate) async fn addresses(
        &self,
        host: &Host,
        tenant: &str,
        sandbox_permits: &Semaphore,
    ) -> Result<Vec<IpAddr>, ResolveError> {
        if host.is_this_host() {
            return Ok(loopback::ADDRESSES.to_vec());
        }
        if let Some(address) = self.hosts.get(host) {
            return Ok(vec![*address]);
        }
        match host {
            Host::Address(address) => Ok(vec![*address]),
            Host::Name(name) => {
                let asking = timeout(LOOKUP_TIMEOUT, self.ask(name, tenant, sandbox_permits));
                asking.await.unwrap_or_else(|_| Err(ResolveError::TimedOut(name.clone())))
            }
        }
    }

    async fn ask(&self, name: &str, tenant: &str, sandbox_permits: &Semaphore) -> Result<Vec<IpAddr>, ResolveError> {
        let _own = sandbox_permits.acquire().await.map_err(|_| ResolveError::NotFound(name.to_owned()))?;
        let _permit = self.permits.take(tenant).await;
        let found = self.system.config().addresses(name).await.map_err(|failed| match failed {
            LookupError::NoSuchName => ResolveError::NotFound(name.to_owned()),
            LookupError::NoAnswer => ResolveError::TimedOut(name.to_owned()),
        })?;
        let mut addresses = Vec::new();
        for address in found {
            if addresses.len() < MAX_ADDRESSES && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        Ok(addresses)
    }
}

/// Returns the number of simultaneous look-ups. Each one uses a socket for IPv4 and one for IPv6, so together they
/// use an eighth of the descriptors that the process may open.
fn max_lookups() -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX) / 16;
    usize::try_from(most).unwrap_or(usize::MAX).clamp(16, 1024)
}

/// The permits for look-ups of all tenants. A tenant has at most an eighth of them, and gets none while it has as many
/// as are free. A tenant that gets a permit therefore leaves about as many free as it has, and tenants that request as
/// many as they can end up with equal shares, one of which stays free for the next tenant.
#[derive(Debug)]
struct LookupPermits {
    all: usize,
    held: Mutex<HashMap<String, usize>>,
    changed: Notify,
}

/// Permission for one look-up. Dropping it gives the permit back. A look-up may be dropped at any time.
#[must_use]
#[derive(Debug)]
struct LookupPermit<'a> {
    permits: &'a LookupPermits,
    tenant: &'a str,
}

impl LookupPermits {
    fn new(all: usize) -> Self {
        Self { all, held: Mutex::default(), changed: Notify::new() }
    }

    async fn take<'a>(&'a self, tenant: &'a str) -> LookupPermit<'a> {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Registered before the check, so that no notification in between is missed.
            changed.as_mut().enable();
            if self.take_now(tenant) {
                return LookupPermit { permits: self, tenant };
            }
            changed.await;
        }
    }

    fn take_now(&self, tenant: &str) -> bool {
        let mut held = lock(&self.held);
        let free = self.all - held.values().sum::<usize>();
        let own = held.get(tenant).copied().unwrap_or(0);
        let is_allowed = own < free.min(self.all / SHARES);
        if is_allowed {
            held.insert(tenant.to_owned(), own + 1);
        }
        is_allowed
    }
}

impl Drop for LookupPermit<'_> {
    fn drop(&mut self) {
        let mut held = lock(&self.permits.held);
        if let Some(own) = held.get_mut(self.tenant) {
            *own -= 1;
            if *own == 0 {
                held.remove(self.tenant);
            }
        }
        drop(held);
        self.permits.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[tokio::test]
    async fn the_operators_own_names_come_first_however_they_are_written() {
        let hosts = BTreeMap::from([("Pages.Test.".to_owned(), "127.0.0.7".parse().unwrap())]);
        let resolver = Resolver::new(&hosts).unwrap();
        let sandbox_permits = Semaphore::new(1);
        let found = resolver.addresses(&Host::parse("pages.test").unwrap(), "blue", &sandbox_permits).await;
        assert_eq!(found, Ok(vec!["127.0.0.7".parse().unwrap()]));
        let address = resolver.addresses(&Host::parse("10.1").unwrap(), "blue", &sandbox_permits).await;
        assert_eq!(address, Ok(vec!["10.0.0.1".parse().unwrap()]));
        let error =
            Resolver::new(&BTreeMap::from([("10.0.0.1".to_owned(), "127.0.0.1".parse().unwrap())])).unwrap_err();
        assert_eq!(error.to_string(), "`10.0.0.1` is not a name of a host");
    }

    /// W24: tenants that take as many permits as they can leave some to the next tenant and end up sharing.
    #[test]
    fn w24_places_are_left_to_the_next_tenant_however_many_take_all_they_can() {
        let permits = LookupPermits::new(64);
        let tenants: Vec<String> = (0..10).map(|number| format!("tenant-{number}")).collect();
        let mut held = Vec::new();
        for (tenant, share) in tenants.iter().zip([8, 8, 8, 8, 8, 8, 8, 4, 2, 1]) {
            while permits.take_now(tenant) {
                held.push(LookupPermit { permits: &permits, tenant });
            }
            assert_eq!(lock(&permits.held)[tenant], share, "{tenant}");
        }
        // Whenever a look-up ends, the tenants ask for its permit in order.
        for _ in 0..1000 {
            drop(held.remove(0));
            for tenant in &tenants {
                if permits.take_now(tenant) {
                    held.push(LookupPermit { permits: &permits, tenant });
                    break;
                }
            }
        }
        let most = lock(&permits.held).values().copied().max().unwrap_or(0);
        assert!(most <= 8 && permits.take_now("another"), "{:?}", lock(&permits.held));
        lock(&permits.held).remove("another");
        held.clear();
        assert!(lock(&permits.held).is_empty());
    }

    /// W24, the attack from the audit: one tenant's flood of names that no server answers for does not delay another
    /// tenant's look-ups.
    #[tokio::test]
    async fn w24_slow_names_of_one_tenant_do_not_hold_up_another() {
        let config = crate::dns::tests::server().await;
        let all = 64;
        let resolver = Resolver {
            hosts: BTreeMap::new(),
            system: System::fixed(crate::dns::ResolverConfig { timeout: LOOKUP_TIMEOUT, ..config }),
            permits: Arc::new(LookupPermits::new(all)),
        };
        let resolver = Arc::new(resolver);
        let mut flood = tokio::task::JoinSet::new();
        for sandbox in 0..60 {
            let sandbox_permits = Arc::new(Semaphore::new(LOOKUPS_PER_SANDBOX));
            for name in 0..2 * LOOKUPS_PER_SANDBOX {
                let (resolver, sandbox_permits) = (Arc::clone(&resolver), Arc::clone(&sandbox_permits));
                let host = Host::parse(&format!("slow-{sandbox}-{name}.test")).unwrap();
                flood.spawn(async move { resolver.addresses(&host, "red", &sandbox_permits).await });
            }
        }
        while lock(&resolver.permits.held).get("red").copied().unwrap_or(0) < all / SHARES {
            tokio::task::yield_now().await;
        }
        let sandbox_permits = Semaphore::new(LOOKUPS_PER_SANDBOX);
        for name in 0..100 {
            let host = Host::parse(&format!("quick-{name}.test")).unwrap();
            let found = resolver.addresses(&host, "blue", &sandbox_permits).await;
            assert_eq!(found, Ok(vec!["192.0.2.1".parse().unwrap()]), "{name}");
            assert!(lock(&resolver.permits.held)["red"] <= all / SHARES);
        }
        // A look-up that is cancelled holds no permit.
        flood.shutdown().await;
        assert!(lock(&resolver.permits.held).is_empty());
    }
}
