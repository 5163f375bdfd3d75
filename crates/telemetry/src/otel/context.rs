//! Identifies traces and spans, and reads the forms in which clients and operators write them.

use std::fmt;

/// The span of the client that a request belongs to, as the request's `_meta` names it (W3C Trace Context).
#[derive(Debug, Clone, Copy, Default)]
pub struct RemoteParent<'a> {
    pub traceparent: Option<&'a str>,
    pub tracestate: Option<&'a str>,
}

/// Maximum length of a `tracestate` that is passed on.
const LONGEST_STATE: usize = 512;

/// A span as another program knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SpanContext {
    pub(super) trace: u128,
    pub(super) span: u64,
    pub(super) sampled: bool,
}

impl SpanContext {
    /// Parses a `traceparent`. A malformed one counts as none, as the specification demands.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
        let is_hex = |text: &str, length| {
            text.len() == length && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
        };
        let fits = is_hex(version, 2) && is_hex(trace, 32) && is_hex(span, 16) && is_hex(flags, 2);
        // Later versions may append members.
        if !fits || version == "ff" || (version == "00" && parts.next().is_some()) {
            return None;
        }
        let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|span| *span != 0)?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        Some(Self { trace, span, sampled: flags & 1 == 1 })
    }

    pub(super) fn traceparent(self) -> String {
        let Self { trace, span, sampled } = self;
        format!("00-{trace:032x}-{span:016x}-{:02x}", u8::from(sampled))
    }
}

impl RemoteParent<'_> {
    pub(super) fn context(&self) -> Option<SpanContext> {
        self.traceparent.and_then(SpanContext::parse)
    }

    /// Returns the state that belongs to the context, if it can be passed on.
    pub(super) fn state(&self) -> Option<String> {
        let fits = |state: &&str| state.len() <= LONGEST_STATE && state.bytes().all(|b| (b' '..=b'~').contains(&b));
        self.tracestate.filter(fits).map(str::to_owned)
    }
}

/// Returns an id for a span. Ids are random: a tenant sees some in its runs, and must not be able to compute those of
/// others.
pub(super) fn new_span() -> u64 {
    // The version and the variant of a UUID are not random, so only some of its bits are used.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    (high ^ low.rotate_left(32)).max(1)
}

pub(super) fn new_trace() -> u128 {
    u128::from(new_span()) << 64 | u128::from(new_span())
}

/// Parses a list such as `key1=value1,key2=value2`, in which special characters are percent-encoded. Parts of another
/// form are left out.
fn pairs(text: &str) -> impl Iterator<Item = (String, String)> {
    let pair = |part: &str| {
        let (key, value) = part.split_once('=')?;
        let (key, value) = (decoded(key.trim())?, decoded(value.trim())?);
        (!key.is_empty()).then_some((key, value))
    };
    text.split(',').filter_map(pair)
}

/// Headers of every request to a collector. They may contain keys, so they are never shown.
#[derive(Clone, Default, PartialEq)]
pub struct RequestHeaders(pub Vec<(String, String)>);

impl RequestHeaders {
    /// Parses the value of `OTEL_EXPORTER_OTLP_HEADERS`.
    pub fn parse(text: &str) -> Self {
        let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        let is_value = |value: &str| value.bytes().all(|b| (b' '..=b'~').contains(&b));
        Self(pairs(text).filter(|(name, value)| is_name(name) && is_value(value)).collect())
    }
}

impl fmt::Debug for RequestHeaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} set)", self.0.len())
    }
}

/// Parses the value of `OTEL_RESOURCE_ATTRIBUTES`.
pub fn resource_attributes(text: &str) -> Vec<(String, String)> {
    pairs(text).collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, others)) = rest.split_first() {
        rest = others;
        match (first, others) {
            (b'%', [high, low, after @ ..]) => {
                let digits = [*high, *low];
                bytes.push(u8::from_str_radix(std::str::from_utf8(&digits).ok()?, 16).ok()?);
                rest = after;
            }
            (b'%', _) => return None,
            (byte, _) => bytes.push(*byte),
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_parent_is_read_as_the_specification_says() {
        let parsed = SpanContext::parse(PARENT).unwrap();
        assert!(parsed.sampled);
        assert_eq!(parsed.traceparent(), PARENT);
        assert!(!SpanContext::parse(&PARENT.replace("-01", "-00")).unwrap().sampled);
        assert!(SpanContext::parse(&format!("{}-more", PARENT.replace("00-4", "01-4"))).is_some(), "a later version");
        for wrong in [
            "",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
            &PARENT.replace("00-4", "ff-4"),
            &PARENT.to_uppercase(),
            &format!("{PARENT}-more"),
            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
            "00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        ] {
            assert_eq!(SpanContext::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn ids_differ_and_are_not_zero() {
        let made: std::collections::BTreeSet<u64> = (0..10_000).map(|_| new_span()).collect();
        assert_eq!(made.len(), 10_000);
        assert!(!made.contains(&0));
        assert_ne!(new_trace(), new_trace());
    }

    #[test]
    fn lists_of_pairs_are_decoded_and_bad_parts_left_out() {
        let pairs = resource_attributes("a=1, b = x%2Cy ,c,=d,e=%zz,f=");
        let expected = [("a", "1"), ("b", "x,y"), ("f", "")];
        assert_eq!(pairs, expected.map(|(key, value)| (key.to_owned(), value.to_owned())));
        assert_eq!(RequestHeaders::parse("x-key=a%20b,bad name=1,y=%0a").0, [("x-key".to_owned(), "a b".to_owned())]);
    }
}
