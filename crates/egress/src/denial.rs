//! Denials, phrased as sentences that a model can act on and an operator can look up.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::limits::Bucket;
use crate::lock;
use crate::policy::DenyReason;

/// Something that a sandbox asked of the network and did not get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Denial {
    /// The denied request as far as it is known, such as `GET http://10.0.0.1/` or `CONNECT evil.test:443`. It never
    /// contains a query or a password.
    pub what: String,
    /// The rule that denied it, such as `policy "corp" denies "*.evil.test"`.
    pub rule: String,
    /// The complete sentence: the request, the rule, and how the operator can allow it.
    pub sentence: String,
}

impl Denial {
    pub(crate) fn new(what: &str, refusal: DenyReason) -> Self {
        let what = plain(what, 160);
        let DenyReason { rule, remedy } = refusal;
        let sentence = format!("{what} was denied: {rule}. {remedy}.");
        Self { what, rule, sentence }
    }
}

/// Makes text from the sandbox safe to quote in a sentence: one line, printable, and at most `most` characters long.
pub(crate) fn plain(text: &str, most: usize) -> String {
    let shown = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    let mut plain: String = text.chars().take(most).map(shown).collect();
    if text.chars().nth(most).is_some() {
        plain.push_str("...");
    }
    plain
}

/// Receives denials, but only a few per second, because code can cause any number of them and each one is recorded.
pub(crate) type Sink = Arc<dyn Fn(&Denial) + Send + Sync>;

const MAX_RECENT: usize = 256;
const SHOWN: usize = 10;
const REPORTS_PER_SECOND: f64 = 10.0;
const REPORTS_AT_ONCE: f64 = 100.0;

/// The recent denials of one sandbox.
pub(crate) struct Denials {
    sink: Sink,
    recent: Mutex<RecentDenials>,
}

struct RecentDenials {
    last: VecDeque<Denial>,
    count: u64,
    reports: Bucket,
}

impl Denials {
    pub(crate) fn new(sink: Sink) -> Self {
        let reports = Bucket::new(REPORTS_PER_SECOND, REPORTS_AT_ONCE);
        Self { sink, recent: Mutex::new(RecentDenials { last: VecDeque::new(), count: 0, reports }) }
    }

    pub(crate) fn add(&self, denial: &Denial) {
        let is_reported = {
            let mut recent = lock(&self.recent);
            if recent.last.len() == MAX_RECENT {
                recent.last.pop_front();
            }
            recent.last.push_back(denial.clone());
            recent.count += 1;
            recent.reports.try_take()
        };
        if is_reported {
            (self.sink)(denial);
        }
    }

    pub(crate) fn mark(&self) -> u64 {
        lock(&self.recent).count
    }

    /// Returns the first few distinct denials after `mark`, and the number of further ones.
    pub(crate) fn since(&self, mark: u64) -> (Vec<Denial>, u64) {
        let recent = lock(&self.recent);
        let oldest = recent.count - recent.last.len() as u64;
        let mut distinct: Vec<Denial> = Vec::new();
        for denial in recent.last.iter().skip(mark.saturating_sub(oldest) as usize) {
            if !distinct.contains(denial) {
                distinct.push(denial.clone());
            }
        }
        let more = distinct.len().saturating_sub(SHOWN) as u64 + oldest.saturating_sub(mark);
        distinct.truncate(SHOWN);
        (distinct, more)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn denial(what: &str) -> Denial {
        Denial::new(
            what,
            DenyReason { rule: "policy \"t\" denies \"*\"".into(), remedy: "The operator can change it".into() },
        )
    }

    #[test]
    fn a_sentence_is_one_line_whatever_is_in_it() {
        let denial = denial("GET http://a.test/\r\nX: y\u{202e}\0");
        assert_eq!(
            denial.sentence,
            "GET http://a.test/??X: y?? was denied: policy \"t\" denies \"*\". The operator can change it."
        );
        assert_eq!(plain(&"a".repeat(5), 3), "aaa...");
    }

    #[test]
    fn each_is_shown_once_and_the_rest_is_counted() {
        let told = Arc::new(AtomicUsize::new(0));
        let sink = Arc::clone(&told);
        let denials = Denials::new(Arc::new(move |_| {
            sink.fetch_add(1, Ordering::Relaxed);
        }));
        denials.add(&denial("before"));
        let mark = denials.mark();
        for _ in 0..3 {
            denials.add(&denial("a"));
            denials.add(&denial("b"));
        }
        let (shown, more) = denials.since(mark);
        assert_eq!((shown.iter().map(|d| d.what.as_str()).collect::<Vec<_>>(), more), (vec!["a", "b"], 0));
        assert_eq!(told.load(Ordering::Relaxed), 7);
        for n in 0..100_000 {
            denials.add(&denial(&n.to_string()));
        }
        let (shown, more) = denials.since(mark);
        assert_eq!(shown.len(), SHOWN);
        assert!((99_990..=100_006).contains(&more), "{more}");
        assert!(told.load(Ordering::Relaxed) < 1000);
        assert_eq!(denials.since(denials.mark()), (vec![], 0));
    }
}
