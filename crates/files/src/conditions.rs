//! Decides which version of the file and which part of it a request gets (RFC 9110, sections 8.8, 13 and 14). The
//! decision has no side effects; the clock is an argument.

use std::ops::Range;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::Method;
use http::header::{self, HeaderMap, HeaderName, HeaderValue};
use ring::digest;
use text::hex;

use super::{Stat, plain};

/// The last second that a date in a header can express.
const LAST_SECOND: u64 = 253_402_300_799;

/// The identity of one version of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Version {
    /// The entity tag, with its quotes.
    etag: String,
    /// Time of the last change in whole seconds; `None` if a header cannot express it: before 1970, or in the future.
    modified: Option<SystemTime>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    Whole,
    Part(Range<u64>),
    NotModified,
    /// A condition of the client does not hold.
    Failed,
    Unsatisfiable,
}

impl Version {
    pub(crate) fn of(stat: &Stat, now: SystemTime) -> Self {
        let mut facts = [0; 24];
        facts[..8].copy_from_slice(&stat.inode.to_be_bytes());
        facts[8..16].copy_from_slice(&stat.modified_ns.to_be_bytes());
        facts[16..].copy_from_slice(&stat.size.to_be_bytes());
        let digest = digest::digest(&digest::SHA256, &facts);
        let seconds = u64::try_from(stat.modified_ns.div_euclid(1_000_000_000)).ok();
        let modified = seconds.filter(|seconds| *seconds <= LAST_SECOND).map(|s| UNIX_EPOCH + Duration::from_secs(s));
        Self { etag: format!("\"{}\"", hex(&digest.as_ref()[..16])), modified: modified.filter(|time| *time <= now) }
    }

    /// Returns the headers of every answer about this version.
    pub(crate) fn headers(&self) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("private, no-cache"));
        headers.insert(header::ETAG, plain(self.etag.clone()));
        if let Some(modified) = self.modified {
            headers.insert(header::LAST_MODIFIED, plain(httpdate::fmt_http_date(modified)));
        }
        headers
    }

    /// Returns whether the list of entity tags in a header names this version, or `None` if there is no such header.
    /// Our tag contains no comma, so splitting the list at commas cannot miss it.
    fn is_in(&self, headers: &HeaderMap, name: HeaderName, weak: bool) -> Option<bool> {
        let mut lines = headers.get_all(name).iter().peekable();
        lines.peek()?;
        let names_this = |tag: &str| {
            let tag = tag.trim_matches([' ', '\t']);
            tag == "*" || tag == self.etag || weak && tag.strip_prefix("W/") == Some(&self.etag)
        };
        Some(lines.any(|line| line.to_str().is_ok_and(|line| line.split(',').any(names_this))))
    }

    /// Returns whether the version changed after the date in the header, or `None` if either date is missing or
    /// unreadable.
    fn is_newer(&self, headers: &HeaderMap, name: HeaderName) -> Option<bool> {
        Some(self.modified? > date(headers.get(name)?)?)
    }

    /// Evaluates `If-Range`, because a part is useful only to a client that has other parts of the same version. A date
    /// proves that only if the file cannot have changed again within that second.
    fn matches_if_range(&self, headers: &HeaderMap, now: SystemTime) -> bool {
        let Some(value) = headers.get(header::IF_RANGE) else { return true };
        if value.as_bytes() == self.etag.as_bytes() {
            return true;
        }
        let over = |time: SystemTime| now.duration_since(time).is_ok_and(|age| age >= Duration::from_secs(1));
        date(value).is_some_and(|date| Some(date) == self.modified && over(date))
    }
}

fn date(value: &HeaderValue) -> Option<SystemTime> {
    httpdate::parse_http_date(value.to_str().ok()?).ok()
}

/// Evaluates the conditions in the order of RFC 9110, section 13.2.2.
pub(crate) fn decide(method: &Method, headers: &HeaderMap, version: &Version, size: u64, now: SystemTime) -> Decision {
    let holds = version
        .is_in(headers, header::IF_MATCH, false)
        .or_else(|| Some(!version.is_newer(headers, header::IF_UNMODIFIED_SINCE)?));
    if holds == Some(false) {
        return Decision::Failed;
    }
    let known = version
        .is_in(headers, header::IF_NONE_MATCH, true)
        .or_else(|| Some(!version.is_newer(headers, header::IF_MODIFIED_SINCE)?));
    if known == Some(true) {
        return Decision::NotModified;
    }
    if *method != Method::GET || !version.matches_if_range(headers, now) {
        return Decision::Whole;
    }
    let mut ranges = headers.get_all(header::RANGE).iter();
    match (ranges.next(), ranges.next()) {
        (Some(range), None) => part(range, size),
        _ => Decision::Whole,
    }
}

/// Evaluates one range. A request with several ranges or a malformed one gets the whole file, as the RFC allows, so
/// that the server need not limit their number.
fn part(range: &HeaderValue, size: u64) -> Decision {
    let spec = || {
        let (unit, spec) = range.to_str().ok()?.split_once('=')?;
        let (first, last) = spec.trim_matches([' ', '\t']).split_once('-')?;
        unit.eq_ignore_ascii_case("bytes").then_some((position(first)?, position(last)?))
    };
    match spec() {
        Some((Some(first), last)) if last.is_none_or(|last| first <= last) => match first < size {
            true => Decision::Part(first..last.map_or(size, |last| size.min(last.saturating_add(1)))),
            false => Decision::Unsatisfiable,
        },
        Some((None, Some(0))) => Decision::Unsatisfiable,
        // The end of an empty file is the empty file, which `Content-Range` cannot express.
        Some((None, Some(last))) if size > 0 => Decision::Part(size.saturating_sub(last)..size),
        _ => Decision::Whole,
    }
}

/// Parses digits or an empty text. A number that does not fit becomes the largest one, which is beyond any file.
fn position(text: &str) -> Option<Option<u64>> {
    if text.is_empty() {
        return Some(None);
    }
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| Some(text.parse().unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;
    const STAT: Stat = Stat { size: 1_000, modified_ns: 1_700_000_000_123_456_789, inode: 7 };

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW)
    }

    fn version() -> Version {
        Version::of(&STAT, now())
    }

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        lines
            .iter()
            .map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap()))
            .collect()
    }

    fn get(lines: &[(&'static str, &str)]) -> Decision {
        decide(&Method::GET, &headers(lines), &version(), STAT.size, now())
    }

    #[test]
    fn each_fact_makes_another_tag() {
        let tag = |stat: Stat| Version::of(&stat, now()).etag;
        let tags = [
            tag(STAT),
            tag(Stat { size: 1_001, ..STAT }),
            tag(Stat { inode: 8, ..STAT }),
            tag(Stat { modified_ns: STAT.modified_ns + 1, ..STAT }),
        ];
        for (at, tag) in tags.iter().enumerate() {
            assert_eq!(tag.len(), 34);
            assert!(!tags[..at].contains(tag));
        }
    }

    #[test]
    fn a_time_that_a_header_cannot_say_is_left_out() {
        let modified =
            |ns: i64| Version::of(&Stat { modified_ns: ns, ..STAT }, now()).headers().remove("last-modified");
        assert_eq!(modified(STAT.modified_ns).unwrap(), "Tue, 14 Nov 2023 22:13:20 GMT");
        assert_eq!(modified(0).unwrap(), "Thu, 01 Jan 1970 00:00:00 GMT");
        for ns in [-1, i64::MIN, i64::MAX, (NOW as i64 + 1) * 1_000_000_000] {
            assert_eq!(modified(ns), None, "{ns}");
        }
    }

    /// Covers hostile row A13.
    #[test]
    fn ranges() {
        use Decision::*;
        let many = format!("bytes={}", vec!["0-0"; 10_000].join(","));
        let cases = [
            ("bytes=0-0", Part(0..1)),
            ("bytes=0-", Part(0..1_000)),
            ("bytes=10-19", Part(10..20)),
            ("BYTES= 10-19 ", Part(10..20)),
            ("bytes=999-", Part(999..1_000)),
            ("bytes=999-5000", Part(999..1_000)),
            ("bytes=0-99999999999999999999999999", Part(0..1_000)),
            ("bytes=0-18446744073709551615", Part(0..1_000)),
            ("bytes=-1", Part(999..1_000)),
            ("bytes=-1000", Part(0..1_000)),
            ("bytes=-99999999999999999999999", Part(0..1_000)),
            ("bytes=1000-", Unsatisfiable),
            ("bytes=1000-1001", Unsatisfiable),
            ("bytes=99999999999999999999999999-", Unsatisfiable),
            ("bytes=-0", Unsatisfiable),
            ("bytes=5-4", Whole),
            ("bytes=-", Whole),
            ("bytes=", Whole),
            ("bytes", Whole),
            ("bytes=--1", Whole),
            ("bytes=-1-", Whole),
            ("bytes=+1-2", Whole),
            ("bytes=1 -2", Whole),
            ("bytes=0x1-2", Whole),
            ("bytes=a-b", Whole),
            ("lines=0-1", Whole),
            ("bytes=0-1,5-6", Whole),
            ("bytes=0-,0-,0-", Whole),
            (&many, Whole),
        ];
        for (range, decision) in cases {
            assert_eq!(get(&[("range", range)]), decision, "{}", &range[..range.len().min(60)]);
        }
        let mut twice = headers(&[("range", "bytes=0-1")]);
        twice.append("range", HeaderValue::from_static("bytes=2-3"));
        assert_eq!(decide(&Method::GET, &twice, &version(), STAT.size, now()), Whole);
        let one = headers(&[("range", "bytes=0-1")]);
        assert_eq!(decide(&Method::HEAD, &one, &version(), STAT.size, now()), Whole, "ranges are for GET");
        assert_eq!(decide(&Method::GET, &one, &version(), 0, now()), Unsatisfiable);
        assert_eq!(decide(&Method::GET, &headers(&[("range", "bytes=-5")]), &version(), 0, now()), Whole);
    }

    #[test]
    fn conditions_in_their_order() {
        use Decision::*;
        let tag = version().etag;
        let (weak, listed) = (format!("W/{tag}"), format!("\"x\", {tag} ,W/\"y\""));
        let same = "Tue, 14 Nov 2023 22:13:20 GMT";
        let before = "Tue, 14 Nov 2023 22:13:19 GMT";
        let range = ("range", "bytes=0-9");
        let cases: &[(&[(&'static str, &str)], Decision)] = &[
            (&[("if-none-match", &tag)], NotModified),
            (&[("if-none-match", &weak)], NotModified),
            (&[("if-none-match", &listed)], NotModified),
            (&[("if-none-match", "*")], NotModified),
            (&[("if-none-match", "\"other\"")], Whole),
            (&[("if-none-match", tag.trim_matches('"'))], Whole),
            (&[("if-modified-since", same)], NotModified),
            (&[("if-modified-since", before)], Whole),
            (&[("if-modified-since", "yesterday")], Whole),
            (&[("if-none-match", "\"other\""), ("if-modified-since", same)], Whole),
            (&[("if-match", &tag)], Whole),
            (&[("if-match", "*")], Whole),
            (&[("if-match", &listed)], Whole),
            (&[("if-match", &weak)], Failed),
            (&[("if-match", "\"other\"")], Failed),
            (&[("if-match", "\"other\""), ("if-unmodified-since", same)], Failed),
            (&[("if-match", &tag), ("if-unmodified-since", before)], Whole),
            (&[("if-unmodified-since", same)], Whole),
            (&[("if-unmodified-since", before)], Failed),
            (&[("if-unmodified-since", "nonsense")], Whole),
            (&[("if-match", &tag), ("if-none-match", &tag)], NotModified),
            (&[("if-match", "\"other\""), ("if-none-match", &tag)], Failed),
            (&[range, ("if-none-match", &tag)], NotModified),
            (&[range, ("if-match", "\"other\"")], Failed),
            (&[range, ("if-range", &tag)], Part(0..10)),
            (&[range, ("if-range", &weak)], Whole),
            (&[range, ("if-range", "\"other\"")], Whole),
            (&[range, ("if-range", same)], Part(0..10)),
            (&[range, ("if-range", before)], Whole),
            (&[range, ("if-range", "")], Whole),
            (&[("range", "bytes=5000-"), ("if-range", "\"other\"")], Whole),
            (&[("range", "bytes=5000-"), ("if-range", &tag)], Unsatisfiable),
        ];
        for (lines, decision) in cases {
            assert_eq!(get(lines), *decision, "{lines:?}");
        }
    }

    #[test]
    fn a_date_is_no_proof_within_its_own_second() {
        let fresh = Stat { modified_ns: NOW as i64 * 1_000_000_000, ..STAT };
        let at = |now: SystemTime| {
            let version = Version::of(&fresh, now);
            let date = httpdate::fmt_http_date(version.modified.unwrap());
            decide(&Method::GET, &headers(&[("range", "bytes=0-9"), ("if-range", &date)]), &version, 1_000, now)
        };
        assert_eq!(at(now()), Decision::Whole);
        assert_eq!(at(now() + Duration::from_secs(1)), Decision::Part(0..10));
    }
}
