//! Metrics for Prometheus, in its text format.
//!
//! A few dozen names need no library: atomics, one table of histograms and a hand-written page are enough. Every label
//! comes from a closed set (tools from the dialects' tables, reasons from the enums below), so that no client can make
//! the page grow. Tenants are not a label.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use engine::op::{Notice, NoticeKind};
use engine::{Browsers, Ready, Traffic, ZygoteStatus};
use mcp::http::HttpTotals;

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds of the buckets in seconds. They range from the time of a listing to that of the longest command.
const BUCKETS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallEnd {
    Ok,
    /// The code or the operation failed.
    Failed,
    /// The arguments were refused.
    Refused,
    Cancelled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenialReason {
    Auth,
    Rate,
    Quota,
}

impl DenialReason {
    pub fn name(self) -> &'static str {
        DENIALS[self as usize]
    }
}

/// Values at the moment at which the page is requested.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    /// Seconds since 1970.
    pub started: u64,
    pub contexts: usize,
    pub ready: Ready,
    pub sandboxes: usize,
    pub ending: usize,
    pub runs: usize,
    pub journal_lost: u64,
    pub zygote: ZygoteStatus,
    pub browsers: Browsers,
    pub network_denials: u64,
    pub traffic: Traffic,
    pub http: HttpTotals,
}

impl Gauges {
    fn write_pool(&self, page: &mut Exposition) {
        let Ready { wanted, available, memory_bytes, taken, handed_over, made } = self.ready;
        page.gauge("sandpool_pool_size", "Sandboxes to be kept ready.", wanted);
        page.gauge("sandpool_pool_available", "Sandboxes that are ready.", available);
        page.gauge("sandpool_pool_memory_bytes", "Memory of the sandboxes that are ready.", memory_bytes);
        let name = "sandpool_pool_taken_total";
        let help = "New contexts by what they got: one that was ready, one just being made, or a new one.";
        page.kind(name, "counter", help);
        for (what, count) in [("ready", taken), ("under_way", handed_over), ("new", made)] {
            page.sample(name, &[("what", what)], count);
        }
    }

    fn write_zygote(&self, page: &mut Exposition) {
        let ZygoteStatus { ready, forks, restarts, .. } = self.zygote;
        page.gauge(
            "sandpool_warm_ready",
            "Whether Python kernels are forked from a warm interpreter.",
            usize::from(ready),
        );
        page.counter("sandpool_warm_forks_total", "Kernels forked from the warm interpreter.", forks);
        page.counter(
            "sandpool_warm_restarts_total",
            "Times the warm interpreter died and was started again.",
            restarts,
        );
    }

    fn write_network(&self, page: &mut Exposition) {
        let Traffic { connections, bytes } = self.traffic;
        page.counter(
            "sandpool_network_connections_total",
            "Connections from sandboxes to their egress proxies.",
            connections,
        );
        page.counter("sandpool_network_bytes_total", "Bytes that sandboxes exchanged with hosts outside.", bytes);
        let help = "What sandboxes asked of the network and did not get.";
        page.counter("sandpool_network_denials_total", help, self.network_denials);
    }

    fn write_browsers(&self, page: &mut Exposition) {
        let Browsers { running, started, died } = self.browsers;
        page.gauge("sandpool_browsers", "Browsers that run, in contexts and ready.", running);
        page.counter("sandpool_browsers_started_total", "Browsers that were started.", started);
        page.counter("sandpool_browsers_died_total", "Browsers that ended by themselves or were given up.", died);
    }
}

/// Handle to the metrics. It is cheap to clone; all clones count together.
#[derive(Clone, Default)]
pub struct Metrics(Arc<Inner>);

#[derive(Default)]
struct Inner {
    calls: Mutex<BTreeMap<(&'static str, &'static str), Calls>>,
    calls_in_progress: AtomicU64,
    kills: [AtomicU64; KILLS.len()],
    denials: [AtomicU64; DENIALS.len()],
}

#[derive(Default)]
struct Calls {
    ends: [u64; ENDS.len()],
    buckets: [u64; BUCKETS.len()],
    seconds: f64,
}

const ENDS: [&str; 4] = ["ok", "failed", "refused", "cancelled"];
const KILLS: [&str; 3] = ["timeout", "memory", "crash"];
const DENIALS: [&str; 3] = ["auth", "rate", "quota"];

impl Metrics {
    /// Begins a call. The call is counted when it ends; if the returned value is dropped before, it counts as
    /// cancelled.
    pub(crate) fn begin(&self, dialect: &'static str, tool: &'static str) -> InProgress {
        add(&self.0.calls_in_progress, 1);
        InProgress { metrics: self.clone(), labels: (dialect, tool), began: Instant::now(), end: CallEnd::Cancelled }
    }

    pub fn denied(&self, why: DenialReason) {
        add(&self.0.denials[why as usize], 1);
    }

    /// Counts a notice of the engine.
    pub fn notice(&self, notice: &Notice) {
        let kill = match notice.what {
            NoticeKind::TimedOut => 0,
            NoticeKind::OutOfMemory => 1,
            NoticeKind::Crashed | NoticeKind::Lost => 2,
            NoticeKind::Created
            | NoticeKind::Stopped
            | NoticeKind::Expired
            | NoticeKind::Evicted
            | NoticeKind::Denied
            | NoticeKind::BrowserDied => return,
        };
        add(&self.0.kills[kill], 1);
    }

    /// Returns the page in Prometheus' text format.
    pub fn text(&self, gauges: &Gauges) -> String {
        let inner = &*self.0;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut page = Exposition::default();
        page.kind("sandpool_build_info", "gauge", "The version that runs.");
        page.sample("sandpool_build_info", &[("version", env!("CARGO_PKG_VERSION"))], 1);
        let help = "When the server started, in seconds since 1970.";
        page.gauge("process_start_time_seconds", help, gauges.started);
        inner.write_calls(&mut page);
        page.gauge("sandpool_calls_in_progress", "Calls that are being answered.", read(&inner.calls_in_progress));
        page.gauge("sandpool_contexts", "Contexts, sessions and conversations with a sandbox.", gauges.contexts);
        page.gauge("sandpool_sessions", "Protocol sessions over HTTP.", gauges.http.sessions_open);
        page.gauge("sandpool_sandboxes", "Sandboxes of every kind.", gauges.sandboxes);
        page.gauge("sandpool_sandboxes_ending", "Sandboxes that are being destroyed.", gauges.ending);
        gauges.write_pool(&mut page);
        gauges.write_zygote(&mut page);
        gauges.write_browsers(&mut page);
        page.gauge("sandpool_runs_in_progress", "Runs that execute.", gauges.runs);
        page.labelled("sandpool_kills_total", "Runs and sandboxes ended by force.", &KILLS, &inner.kills);
        page.labelled("sandpool_denials_total", "Requests that were not let in.", &DENIALS, &inner.denials);
        gauges.write_network(&mut page);
        page.gauge("sandpool_http_connections", "Open connections.", gauges.http.connections_open);
        page.counter("sandpool_http_connections_total", "Connections accepted.", gauges.http.connections);
        page.counter("sandpool_http_served_bytes_total", "Bytes of bodies sent.", gauges.http.bytes_served);
        page.counter("sandpool_journal_lost_total", "Entries missing in the journal.", gauges.journal_lost);
        page.0
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Inner {
    fn write_calls(&self, page: &mut Exposition) {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        page.kind("sandpool_calls_total", "counter", "Tool calls by how they ended.");
        for ((dialect, tool), calls) in &*calls {
            for (end, count) in ENDS.iter().zip(calls.ends).filter(|(_, count)| *count > 0) {
                let labels = [("dialect", *dialect), ("tool", *tool), ("outcome", *end)];
                page.sample("sandpool_calls_total", &labels, count);
            }
        }
        page.kind("sandpool_call_duration_seconds", "histogram", "How long tool calls took.");
        for ((dialect, tool), calls) in &*calls {
            let labels = [("dialect", *dialect), ("tool", *tool)];
            let all: u64 = calls.ends.iter().sum();
            let bounds = BUCKETS.iter().map(f64::to_string).chain(["+Inf".into()]);
            for (bound, count) in bounds.zip(calls.buckets.into_iter().chain([all])) {
                let labels = [labels[0], labels[1], ("le", bound.as_str())];
                page.sample("sandpool_call_duration_seconds_bucket", &labels, count);
            }
            page.sample("sandpool_call_duration_seconds_sum", &labels, calls.seconds);
            page.sample("sandpool_call_duration_seconds_count", &labels, all);
        }
    }
}

/// A call that has not ended.
#[must_use = "a call counts as cancelled when this value is dropped"]
pub(crate) struct InProgress {
    metrics: Metrics,
    labels: (&'static str, &'static str),
    began: Instant,
    end: CallEnd,
}

impl InProgress {
    /// Ends the call and returns how long it took.
    pub(crate) fn end(mut self, end: CallEnd) -> Duration {
        self.end = end;
        self.began.elapsed()
    }
}

impl Drop for InProgress {
    fn drop(&mut self) {
        let seconds = self.began.elapsed().as_secs_f64();
        self.metrics.0.calls_in_progress.fetch_sub(1, Ordering::Relaxed);
        let mut calls = self.metrics.0.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = calls.entry(self.labels).or_default();
        calls.ends[self.end as usize] += 1;
        calls.seconds += seconds;
        // Buckets are cumulative, as the format demands.
        for (_, count) in BUCKETS.iter().zip(&mut calls.buckets).filter(|(bound, _)| seconds <= **bound) {
            *count += 1;
        }
    }
}

/// Writes the text format. Names and labels come from this server only, and none contains a character that needs
/// escaping.
#[derive(Default)]
struct Exposition(String);

impl Exposition {
    fn kind(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let labels: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
        let labels = if labels.is_empty() { String::new() } else { format!("{{{}}}", labels.join(",")) };
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.kind(name, "gauge", help);
        self.sample(name, &[], value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.kind(name, "counter", help);
        self.sample(name, &[], value);
    }

    /// Writes one sample for each reason, including those that did not occur, because a rate needs a first value.
    fn labelled(&mut self, name: &str, help: &str, reasons: &[&str], counts: &[AtomicU64]) {
        self.kind(name, "counter", help);
        for (reason, count) in reasons.iter().zip(counts) {
            self.sample(name, &[("reason", reason)], count.load(Ordering::Relaxed));
        }
    }
}

#[cfg(test)]
mod tests {
    use engine::op::Tenant;

    use super::*;

    #[test]
    fn the_whole_page() {
        let metrics = Metrics::default();
        metrics.begin("agentrun", "run_code").end(CallEnd::Ok);
        metrics.begin("agentrun", "run_code").end(CallEnd::Failed);
        drop(metrics.begin("agentrun", "list_contexts"));
        metrics.denied(DenialReason::Rate);
        for what in [NoticeKind::TimedOut, NoticeKind::OutOfMemory, NoticeKind::Lost, NoticeKind::Created] {
            metrics.notice(&Notice {
                tenant: Tenant::local(),
                realm: dialects::agentrun::REALM,
                id: "ctx-1".into(),
                what,
                detail: None,
            });
        }
        let ready = Ready { wanted: 3, available: 1, memory_bytes: 6_000_000, taken: 7, handed_over: 8, made: 9 };
        let warm = ZygoteStatus { ready: true, forks: 10, restarts: 1, ..ZygoteStatus::default() };
        let browsers = Browsers { running: 2, started: 12, died: 3 };
        let gauges = Gauges {
            started: 1_700_000_000,
            contexts: 4,
            ready,
            sandboxes: 6,
            ending: 1,
            runs: 2,
            journal_lost: 5,
            zygote: warm,
            browsers,
            network_denials: 11,
            traffic: Traffic { connections: 13, bytes: 14 },
            http: HttpTotals { connections: 2, connections_open: 1, sessions_open: 2, bytes_served: 4096 },
        };
        let page = metrics.text(&gauges);
        // Times differ from run to run, so the test leaves out sums and looks only at the last bucket.
        let bucket = |line: &&str| !line.contains("_sum") && (!line.contains("_bucket") || line.contains("+Inf"));
        let lines: Vec<&str> = page.lines().filter(bucket).collect();
        insta::assert_snapshot!(lines.join("\n").replace(env!("CARGO_PKG_VERSION"), "VERSION"));
    }

    #[test]
    fn a_bucket_holds_all_that_were_as_quick() {
        let metrics = Metrics::default();
        for _ in 0..3 {
            metrics.begin("sandpool", "run_code").end(CallEnd::Ok);
        }
        let page = metrics.text(&Gauges::default());
        let counts = page.lines().filter(|line| line.contains("_bucket{"));
        let counts: Vec<u64> = counts.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert_eq!((counts.len(), counts.last()), (BUCKETS.len() + 1, Some(&3)));
        assert!(counts.is_sorted(), "{counts:?}");
    }
}
