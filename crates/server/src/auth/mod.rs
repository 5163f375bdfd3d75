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
mod reserved;
mod signature;
mod tenants;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use engine::op::Tenant;
use http::StatusCode;
use http::request::Parts;
use mcp::Membership;
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
    /// File that keeps the names of tenants that have or had a token.
    pub reserved: Option<PathBuf>,
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
    #[error("cannot keep the names of tenants in `{path}`")]
    Reserved { path: PathBuf, source: std::io::Error },
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
    pub membership: Membership,
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
    /// Number of the reload.
    version: u64,
    /// The memberships of the tenants with a token.
    members: BTreeMap<String, Membership>,
    /// The membership of all subjects of the identity provider.
    subjects: Membership,
    token: Option<[u8; 32]>,
    tenants: tenants::Tenants,
    jwt: Option<jwt::Verifier>,
    public_url: Option<String>,
    servers: Vec<String>,
    quotas: Quotas,
    /// Names of tenants that have or had a token. No subject of the identity provider gets one of them, because it would
    /// find what the tenant left.
    reserved: BTreeSet<String>,
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
        let before = std::mem::replace(&mut *known, Arc::new(new));
        before.end_memberships(&known);
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

    /// Returns a number that changes with each reload.
    pub(crate) fn version(&self) -> u64 {
        self.known().version
    }

    /// Refuses a request that was admitted before a reload and would not be admitted as one of the same member now.
    pub(crate) fn confirm(&self, parts: &Parts, membership: &Membership, tenant: &Tenant) -> Result<(), Denied> {
        if !self.required {
            return Ok(());
        }
        let known = self.known();
        let now = known.identify(parts)?;
        match now.tenant == *tenant && now.membership == *membership {
            true => Ok(()),
            false => Err(known.unknown(parts, bearer::TokenError::Wrong)),
        }
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
        let mut reserved = match config.reserved {
            Some(path) => {
                reserved::add(&path, tenants.with_tokens()).map_err(|source| AuthError::Reserved { path, source })?
            }
            None => tenants.with_tokens().map(str::to_owned).collect(),
        };
        reserved.extend(before.iter().flat_map(|before| before.reserved.iter().cloned()));
        let local = token.map(|_| Tenant::local().0);
        let names = tenants.with_tokens().map(str::to_owned).chain(local);
        let known = |name: &str| before?.members.get(name).cloned();
        let members = names.map(|name| (known(&name).unwrap_or_else(Membership::begin), name));
        let members = members.map(|(membership, name)| (name, membership)).collect();
        let verifier = before.and_then(|before| before.jwt.as_ref());
        let jwt = config.jwt.map(|jwt| jwt::Verifier::open(jwt, verifier)).transpose()?;
        let subjects = before.filter(|before| before.jwt.is_some()).map(|before| before.subjects.clone());
        Ok(Self {
            version: before.map_or(0, |before| before.version + 1),
            members,
            subjects: subjects.unwrap_or_else(Membership::begin),
            token,
            tenants,
            jwt,
            public_url: config.public_url,
            servers,
            quotas: config.quotas,
            reserved,
        })
    }

    /// Ends the memberships of the tenants that `new` does not have.
    fn end_memberships(&self, new: &Self) {
        let removed = self.members.iter().filter(|(name, _)| !new.members.contains_key(*name));
        removed.for_each(|(_, membership)| membership.end());
        if new.jwt.is_none() {
            self.subjects.end();
        }
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
        let quotas = Quotas { show_host_paths: true, ..self.quotas.clone() };
        Caller { tenant: Tenant::local(), quotas, membership: Membership::default() }
    }

    fn identify(&self, parts: &Parts) -> Result<Caller, Denied> {
        let token = bearer::token(&parts.headers);
        token.and_then(|token| self.caller(token)).map_err(|refused| self.unknown(parts, refused))
    }

    fn unknown(&self, parts: &Parts, refused: bearer::TokenError) -> Denied {
        let metadata = self.base(parts).map(|base| metadata::url(&base, parts.uri.path()));
        Denied::Unknown { challenge: refused.challenge(metadata.as_deref()), message: refused.message() }
    }

    fn caller(&self, token: &str) -> Result<Caller, bearer::TokenError> {
        let digest = sha256(token);
        if self.token.is_some_and(|expected| same(&expected, &digest)) {
            let (tenant, quotas) = (Tenant::local(), self.quotas.clone());
            return Ok(Caller { membership: self.membership(&tenant.0), tenant, quotas });
        }
        let (name, membership) = match (self.tenants.by_digest(&digest), &self.jwt) {
            (Some(entry), _) => (entry.name.clone(), self.membership(&entry.name)),
            (None, Some(jwt)) => {
                (self.tenants.name_of_subject(&jwt.subject(token)?, &self.reserved), self.subjects.clone())
            }
            (None, None) => return Err(bearer::TokenError::Wrong),
        };
        let own = self.tenants.quotas_of(&name);
        let quotas = own.map_or_else(|| self.quotas.clone(), |own| own.or(&self.quotas));
        Ok(Caller { tenant: Tenant(name), quotas, membership })
    }

    fn membership(&self, name: &str) -> Membership {
        self.members.get(name).cloned().unwrap_or_default()
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
mod tests;
