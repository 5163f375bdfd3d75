//! Termination of TLS for hosts with a secret, so that the proxy can insert the secret into requests.
//!
//! Such a request takes the following path: CONNECT or SOCKS names the host, the policy allows it,
//! [`Interceptor::takes`] returns true, and [`Interceptor::accept`] terminates the client's TLS. Each request inside
//! is judged like a plain one (policy, methods, address). Then [`Interceptor::inject`] inserts the secret,
//! [`Interceptor::connect`] starts TLS on the connection that was checked and opened, and [`InjectedSecrets::clean`]
//! masks the secret in a response that echoes it.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use hyper::HeaderMap;
use rustls::crypto::{CryptoProvider, SecureRandom, ring};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::authority::Authority;
use crate::secrets::Secret;
use crate::vault::{InjectedSecrets, SecretSet, Vault};
use crate::wire::Wire;

/// Timeout for a TLS handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Terminates TLS for hosts with a secret. It is empty if no host has one.
#[derive(Debug, Default)]
pub(crate) struct Interceptor(Option<Interception>);

#[derive(Debug)]
struct Interception {
    vault: Vault,
    /// One authority for each set of secrets. Its name constraints list the hosts of that set, which other tenants
    /// must not see.
    authorities: BTreeMap<SecretSet, Authority>,
    connector: Arc<ClientConfig>,
    /// Certificates of the authorities trusted by this machine and of the additional ones, for the bundle in
    /// sandboxes.
    roots: Vec<CertificateDer<'static>>,
}

impl Interceptor {
    /// Creates an interceptor. `roots` are trusted in addition to the authorities of this machine.
    pub(crate) fn new(secrets: &[Secret], roots: &[CertificateDer<'static>]) -> io::Result<Self> {
        if secrets.is_empty() {
            return Ok(Self(None));
        }
        let provider = Arc::new(ring::default_provider());
        let vault = Vault::new(secrets, || random(provider.secure_random)).map_err(io::Error::other)?;
        let authority =
            |set: SecretSet| Authority::new(&vault.hosts(&set), Arc::clone(&provider)).map(|own| (set, own));
        let authorities =
            vault.sets().into_iter().map(authority).collect::<Result<_, _>>().map_err(io::Error::other)?;
        let found = rustls_native_certs::load_native_certs();
        if found.certs.is_empty() {
            tracing::warn!(
                "no certificates of authorities were found on this machine; hosts with a secret cannot be reached"
            );
        }
        let roots = [found.certs, roots.to_vec()].concat();
        let connector = Arc::new(connector(provider, &roots).map_err(io::Error::other)?);
        Ok(Self(Some(Interception { vault, authorities, connector, roots })))
    }

    /// Returns whether the proxy terminates TLS to this host, because the tenant has a secret for it. `name` has to
    /// be in lower case and without a trailing dot.
    pub(crate) fn takes(&self, tenant: &str, name: &str, port: u16) -> bool {
        self.0.as_ref().is_some_and(|own| own.vault.has_for(tenant, name, port))
    }

    /// Terminates the client's TLS with a certificate for `name`. Only HTTP/1.1 is offered inside.
    pub(crate) async fn accept(&self, tenant: &str, client: Wire, name: &str) -> io::Result<Wire> {
        let own = self.own()?;
        let authority = own.authorities.get(&own.vault.set(tenant)).ok_or_else(none)?;
        let config = authority.server(name).map_err(io::Error::other)?;
        Ok(Box::new(timeout(HANDSHAKE_TIMEOUT, TlsAcceptor::from(config).accept(client)).await??))
    }

    /// Starts TLS with the host, whose certificate has to be valid for `name`.
    pub(crate) async fn connect(&self, upstream: Wire, name: &str) -> io::Result<Wire> {
        let server = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::clone(&self.own()?.connector));
        Ok(Box::new(timeout(HANDSHAKE_TIMEOUT, connector.connect(server, upstream)).await??))
    }

    /// Inserts the secrets for this host into the headers of a request.
    pub(crate) fn inject(&self, tenant: &str, name: &str, port: u16, headers: &mut HeaderMap) -> InjectedSecrets {
        self.0.as_ref().map(|own| own.vault.inject(tenant, name, port, headers)).unwrap_or_default()
    }

    /// Returns the secrets that this tenant may use, or `None` if there are none.
    pub(crate) fn set(&self, tenant: &str) -> Option<SecretSet> {
        self.0.as_ref().map(|own| own.vault.set(tenant)).filter(|set| !set.is_empty())
    }

    /// Returns what a sandbox needs to use these secrets, or `None` if there is no authority for the set.
    pub(crate) fn trusted(&self, set: &SecretSet) -> Option<Trusted> {
        let own = self.0.as_ref()?;
        let authority = own.authorities.get(set)?.pem();
        Some(Trusted { authority, roots: own.roots.clone(), placeholders: own.vault.placeholders(set) })
    }

    /// Returns what is different in the other interceptor: its secrets, or the authorities that vouch for their hosts.
    pub(crate) fn changes(&self, other: &Self) -> Vec<&'static str> {
        let secrets = |of: &Self| of.0.iter().flat_map(|own| own.vault.secrets().cloned()).collect::<Vec<_>>();
        let roots = self.0.as_ref().zip(other.0.as_ref()).is_some_and(|(old, new)| old.roots != new.roots);
        let all = [("secrets", secrets(self) != secrets(other)), ("certificates", roots)];
        all.into_iter().filter(|(_, differs)| *differs).map(|(what, _)| what).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    fn own(&self) -> io::Result<&Interception> {
        self.0.as_ref().ok_or_else(none)
    }
}

/// The certificates that a sandbox has to trust, and the placeholders of its secrets.
pub(crate) struct Trusted {
    /// Certificate of the authority of this set of secrets, in PEM.
    pub authority: String,
    /// Certificates of the other authorities that sandboxes trust.
    pub roots: Vec<CertificateDer<'static>>,
    pub placeholders: BTreeMap<String, String>,
}

fn none() -> io::Error {
    io::Error::other("no host has a secret")
}

fn connector(provider: Arc<CryptoProvider>, roots: &[CertificateDer<'static>]) -> Result<ClientConfig, rustls::Error> {
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let mut config = builder.with_root_certificates(store).with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

/// Returns random bytes for a placeholder. Placeholders are not secret; they only have to differ.
fn random(source: &dyn SecureRandom) -> [u8; 12] {
    let mut bytes = [0; 12];
    let _ = source.fill(&mut bytes);
    bytes
}
