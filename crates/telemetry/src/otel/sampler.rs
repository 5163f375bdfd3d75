//! Decides which traces are exported.

use super::context::SpanContext;

/// A sampler of OpenTelemetry. It exports a share of the traces, which it chooses by their ids.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    /// Whether a request that belongs to a trace of its client is exported exactly if the client exports that trace.
    pub parent_based: bool,
    /// Share of the other traces, from 0 to 1.
    pub ratio: f64,
}

impl Sampler {
    /// Returns the sampler of this name, as `OTEL_TRACES_SAMPLER` writes it.
    pub fn named(name: &str, ratio: f64) -> Option<Self> {
        let (parent_based, root) = match name.strip_prefix("parentbased_") {
            Some(root) => (true, root),
            None => (false, name),
        };
        let ratio = match root {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => ratio,
            _ => return None,
        };
        Some(Self { parent_based, ratio })
    }

    pub(super) fn takes(self, parent: Option<SpanContext>, trace: u128) -> bool {
        match parent {
            Some(parent) if self.parent_based => parent.sampled,
            // The comparison is the one that the SDKs use, so that all services of a trace decide alike.
            _ => ((trace as u64) >> 1) as f64 <= self.ratio * (u64::MAX >> 1) as f64 && self.ratio > 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::otel::context::new_trace;

    #[test]
    fn a_sampler_takes_what_its_name_says() {
        let parent = |sampled| Some(SpanContext { trace: 1, span: 1, sampled });
        let share = |name: &str, ratio, parent| {
            let sampler = Sampler::named(name, ratio).unwrap();
            (0..1000).filter(|_| sampler.takes(parent, new_trace())).count()
        };
        assert_eq!(share("always_on", 0.0, None), 1000);
        assert_eq!(share("always_off", 1.0, parent(true)), 0);
        assert_eq!(share("parentbased_always_on", 1.0, parent(false)), 0);
        assert_eq!(share("parentbased_always_off", 1.0, parent(true)), 1000);
        assert!((150..=350).contains(&share("traceidratio", 0.25, parent(true))));
        assert!((150..=350).contains(&share("parentbased_traceidratio", 0.25, None)));
        assert_eq!(share("parentbased_traceidratio", 1.0, None), 1000);
        assert_eq!(Sampler::named("jaeger_remote", 1.0), None);
    }
}
