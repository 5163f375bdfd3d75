//! Links to files: `<base>/files/<key>/<path>`. The key is the permission; a link can also carry an expiry time and a
//! signature. Links for uploads: `<base>/upload/<id>`. The id is the permission.
//!
//! Only this module writes and parses links. It uses no clock; its caller supplies the time.

use std::fmt::Write as _;
use std::time::Duration;

use ring::hmac;
use text::{hex, percent_decoded};

/// Maximum length of a decoded path, in bytes.
const LONGEST_PATH: usize = 4096;
/// Path of the files below the base address.
const ROOT: &str = "/files/";
/// Path of the uploads below the base address.
const UPLOADS: &str = "/upload/";

/// Settings with which links are written. Without a base address there are no links.
#[derive(Debug, Clone, Default)]
pub struct Links {
    /// Scheme, host and port, without a slash at the end.
    pub base: Option<String>,
    /// Expiry of links; without it a link is valid as long as the file exists.
    pub expiring: Option<Expiring>,
}

/// Settings of links that expire.
#[derive(Debug, Clone)]
pub struct Expiring {
    pub signer: Signer,
    pub ttl: Duration,
    /// Time at which links are written, in seconds since 1970; see [`Links::at`].
    pub now: u64,
}

impl Links {
    /// Returns the same settings for links that are written at the time `now`.
    pub fn at(&self, now: u64) -> Self {
        let mut links = self.clone();
        if let Some(expiring) = &mut links.expiring {
            expiring.now = now;
        }
        links
    }

    /// Returns the link to a file, or `None` without a base address or for a path that could not be requested again.
    pub fn to(&self, key: &str, path: &str) -> Option<String> {
        let path = path.trim_start_matches('/');
        let mut link = format!("{}{ROOT}{key}/{}", self.base.as_ref()?, encoded_path(path)?);
        if let Some(Expiring { signer, ttl, now }) = &self.expiring {
            let expires = now.saturating_add(ttl.as_secs());
            let _ = write!(link, "?expires={expires}&signature={}", signer.sign(key, path, expires));
        }
        Some(link)
    }

    /// Returns the address for an upload, or `None` without a base address.
    pub fn upload(&self, id: &str) -> Option<String> {
        Some(format!("{}{UPLOADS}{id}", self.base.as_ref()?))
    }
}

/// Returns the id in the path of an upload's address: 32 lower-case hex digits.
pub fn upload_id(raw: &str) -> Option<&str> {
    raw.strip_prefix(UPLOADS).filter(|id| id.len() == 32 && id.bytes().all(is_hex))
}

fn is_hex(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// Key and path of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Key of the file: 64 lower-case hex digits.
    pub key: String,
    /// Decoded relative path, without components such as `..` that lead to another place.
    pub path: String,
}

impl Address {
    /// Parses the path of a request target as it was sent. This is the only place that decodes it, and it does so once.
    pub fn parse(raw: &str) -> Option<Self> {
        let (key, path) = raw.strip_prefix(ROOT)?.split_once('/')?;
        if key.len() != 64 || !key.bytes().all(is_hex) {
            return None;
        }
        let components: Option<Vec<String>> = path.split('/').map(decoded).collect();
        let components = components?;
        let path = components.join("/");
        let valid = path.len() <= LONGEST_PATH && components.iter().all(|component| is_plain(component));
        valid.then(|| Self { key: key.into(), path })
    }

    /// Parses a whole address, whatever its host is. The key alone decides which file it means.
    pub(crate) fn of_url(url: &str) -> Option<Self> {
        let (_, rest) = url.split_once("://").filter(|(scheme, _)| matches!(*scheme, "http" | "https"))?;
        let path = &rest[rest.find('/')?..];
        Self::parse(path.split_once('?').map_or(path, |(path, _)| path))
    }
}

/// Makes and checks the signatures of expiring links.
#[derive(Debug, Clone)]
pub struct Signer(hmac::Key);

/// Result of checking the query of a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signed {
    Valid,
    /// The signature is right, but the link has expired.
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

    /// Checks the query of a link. Only the exact bytes that this server writes are valid.
    pub fn check(&self, address: &Address, query: &str, now: u64) -> Signed {
        let written = || {
            let (expires, signature) = query.strip_prefix("expires=")?.split_once("&signature=")?;
            let number: u64 = expires.parse().ok()?;
            (number.to_string() == expires).then_some((number, unhex(signature)?))
        };
        let Some((expires, signature)) = written() else { return Signed::Wrong };
        let message = message(&address.key, &address.path, expires);
        // This compares in constant time.
        match hmac::verify(&self.0, message.as_bytes(), &signature) {
            Err(_) => Signed::Wrong,
            Ok(()) if expires <= now => Signed::Expired,
            Ok(()) => Signed::Valid,
        }
    }
}

/// Returns the text that is signed. The path is last, because it is the only part whose alphabet is not fixed. The text
/// begins with a prefix that only this use has, because the same secret makes the keys of files.
fn message(key: &str, path: &str, expires: u64) -> String {
    format!("sandpool expiring link\0read\0{key}\0{expires}\0{path}")
}

/// Returns whether a path component is a plain name in a directory.
fn is_plain(component: &str) -> bool {
    !matches!(component, "" | "." | "..") && !component.contains(['/', '\\', '\0'])
}

/// Encodes a path, or returns `None` if it could not be requested. A replacement character means that the file's name
/// is not valid UTF-8: a request for the replaced name would not find it.
fn encoded_path(path: &str) -> Option<String> {
    let known = !path.contains(char::REPLACEMENT_CHARACTER);
    let valid = known && path.len() <= LONGEST_PATH && path.split('/').all(is_plain);
    valid.then(|| path.split('/').map(encoded).collect::<Vec<_>>().join("/"))
}

/// Escapes every byte except the unreserved ones of RFC 3986, which need no encoding in a header parameter either (RFC
/// 8187).
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

/// Decodes percent escapes. Returns `None` for an invalid escape and for bytes that are not UTF-8.
fn decoded(text: &str) -> Option<String> {
    let is_escape = |part: &str| part.as_bytes().get(..2).and_then(hex_byte).is_some();
    percent_decoded(text).filter(|_| text.split('%').skip(1).all(is_escape))
}

fn hex_byte(digits: &[u8]) -> Option<u8> {
    let digit = |at: usize| (*digits.get(at)? as char).to_digit(16);
    u8::try_from(digit(0)? * 16 + digit(1)?).ok()
}

fn unhex(text: &str) -> Option<Vec<u8>> {
    let whole = text.len() == 64 && text.bytes().all(is_hex);
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

    /// A07, A08, A12, X24: a key has one spelling, a path is decoded once, and no component leads to another place.
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
        // The path is decoded once: the rest is an ordinary name.
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

    /// A07, A12: tests every string of four of these pieces, about fifty thousand.
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

    /// X20: the signature covers the key, the path, the permitted use and the expiry time.
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
    fn addresses_of_uploads_and_whole_addresses_have_one_spelling() {
        let id = &KEY[..32];
        assert_eq!(links().upload(id).unwrap(), format!("http://127.0.0.1:1/upload/{id}"));
        assert_eq!(upload_id(&format!("/upload/{id}")), Some(id));
        let upper = id.to_uppercase();
        for wrong in ["", "/", &id[1..], KEY, &upper, &format!("{id}/"), &format!("/{id}"), &format!("{}%30", &id[1..])]
        {
            assert_eq!(upload_id(&format!("/upload/{wrong}")), None, "{wrong}");
        }
        let address = Some(Address { key: KEY.into(), path: "a b".into() });
        for url in ["http://127.0.0.1:1", "https://example.com"] {
            assert_eq!(Address::of_url(&format!("{url}/files/{KEY}/a%20b")), address);
            assert_eq!(Address::of_url(&format!("{url}/files/{KEY}/a%20b?expires=1&signature=2")), address);
            assert_eq!(Address::of_url(&format!("{url}/x/files/{KEY}/a%20b")), None);
        }
        for wrong in ["", "http://", "http://x", "file:///files/x", &format!("ftp://x/files/{KEY}/a"), KEY] {
            assert_eq!(Address::of_url(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn the_secret_is_not_in_the_debug_form() {
        assert!(!format!("{:?}", Signer::new(b"a very secret text")).contains("very"));
    }
}
