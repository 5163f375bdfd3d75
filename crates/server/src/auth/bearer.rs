//! The `Authorization` header, and the answer to an invalid one (RFC 6750).

use std::fmt;

use http::HeaderMap;
use http::header::AUTHORIZATION;

use crate::digest::sha256;

/// Maximum length of a token that is examined; tokens of identity providers are a few kilobytes.
const LONGEST: usize = 16 << 10;

/// A token as the operator set it. It is never shown.
#[derive(Clone)]
pub(crate) struct Secret(String);

impl Secret {
    /// Reads a token from the text of a variable or a file; a trailing line end is not part of the token.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let token = text.trim_end_matches(['\r', '\n']);
        if token.is_empty() {
            return Err("the token is empty".into());
        }
        if token.len() > LONGEST || !token.bytes().all(|b| b.is_ascii_graphic()) {
            return Err(format!("a token is at most {LONGEST} visible ASCII characters, without spaces"));
        }
        Ok(Self(token.into()))
    }

    pub(crate) fn sha256(&self) -> [u8; 32] {
        sha256(&self.0)
    }

    pub(crate) fn is_short(&self) -> bool {
        self.0.len() < 16
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[secret]")
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenError {
    Missing,
    /// The request has no single header of the right form.
    Malformed,
    Wrong,
    Expired,
    /// The token is signed with a key that is not in the set; the set is being fetched again.
    UnknownKey,
    /// The token was issued for another service.
    OtherAudience,
}

impl TokenError {
    pub(crate) fn message(self) -> &'static str {
        match self {
            Self::Missing => "a token is needed: send the header `Authorization: Bearer <token>`",
            Self::Malformed => "exactly one header `Authorization: Bearer <token>` is expected",
            Self::Wrong => "the token is not valid",
            Self::Expired => "the token has expired or is not valid yet",
            Self::UnknownKey => {
                "the token is signed with a key that is not known, or not yet: get a new one and try again"
            }
            Self::OtherAudience => "the token was not issued for this server",
        }
    }

    /// Returns the value of `WWW-Authenticate`. A request without a token gets no error code, as the RFC requires.
    pub(crate) fn challenge(self, metadata: Option<&str>) -> String {
        let mut challenge = String::from("Bearer realm=\"sandpool\"");
        let code = match self {
            Self::Missing => None,
            Self::Malformed => Some("invalid_request"),
            _ => Some("invalid_token"),
        };
        if let Some(code) = code {
            challenge += &format!(", error=\"{code}\", error_description=\"{}\"", self.message());
        }
        if let Some(url) = metadata {
            challenge += &format!(", resource_metadata=\"{url}\"");
        }
        challenge
    }
}

/// Returns the token of a request. Only a single `Authorization` header counts.
pub(crate) fn token(headers: &HeaderMap) -> Result<&str, TokenError> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let value = values.next().ok_or(TokenError::Missing)?;
    if values.next().is_some() {
        return Err(TokenError::Malformed); // Two readers might choose different headers.
    }
    let (scheme, rest) = value.to_str().ok().and_then(|text| text.split_once(' ')).ok_or(TokenError::Malformed)?;
    let token = rest.trim_matches(' ');
    let fits = (1..=LONGEST).contains(&token.len()) && token.bytes().all(|b| b.is_ascii_graphic() && b != b',');
    if fits && scheme.eq_ignore_ascii_case("bearer") { Ok(token) } else { Err(TokenError::Malformed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown_and_bad_ones_are_named() {
        assert_eq!(format!("{:?}", Secret::parse("hunter2\n").unwrap()), "[secret]");
        assert_eq!(Secret::parse("hunter2\n").unwrap().sha256(), Secret::parse("hunter2").unwrap().sha256());
        assert_eq!(Secret::parse("\n").unwrap_err(), "the token is empty");
        assert!(Secret::parse("two words").unwrap_err().contains("visible ASCII"));
    }
}
