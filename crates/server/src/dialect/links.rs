//! Addresses of files: `<base>/files/<key>/<path>`. The key is the permission; an address can also carry an end and a signature.
//!
//! Written and read here and nowhere else. No clock: whoever renders an answer says what time it is.

use std::fmt::Write as _;
use std::time::Duration;

use ring::hmac;

/// Decoded, in bytes.
const LONGEST_PATH: usize = 4096;
/// Where files are, below the base address.
const ROOT: &str = "/files/";

/// How links are written. Without a base address there are none.
#[derive(Debug, Clone, Default)]
pub struct Links {
    /// Scheme, host and port, without a slash at the end.
    pub base: Option<String>,
    /// Without it a link lasts as long as the file.
    pub expiring: Option<Expiring>,
}

/// Links that end.
#[derive(Debug, Clone)]
pub struct Expiring {
    pub signer: Signer,
    pub ttl: Duration,
    /// When the links are written, in seconds since 1970; see [`Links::at`].
    pub now: u64,
}

impl Links {
    /// The same, written at this time.
    pub fn at(&self, now: u64) -> Self {
        let mut links = self.clone();
        if let Some(expiring) = &mut links.expiring {
            expiring.now = now;
        }
        links
    }

    /// None for a path that could not be asked for again.
    pub fn to(&self, key: &str, path: &str) -> Option<String> {
        let path = path.trim_start_matches('/');
        let mut link = format!("{}{ROOT}{key}/{}", self.base.as_ref()?, encoded_path(path)?);
        if let Some(Expiring { signer, ttl, now }) = &self.expiring {
            let expires = now.saturating_add(ttl.as_secs());
            let _ = write!(link, "?expires={expires}&signature={}", signer.sign(key, path, expires));
        }
        Some(link)
    }
}

/// Key and path, as an address names them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// 64 lower-case hex digits.
    pub key: String,
    /// Decoded; relative, and without a component that means another place.
    pub path: String,
}

impl Address {
    /// The path of a request target as it was sent. It is decoded once, here.
    pub fn parse(raw: &str) -> Option<Self> {
        let (key, path) = raw.strip_prefix(ROOT)?.split_once('/')?;
        let is_hex = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if key.len() != 64 || !key.bytes().all(is_hex) {
            return None;
        }
        let components: Option<Vec<String>> = path.split('/').map(decoded).collect();
        let components = components?;
        let path = components.join("/");
        let valid = path.len() <= LONGEST_PATH && components.iter().all(|component| is_plain(component));
        valid.then(|| Self { key: key.into(), path })
    }
}

/// Makes and checks the signatures of expiring links.
#[derive(Debug, Clone)]
pub struct Signer(hmac::Key);

/// What the query of a link is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    Valid,
    /// It was valid once.
    Expired,
    Wrong,
}

impl Signer {
    pub fn new(secret: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    fn sign(&self, key: &str, path: &str, expires: u64) -> String {
        hex(hmac::sign(&self.0, message(key, path, expires).as_bytes()).as_ref())
    }

    /// Only the query as it was written is valid, byte for byte.
    pub fn check(&self, address: &Address, query: &str, now: u64) -> Signed {
        let written = || {
            let (expires, signature) = query.strip_prefix("expires=")?.split_once("&signature=")?;
            let number: u64 = expires.parse().ok()?;
            (number.to_string() == expires).then_some((number, unhex(signature)?))
        };
        let Some((expires, signature)) = written() else { return Signed::Wrong };
        let message = message(&address.key, &address.path, expires);
        // Compares in constant time.
        match hmac::verify(&self.0, message.as_bytes(), &signature) {
            Err(_) => Signed::Wrong,
            Ok(()) if expires <= now => Signed::Expired,
            Ok(()) => Signed::Valid,
        }
    }
}

/// The path is last, and the only part that is not of fixed alphabet. It begins with our own words because the secret makes the
/// keys of files too.
fn message(key: &str, path: &str, expires: u64) -> String {
    format!("sandpool expiring link\0read\0{key}\0{expires}\0{path}")
}

/// A name in a directory: what a path may be made of.
fn is_plain(component: &str) -> bool {
    !matches!(component, "" | "." | "..") && !component.contains(['/', '\\', '\0'])
}

/// A replacement character stands where the file's name is no text: asked for under this name, it would not be found.
fn encoded_path(path: &str) -> Option<String> {
    let known = !path.contains(char::REPLACEMENT_CHARACTER);
    let valid = known && path.len() <= LONGEST_PATH && path.split('/').all(is_plain);
    valid.then(|| path.split('/').map(encoded).collect::<Vec<_>>().join("/"))
}

/// Every byte but the unreserved ones of RFC 3986, which need no encoding in a header parameter either (RFC 8187).
pub fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte as char),
            other => {
                let _ = write!(encoded, "%{other:02X}");
            }
        }
    }
    encoded
}

/// None for an escape that is none, or bytes that are no text.
fn decoded(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut bytes = parts.next()?.as_bytes().to_vec();
    for part in parts {
        let (digits, rest) = part.split_at_checked(2)?;
        bytes.push(hex_byte(digits.as_bytes())?);
        bytes.extend_from_slice(rest.as_bytes());
    }
    String::from_utf8(bytes).ok()
}

fn hex_byte(digits: &[u8]) -> Option<u8> {
    let digit = |at: usize| (*digits.get(at)? as char).to_digit(16);
    u8::try_from(digit(0)? * 16 + digit(1)?).ok()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let lower = text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    let whole = text.len() == 64 && lower;
    whole.then(|| text.as_bytes().chunks(2).filter_map(hex_byte).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn links() -> Links {
        Links { base: Some("http://127.0.0.1:1".into()), expiring: None }
    }

    #[test]
    fn names_are_written_so_that_they_come_back_the_same() {
        assert_eq!(links().to("ab", "a b/ü?#%.png").unwrap(), "http://127.0.0.1:1/files/ab/a%20b/%C3%BC%3F%23%25.png");
        assert_eq!(Links::default().to("ab", "x"), None);
        for path in ["a", "a b", "ü/ö", "50%", "%2e%2e", "a\r\nb", "\"quoted\"", "...", ".hidden", "e\u{301}"] {
            let link = links().to(KEY, path).unwrap();
            let raw = link.strip_prefix("http://127.0.0.1:1").unwrap();
            assert_eq!(Address::parse(raw), Some(Address { key: KEY.into(), path: path.into() }));
        }
    }

    #[test]
    fn what_could_not_be_asked_for_gets_no_link() {
        for path in ["", "dir/", "a//b", "../x", "a/./b", "a\\b", "a\0b", "a\u{fffd}b"] {
            assert_eq!(links().to(KEY, path), None, "{path:?}");
        }
        assert_eq!(links().to(KEY, &"x".repeat(LONGEST_PATH + 1)), None);
    }

    /// A07, A08, A12, X24: one spelling of a key, one decoding of a path, nothing that means another place.
    #[test]
    fn only_plain_addresses_are_read() {
        let ends =
            ["", "/", ".", "..", "a/..", "../a", "a/../b", "./a", "a//b", "a/", "//a", "%", "a%2", "%zz", "%2", "%+1"];
        let codes = [
            "%2e",
            "%2E%2e",
            ".%2e",
            "%2e./a",
            "a%2fb",
            "a%2Fb",
            "%2f",
            "..%2f..%2fetc",
            "%5c",
            "a\\b",
            "..\\..",
            "%00",
            "a%00.png",
            "%ff",
            "%c0%ae%c0%ae",
            "%e0%80%af",
        ];
        for end in ends.into_iter().chain(codes) {
            assert_eq!(Address::parse(&format!("/files/{KEY}/{end}")), None, "{end}");
        }
        // Decoded once: what is left is a name like any other.
        let twice = Address::parse(&format!("/files/{KEY}/%252e%252e%252fpasswd")).unwrap();
        assert_eq!(twice.path, "%2e%2e%2fpasswd");
        let path_parameters = Address::parse(&format!("/files/{KEY}/a;x=1/..;/b")).unwrap();
        assert_eq!(path_parameters.path, "a;x=1/..;/b");

        let upper = KEY.to_uppercase();
        let keys =
            [&upper, &KEY[1..], &format!("0{KEY}"), "", ".", &format!(" {}", &KEY[1..]), &KEY.replace('0', "%30")];
        for key in keys {
            assert_eq!(Address::parse(&format!("/files/{key}/a")), None, "{key}");
        }
        for raw in [
            "",
            "/",
            "/files",
            "/files/",
            KEY,
            &format!("/files/{KEY}"),
            &format!("files/{KEY}/a"),
            &format!("/Files/{KEY}/a"),
        ] {
            assert_eq!(Address::parse(raw), None, "{raw}");
        }
        assert!(Address::parse(&format!("/files/{KEY}/{}", "x".repeat(LONGEST_PATH))).is_some());
        assert_eq!(Address::parse(&format!("/files/{KEY}/{}", "x".repeat(LONGEST_PATH + 1))), None);
    }

    /// A07, A12: every string of four of these pieces, some fifty thousand.
    #[test]
    fn whatever_is_read_stays_below_and_is_written_the_same() {
        let pieces = ["/", "\\", ".", "..", "%", "25", "2e", "%2e", "%2F", "%5c", "%00", "%c0%af", "a", " ", ";"];
        let mut read = 0;
        for n in 0..pieces.len().pow(4) {
            let raw: String = (0..4).map(|at| pieces[n / pieces.len().pow(at) % pieces.len()]).collect();
            let Some(address) = Address::parse(&format!("/files/{KEY}/{raw}")) else { continue };
            read += 1;
            let below = |part: &str| !["", ".", ".."].contains(&part) && !part.contains(['\\', '\0']);
            assert!(address.path.split('/').all(below), "{raw:?} is {:?}", address.path);
            let link = links().to(KEY, &address.path).unwrap();
            assert_eq!(Address::parse(link.strip_prefix("http://127.0.0.1:1").unwrap()), Some(address), "{raw:?}");
        }
        assert!(read > 1_000, "{read} of them");
    }

    /// X20: the signature covers key, path, what may be done, and the end.
    #[test]
    fn a_signature_holds_for_one_file_until_its_end() {
        let signer = Signer::new(b"secret");
        let ttl = Duration::from_secs(60);
        let links = Links { expiring: Some(Expiring { signer: signer.clone(), ttl, now: 0 }), ..links() }.at(1_000);
        let link = links.to(KEY, "a b.png").unwrap();
        let (address, query) = link.strip_prefix("http://127.0.0.1:1").unwrap().split_once('?').unwrap();
        let address = Address::parse(address).unwrap();
        assert!(query.starts_with("expires=1060&signature="), "{query}");

        assert_eq!(signer.check(&address, query, 1_059), Signed::Valid);
        assert_eq!(signer.check(&address, query, 1_060), Signed::Expired);

        let elsewhere = Address { path: "a b.pn".into(), ..address.clone() };
        assert_eq!(signer.check(&elsewhere, query, 1_000), Signed::Wrong);
        let another = Address { key: KEY.replace('0', "1"), ..address.clone() };
        assert_eq!(signer.check(&another, query, 1_000), Signed::Wrong);
        assert_eq!(Signer::new(b"other").check(&address, query, 1_000), Signed::Wrong);
        let mutations = [
            query.replace("1060", "1061"),
            query.replace("1060", "01060"),
            query.replace("1060", "+1060"),
            query.replace("1060", "18446744073709551616"),
            query.replace("expires", "Expires"),
            query.to_uppercase(),
            query[..query.len() - 1].to_owned(),
            format!("{query}0"),
            format!("{query}&x=1"),
            format!("x=1&{query}"),
            String::new(),
            "expires=1060".into(),
            "expires=1060&signature=".into(),
            format!("expires=1060&signature={}", "0".repeat(64)),
        ];
        for mutation in mutations {
            assert_eq!(signer.check(&address, &mutation, 1_000), Signed::Wrong, "{mutation}");
        }
        let digits = query.len() - 64;
        for at in digits..query.len() {
            let other = if query.as_bytes()[at] == b'0' { "1" } else { "0" };
            let mutation = format!("{}{other}{}", &query[..at], &query[at + 1..]);
            assert_eq!(signer.check(&address, &mutation, 1_000), Signed::Wrong, "{mutation}");
        }
    }

    #[test]
    fn the_secret_is_not_in_the_debug_form() {
        assert!(!format!("{:?}", Signer::new(b"a very secret text")).contains("very"));
    }
}
