//! Addresses of files: `<base>/files/<key>/<path>`. The key is the permission; an address can also carry an end and a signature.

use std::fmt::Write as _;

/// How links are written. Without a base address there are none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Links {
    /// Scheme, host and port, without a slash at the end.
    pub base: Option<String>,
}

impl Links {
    pub fn to(&self, key: &str, path: &str) -> Option<String> {
        let mut link = format!("{}/files/{key}/", self.base.as_ref()?);
        for byte in path.trim_start_matches('/').bytes() {
            match byte {
                b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => link.push(byte as char),
                other => {
                    let _ = write!(link, "%{other:02X}");
                }
            }
        }
        Some(link)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_so_that_they_come_back_the_same() {
        let links = Links { base: Some("http://127.0.0.1:1".into()) };
        assert_eq!(links.to("ab", "a b/ü?#%.png").unwrap(), "http://127.0.0.1:1/files/ab/a%20b/%C3%BC%3F%23%25.png");
        assert_eq!(Links::default().to("ab", "x"), None);
    }
}
