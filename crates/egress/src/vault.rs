//! Inserts secrets into requests in place of their placeholders, and masks them in responses that echo them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hyper::body::Body;
use hyper::header::{
    ACCEPT_CHARSET, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HeaderMap, HeaderName, HeaderValue, IF_RANGE,
    RANGE,
};
use hyper::{Response, StatusCode};
use zeroize::Zeroizing;

use crate::scrub::{Needles, Scrubbed};
use crate::secrets::{Pattern, Secret};

/// The secrets of one server.
#[derive(Debug)]
pub(crate) struct Vault(Vec<VaultEntry>);

/// A subset of the server's secrets. Tenants with the same subset get the same sandbox setup.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SecretSet(Vec<usize>);

impl SecretSet {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[derive(Debug)]
struct VaultEntry {
    secret: Secret,
    hosts: Vec<Pattern>,
    header: HeaderName,
    /// The text that code in the sandbox has in place of the value.
    placeholder: String,
}

impl Vault {
    /// Checks the secrets and generates their placeholders. The error message does not contain a value.
    pub(crate) fn new(secrets: &[Secret], random: impl Fn() -> [u8; 12]) -> Result<Self, String> {
        let entry = |secret: &Secret| {
            Secret::check(&secret.name, &secret.hosts, &secret.header, secret.format.as_deref())?;
            let header = secret.header.parse().map_err(|_| format!("`{}` is not a header", secret.header))?;
            let hosts = secret.hosts.iter().filter_map(|host| Pattern::parse(host)).collect();
            let number: String = random().iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(VaultEntry {
                placeholder: format!("sandpool-placeholder-{number}"),
                secret: secret.clone(),
                hosts,
                header,
            })
        };
        secrets.iter().map(entry).collect::<Result<_, _>>().map(Self)
    }

    pub(crate) fn secrets(&self) -> impl Iterator<Item = &Secret> {
        self.0.iter().map(|entry| &entry.secret)
    }

    /// Returns the distinct non-empty sets of secrets that tenants can have.
    pub(crate) fn sets(&self) -> BTreeSet<SecretSet> {
        let named = self.0.iter().flat_map(|entry| entry.secret.tenants.iter().map(String::as_str));
        // No tenant has the empty name, so it yields the secrets that every tenant may use.
        let sets = named.chain([""]).map(|tenant| self.set(tenant));
        sets.filter(|set| !set.is_empty()).collect()
    }

    /// Returns the secrets that this tenant may use.
    pub(crate) fn set(&self, tenant: &str) -> SecretSet {
        SecretSet(
            self.0.iter().enumerate().filter(|(_, entry)| entry.is_for(tenant)).map(|(number, _)| number).collect(),
        )
    }

    pub(crate) fn hosts(&self, set: &SecretSet) -> Vec<Pattern> {
        self.in_set(set).flat_map(|entry| entry.hosts.clone()).collect()
    }

    /// Returns the placeholders by the names of their environment variables.
    pub(crate) fn placeholders(&self, set: &SecretSet) -> BTreeMap<String, String> {
        self.in_set(set).map(|entry| (entry.secret.name.clone(), entry.placeholder.clone())).collect()
    }

    fn in_set(&self, set: &SecretSet) -> impl Iterator<Item = &VaultEntry> {
        set.0.iter().map(|number| &self.0[*number])
    }

    pub(crate) fn has_for(&self, tenant: &str, name: &str, port: u16) -> bool {
        self.of(tenant, name, port).next().is_some()
    }

    fn of(&self, tenant: &str, name: &str, port: u16) -> impl Iterator<Item = &VaultEntry> {
        let own = self.0.iter().filter(move |entry| entry.is_for(tenant));
        own.filter(move |entry| entry.hosts.iter().any(|host| host.matches(name, port)))
    }

    /// Inserts the secrets for this host into the headers of a request, as far as this tenant may use them.
    pub(crate) fn inject(&self, tenant: &str, name: &str, port: u16, headers: &mut HeaderMap) -> InjectedSecrets {
        let mut needles = Needles::default();
        for entry in self.of(tenant, name, port) {
            let value = entry.secret.value.expose().as_bytes();
            needles.add(value);
            // The host may show the password of an earlier request.
            if entry.takes_passwords() {
                needles.add_base64(value);
            }
            entry.put(headers, &mut needles);
        }
        if !needles.is_empty() {
            ask_for_searchable(headers);
        }
        InjectedSecrets { needles }
    }
}

/// Changes a request so that its response can be searched. It could not be if it were compressed, or if the client chose
/// its charset or range.
pub(crate) fn ask_for_searchable(headers: &mut HeaderMap) {
    headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    for name in [ACCEPT_CHARSET, RANGE, IF_RANGE] {
        headers.remove(name);
    }
}

impl VaultEntry {
    fn is_for(&self, tenant: &str) -> bool {
        let tenants = &self.secret.tenants;
        tenants.is_empty() || tenants.iter().any(|own| own == tenant)
    }

    /// Returns whether the value is also inserted into base64-encoded passwords.
    fn takes_passwords(&self) -> bool {
        self.header == AUTHORIZATION
    }

    fn put(&self, headers: &mut HeaderMap, needles: &mut Needles) {
        let value = self.secret.value.expose();
        let given: Vec<HeaderValue> = headers.get_all(&self.header).iter().cloned().collect();
        if given.is_empty()
            && let Some(format) = &self.secret.format
        {
            headers.extend(sensitive(&format.replace("{}", value)).map(|value| (self.header.clone(), value)));
        }
        let put: Vec<Option<HeaderValue>> = given.iter().map(|given| self.replaced(given, needles)).collect();
        if put.iter().any(Option::is_some) {
            headers.remove(&self.header);
            for (given, put) in given.into_iter().zip(put) {
                headers.append(&self.header, put.unwrap_or(given));
            }
        }
    }

    /// Returns the header value with the placeholder replaced, or `None` if it does not contain the placeholder.
    fn replaced(&self, given: &HeaderValue, needles: &mut Needles) -> Option<HeaderValue> {
        let (text, value) = (given.to_str().ok()?, self.secret.value.expose());
        if text.contains(&self.placeholder) {
            return sensitive(&text.replace(&self.placeholder, value));
        }
        // A password is sent in base64, preceded by the name of the user.
        let (scheme, encoded) = text.split_once(' ').filter(|_| self.takes_passwords())?;
        let decoded = String::from_utf8(STANDARD.decode(encoded.trim()).ok()?).ok()?;
        if !scheme.eq_ignore_ascii_case("basic") || !decoded.contains(&self.placeholder) {
            return None;
        }
        let decoded = Zeroizing::new(decoded.replace(&self.placeholder, value));
        let encoded = Zeroizing::new(STANDARD.encode(decoded.as_bytes()));
        needles.add(encoded.as_bytes());
        sensitive(&format!("{scheme} {}", *encoded))
    }
}

/// Creates a header value that is not printed with the other headers.
fn sensitive(text: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::from_str(text).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// The secrets that were inserted into a request, which have to be masked in the response.
#[must_use]
#[derive(Default)]
pub(crate) struct InjectedSecrets {
    needles: Needles,
}

impl fmt::Debug for InjectedSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InjectedSecrets")
    }
}

impl InjectedSecrets {
    /// Returns a text to mask that is no secret of a tenant; none if it is empty.
    pub(crate) fn only(text: &str) -> Self {
        let mut needles = Needles::default();
        if !text.is_empty() {
            needles.add(text.as_bytes());
        }
        Self { needles }
    }

    /// Masks the secrets in a response. The error is a sentence for the client that says why the response cannot be
    /// searched.
    pub(crate) fn clean<B: Body>(self, response: Response<B>) -> Result<Response<Scrubbed<B>>, &'static str> {
        let (mut parts, body) = response.into_parts();
        if !self.needles.is_empty() {
            if parts.status == StatusCode::SWITCHING_PROTOCOLS {
                return Err(
                    "a host that has a secret cannot switch to another protocol, which could not be looked through",
                );
            }
            if !body.is_end_stream() && is_compressed(&parts.headers) {
                return Err("a host that has a secret answered in compressed form, though it was asked not to");
            }
            self.needles.mask_headers(&mut parts.headers);
            // The extensions contain the reason phrase and the original spelling of the header names.
            parts.extensions.clear();
        }
        Ok(Response::from_parts(parts, Scrubbed::new(body, self.needles)))
    }
}

/// Returns whether the body of a response is in a form that cannot be searched.
pub(crate) fn is_compressed(headers: &HeaderMap) -> bool {
    let identity = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    !headers.get_all(CONTENT_ENCODING).iter().all(identity)
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http_body_util::{BodyExt as _, Full};

    use super::*;
    use crate::secrets::Value;

    fn secret(name: &str, host: &str, header: &str, format: Option<&str>, value: &str) -> Secret {
        Secret {
            name: name.into(),
            hosts: vec![host.into()],
            header: header.into(),
            format: format.map(Into::into),
            tenants: Vec::new(),
            value: Value::parse(value.into()).unwrap(),
        }
    }

    fn vault() -> Vault {
        let secrets = [
            secret("TOKEN", "api.test", "Authorization", None, "value-of-token"),
            secret("KEY", "*.keys.test:8443", "X-Key", Some("key {}"), "value-of-key"),
        ];
        let next = std::cell::Cell::new(0);
        Vault::new(&secrets, || [next.replace(next.get() + 1); 12]).unwrap()
    }

    fn injected(host: &str, port: u16, headers: &[(&str, &str)]) -> String {
        let mut map: HeaderMap = HeaderMap::new();
        for (name, value) in headers {
            map.append(name.parse::<HeaderName>().unwrap(), value.parse().unwrap());
        }
        let _ = vault().inject("blue", host, port, &mut map);
        let mut shown: Vec<_> =
            map.iter().map(|(name, value)| format!("{name}: {}", value.to_str().unwrap())).collect();
        shown.sort();
        shown.join("\n")
    }

    #[test]
    fn a_placeholder_is_replaced_in_its_header_towards_its_host_and_nowhere_else() {
        let vault = vault();
        let token = &vault.placeholders(&vault.set("blue"))["TOKEN"];
        let bearer = format!("Bearer {token}");
        let headers = [("authorization", bearer.as_str()), ("x-other", token)];
        assert_eq!(
            injected("api.test", 443, &headers),
            format!("accept-encoding: identity\nauthorization: Bearer value-of-token\nx-other: {token}")
        );
        let as_it_was = format!("authorization: {bearer}\nx-other: {token}");
        for (host, port) in [("api.test", 80), ("api.test.evil.test", 443), ("a.api.test", 443), ("evil-api.test", 443)]
        {
            assert_eq!(injected(host, port, &headers), as_it_was, "{host}:{port}");
        }
        assert_eq!(injected("api.test", 443, &[]), "accept-encoding: identity", "no format, nothing to add");
    }

    #[test]
    fn a_secret_with_a_format_is_added_where_its_header_is_absent() {
        let added = "accept-encoding: identity\nx-key: key value-of-key";
        assert_eq!(injected("a.keys.test", 8443, &[("range", "bytes=0-3"), ("accept-charset", "utf-16")]), added);
        assert_eq!(injected("a.b.keys.test", 8443, &[]), added);
        assert_eq!(injected("keys.test", 8443, &[]), "");
        let own = "accept-encoding: identity\nx-key: own";
        assert_eq!(injected("a.keys.test", 8443, &[("x-key", "own")]), own);
    }

    #[test]
    fn a_password_is_replaced_in_its_base64() {
        let vault = vault();
        let pair = |password: &str| format!("Basic {}", STANDARD.encode(format!("user:{password}")));
        let given = pair(&vault.placeholders(&vault.set("blue"))["TOKEN"]);
        let sent = injected("api.test", 443, &[("authorization", &given)]);
        assert_eq!(sent, format!("accept-encoding: identity\nauthorization: {}", pair("value-of-token")));
    }

    /// W52: a host that stored the header of one request shows it in the answer to another, which has no password.
    #[tokio::test]
    async fn w52_a_stored_password_is_masked_in_every_answer() {
        async fn shown(value: &str, before: &str, after: &str) -> (String, String) {
            let vault = Vault::new(&[secret("T", "api.test", "Authorization", None, value)], || [0; 12]).unwrap();
            let stored = format!("Basic {}", STANDARD.encode(format!("{before}{value}{after}")));
            let answer = Response::builder().header("x-stored", &stored);
            let answer = answer.body(Full::new(Bytes::from(format!("{{\"sent\":\"{stored}\"}}")))).unwrap();
            let injected = vault.inject("blue", "api.test", 443, &mut HeaderMap::new());
            let (parts, body) = injected.clean(answer).unwrap().into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            (parts.headers["x-stored"].to_str().unwrap().into(), String::from_utf8(body.to_vec()).unwrap())
        }
        for before in ["", "u", "u:", "us:", "user:"] {
            for after in ["", ":", "@x", ":!?"] {
                for [one, other] in [["value-of-token", "zebra-in-a-zoo"], ["12345678", "abcdefgh"]] {
                    let (header, body) = shown(one, before, after).await;
                    assert!(header.contains("********") && body.contains(&header), "{header} {body}");
                    // Nothing is left that depends on the value, not even the bits of its first and last letter.
                    assert_eq!(shown(other, before, after).await, (header, body), "{before} {after}");
                }
            }
        }
    }

    #[test]
    fn a_secret_of_some_tenants_is_not_the_others() {
        let of_blue =
            Secret { tenants: vec!["blue".into()], ..secret("T", "api.test", "X-Key", Some("{}"), "value-of-t") };
        let vault = Vault::new(&[of_blue], || [0; 12]).unwrap();
        for (tenant, has) in [("blue", true), ("green", false), ("", false)] {
            let mut headers = HeaderMap::new();
            let _ = vault.inject(tenant, "api.test", 443, &mut headers);
            assert_eq!((vault.has_for(tenant, "api.test", 443), headers.contains_key("x-key")), (has, has), "{tenant}");
        }
    }

    #[test]
    fn nothing_prints_a_value() {
        let mut headers = HeaderMap::new();
        let vault = vault();
        let injected = vault.inject("blue", "a.keys.test", 8443, &mut headers);
        let shown = format!("{vault:?} {injected:?} {headers:?}");
        assert!(!shown.contains("value-of") && headers.len() == 2, "{shown}");
    }
}
