//! Samples and their statistics: medians, tails, and ratios of medians within rounds.
//!
//! The speed of a machine varies over time. Rounds are interleaved, so a ratio is taken inside each round and the
//! median of these ratios is reported.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::BenchError;

/// All measurements of one figure: the values of each subject, by round.
#[derive(Debug, Default)]
pub(crate) struct Samples {
    rounds: Vec<BTreeMap<&'static str, Vec<f64>>>,
    failed: BTreeMap<&'static str, String>,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Summary {
    pub samples: usize,
    pub min: f64,
    pub median: f64,
    pub p95: f64,
    pub p99: f64,
}

impl Samples {
    pub(crate) fn begin_round(&mut self) {
        self.rounds.push(BTreeMap::new());
    }

    /// Adds values of a subject to this round. A subject that failed before is not measured again. Only an interruption
    /// is returned as an error.
    pub(crate) fn take(
        &mut self,
        subject: &'static str,
        measure: impl FnOnce() -> Result<Vec<f64>, BenchError>,
    ) -> Result<(), BenchError> {
        if self.failed.contains_key(subject) {
            return Ok(());
        }
        match measure() {
            Ok(values) => {
                if self.rounds.is_empty() {
                    self.begin_round();
                }
                if let Some(round) = self.rounds.last_mut() {
                    round.entry(subject).or_default().extend(&values);
                }
            }
            Err(BenchError::Interrupted) => return Err(BenchError::Interrupted),
            Err(why) => self.fail(subject, &why),
        }
        Ok(())
    }

    /// Adds values of a subject that needs something, unless that is missing (see [`Samples::need`]).
    pub(crate) fn take_from<T>(
        &mut self,
        subject: &'static str,
        needed: &mut Option<T>,
        measure: impl FnOnce(&mut T) -> Result<Vec<f64>, BenchError>,
    ) -> Result<(), BenchError> {
        needed.as_mut().map_or(Ok(()), |needed| self.take(subject, || measure(needed)))
    }

    /// Returns something that a subject needs, such as a process. Without it the subject has failed.
    pub(crate) fn need<T>(
        &mut self,
        subject: &'static str,
        made: Result<T, BenchError>,
    ) -> Result<Option<T>, BenchError> {
        match made {
            Ok(made) => Ok(Some(made)),
            Err(BenchError::Interrupted) => Err(BenchError::Interrupted),
            Err(why) => {
                self.fail(subject, &why);
                Ok(None)
            }
        }
    }

    fn fail(&mut self, subject: &'static str, why: &BenchError) {
        self.rounds.iter_mut().for_each(|round| drop(round.remove(subject)));
        self.failed.insert(subject, without_paths(&why.to_string()));
    }

    pub(crate) fn failures(&self) -> BTreeMap<&'static str, String> {
        self.failed.clone()
    }

    /// Returns why there is no value: the reason of the first of these subjects that failed.
    pub(crate) fn why_not(&self, subjects: &[&str]) -> &str {
        let reason = subjects.iter().find_map(|subject| self.failed.get(*subject));
        reason.map_or("not measured", String::as_str)
    }

    fn all(&self, subject: &str) -> Vec<f64> {
        self.rounds.iter().filter_map(|round| round.get(subject)).flatten().copied().collect()
    }

    pub(crate) fn median(&self, subject: &str) -> Option<f64> {
        quantile(self.all(subject), 0.5)
    }

    pub(crate) fn quantile(&self, subject: &str, at: f64) -> Option<f64> {
        quantile(self.all(subject), at)
    }

    /// Returns how many times as large `subject` is as `unit`: the median over the rounds of the ratio of the round's
    /// medians.
    pub(crate) fn ratio(&self, subject: &str, unit: &str) -> Option<f64> {
        self.ratio_to_sum(subject, &[(unit, 1.0)])
    }

    /// Returns the ratio to the sum of several subjects, each multiplied by its factor.
    pub(crate) fn ratio_to_sum(&self, subject: &str, parts: &[(&str, f64)]) -> Option<f64> {
        let median = |round: &BTreeMap<_, Vec<f64>>, of: &str| quantile(round.get(of)?.clone(), 0.5);
        let ratios = self.rounds.iter().filter_map(|round| {
            let parts: Option<Vec<f64>> = parts.iter().map(|(of, times)| Some(median(round, of)? * times)).collect();
            let sum: f64 = parts?.iter().sum();
            Some(median(round, subject)? / Some(sum).filter(|sum| *sum > 0.0)?)
        });
        quantile(ratios.collect(), 0.5)
    }

    /// Returns the ratio of a tail to the median of a unit, over all rounds, because one round has too few samples for
    /// a tail.
    pub(crate) fn tail_ratio(&self, subject: &str, at: f64, unit: &str) -> Option<f64> {
        Some(self.quantile(subject, at)? / self.median(unit).filter(|unit| *unit > 0.0)?)
    }

    pub(crate) fn summaries(&self) -> BTreeMap<&'static str, Summary> {
        let subjects: BTreeSet<&'static str> = self.rounds.iter().flat_map(|round| round.keys().copied()).collect();
        subjects.into_iter().filter_map(|subject| Some((subject, summary(self.all(subject))?))).collect()
    }
}

/// Reduces each path to its last component, because results are published and the rest would reveal the machine.
fn without_paths(text: &str) -> String {
    let word = |word: &str| match word.split_once('/') {
        Some((before, path)) if !before.ends_with(char::is_alphanumeric) => {
            format!("{before}{}", path.rsplit('/').next().unwrap_or_default())
        }
        _ => word.to_owned(),
    };
    text.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

fn summary(values: Vec<f64>) -> Option<Summary> {
    let at = |at| quantile(values.clone(), at);
    Some(Summary { samples: values.len(), min: at(0.0)?, median: at(0.5)?, p95: at(0.95)?, p99: at(0.99)? })
}

/// Returns the quantile by nearest rank, which is always a measured value. The median of an even number of values is
/// the mean of the two in the middle.
pub(crate) fn quantile(mut values: Vec<f64>, at: f64) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let count = values.len();
    if at == 0.5 && count > 0 && count.is_multiple_of(2) {
        return Some((values[count / 2 - 1] + values[count / 2]) / 2.0);
    }
    // The conversion is exact for any number of samples that fits into memory.
    let rank = (at * count as f64).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn samples(rounds: &[&[(&'static str, &[f64])]]) -> Samples {
        let mut samples = Samples::default();
        for round in rounds {
            samples.begin_round();
            for (subject, values) in *round {
                samples.take(subject, || Ok(values.to_vec())).unwrap();
            }
        }
        samples
    }

    #[test]
    fn a_quantile_is_a_value_that_was_measured() {
        let values: Vec<f64> = (1..=100).map(f64::from).rev().collect();
        assert_eq!(quantile(values.clone(), 0.99), Some(99.0));
        assert_eq!(quantile(values.clone(), 0.95), Some(95.0));
        assert_eq!(quantile(values.clone(), 0.0), Some(1.0));
        assert_eq!(quantile(values, 0.5), Some(50.5));
        assert_eq!(quantile(vec![3.0, 1.0, 2.0], 0.5), Some(2.0));
        assert_eq!(quantile(vec![7.0], 0.99), Some(7.0));
        assert_eq!(quantile(vec![], 0.5), None);
    }

    #[test]
    fn a_ratio_is_taken_inside_each_round() {
        // The second round is ten times slower for both: pooled medians would give 2.1 / 5.5.
        let samples = samples(&[
            &[("a", &[2.0, 2.0]), ("b", &[1.0])],
            &[("a", &[20.0]), ("b", &[10.0, 10.0])],
            &[("a", &[2.2]), ("b", &[1.0])],
        ]);
        assert_eq!(samples.ratio("a", "b"), Some(2.0));
        assert_eq!(samples.ratio("a", "absent"), None);
        assert_eq!(samples.ratio_to_sum("a", &[("b", 1.0), ("a", 0.5)]), Some(1.0));
    }

    #[test]
    fn a_tail_is_taken_over_all_rounds() {
        let samples = samples(&[&[("a", &[4.0; 98]), ("unit", &[2.0])], &[("a", &[4.0, 40.0]), ("unit", &[2.0])]]);
        assert_eq!(samples.tail_ratio("a", 0.99, "unit"), Some(2.0));
        assert_eq!(samples.tail_ratio("a", 1.0, "unit"), Some(20.0));
    }

    #[test]
    fn a_reason_names_no_path() {
        let why = "error: `x` (from /tmp/bench-1/server-1.toml): `0` is neither/nor";
        assert_eq!(without_paths(why), "error: `x` (from server-1.toml): `0` is neither/nor");
    }

    #[test]
    fn a_subject_that_failed_keeps_its_first_reason_and_no_values() {
        let mut samples = samples(&[&[("a", &[1.0])]]);
        samples.take("a", || Err(BenchError::Said("it broke".into()))).unwrap();
        samples.take("a", || unreachable!("not tried again")).unwrap();
        assert_eq!(samples.why_not(&["absent", "a"]), "it broke");
        assert_eq!(samples.why_not(&["absent"]), "not measured");
        assert_eq!(samples.median("a"), None);
        assert!(matches!(samples.take("b", || Err(BenchError::Interrupted)), Err(BenchError::Interrupted)));
    }
}
