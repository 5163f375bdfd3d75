//! Compares two builds to find out whether the new one is slower.
//!
//! Each round measures both builds once, and the build that begins alternates. A ratio is taken inside each round; the
//! median of these ratios is reported, with the lowest and the highest.

use std::collections::BTreeMap;
use std::fmt;

use crate::report::Figure;
use crate::stats::quantile;

/// The ratios of the new build to the old one, with a line for each figure and series that both have.
#[derive(Debug)]
pub struct Comparison {
    pub rounds: usize,
    lines: BTreeMap<(&'static str, &'static str), Vec<f64>>,
}

impl Comparison {
    pub(crate) fn new(rounds: usize) -> Self {
        Self { rounds, lines: BTreeMap::new() }
    }

    /// Adds one round of one figure: the ratio of the new median to the old one, for every series. The floors are the
    /// same on both sides, so their ratios show how much the machine itself varied.
    pub(crate) fn add(&mut self, new: &Figure, old: &Figure) {
        for (series, new_summary) in &new.series {
            let Some(old_summary) = old.series.get(series).filter(|old| old.median > 0.0) else { continue };
            self.lines.entry((new.name, series)).or_default().push(new_summary.median / old_summary.median);
        }
    }

    /// Renders the ratios of one figure, or of all figures if `figure` is empty.
    pub(crate) fn lines_of(&self, figure: &str) -> String {
        let wanted = self.lines.iter().filter(|((name, _), _)| figure.is_empty() || *name == figure);
        let lines = wanted.map(|((figure, series), ratios)| {
            let at = |at| quantile(ratios.clone(), at).unwrap_or(f64::NAN);
            format!("{figure:<12} {series:<28} {:>6.3}   ({:.3} to {:.3})\n", at(0.5), at(0.0), at(1.0))
        });
        lines.collect()
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "new / old, {} rounds by turns; below 1 the new build takes less (for `load`: serves less)",
            self.rounds
        )?;
        f.write_str(&self.lines_of(""))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stats::Samples;

    fn figure(ours: f64) -> Figure {
        let mut samples = Samples::default();
        samples.take("sandpool", || Ok(vec![ours])).unwrap();
        Figure::new("warm", "", &samples)
    }

    #[test]
    fn the_median_of_the_rounds_ratios_is_shown_with_their_range() {
        let mut comparison = Comparison::new(3);
        for new in [1.0, 1.2, 3.0] {
            comparison.add(&figure(new), &figure(1.0));
        }
        let text = comparison.to_string();
        assert!(text.contains("1.200   (1.000 to 3.000)"), "{text}");
    }
}
