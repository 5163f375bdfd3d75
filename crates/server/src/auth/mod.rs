//! Identifies callers by bearer tokens and by tokens of an identity provider, and limits their calls per second.
//!
//! This module knows HTTP's types but no transport: it turns the head of a request into a [`Caller`] or a [`Denied`].
//! The identity of a caller comes from the `Authorization` header alone; other headers, queries and ids do not affect
//! it.

mod bearer;
mod configured;
mod jwks;
mod jwt;
mod metadata;
mod middleware;
mod rate;
mod signature;
mod tenants;

use std::collections::HashSet;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use engine::op::Tenant;
use http::StatusCode;
use http::request::Parts;
use serde_json::{Value, json};
use subtle::{Choice, ConstantTimeEq};

pub(crate) use self::bearer::Secret;
pub(crate) use self::jwks::{KeySource, KeysError};
pub(crate) use self::jwt::JwtConfig;
pub(crate) use self::metadata::WELL_KNOWN;
pub(crate) use self::middleware::{Watched, routes};
pub(crate) use self::tenants::{Quotas, TenantChanges, TenantsError, check_name as check_tenant_name};
use crate::config::Policies;
use crate::digest::sha256;

/// How callers are identified. If nothing is set, every caller is the local tenant.
#[derive(Debug, Clone, Default)]
pub(crate) struct AuthConfig {
    /// Token of the local tenant, for a server with one tenant.
    pub token: Option<Secret>,
    /// Path of the tenants file.
    pub tenants: Option<PathBuf>,
    /// Policies that a tenant's `network` may name.
    pub policies: Policies,
    pub jwt: Option<JwtConfig>,
    /// Address of this server as its clients know it, such as `https://sandbox.example.com`; if not set, the request's
    /// host is used.
    pub public_url: Option<String>,
    /// Issuers of tokens that the metadata names. If there are none, the metadata names the issuer of `jwt`.
    pub servers: Vec<String>,
    /// Quotas that apply where a tenant's entry sets none.
    pub quotas: Quotas,
}

impl AuthConfig {
    pub(crate) fn is_set(&self) -> bool {
        self.token.is_some() || self.tenants.is_some() || self.jwt.is_some()
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum AuthError {
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error("{0}")]
    Setting(String),
    #[error(
        "the server's token (`auth.token` or `auth.token_file`) is also the token of tenant `{0}`; give each tenant its own token"
    )]
    SharedToken(String),
}

/// An identified caller and its quotas.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Caller {
    pub tenant: Tenant,
    pub quotas: Quotas,
}

/// The refusal of a request. It reveals nothing that helps to guess a token.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Denied {
    /// Status 401: the caller could not be identified.
    Unknown { challenge: String, message: &'static str },
    /// Status 429: the tenant makes too many calls. The next one may succeed after `retry_after`.
    TooFast { tenant: Tenant, retry_after: Duration, per_second: f64 },
}

impl Denied {
    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::Unknown { .. } => StatusCode::UNAUTHORIZED,
            Self::TooFast { .. } => StatusCode::TOO_MANY_REQUESTS,
        }
    }

    /// Returns the header that has to accompany the status.
    pub(crate) fn header(&self) -> (http::HeaderName, String) {
        match self {
            Self::Unknown { challenge, .. } => (http::header::WWW_AUTHENTICATE, challenge.clone()),
            Self::TooFast { retry_after, .. } => {
                // The header has whole seconds, rounded up so that the client does not retry too early.
                (http::header::RETRY_AFTER, retry_after.as_secs_f64().ceil().max(1.0).to_string())
            }
        }
    }

    pub(crate) fn message(&self) -> String {
        match self {
            Self::Unknown { message, .. } => (*message).into(),
            Self::TooFast { per_second, .. } => {
                format!("over the quota `calls_per_second` ({per_second}); try again later")
            }
        }
    }

    /// Returns the body, which is JSON-RPC so that every client can show it.
    pub(crate) fn body(&self) -> Value {
        json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32600, "message": self.message()}})
    }
}

pub(crate) struct Auth {
    known: RwLock<Arc<Identities>>,
    buckets: rate::Buckets,
    required: bool,
}

/// Everything by which callers are identified. A reload replaces it as a whole.
pub(crate) struct Identities {
    token: Option<[u8; 32]>,
    tenants: tenants::Tenants,
    jwt: Option<jwt::Verifier>,
    public_url: Option<String>,
    servers: Vec<String>,
    quotas: Quotas,
    /// Names of tenants that had a token since the server started. No subject of the identity provider gets one of
    /// them, because it would find what the tenant left.
    reserved: HashSet<String>,
}

impl Auth {
    /// Reads the token, tenants and key files. It starts no thread; `start` does.
    pub(crate) fn open(config: AuthConfig) -> Result<Self, AuthError> {
        let required = config.is_set();
        let known = RwLock::new(Arc::new(Identities::open(config, None)?));
        Ok(Self { known, buckets: rate::Buckets::default(), required })
    }

    /// Reads the token, tenants and key files again, for [`Self::replace`].
    pub(crate) fn reopen(&self, config: AuthConfig) -> Result<Identities, AuthError> {
        if config.is_set() != self.required {
            let why = "whether callers need a token cannot change while the server runs; restart it";
            return Err(AuthError::Setting(why.into()));
        }
        Identities::open(config, Some(&self.known()))
    }

    /// Replaces everything by which callers are identified, from the next request on. Returns what is different.
    pub(crate) fn replace(&self, new: Identities) -> TenantChanges {
        new.start();
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let changes = known.changes(&new);
        *known = Arc::new(new);
        changes
    }

    fn known(&self) -> Arc<Identities> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Starts fetching the keys of an identity provider in the background. Without this call, the first token that
    /// needs a key starts it.
    pub(crate) fn start(&self) {
        self.known().start();
    }

    /// Returns the tenants that are known by name, with their quotas.
    pub(crate) fn tenants(&self) -> Vec<(Tenant, Quotas)> {
        self.known().tenants()
    }

    /// Returns the number of tokens that a tenant has.
    pub(crate) fn tokens_of(&self, tenant: &Tenant) -> usize {
        let known = self.known();
        match *tenant == Tenant::local() {
            true => usize::from(known.token.is_some()),
            false => known.tenants.tokens_of(&tenant.0),
        }
    }

    /// Returns whether callers have to identify themselves. If not, every caller is the local tenant.
    pub(crate) fn is_required(&self) -> bool {
        self.required
    }

    /// Admits a request and counts it as one call of its tenant.
    pub(crate) fn admit(&self, parts: &Parts) -> Result<Caller, Denied> {
        let known = self.known();
        let caller = if self.required { known.identify(parts)? } else { known.everybody() };
        self.charge(&caller).map(|()| caller)
    }

    fn charge(&self, caller: &Caller) -> Result<(), Denied> {
        let Some(per_second) = caller.quotas.calls_per_second else { return Ok(()) };
        let taken = self.buckets.take(&caller.tenant.0, per_second, Instant::now());
        let tenant = || caller.tenant.clone();
        taken.map_err(|retry_after| Denied::TooFast { tenant: tenant(), retry_after, per_second })
    }

    /// Returns the RFC 9728 document at `/.well-known/oauth-protected-resource<path>`, or `None` if there is none for
    /// that path.
    pub(crate) fn metadata(&self, parts: &Parts, path: &str) -> Option<Value> {
        let known = self.known();
        metadata::document(&known.base(parts)?, path, &known.servers)
    }
}

impl Identities {
    /// Reads the files. The keys of an identity provider that `before` has fetched are kept.
    fn open(config: AuthConfig, before: Option<&Self>) -> Result<Self, AuthError> {
        let tenants = match &config.tenants {
            Some(path) => tenants::Tenants::read(path, config.jwt.is_some(), &config.policies)?,
            None => tenants::Tenants::default(),
        };
        let token = config.token.as_ref().map(Secret::sha256);
        if let Some(entry) = token.and_then(|token| tenants.by_digest(&token)) {
            return Err(AuthError::SharedToken(entry.name.clone()));
        }
        if config.token.as_ref().is_some_and(Secret::is_short) {
            tracing::warn!("the server's token is short and can be guessed; `openssl rand -hex 32` makes a good one");
        }
        let issuer = config.jwt.as_ref().and_then(|jwt| jwt.issuer.clone());
        let servers = if config.servers.is_empty() { issuer.into_iter().collect() } else { config.servers };
        let mut reserved: HashSet<String> = tenants.with_tokens().map(str::to_owned).collect();
        reserved.extend(before.iter().flat_map(|before| before.reserved.iter().cloned()));
        let before = before.and_then(|before| before.jwt.as_ref());
        let jwt = config.jwt.map(|jwt| jwt::Verifier::open(jwt, before)).transpose()?;
        Ok(Self { token, tenants, jwt, public_url: config.public_url, servers, quotas: config.quotas, reserved })
    }

    fn start(&self) {
        if let Some(jwt) = &self.jwt {
            jwt.start();
        }
    }

    pub(crate) fn tenants(&self) -> Vec<(Tenant, Quotas)> {
        let local = self.token.map(|_| (Tenant::local(), self.quotas.clone()));
        let named = self.tenants.all().map(|(name, quotas)| (Tenant(name.into()), quotas.or(&self.quotas)));
        local.into_iter().chain(named).collect()
    }

    /// Returns how the tenants of `new` differ from these.
    fn changes(&self, new: &Self) -> TenantChanges {
        let mut changes = self.tenants.changes(&new.tenants);
        let local = || Tenant::local().0;
        match (self.token, new.token) {
            (None, Some(_)) => {
                changes.added.push(local());
                changes.claimed.push(local());
            }
            (Some(_), None) => changes.removed.push(local()),
            (Some(old), Some(new)) if old != new => changes.changed.push((local(), vec!["token"])),
            _ => {}
        }
        changes
    }

    /// Returns the caller of a server that needs no token: a client that can connect is on this machine, or is the
    /// operator's gateway.
    fn everybody(&self) -> Caller {
        Caller { tenant: Tenant::local(), quotas: Quotas { show_host_paths: true, ..self.quotas.clone() } }
    }

    fn identify(&self, parts: &Parts) -> Result<Caller, Denied> {
        let unknown = |refused: bearer::TokenError| {
            let metadata = self.base(parts).map(|base| metadata::url(&base, parts.uri.path()));
            Denied::Unknown { challenge: refused.challenge(metadata.as_deref()), message: refused.message() }
        };
        let token = bearer::token(&parts.headers).map_err(unknown)?;
        self.caller(token).map_err(unknown)
    }

    fn caller(&self, token: &str) -> Result<Caller, bearer::TokenError> {
        let digest = sha256(token);
        if self.token.is_some_and(|expected| same(&expected, &digest)) {
            return Ok(Caller { tenant: Tenant::local(), quotas: self.quotas.clone() });
        }
        let name = match (self.tenants.by_digest(&digest), &self.jwt) {
            (Some(entry), _) => entry.name.clone(),
            (None, Some(jwt)) => self.tenants.name_of_subject(&jwt.subject(token)?, &self.reserved),
            (None, None) => return Err(bearer::TokenError::Wrong),
        };
        let own = self.tenants.quotas_of(&name);
        let quotas = own.map_or_else(|| self.quotas.clone(), |own| own.or(&self.quotas));
        Ok(Caller { tenant: Tenant(name), quotas })
    }

    /// Returns scheme and host of this server as its clients know it. A malformed `Host` is not repeated.
    fn base(&self, parts: &Parts) -> Option<String> {
        if let Some(url) = &self.public_url {
            return Some(url.trim_end_matches('/').to_owned());
        }
        let host = match parts.uri.authority() {
            Some(authority) => authority.as_str(),
            None => parts.headers.get(http::header::HOST)?.to_str().ok()?,
        };
        let plain = |b: u8| b.is_ascii_alphanumeric() || b".-:[]".contains(&b);
        (host.len() <= 255 && host.bytes().all(plain)).then(|| format!("http://{host}"))
    }
}

/// Compares two hashes in constant time, whatever they contain.
fn same(one: &[u8; 32], other: &[u8; 32]) -> bool {
    let equal: Choice = one.ct_eq(other);
    equal.into()
}

/// Returns an error if the server must not listen on an address. Without authentication it may listen on loopback only,
/// unless `no_auth` says that the operator has a gateway in front.
pub(crate) fn bind_allowed(addr: SocketAddr, has_auth: bool, no_auth: bool) -> Result<(), String> {
    let loopback = match addr.ip() {
        IpAddr::V6(ip) => ip.to_ipv4_mapped().map_or(ip.is_loopback(), |ip| ip.is_loopback()),
        IpAddr::V4(ip) => ip.is_loopback(),
    };
    if has_auth || no_auth || loopback {
        return Ok(());
    }
    Err(format!(
        "refusing to listen on `{addr}` without authentication: anybody who reaches it could run code here; set \
         `SANDPOOL_API_TOKEN`, or pass `--no-auth` if a gateway in front of it checks every request"
    ))
}

#[cfg(test)]
mod tests {
    use http::Request;

    use super::*;
    use testkit::scratch::Scratch;
    use text::hex;

    const TOKEN: &str = "correct-horse-battery-staple";

    fn with_token() -> Auth {
        Auth::open(AuthConfig { token: Some(Secret::parse(TOKEN).unwrap()), ..AuthConfig::default() }).unwrap()
    }

    fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
        let mut request = Request::post(uri).header("host", "127.0.0.1:8775");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(()).unwrap().into_parts().0
    }

    /// Covers hostile row A24.
    #[test]
    fn only_the_whole_token_in_one_header_is_let_in() {
        const META: &str = r#"resource_metadata="http://127.0.0.1:8775/.well-known/oauth-protected-resource/mcp""#;
        let missing = format!(r#"Bearer realm="sandpool", {META}"#);
        let wrong = format!(
            r#"Bearer realm="sandpool", error="invalid_token", error_description="the token is not valid", {META}"#
        );
        let broken = format!(
            r#"Bearer realm="sandpool", error="invalid_request", error_description="exactly one header `Authorization: Bearer <token>` is expected", {META}"#
        );
        let good = format!("Bearer {TOKEN}");
        let cases: &[(&str, &str, &[&str], Option<&str>)] = &[
            ("right", "/mcp", &[&good], None),
            ("lower-case scheme", "/mcp", &[&good.replace("Bearer", "bearer")], None),
            ("two spaces", "/mcp", &[&good.replace(' ', "  ")], None),
            ("missing", "/mcp", &[], Some(&missing)),
            ("in the query", &format!("/mcp?access_token={TOKEN}&token={TOKEN}"), &[], Some(&missing)),
            ("wrong", "/mcp", &["Bearer wrong"], Some(&wrong)),
            ("a prefix", "/mcp", &[&good[..good.len() - 1]], Some(&wrong)),
            ("longer", "/mcp", &[&format!("{good}x")], Some(&wrong)),
            ("other case", "/mcp", &[&good.replace("horse", "Horse")], Some(&wrong)),
            ("its hash", "/mcp", &[&format!("Bearer {}", hex(&sha256(TOKEN)))], Some(&wrong)),
            ("empty", "/mcp", &["Bearer "], Some(&broken)),
            ("scheme alone", "/mcp", &["Bearer"], Some(&broken)),
            ("no scheme", "/mcp", &[TOKEN], Some(&broken)),
            ("another scheme", "/mcp", &[&good.replace("Bearer", "Basic")], Some(&broken)),
            ("two tokens", "/mcp", &[&format!("{good} {TOKEN}")], Some(&broken)),
            ("a list", "/mcp", &[&format!("{good}, {good}")], Some(&broken)),
            ("two headers", "/mcp", &[&good, &good], Some(&broken)),
            ("two headers, one wrong", "/mcp", &["Bearer wrong", &good], Some(&broken)),
        ];
        let auth = with_token();
        for (what, uri, values, challenge) in cases {
            let headers: Vec<_> = values.iter().map(|value| ("authorization", *value)).collect();
            let admitted = auth.admit(&parts(uri, &headers));
            match challenge {
                None => assert_eq!(admitted.expect(what).tenant, Tenant::local(), "{what}"),
                Some(challenge) => {
                    let denied = admitted.expect_err(what);
                    assert_eq!(denied.status(), 401, "{what}");
                    assert_eq!(denied.header(), (http::header::WWW_AUTHENTICATE, challenge.to_string()), "{what}");
                    http::HeaderValue::from_str(&denied.header().1).expect(what);
                    assert!(!denied.body().to_string().contains(TOKEN), "{what}");
                }
            }
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_no_token() {
        let mut parts = parts("/mcp", &[]);
        parts.headers.insert("authorization", http::HeaderValue::from_bytes(b"Bearer \xff\xfe").unwrap());
        assert_eq!(with_token().admit(&parts).unwrap_err().status(), 401);
    }

    /// Covers hostile row X25.
    #[test]
    fn no_other_header_says_who_a_caller_is() {
        let spoofs =
            ["x-user", "x-tenant", "x-forwarded-user", "x-forwarded-for", "forwarded", "x-remote-user", "cookie"];
        let auth = with_token();
        for name in spoofs {
            for value in [TOKEN, "admin", "for=127.0.0.1;by=admin"] {
                let denied = auth.admit(&parts("/mcp", &[(name, value)])).unwrap_err();
                assert_eq!(denied.status(), 401, "{name}");
                let good = format!("Bearer {TOKEN}");
                let caller = auth.admit(&parts("/mcp", &[("authorization", &good), (name, value)])).unwrap();
                assert_eq!(caller.tenant, Tenant::local(), "{name}");
            }
        }
        let headers = [("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "https")];
        let (_, challenge) = auth.admit(&parts("/mcp", &headers)).unwrap_err().header();
        assert!(challenge.contains("http://127.0.0.1:8775/"), "{challenge}");
    }

    #[test]
    fn without_anything_configured_everybody_is_the_local_tenant() {
        let auth = Auth::open(AuthConfig::default()).unwrap();
        let caller = auth.admit(&parts("/mcp", &[("authorization", "Bearer whatever")])).unwrap();
        assert_eq!(caller.tenant, Tenant::local());
        assert!(caller.quotas.show_host_paths);
    }

    #[test]
    fn each_tenant_is_who_his_token_says_with_his_own_rate() {
        let dir = Scratch::new();
        let tenant = |name: &str, token: &str, quotas: &str| {
            format!("[[tenant]]\nname = '{name}'\ntoken_sha256 = '{}'\n{quotas}\n", hex(&sha256(token)))
        };
        let file = tenant("blue", "blue-token", "quotas = { calls_per_second = 2, runs = 1 }")
            + &tenant("green", "green-token", "");
        let config = AuthConfig {
            token: Some(Secret::parse(TOKEN).unwrap()),
            tenants: Some(dir.write("tenants.toml", &file)),
            quotas: Quotas { contexts: Some(7), ..Quotas::default() },
            ..AuthConfig::default()
        };
        let auth = Auth::open(config.clone()).unwrap();
        let admit = |token: &str| {
            let bearer = format!("Bearer {token}");
            auth.admit(&parts("/mcp", &[("authorization", &bearer)]))
        };
        let blue = admit("blue-token").unwrap();
        assert_eq!((blue.tenant.0.as_str(), blue.quotas.runs, blue.quotas.contexts), ("blue", Some(1), Some(7)));
        assert_eq!(admit("green-token").unwrap().tenant.0, "green");
        assert_eq!(admit(TOKEN).unwrap().tenant, Tenant::local());
        assert_eq!(admit("red-token").unwrap_err().status(), 401);
        let refused = (0..10).filter_map(|_| admit("blue-token").err()).next_back().unwrap();
        assert_eq!(refused.status(), 429);
        assert!((0..100).all(|_| admit("green-token").is_ok()), "another's rate is none of his");
        assert_eq!(
            auth.tenants().into_iter().map(|(tenant, quotas)| (tenant.0, quotas.contexts)).collect::<Vec<_>>(),
            ["local", "blue", "green"].map(|name| (name.to_owned(), Some(7)))
        );
        // After a reload only the new tokens are let in.
        let file = tenant("blue", "other-token", "quotas = { runs = 2 }") + &tenant("red", "red-token", "");
        std::fs::write(dir.0.join("tenants.toml"), file).unwrap();
        let changes = auth.replace(auth.reopen(AuthConfig { token: None, ..config.clone() }).unwrap());
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let changed = vec![("blue".to_owned(), vec!["token", "quotas"])];
        let (added, removed) = (names(&["red"]), names(&["green", "local"]));
        let claimed = vec!["red".to_owned()];
        assert_eq!(changes, TenantChanges { added, removed, claimed, changed });
        for token in ["blue-token", "green-token", TOKEN] {
            assert_eq!(admit(token).unwrap_err().status(), 401, "{token}");
        }
        assert_eq!((admit("other-token").unwrap().quotas.runs, admit("red-token").is_ok()), (Some(2), true));
        assert!(auth.reopen(AuthConfig::default()).is_err(), "nobody is let in without a token by a reload");
        let file = tenant("blue", "blue-token", "") + &tenant("green", "green-token", "");
        std::fs::write(dir.0.join("tenants.toml"), file).unwrap();
        let shared = AuthConfig { token: Some(Secret::parse("blue-token").unwrap()), ..config };
        let error = Auth::open(shared).err().unwrap().to_string();
        assert_eq!(
            error,
            "the server's token (`auth.token` or `auth.token_file`) is also the token of tenant `blue`; give each tenant its own token"
        );
    }

    #[test]
    fn a_host_that_is_none_is_not_repeated() {
        let mut parts = parts("/mcp", &[]);
        parts.headers.insert("host", http::HeaderValue::from_static("a\", error=\"x"));
        let (_, challenge) = with_token().admit(&parts).unwrap_err().header();
        assert_eq!(challenge, r#"Bearer realm="sandpool""#);
    }

    #[test]
    fn over_calls_per_second_is_429_with_a_time_to_wait() {
        let (tenant, retry_after) = (Tenant::local(), Duration::from_millis(1200));
        let denied = Denied::TooFast { tenant, retry_after, per_second: 2.5 };
        assert_eq!(denied.status(), 429);
        assert_eq!(denied.header(), (http::header::RETRY_AFTER, "2".into()));
        assert_eq!(
            denied.body(),
            json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32600,
                "message": "over the quota `calls_per_second` (2.5); try again later"}})
        );
    }

    #[test]
    fn without_a_token_only_loopback_is_bound() {
        let refused = bind_allowed("0.0.0.0:8775".parse().unwrap(), false, false).unwrap_err();
        assert_eq!(
            refused,
            "refusing to listen on `0.0.0.0:8775` without authentication: anybody who reaches it could run code here; set \
             `SANDPOOL_API_TOKEN`, or pass `--no-auth` if a gateway in front of it checks every request"
        );
        for loopback in ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert_eq!(bind_allowed(loopback.parse().unwrap(), false, false), Ok(()), "{loopback}");
        }
        for open in ["[::]:1", "192.0.2.1:1", "[::ffff:192.0.2.1]:1", "[fe80::1]:1"] {
            assert!(bind_allowed(open.parse().unwrap(), false, false).is_err(), "{open}");
            assert_eq!(bind_allowed(open.parse().unwrap(), true, false), Ok(()), "{open}");
            assert_eq!(bind_allowed(open.parse().unwrap(), false, true), Ok(()), "{open}");
        }
    }
}
