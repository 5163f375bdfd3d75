//! Hosts that have a secret: TLS ends here, so that the secret can be put in on the way out.
//!
//! The way of such a request: CONNECT or SOCKS names the host, the policy allows it, [`Interceptor::takes`] says yes, and
//! [`Interceptor::accept`] ends the client's TLS. Each request inside goes the same way as a plain one (policy, methods, address), then
//! [`Interceptor::dress`] puts the secret in, [`Interceptor::connect`] begins TLS on the connection that was checked and opened,
//! and [`InjectedSecrets::clean`] takes the secret out of an answer that repeats it.

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

/// For a handshake.
const PATIENCE: Duration = Duration::from_secs(10);

/// Nothing in it: no host has a secret.
#[derive(Debug, Default)]
pub struct Interceptor(Option<Interception>);

#[derive(Debug)]
struct Interception {
    vault: Vault,
    /// One for each set of secrets: in its name constraints are the hosts of that set, which are nobody else's business.
    authorities: BTreeMap<SecretSet, Authority>,
    connector: Arc<ClientConfig>,
    /// Of this machine, for the bundle in sandboxes.
    roots: Vec<CertificateDer<'static>>,
}

impl Interceptor {
    /// `roots` are trusted besides those of this machine.
    pub fn new(secrets: &[Secret], roots: &[CertificateDer<'static>]) -> io::Result<Self> {
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

    /// Whether TLS to this host ends here: this tenant has a secret for it. `name` is lower case, without a dot at its end.
    pub fn takes(&self, tenant: &str, name: &str, port: u16) -> bool {
        self.0.as_ref().is_some_and(|own| own.vault.has_for(tenant, name, port))
    }

    /// Ends the client's TLS, with a certificate for `name`. HTTP/1.1 is all that is offered inside.
    pub async fn accept(&self, tenant: &str, client: Wire, name: &str) -> io::Result<Wire> {
        let own = self.own()?;
        let authority = own.authorities.get(&own.vault.set(tenant)).ok_or_else(none)?;
        let config = authority.server(name).map_err(io::Error::other)?;
        Ok(Box::new(timeout(PATIENCE, TlsAcceptor::from(config).accept(client)).await??))
    }

    /// Begins TLS with the host itself, whose certificate has to be good for `name`.
    pub async fn connect(&self, upstream: Wire, name: &str) -> io::Result<Wire> {
        let server = ServerName::try_from(name.to_owned()).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::clone(&self.own()?.connector));
        Ok(Box::new(timeout(PATIENCE, connector.connect(server, upstream)).await??))
    }

    /// Puts the secrets of this host into the headers of a request to it.
    pub fn dress(&self, tenant: &str, name: &str, port: u16, headers: &mut HeaderMap) -> InjectedSecrets {
        self.0.as_ref().map(|own| own.vault.dress(tenant, name, port, headers)).unwrap_or_default()
    }

    /// Which secrets this tenant has; none is none.
    pub fn set(&self, tenant: &str) -> Option<SecretSet> {
        self.0.as_ref().map(|own| own.vault.set(tenant)).filter(|set| !set.is_empty())
    }

    /// What a sandbox needs to use these, if there are any.
    pub fn trusted(&self, set: &SecretSet) -> Option<Trusted> {
        let own = self.0.as_ref()?;
        let authority = own.authorities.get(set)?.pem();
        Some(Trusted { authority, roots: own.roots.clone(), placeholders: own.vault.placeholders(set) })
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    fn own(&self) -> io::Result<&Interception> {
        self.0.as_ref().ok_or_else(none)
    }
}

/// Whom a sandbox has to trust, and what it has in place of secrets.
pub struct Trusted {
    /// The certificate of our authority.
    pub authority: String,
    /// Of this machine's authorities.
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

/// For placeholders, which are no secret; only alike they must not be.
fn random(source: &dyn SecureRandom) -> [u8; 12] {
    let mut bytes = [0; 12];
    let _ = source.fill(&mut bytes);
    bytes
}
