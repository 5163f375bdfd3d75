//! Verifies the tokens of an identity provider: signature, audience, issuer and times. A claim names the tenant.

use std::sync::Arc;
use std::time::{Duration, Instant};

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::{Validation, decode, decode_header};
use serde_json::{Map, Value};

use super::bearer::TokenError;
use super::jwks::{Jwks, KeySource, KeysError, Pace};
use super::signature::{self, ALGORITHMS};

/// Difference between clocks that is tolerated, in seconds.
const LEEWAY_SECONDS: u64 = 60;

#[derive(Debug, Clone)]
pub(crate) struct JwtConfig {
    pub keys: KeySource,
    /// Value that `aud` has to contain: a token for another service is not valid here.
    pub audience: String,
    pub issuer: Option<String>,
    /// The claim that names the tenant.
    pub tenant_claim: String,
    /// How long keys are trusted while they cannot be fetched again.
    pub max_age: Duration,
}

#[cfg(test)]
impl JwtConfig {
    fn new(keys: KeySource, audience: impl Into<String>) -> Self {
        let max_age = Pace::default().max_age;
        Self { keys, audience: audience.into(), issuer: None, tenant_claim: "sub".into(), max_age }
    }
}

pub(crate) struct Verifier {
    keys: Arc<Jwks>,
    validation: Validation,
    tenant_claim: String,
}

impl Verifier {
    /// Opens the key set. If `before` fetched it from the same address, its keys are kept and fetched again soon.
    pub(crate) fn open(config: JwtConfig, before: Option<&Self>) -> Result<Self, KeysError> {
        let pace = Pace { max_age: config.max_age, ..Pace::default() };
        let fetched = before.map(|before| &before.keys).filter(|keys| keys.is_fetched_like(&config.keys, pace));
        if let Some(keys) = fetched {
            keys.missed();
        }
        Self::with_pace(config, pace, fetched.cloned())
    }

    fn with_pace(config: JwtConfig, pace: Pace, keys: Option<Arc<Jwks>>) -> Result<Self, KeysError> {
        signature::install();
        let mut validation = Validation::new(ALGORITHMS[0]);
        validation.leeway = LEEWAY_SECONDS;
        validation.validate_nbf = true;
        validation.set_audience(&[&config.audience]);
        validation.set_required_spec_claims(&["exp", "aud"]);
        if let Some(issuer) = &config.issuer {
            validation.set_issuer(&[issuer]);
            validation.set_required_spec_claims(&["exp", "aud", "iss"]);
        }
        let keys = match keys {
            Some(keys) => keys,
            None => Arc::new(Jwks::open(config.keys, pace)?),
        };
        Ok(Self { keys, validation, tenant_claim: config.tenant_claim })
    }

    /// Starts fetching the keys, now and at intervals.
    pub(crate) fn start(&self) {
        self.keys.start();
    }

    /// Returns the subject that a token speaks for. Keys inside the token, and addresses that it names for keys, are
    /// ignored.
    pub(crate) fn subject(&self, token: &str) -> Result<String, TokenError> {
        self.subject_at(token, Instant::now())
    }

    fn subject_at(&self, token: &str, now: Instant) -> Result<String, TokenError> {
        let header = decode_header(token).map_err(|_| TokenError::Wrong)?;
        if !ALGORITHMS.contains(&header.alg) || header.crit.is_some() {
            return Err(TokenError::Wrong);
        }
        let Some(key) = self.keys.find(header.kid.as_deref(), header.alg, now) else {
            self.keys.missed();
            return Err(TokenError::UnknownKey);
        };
        // Only the algorithm of the key is accepted.
        let validation = Validation { algorithms: vec![header.alg], ..self.validation.clone() };
        let claims =
            decode::<Map<String, Value>>(token, &key, &validation).map_err(|error| refused(error.kind()))?.claims;
        let subject = claims.get(&self.tenant_claim).and_then(Value::as_str).filter(|subject| !subject.is_empty());
        subject.map(str::to_owned).ok_or(TokenError::Wrong)
    }
}

fn refused(kind: &ErrorKind) -> TokenError {
    match kind {
        ErrorKind::ExpiredSignature | ErrorKind::ImmatureSignature => TokenError::Expired,
        ErrorKind::InvalidAudience => TokenError::OtherAudience,
        ErrorKind::MissingRequiredClaim(claim) if claim == "aud" => TokenError::OtherAudience,
        _ => TokenError::Wrong,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::path::PathBuf;
    use std::time::Duration;

    use base64::Engine as _;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;
    use jsonwebtoken::get_current_timestamp;
    use ring::rand::SystemRandom;
    use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, Ed25519KeyPair, KeyPair};
    use serde_json::json;

    use super::*;
    use testkit::scratch::Scratch;

    /// An RSA key whose private half no longer exists, and a token signed with it: `sub` is `rsa-user`, valid until the
    /// year 2100.
    const RSA: &str = include_str!("rsa_fixture.json");

    fn base64(bytes: impl AsRef<[u8]>) -> String {
        URL_SAFE_NO_PAD.encode(bytes)
    }

    enum Signer {
        Es(EcdsaKeyPair),
        Ed(Ed25519KeyPair),
    }

    impl Signer {
        fn es() -> Self {
            let random = SystemRandom::new();
            let pkcs8 = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
            Self::Es(EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, pkcs8.as_ref(), &random).unwrap())
        }

        fn ed() -> Self {
            let pkcs8 = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new()).unwrap();
            Self::Ed(Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap())
        }

        fn jwk(&self, kid: &str) -> Value {
            match self {
                Self::Es(pair) => {
                    let (x, y) = pair.public_key().as_ref()[1..].split_at(32);
                    json!({"kty": "EC", "crv": "P-256", "x": base64(x), "y": base64(y), "kid": kid, "use": "sig"})
                }
                Self::Ed(pair) => {
                    json!({"kty": "OKP", "crv": "Ed25519", "x": base64(pair.public_key()), "kid": kid, "alg": "EdDSA"})
                }
            }
        }

        fn token(&self, header: Value, claims: &Value) -> String {
            let message = format!("{}.{}", base64(header.to_string()), base64(claims.to_string()));
            let signature = match self {
                Self::Es(pair) => base64(pair.sign(&SystemRandom::new(), message.as_bytes()).unwrap()),
                Self::Ed(pair) => base64(pair.sign(message.as_bytes())),
            };
            format!("{message}.{signature}")
        }
    }

    struct Provider {
        _dir: Scratch,
        file: PathBuf,
    }

    impl Provider {
        fn of(keys: &[Value]) -> Self {
            let dir = Scratch::new();
            let file = dir.write("jwks.json", &json!({"keys": keys}).to_string());
            Self { _dir: dir, file }
        }

        fn verifier(&self) -> Verifier {
            let source = KeySource::File(self.file.clone());
            let issuer = Some("https://id.example.com".into());
            Verifier::open(JwtConfig { issuer, ..JwtConfig::new(source, "sandpool") }, None).unwrap()
        }
    }

    fn claims(change: impl FnOnce(&mut Value)) -> Value {
        let mut claims = json!({"sub": "alice", "aud": ["other", "sandpool"], "iss": "https://id.example.com",
            "exp": get_current_timestamp() + 600});
        change(&mut claims);
        claims
    }

    #[test]
    fn tokens_of_each_algorithm_name_their_subject() {
        let (es, ed) = (Signer::es(), Signer::ed());
        let rsa: Value = serde_json::from_str(RSA).unwrap();
        let verifier = Provider::of(&[es.jwk("e"), ed.jwk("d"), rsa["jwk"].clone()]).verifier();
        let claims = claims(|_| ());
        assert_eq!(verifier.subject(&es.token(json!({"alg": "ES256", "kid": "e"}), &claims)), Ok("alice".into()));
        assert_eq!(verifier.subject(&ed.token(json!({"alg": "EdDSA", "kid": "d"}), &claims)), Ok("alice".into()));
        assert_eq!(verifier.subject(rsa["token"].as_str().unwrap()), Ok("rsa-user".into()));
        let no_choice = es.token(json!({"alg": "ES256", "typ": "at+jwt"}), &claims);
        assert_eq!(verifier.subject(&no_choice), Ok("alice".into()));
    }

    #[test]
    fn every_claim_that_has_to_hold_holds() {
        use TokenError::{Expired, OtherAudience, Wrong};
        let es = Signer::es();
        let verifier = Provider::of(&[es.jwk("e")]).verifier();
        let now = get_current_timestamp();
        type Change = Box<dyn FnOnce(&mut Value)>;
        let set = |key: &'static str, value: Value| -> Change { Box::new(move |claims| claims[key] = value) };
        let without = |key: &'static str| -> Change {
            Box::new(move |claims| {
                claims.as_object_mut().unwrap().remove(key);
            })
        };
        let cases: Vec<(&str, Change, Result<String, TokenError>)> = vec![
            ("expired within the leeway", set("exp", json!(now - 30)), Ok("alice".into())),
            ("expired", set("exp", json!(now - 90)), Err(Expired)),
            ("without an end", without("exp"), Err(Wrong)),
            ("with an end that is a text", set("exp", json!("2100-01-01")), Err(Wrong)),
            ("not yet valid", set("nbf", json!(now + 90)), Err(Expired)),
            ("nearly valid", set("nbf", json!(now + 30)), Ok("alice".into())),
            ("not before a text", set("nbf", json!("later")), Err(Wrong)),
            ("for somebody else", set("aud", json!("other")), Err(OtherAudience)),
            ("for a prefix", set("aud", json!("sandpoo")), Err(OtherAudience)),
            ("for one", set("aud", json!("sandpool")), Ok("alice".into())),
            ("for nobody", set("aud", json!([])), Err(OtherAudience)),
            ("without an audience", without("aud"), Err(OtherAudience)),
            ("from another issuer", set("iss", json!("https://id.example.com.evil")), Err(Wrong)),
            ("without an issuer", without("iss"), Err(Wrong)),
            ("without a subject", without("sub"), Err(Wrong)),
            ("with an empty subject", set("sub", json!("")), Err(Wrong)),
            ("with a subject that is a number", set("sub", json!(7)), Err(Wrong)),
        ];
        for (what, change, expected) in cases {
            let token = es.token(json!({"alg": "ES256", "kid": "e"}), &claims(change));
            assert_eq!(verifier.subject(&token), expected, "{what}");
        }
    }

    #[test]
    fn a_token_cannot_choose_how_it_is_checked() {
        use TokenError::{UnknownKey, Wrong};
        let (es, ed, foreign) = (Signer::es(), Signer::ed(), Signer::es());
        let verifier = Provider::of(&[es.jwk("e"), ed.jwk("d")]).verifier();
        let claims = claims(|_| ());
        let good = es.token(json!({"alg": "ES256", "kid": "e"}), &claims);
        let (message, signature) = good.rsplit_once('.').unwrap();
        let payload = message.split_once('.').unwrap().1;
        let header = |header: Value| base64(header.to_string());
        let cases = [
            ("no algorithm", format!("{}.{payload}.", header(json!({"alg": "none", "kid": "e"}))), Wrong),
            ("an empty signature", format!("{message}."), Wrong),
            ("two parts", message.to_owned(), Wrong),
            ("shared secret", format!("{}.{payload}.{signature}", header(json!({"alg": "HS256", "kid": "e"}))), Wrong),
            (
                "another header",
                format!("{}.{payload}.{signature}", header(json!({"alg": "ES256", "kid": "e", "x": 1}))),
                Wrong,
            ),
            ("another key's id", es.token(json!({"alg": "ES256", "kid": "d"}), &claims), UnknownKey),
            ("another algorithm", es.token(json!({"alg": "EdDSA", "kid": "e"}), &claims), UnknownKey),
            ("a foreign signature", foreign.token(json!({"alg": "ES256", "kid": "e"}), &claims), Wrong),
            (
                "its own key",
                foreign.token(
                    json!({"alg": "ES256", "kid": "e", "jwk": foreign.jwk("e"), "jku": "https://evil"}),
                    &claims,
                ),
                Wrong,
            ),
            (
                "must be understood",
                es.token(json!({"alg": "ES256", "kid": "e", "crit": ["x"], "x": 1}), &claims),
                Wrong,
            ),
            (
                "other claims",
                {
                    let other = base64(self::claims(|claims| claims["sub"] = json!("root")).to_string());
                    format!("{}.{other}.{signature}", message.split_once('.').unwrap().0)
                },
                Wrong,
            ),
            ("no token at all", "x".into(), Wrong),
            ("dots", "...".into(), Wrong),
        ];
        for (what, token, expected) in cases {
            assert_eq!(verifier.subject(&token), Err(expected), "{what}");
        }
    }

    #[test]
    fn another_claim_may_name_the_tenant() {
        let es = Signer::es();
        let provider = Provider::of(&[es.jwk("e")]);
        let source = KeySource::File(provider.file.clone());
        let config = JwtConfig { tenant_claim: "org".into(), ..JwtConfig::new(source, "sandpool") };
        let verifier = Verifier::open(config, None).unwrap();
        let header = json!({"alg": "ES256", "kid": "e"});
        let with_org = claims(|claims| claims["org"] = json!("acme"));
        assert_eq!(verifier.subject(&es.token(header.clone(), &with_org)), Ok("acme".into()));
        assert_eq!(verifier.subject(&es.token(header, &claims(|_| ()))), Err(TokenError::Wrong));
    }

    /// Answers each request with the next body, then stops listening.
    fn serve(answers: Vec<String>) -> (String, std::thread::JoinHandle<usize>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/jwks", listener.local_addr().unwrap());
        let served = std::thread::spawn(move || {
            let mut count = 0;
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 4096];
                let _ = stream.read(&mut request).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                count += 1;
            }
            count
        });
        (url, served)
    }

    fn answer(status: &str, body: &Value) -> String {
        let body = body.to_string();
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
    }

    #[test]
    fn a_key_the_provider_adds_is_found_after_a_miss() {
        let (old, new) = (Signer::es(), Signer::ed());
        let (first, second) = (json!({"keys": [old.jwk("1")]}), json!({"keys": [old.jwk("1"), new.jwk("2")]}));
        let (url, served) =
            serve(vec![answer("503 Busy", &json!({})), answer("200 OK", &first), answer("200 OK", &second)]);
        let (every, at_most_every) = (Duration::from_secs(3600), Duration::from_millis(20));
        let pace = Pace { every, at_most_every, ..Pace::default() };
        let config = JwtConfig::new(KeySource::parse(&url).unwrap(), "sandpool");
        let verifier = Verifier::with_pace(config, pace, None).unwrap();
        let token = new.token(json!({"alg": "EdDSA", "kid": "2"}), &claims(|_| ()));
        // Each attempt is a miss until the set with the key has arrived.
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        let mut subject = verifier.subject(&token);
        while subject == Err(TokenError::UnknownKey) && std::time::Instant::now() < deadline {
            std::thread::yield_now();
            subject = verifier.subject(&token);
        }
        assert_eq!(subject, Ok("alice".into()));
        assert_eq!(served.join().unwrap(), 3);
    }

    /// Covers hostile row W33: a key that was withdrawn while the provider could not be reached is not trusted for
    /// ever.
    #[test]
    fn w33_keys_are_trusted_no_longer_than_their_largest_age() {
        const HOUR: Duration = Duration::from_secs(3600);
        let es = Signer::es();
        let token = es.token(json!({"alg": "ES256", "kid": "1"}), &claims(|_| ()));
        // The provider answers once; after that nothing listens there.
        let (url, served) = serve(vec![answer("200 OK", &json!({"keys": [es.jwk("1")]}))]);
        let config = JwtConfig { max_age: 2 * HOUR, ..JwtConfig::new(KeySource::parse(&url).unwrap(), "sandpool") };
        let verifier = Verifier::open(config, None).unwrap();
        verifier.start();
        assert_eq!(served.join().unwrap(), 1);
        let deadline = Instant::now() + Duration::from_secs(60);
        while verifier.subject(&token).is_err() && Instant::now() < deadline {
            std::thread::yield_now();
        }
        let now = Instant::now();
        assert_eq!(verifier.subject_at(&token, now), Ok("alice".into()));
        assert_eq!(verifier.subject_at(&token, now + HOUR), Ok("alice".into()));
        assert_eq!(verifier.subject_at(&token, now + 3 * HOUR), Err(TokenError::UnknownKey));
        assert_eq!(Pace::default().max_age, 24 * HOUR);
    }

    #[test]
    fn misses_do_not_flood_the_provider_and_bad_answers_are_no_keys() {
        let moved =
            "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        let huge = format!("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{}", " ".repeat(300 << 10));
        for (what, answer) in [("a redirect", moved.to_owned()), ("a large answer", huge)] {
            let (url, served) = serve(vec![answer]);
            let config = JwtConfig::new(KeySource::parse(&url).unwrap(), "sandpool");
            let verifier = Verifier::open(config, None).unwrap();
            let token = Signer::es().token(json!({"alg": "ES256", "kid": "1"}), &claims(|_| ()));
            for _ in 0..1000 {
                assert_eq!(verifier.subject(&token), Err(TokenError::UnknownKey), "{what}");
            }
            // A second request would fail to connect; there is none within the minute.
            assert_eq!(served.join().unwrap(), 1, "{what}");
        }
    }
}
