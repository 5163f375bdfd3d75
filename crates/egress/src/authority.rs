//! The certificate authority that vouches, inside sandboxes, for hosts with a secret. It is created when the server
//! starts, exists only in memory, and is constrained to those hosts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rcgen::{
    BasicConstraints, CertificateParams, CidrSubnet, DnType, ExtendedKeyUsagePurpose, GeneralSubtree, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, NameConstraints,
};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{Error, ServerConfig};
use time::{Duration, OffsetDateTime};

use crate::lock;
use crate::secrets::Pattern;

/// Validity of certificates in days. Browsers refuse certificates that are valid for more than 398 days.
const DAYS: i64 = 396;
/// Maximum number of cached certificates. The cache needs a bound because a wildcard matches any number of names.
const MAX_LEAVES: usize = 256;

pub(crate) struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
    /// Key of all leaf certificates. One key is enough because, like the authority's key, it never leaves this
    /// process.
    leaf_key: KeyPair,
    provider: Arc<CryptoProvider>,
    leaves: Mutex<HashMap<String, Arc<ServerConfig>>>,
}

impl Authority {
    pub(crate) fn new(hosts: &[Pattern], provider: Arc<CryptoProvider>) -> Result<Self, rcgen::Error> {
        let mut params = valid(Vec::new())?;
        params.distinguished_name.push(DnType::CommonName, "Sandpool, for hosts with a secret");
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.name_constraints = Some(NameConstraints {
            permitted_subtrees: hosts.iter().map(|host| GeneralSubtree::DnsName(host.name.clone())).collect(),
            // The permitted names do not restrict addresses, so all addresses are excluded explicitly.
            excluded_subtrees: vec![
                GeneralSubtree::IpAddress(CidrSubnet::V4([0; 4], [0; 4])),
                GeneralSubtree::IpAddress(CidrSubnet::V6([0; 16], [0; 16])),
            ],
        });
        let key = KeyPair::generate()?;
        let certificate = params.self_signed(&key)?;
        let issuer = Issuer::new(params, key);
        Ok(Self { issuer, certificate, leaf_key: KeyPair::generate()?, provider, leaves: Mutex::default() })
    }

    pub(crate) fn pem(&self) -> String {
        self.certificate.pem()
    }

    /// Returns the TLS configuration for a client that connects to `name`. It holds a certificate for that name only.
    pub(crate) fn server(&self, name: &str) -> Result<Arc<ServerConfig>, Error> {
        let mut leaves = lock(&self.leaves);
        if let Some(config) = leaves.get(name) {
            return Ok(Arc::clone(config));
        }
        let config = Arc::new(self.server_config(name)?);
        if leaves.len() >= MAX_LEAVES {
            leaves.clear();
        }
        leaves.insert(name.to_owned(), Arc::clone(&config));
        Ok(config)
    }

    fn server_config(&self, name: &str) -> Result<ServerConfig, Error> {
        let leaf = self.leaf(name).map_err(|error| Error::General(error.to_string()))?;
        let key = PrivateKeyDer::try_from(self.leaf_key.serialize_der()).map_err(|why| Error::General(why.into()))?;
        let key = self.provider.key_provider.load_private_key(key)?;
        let own = CertifiedKey::new(vec![leaf, self.certificate.der().clone()], key);
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(SingleCertResolver { name: name.to_owned(), own: Arc::new(own) }));
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }

    fn leaf(&self, name: &str) -> Result<CertificateDer<'static>, rcgen::Error> {
        let mut params = valid(vec![name.to_owned()])?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        Ok(params.signed_by(&self.leaf_key, &self.issuer)?.der().clone())
    }
}

fn valid(names: Vec<String>) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    // Backdated to tolerate clock differences.
    params.not_before = OffsetDateTime::now_utc() - Duration::days(1);
    params.not_after = params.not_before + Duration::days(DAYS);
    Ok(params)
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

/// Presents the certificate of one fixed host and rejects a client that asks for another name.
#[derive(Debug)]
struct SingleCertResolver {
    name: String,
    own: Arc<CertifiedKey>,
}

impl ResolvesServerCert for SingleCertResolver {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let matches = hello.server_name().is_none_or(|name| name.eq_ignore_ascii_case(&self.name));
        matches.then(|| Arc::clone(&self.own))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    /// Returns what curl prints when it requests a page from a server whose certificate this authority issued for
    /// `name`.
    #[allow(clippy::disallowed_methods, reason = "the client under test")]
    async fn curl(authority: &Authority, name: &str) -> String {
        let acceptor = tokio_rustls::TlsAcceptor::from(authority.server(name).unwrap());
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let serving = tokio::spawn(async move {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(mut stream) = acceptor.accept(stream).await {
                let _ = tokio::io::AsyncReadExt::read(&mut stream, &mut [0; 1024]).await;
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
                let _ = tokio::io::AsyncWriteExt::write_all(&mut stream, answer).await;
                let _ = tokio::io::AsyncWriteExt::shutdown(&mut stream).await;
            }
        });
        let file = std::env::temp_dir().join(format!("sandpool-authority-{}-{port}.pem", std::process::id()));
        std::fs::write(&file, authority.pem()).unwrap();
        let output = tokio::process::Command::new("curl")
            .args(["-sS", "--noproxy", "*", "--max-time", "20", "--resolve", &format!("{name}:{port}:127.0.0.1")])
            .arg("--cacert")
            .arg(&file)
            .arg(format!("https://{name}:{port}/"))
            .output()
            .await
            .unwrap();
        std::fs::remove_file(file).unwrap();
        serving.await.unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    #[tokio::test]
    async fn a_client_refuses_a_certificate_for_another_host() {
        let hosts = ["api.test", "*.corp.test:8443"].map(|host| Pattern::parse(host).unwrap());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let authority = Authority::new(&hosts, provider).unwrap();
        assert_eq!(curl(&authority, "api.test").await, "ok");
        assert_eq!(curl(&authority, "a.corp.test").await, "ok");
        for name in ["bank.test", "evilapi.test", "corp.test.evil.test"] {
            let refused = curl(&authority, name).await;
            assert!(refused.contains("permitted subtree violation"), "{name}: {refused}");
        }
    }

    #[test]
    fn names_without_end_do_not_fill_the_memory() {
        let hosts = [Pattern::parse("*.corp.test").unwrap()];
        let authority = Authority::new(&hosts, Arc::new(rustls::crypto::ring::default_provider())).unwrap();
        for number in 0..MAX_LEAVES + 10 {
            authority.server(&format!("n{number}.corp.test")).unwrap();
        }
        assert!(authority.leaves.lock().unwrap().len() <= MAX_LEAVES);
    }
}
