//! Requests that this server makes itself: without redirects or proxies, and with a timeout. They trust the machine's
//! certificates.

use std::sync::Arc;
use std::time::Duration;

use ureq::tls::{Certificate, RootCerts, TlsConfig, TlsProvider};

/// Returns a client for these addresses.
pub(crate) fn agent<'a>(urls: impl IntoIterator<Item = &'a str>, timeout: Duration) -> Result<ureq::Agent, String> {
    let certificates = rustls_native_certs::load_native_certs();
    let roots: Vec<_> = certificates.certs.iter().map(|cert| Certificate::from_der(cert.as_ref()).to_owned()).collect();
    if roots.is_empty() && urls.into_iter().any(|url| url.starts_with("https:")) {
        return Err("this machine has no certificates of authorities; install the package `ca-certificates`".into());
    }
    let tls = TlsConfig::builder()
        .provider(TlsProvider::Rustls)
        .root_certs(RootCerts::new_with_certs(&roots))
        .unversioned_rustls_crypto_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .build();
    let config = ureq::Agent::config_builder()
        .tls_config(tls)
        .proxy(None)
        .max_redirects(0)
        .http_status_as_error(false)
        .timeout_global(Some(timeout));
    Ok(config.build().into())
}
