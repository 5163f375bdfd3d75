//! Draws the picture, which shows how many times better Sandpool is than each alternative, on a logarithmic scale. The
//! picture is readable on light and on dark backgrounds.

use std::fmt::Write as _;

use crate::report::{BenchReport, Goal, number};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 268.0;
const RIGHT: f64 = 84.0;
const TOP: f64 = 62.0;
const ROW: f64 = 40.0;
const BAR: f64 = 18.0;

struct Bar {
    label: String,
    against: &'static str,
    ratio: f64,
    goal: Option<f64>,
}

/// Returns the picture as SVG. It has no bars if nothing was compared.
pub fn svg(report: &BenchReport) -> String {
    let bars = bars(report);
    let most = bars.iter().map(|bar| bar.ratio).fold(10.0, f64::max);
    let decades = most.log10().ceil();
    let x = |ratio: f64| LEFT + (WIDTH - LEFT - RIGHT) * (ratio.max(1.0).log10() / decades);
    let height = TOP + ROW * bars.len() as f64 + 22.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-label=\"How many times faster, or smaller, Sandpool is\">\n<style>{STYLE}</style>\n\
         <text class=\"title\" x=\"0\" y=\"18\">How many times faster, or smaller</text>\n\
         <text class=\"small\" x=\"0\" y=\"37\">medians of interleaved rounds in one run; logarithmic; the mark is the goal</text>\n"
    );
    for decade in 0..=decades as i32 {
        let (at, value) = (x(10f64.powi(decade)), number(10f64.powi(decade)));
        let _ = writeln!(
            svg,
            "<path class=\"grid\" d=\"M{at:.1} {:.0}V{:.0}\"/><text class=\"small middle\" x=\"{at:.1}\" y=\"{:.0}\">{value} ×</text>",
            TOP - 6.0,
            height - 20.0,
            height - 5.0
        );
    }
    for (index, bar) in bars.iter().enumerate() {
        draw(&mut svg, bar, TOP + ROW * index as f64, &x);
    }
    svg + "</svg>\n"
}

const STYLE: &str = "\
text{font:14px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif;fill:#24292f}\
.title{font-size:17px;font-weight:600}.small{font-size:12px;fill:#6e7781}.middle{text-anchor:middle}.end{text-anchor:end}\
.value{font-weight:600}.bar{fill:#2f81f7}.grid{stroke:#8c959f;stroke-opacity:.35}.goal{stroke:#24292f;stroke-width:2}\
@media (prefers-color-scheme:dark){text{fill:#e6edf3}.small{fill:#8d96a0}.goal{stroke:#e6edf3}}";

fn draw(svg: &mut String, bar: &Bar, top: f64, x: &impl Fn(f64) -> f64) {
    let (middle, end) = (top + ROW / 2.0, x(bar.ratio).max(LEFT + 2.0));
    let edge = LEFT - 12.0;
    let _ = writeln!(
        svg,
        "<text class=\"end\" x=\"{edge}\" y=\"{:.0}\">{}</text><text class=\"small end\" x=\"{edge}\" y=\"{:.0}\">against {}</text>\n\
         <rect class=\"bar\" x=\"{LEFT}\" y=\"{:.0}\" width=\"{:.1}\" height=\"{BAR}\" rx=\"3\"/>",
        middle - 3.0,
        bar.label,
        middle + 12.0,
        bar.against,
        middle - BAR / 2.0,
        end - LEFT
    );
    if let Some(goal) = bar.goal {
        let at = x(goal);
        let _ = writeln!(
            svg,
            "<path class=\"goal\" d=\"M{at:.1} {:.0}V{:.0}\"/>",
            middle - BAR / 2.0 - 3.0,
            middle + BAR / 2.0 + 3.0
        );
    }
    // The value is placed after the goal's mark only if the mark would be in its way.
    let mark = bar.goal.map(x).filter(|mark| (end - 4.0..end + 64.0).contains(mark));
    let after = mark.unwrap_or(end);
    let _ = writeln!(
        svg,
        "<text class=\"value\" x=\"{:.1}\" y=\"{:.0}\">{} ×</text>",
        after + 8.0,
        middle + 5.0,
        number(bar.ratio)
    );
}

fn bars(report: &BenchReport) -> Vec<Bar> {
    let lines = report.figures.iter().flat_map(|figure| figure.lines.iter().map(move |line| (figure, line)));
    let bar = |(figure, line): (&crate::report::Figure, &crate::report::ReportRow)| {
        let against = line.against.as_ref()?;
        let goal = match line.goal {
            Some(Goal::AtLeast(bound)) => Some(bound.value),
            _ => None,
        };
        Some(Bar { label: label(figure.name, &line.what), against: against.name, ratio: against.ratio?, goal })
    };
    lines.filter_map(bar).collect()
}

/// Returns a short label for a figure. The figures of the browser and of what a model reads have one bar for each row.
fn label(figure: &str, line: &str) -> String {
    let label = match figure {
        "browser" | "tokens" => return line.split(", against").next().unwrap_or(line).replace('`', ""),
        "first" => "new context, first import pandas",
        "warm" => "warm call, stdio",
        "http" => "warm call, HTTP",
        "javascript" => "new JavaScript context, first line",
        "oneshot" => "one-shot call, fresh process",
        "memory" => "memory of an idle context",
        "load" => "calls a second, many contexts",
        _ => "",
    };
    label.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::tests::example;

    #[test]
    fn a_bar_for_each_ratio_with_its_number_and_its_goal() {
        let drawn = svg(&example());
        let bars: Vec<&str> =
            drawn.lines().filter(|line| !line.contains("<style>") && !line.contains("class=\"grid\"")).collect();
        insta::assert_snapshot!(bars.join("\n"), @r#"
        <svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 164" width="860" height="164" role="img" aria-label="How many times faster, or smaller, Sandpool is">
        <text class="title" x="0" y="18">How many times faster, or smaller</text>
        <text class="small" x="0" y="37">medians of interleaved rounds in one run; logarithmic; the mark is the goal</text>
        <text class="end" x="256" y="79">new context, first import pandas</text><text class="small end" x="256" y="94">against ipykernel</text>
        <rect class="bar" x="268" y="73" width="343.0" height="18" rx="3"/>
        <path class="goal" d="M569.1 70V94"/>
        <text class="value" x="619.0" y="87">106 ×</text>
        <text class="end" x="256" y="119">calls a second, many contexts</text><text class="small end" x="256" y="134">against ipykernel</text>
        <rect class="bar" x="268" y="113" width="173.6" height="18" rx="3"/>
        <path class="goal" d="M437.3 110V134"/>
        <text class="value" x="449.6" y="127">11 ×</text>
        </svg>
        "#);
    }

    #[test]
    fn a_bar_for_each_row_of_a_figure_with_several_has_its_own_label() {
        assert_eq!(label("browser", "warm `browser_goto`"), "warm browser_goto");
        assert_eq!(label("tokens", "answer to `browser_open`, against `browser_navigate`"), "answer to browser_open");
    }

    #[test]
    fn nothing_compared_is_no_bar_and_no_panic() {
        let mut report = example();
        report.figures.clear();
        assert!(!svg(&report).contains("<rect"));
    }
}
