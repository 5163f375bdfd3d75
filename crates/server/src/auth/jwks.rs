//! The keys of an identity provider: a JSON Web Key Set from a file or a URL, refreshed in the background.
//!
//! No request ever waits for the set. A request whose key is not known is refused, the set is fetched again (at most
//! once a minute, however many requests need it), and the next attempt finds the key. Providers publish a key well
//! before they sign with it, and the set is fetched every 15 minutes anyway.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey};
use serde::Deserialize;
use serde_json::Value;

use crate::outgoing;

/// Maximum size of a key set; the sets of real providers are a few kilobytes.
const MOST_BYTES: u64 = 256 << 10;
const MOST_KEYS: usize = 100;
/// Timeout for the whole request that fetches a key set.
const FETCH_TIME: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum KeySource {
    File(PathBuf),
    Url(String),
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum KeysError {
    #[error("cannot read the key set `{path}`")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot fetch the key set: {0}")]
    Fetch(String),
    #[error("the key set is not valid: {0}")]
    Content(String),
}

impl KeySource {
    /// Parses a path or a URL. A URL is `https://…`, or `http://…` on this machine only, because anyone who can change
    /// the key set can get in.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let Some((scheme, _)) = text.split_once("://") else { return Ok(Self::File(text.into())) };
        let uri: http::Uri = text.parse().map_err(|error| format!("`{text}` is not a URL: {error}"))?;
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
        let address = host.parse::<std::net::IpAddr>();
        let loopback = host == "localhost" || address.is_ok_and(|address| address.is_loopback());
        match scheme {
            "https" => Ok(Self::Url(text.into())),
            "http" if loopback => Ok(Self::Url(text.into())),
            "http" => Err(format!("`{text}`: a key set from another machine has to come by `https`")),
            _ => Err(format!("`{text}`: a key set is a file or an `https` URL")),
        }
    }

    fn load(&self) -> Result<Arc<[VerifyingKey]>, KeysError> {
        let text = match self {
            Self::File(path) => read(path).map_err(|source| KeysError::Read { path: path.clone(), source })?,
            Self::Url(url) => fetch(url).map_err(KeysError::Fetch)?,
        };
        parse(&text).map_err(KeysError::Content)
    }
}

/// How often the set is loaded again, and how long it is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Pace {
    /// Maximum age of keys that are trusted: the provider may have withdrawn an older key.
    pub max_age: Duration,
    pub every: Duration,
    /// Minimum interval between two loads, however often a token names a key that is not in the set.
    pub at_most_every: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        let max_age = Duration::from_secs(24 * 60 * 60);
        Self { max_age, every: Duration::from_secs(900), at_most_every: Duration::from_secs(60) }
    }
}

pub(crate) struct Jwks {
    source: KeySource,
    pace: Pace,
    keys: Arc<RwLock<Keys>>,
    /// Channel to the refreshing thread, once it was started. The thread ends when the channel closes.
    missed: OnceLock<Option<SyncSender<()>>>,
}

/// The keys of the last successful load, and the time from which their age counts.
#[derive(Clone, Default)]
struct Keys {
    all: Arc<[VerifyingKey]>,
    loaded: Option<Instant>,
}

struct VerifyingKey {
    id: Option<String>,
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Jwks {
    /// Opens the source. A file has to be valid now; a provider may become reachable later. This starts no thread,
    /// because the launcher has to be started while the process has only one.
    pub(crate) fn open(source: KeySource, pace: Pace) -> Result<Self, KeysError> {
        let first = match source {
            KeySource::File(_) => Keys { all: source.load()?, loaded: Some(Instant::now()) },
            KeySource::Url(_) => Keys::default(),
        };
        Ok(Self { source, pace, keys: Arc::new(RwLock::new(first)), missed: OnceLock::new() })
    }

    /// Returns whether the set is fetched from this address and at this pace. A file is read again instead.
    pub(crate) fn is_fetched_like(&self, source: &KeySource, pace: Pace) -> bool {
        matches!(source, KeySource::Url(_)) && self.source == *source && self.pace == pace
    }

    /// Starts the thread that refreshes the set, unless it runs already. The first missing key starts it, too.
    pub(crate) fn start(&self) {
        self.missed.get_or_init(|| {
            let (missed, misses) = sync_channel(1);
            let (source, pace, keys) = (self.source.clone(), self.pace, self.keys.clone());
            let thread = std::thread::Builder::new().name("key-set".into());
            let started = thread.spawn(move || keep_fresh(&source, &keys, &misses, pace));
            started
                .inspect_err(|error| tracing::error!("the key set cannot be kept fresh: {error}"))
                .ok()
                .map(|_| missed)
        });
    }

    /// Returns the key that a token names, unless the keys are too old at `now`. A token that names no key is checked
    /// only if there is exactly one candidate.
    pub(crate) fn find(&self, id: Option<&str>, algorithm: Algorithm, now: Instant) -> Option<DecodingKey> {
        let Keys { all, loaded } = self.keys.read().unwrap_or_else(PoisonError::into_inner).clone();
        if now.saturating_duration_since(loaded?) > self.pace.max_age {
            return None;
        }
        let mut fitting =
            all.iter().filter(|key| key.algorithm == algorithm && (id.is_none() || key.id.as_deref() == id));
        let (first, second) = (fitting.next(), fitting.next());
        first.filter(|_| second.is_none()).map(|key| key.key.clone())
    }

    /// Requests an early reload of the set, because a key was not in it.
    pub(crate) fn missed(&self) {
        self.start();
        if let Some(Some(missed)) = self.missed.get() {
            let _ = missed.try_send(()); // A full channel means that a reload was requested already.
        }
    }
}

fn keep_fresh(source: &KeySource, keys: &RwLock<Keys>, misses: &Receiver<()>, pace: Pace) {
    let known = || keys.read().unwrap_or_else(PoisonError::into_inner).clone();
    let mut tried = known().loaded;
    loop {
        if tried.is_none_or(|at| at.elapsed() >= pace.at_most_every) {
            // The age of the keys counts from the moment before the request for them.
            let now = Instant::now();
            tried = Some(now);
            match source.load() {
                Ok(all) => {
                    *keys.write().unwrap_or_else(PoisonError::into_inner) = Keys { all, loaded: Some(now) };
                }
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
                    let left = known().loaded.map(|at| pace.max_age.saturating_sub(at.elapsed()).as_secs());
                    match left.filter(|left| *left > 0) {
                        Some(left) => {
                            tracing::warn!(
                                "{error}{cause}; tokens are checked with the keys known so far for {left} s more"
                            )
                        }
                        None => {
                            tracing::error!("{error}{cause}; no key is known that may be trusted: tokens are refused")
                        }
                    }
                }
            }
        }
        let none = known().all.is_empty();
        let wait = if none { pace.at_most_every } else { pace.every };
        if let Err(RecvTimeoutError::Disconnected) = misses.recv_timeout(wait) {
            return;
        }
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut text)?;
    Ok(text)
}

/// Fetches the set with one request, without redirects or proxies and with a short timeout. It trusts the machine's
/// certificates.
fn fetch(url: &str) -> Result<Vec<u8>, String> {
    let agent = outgoing::agent([url], FETCH_TIME)?;
    let mut answer = agent.get(url).header("accept", "application/json").call().map_err(|error| error.to_string())?;
    if answer.status() != http::StatusCode::OK {
        return Err(format!("the answer is {}", answer.status()));
    }
    answer.body_mut().with_config().limit(MOST_BYTES).read_to_vec().map_err(|error| error.to_string())
}

/// Returns the keys that this server can use. Other keys (for encryption, or of other curves) are skipped, because a
/// set may contain both kinds.
fn parse(text: &[u8]) -> Result<Arc<[VerifyingKey]>, String> {
    #[derive(Deserialize)]
    struct KeySet {
        keys: Vec<Value>,
    }
    if text.len() as u64 > MOST_BYTES {
        return Err(format!("it is larger than {MOST_BYTES} bytes"));
    }
    let set: KeySet = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let keys: Arc<[VerifyingKey]> = set.keys.into_iter().take(MOST_KEYS).filter_map(key).collect();
    if keys.is_empty() {
        return Err("it has no key for RS256, ES256 or EdDSA".into());
    }
    Ok(keys)
}

fn key(value: Value) -> Option<VerifyingKey> {
    let jwk: Jwk = serde_json::from_value(value).ok()?;
    let (algorithm, name) = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => (Algorithm::RS256, KeyAlgorithm::RS256),
        AlgorithmParameters::EllipticCurve(key) if key.curve == EllipticCurve::P256 => {
            (Algorithm::ES256, KeyAlgorithm::ES256)
        }
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => {
            (Algorithm::EdDSA, KeyAlgorithm::EdDSA)
        }
        _ => return None,
    };
    let for_signatures = jwk.common.public_key_use.as_ref().is_none_or(|purpose| *purpose == PublicKeyUse::Signature);
    let fits = for_signatures && jwk.common.key_algorithm.is_none_or(|declared| declared == name);
    let key = DecodingKey::from_jwk(&jwk).ok().filter(|_| fits)?;
    Some(VerifyingKey { id: jwk.common.key_id, algorithm, key })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_a_file_or_https_or_this_machine() {
        for url in ["https://id.example.com/jwks", "http://127.0.0.1:9/j", "http://localhost/j", "http://[::1]:8/j"] {
            assert_eq!(KeySource::parse(url), Ok(KeySource::Url(url.into())));
        }
        assert_eq!(KeySource::parse("/etc/jwks.json"), Ok(KeySource::File("/etc/jwks.json".into())));
        for url in ["http://id.example.com/j", "http://localhost.evil.com/j", "http://127.0.0.1.evil.com/", "ftp://x/y"]
        {
            assert!(KeySource::parse(url).is_err(), "{url}");
        }
    }

    #[test]
    fn keys_that_cannot_be_used_here_are_left_out() {
        let set = br#"{"keys": [
            {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"},
            {"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA", "kid": "other curve"},
            {"kty": "OKP", "crv": "Ed25519", "x": "AA", "use": "enc", "kid": "for encryption"},
            {"kty": "OKP", "crv": "Ed25519", "x": "AA", "alg": "ES256", "kid": "contradicts itself"},
            {"kty": "strange"}, 7,
            {"kty": "OKP", "crv": "Ed25519", "x": "AA", "kid": "good"}
        ]}"#;
        let keys = parse(set).unwrap();
        assert_eq!(keys.iter().map(|key| key.id.as_deref()).collect::<Vec<_>>(), [Some("good")]);
        for (bad, why) in [
            (&b"{}"[..], "missing field `keys` at line 1 column 2"),
            (br#"{"keys": []}"#, "it has no key for RS256, ES256 or EdDSA"),
            (&vec![b' '; (256 << 10) + 1], "it is larger than 262144 bytes"),
        ] {
            assert_eq!(parse(bad).err().unwrap(), why);
        }
    }
}
