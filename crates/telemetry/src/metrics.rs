//! Metrics, as a page in Prometheus' text format and for the export to OpenTelemetry.
//!
//! A few dozen names need no library: atomics, one table of histograms and a list of families are enough. Labels come
//! from closed sets (tools from the dialects' tables, reasons from the enums below), so that no client can make the list
//! grow. Tenants are a label only if the operator wants it, and then only a bounded number of them.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use engine::op::{Notice, NoticeKind};
use engine::{Browsers, Ready, Traffic, ZygoteStatus};
use mcp::http::HttpTotals;

use crate::otel::SIGNALS;

pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Upper bounds of the buckets in seconds. They range from the time of a listing to that of the longest command.
const BUCKETS: [f64; 14] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0];

/// Label of all tenants beyond the maximum number of tenants that have their own label.
const OTHERS: &str = "(others)";

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

/// A metric with all of its values.
#[derive(Debug, Clone)]
pub(crate) struct Family {
    pub(crate) name: &'static str,
    pub(crate) help: &'static str,
    pub(crate) unit: Option<&'static str>,
    pub(crate) kind: FamilyKind,
    pub(crate) samples: Vec<Sample>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FamilyKind {
    Gauge,
    Counter,
    Histogram,
}

#[derive(Debug, Clone)]
pub(crate) struct Sample {
    pub(crate) labels: Labels,
    pub(crate) value: SampleValue,
}

type Labels = Vec<(&'static str, Cow<'static, str>)>;

#[derive(Debug, Clone)]
pub(crate) enum SampleValue {
    Number(u64),
    /// The number of values in each bucket, of which the last one has no upper bound.
    Histogram {
        buckets: Vec<u64>,
        bounds: &'static [f64],
        sum: f64,
        count: u64,
    },
}

/// Values at the moment at which the page is requested.
#[derive(Debug, Clone, Default)]
pub struct Gauges {
    /// Time at which the server started, in seconds since 1970.
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
    /// Records that were not exported to OpenTelemetry, by signal; `None` if nothing is exported.
    pub otel_dropped: Option<[u64; SIGNALS.len()]>,
}

impl Gauges {
    fn add_pool(&self, page: &mut Families) {
        let Ready { wanted, available, memory_bytes, taken, handed_over, made } = self.ready;
        page.gauge("sandpool_pool_size", "Sandboxes to be kept ready.", wanted as u64);
        page.gauge("sandpool_pool_available", "Sandboxes that are ready.", available as u64);
        page.gauge("sandpool_pool_memory_bytes", "Memory of the sandboxes that are ready.", memory_bytes);
        let help = "New contexts by what they got: one that was ready, one just being made, or a new one.";
        let counts = [("ready", taken), ("under_way", handed_over), ("new", made)];
        page.labelled("sandpool_pool_taken_total", help, "what", counts);
    }

    fn add_zygote(&self, page: &mut Families) {
        let ZygoteStatus { ready, forks, restarts, .. } = self.zygote;
        page.gauge(
            "sandpool_warm_ready",
            "Whether Python kernels are forked from a warm interpreter.",
            u64::from(ready),
        );
        page.counter("sandpool_warm_forks_total", "Kernels forked from the warm interpreter.", forks);
        page.counter(
            "sandpool_warm_restarts_total",
            "Times the warm interpreter died and was started again.",
            restarts,
        );
    }

    fn add_network(&self, page: &mut Families) {
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

    fn add_browsers(&self, page: &mut Families) {
        let Browsers { running, started, died } = self.browsers;
        page.gauge("sandpool_browsers", "Browsers that run, in contexts and ready.", running as u64);
        page.counter("sandpool_browsers_started_total", "Browsers that were started.", started);
        page.counter("sandpool_browsers_died_total", "Browsers that ended by themselves or were given up.", died);
    }
}

/// Handle to the metrics. It is cheap to clone; all clones count together.
#[derive(Clone, Default)]
pub struct Metrics(Arc<Inner>);

#[derive(Default)]
struct Inner {
    calls: Mutex<BTreeMap<(&'static str, &'static str), [Calls; ENDS.len()]>>,
    calls_in_progress: AtomicU64,
    kills: [AtomicU64; KILLS.len()],
    denials: [AtomicU64; DENIALS.len()],
    /// Maximum number of tenants that are labels; 0 if none are.
    most_tenants: usize,
    by_tenant: Mutex<ByTenant>,
}

/// Counters of each tenant that is a label.
#[derive(Default)]
struct ByTenant {
    names: BTreeSet<Arc<str>>,
    /// Tenants that the operator configured. Others get only the places that these do not need.
    configured: BTreeSet<String>,
    /// Number of names that the operator did not configure.
    others: usize,
    calls: BTreeMap<(&'static str, &'static str, Arc<str>), [u64; ENDS.len()]>,
    denials: BTreeMap<Arc<str>, [u64; DENIALS.len()]>,
}

impl ByTenant {
    /// Returns the label of a tenant.
    fn label(&mut self, tenant: &str, most: usize) -> Arc<str> {
        if let Some(known) = self.names.get(tenant) {
            return known.clone();
        }
        let is_configured = self.configured.contains(tenant);
        let taken =
            if is_configured { self.names.len() } else { self.names.len().max(self.others + self.configured.len()) };
        if taken >= most && !(is_configured && self.displace()) {
            return OTHERS.into();
        }
        let name: Arc<str> = tenant.into();
        self.names.insert(name.clone());
        self.others += usize::from(!is_configured);
        name
    }

    fn configure(&mut self, tenants: BTreeSet<String>) {
        self.others = self.names.iter().filter(|name| !tenants.contains(&***name)).count();
        self.configured = tenants;
    }

    /// Takes the place of a tenant that the operator did not configure, if one has a place. Its counts go to the others.
    fn displace(&mut self) -> bool {
        let Some(name) = self.names.iter().find(|name| !self.configured.contains(&***name)).cloned() else {
            return false;
        };
        self.names.remove(&name);
        self.others -= 1;
        for (labels, ends) in self.calls.extract_if(.., |(_, _, tenant), _| *tenant == name).collect::<Vec<_>>() {
            let sum = self.calls.entry((labels.0, labels.1, OTHERS.into())).or_default();
            sum.iter_mut().zip(ends).for_each(|(sum, count)| *sum += count);
        }
        if let Some(counts) = self.denials.remove(&name) {
            let sum = self.denials.entry(OTHERS.into()).or_default();
            sum.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        true
    }
}

/// The calls of a tool that ended in the same way.
#[derive(Default)]
struct Calls {
    count: u64,
    /// The number of calls in each bucket, without those that took longer than the last bound.
    buckets: [u64; BUCKETS.len()],
    seconds: f64,
}

const ENDS: [&str; 4] = ["ok", "failed", "refused", "cancelled"];
const KILLS: [&str; 3] = ["timeout", "memory", "crash"];
const DENIALS: [&str; 3] = ["auth", "rate", "quota"];

impl Metrics {
    /// Creates metrics in which at most this many tenants are labels.
    pub fn with_tenants(most_tenants: usize) -> Self {
        Self(Arc::new(Inner { most_tenants, ..Inner::default() }))
    }

    /// Sets the tenants that the operator configured. They get the places for labels before all others.
    pub fn configure_tenants(&self, tenants: impl Iterator<Item = String>) {
        if self.0.most_tenants > 0 {
            self.0.by_tenant().configure(tenants.collect());
        }
    }

    /// Begins a call. The call is counted when it ends; if the returned value is dropped before, it counts as
    /// cancelled.
    pub(crate) fn begin(&self, dialect: &'static str, tool: &'static str, tenant: &str) -> InProgress {
        add(&self.0.calls_in_progress, 1);
        let tenant = (self.0.most_tenants > 0).then(|| tenant.to_owned());
        let (metrics, began, end) = (self.clone(), Instant::now(), CallEnd::Cancelled);
        InProgress { metrics, labels: (dialect, tool), tenant, began, end }
    }

    /// Counts a refused request, of a tenant if the tenant is known.
    pub fn denied(&self, why: DenialReason, tenant: Option<&str>) {
        add(&self.0.denials[why as usize], 1);
        if let Some(tenant) = tenant.filter(|_| self.0.most_tenants > 0) {
            let mut by_tenant = self.0.by_tenant();
            let label = by_tenant.label(tenant, self.0.most_tenants);
            by_tenant.denials.entry(label).or_default()[why as usize] += 1;
        }
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
        let mut page = String::new();
        for family in self.families(gauges, Inner::add_durations) {
            family.write(&mut page);
        }
        page
    }

    /// Returns the metrics for OpenTelemetry. The durations of calls have the name and the labels of its conventions.
    pub(crate) fn exported(&self, gauges: &Gauges) -> Vec<Family> {
        self.families(gauges, Inner::add_operations)
    }

    fn families(&self, gauges: &Gauges, add_durations: fn(&Inner, &mut Families)) -> Vec<Family> {
        let inner = &*self.0;
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut page = Families::default();
        let version = vec![("version", env!("CARGO_PKG_VERSION").into())];
        page.add(FamilyKind::Gauge, "sandpool_build_info", "The version that runs.", vec![number(version, 1)]);
        let help = "When the server started, in seconds since 1970.";
        page.gauge("process_start_time_seconds", help, gauges.started);
        inner.add_calls(&mut page);
        add_durations(inner, &mut page);
        page.gauge("sandpool_calls_in_progress", "Calls that are being answered.", read(&inner.calls_in_progress));
        page.gauge("sandpool_contexts", "Contexts, sessions and conversations with a sandbox.", gauges.contexts as u64);
        page.gauge("sandpool_sessions", "Protocol sessions over HTTP.", gauges.http.sessions_open);
        page.gauge("sandpool_sandboxes", "Sandboxes of every kind.", gauges.sandboxes as u64);
        page.gauge("sandpool_sandboxes_ending", "Sandboxes that are being destroyed.", gauges.ending as u64);
        gauges.add_pool(&mut page);
        gauges.add_zygote(&mut page);
        gauges.add_browsers(&mut page);
        page.gauge("sandpool_runs_in_progress", "Runs that execute.", gauges.runs as u64);
        let kills = KILLS.into_iter().zip(inner.kills.iter().map(read));
        page.labelled("sandpool_kills_total", "Runs and sandboxes ended by force.", "reason", kills);
        inner.add_denials(&mut page);
        gauges.add_network(&mut page);
        page.gauge("sandpool_http_connections", "Open connections.", gauges.http.connections_open);
        page.counter("sandpool_http_connections_total", "Connections accepted.", gauges.http.connections);
        page.counter("sandpool_http_served_bytes_total", "Bytes of bodies sent.", gauges.http.bytes_served);
        page.counter("sandpool_journal_lost_total", "Entries missing in the journal.", gauges.journal_lost);
        if let Some(dropped) = gauges.otel_dropped {
            let help = "Records that were not exported to OpenTelemetry.";
            page.labelled("sandpool_otel_dropped_total", help, "signal", SIGNALS.into_iter().zip(dropped));
        }
        page.0
    }
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

fn number(labels: Labels, number: u64) -> Sample {
    Sample { labels, value: SampleValue::Number(number) }
}

impl Inner {
    fn by_tenant(&self) -> MutexGuard<'_, ByTenant> {
        self.by_tenant.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add_calls(&self, page: &mut Families) {
        let mut samples = Vec::new();
        let mut add = |dialect: &'static str, tool: &'static str, tenant: Option<&str>, ends: [u64; ENDS.len()]| {
            for (end, count) in ENDS.into_iter().zip(ends).filter(|(_, count)| *count > 0) {
                let mut labels: Labels =
                    vec![("dialect", dialect.into()), ("tool", tool.into()), ("outcome", end.into())];
                labels.extend(tenant.map(|tenant| ("tenant", tenant.to_owned().into())));
                samples.push(number(labels, count));
            }
        };
        if self.most_tenants > 0 {
            for ((dialect, tool, tenant), ends) in &self.by_tenant().calls {
                add(dialect, tool, Some(&**tenant), *ends);
            }
        } else {
            let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            for ((dialect, tool), ends) in &*calls {
                add(dialect, tool, None, ends.each_ref().map(|calls| calls.count));
            }
        }
        page.add(FamilyKind::Counter, "sandpool_calls_total", "Tool calls by how they ended.", samples);
    }

    /// Adds the refused requests. With labels for tenants, those without one are the requests of strangers.
    fn add_denials(&self, page: &mut Families) {
        let mut samples = Vec::new();
        let by_tenant = self.by_tenant();
        for (at, reason) in DENIALS.into_iter().enumerate() {
            let mut rest = self.denials[at].load(Ordering::Relaxed);
            for (tenant, counts) in by_tenant.denials.iter().filter(|(_, counts)| counts[at] > 0) {
                let labels = vec![("reason", reason.into()), ("tenant", tenant.to_string().into())];
                samples.push(number(labels, counts[at]));
                rest = rest.saturating_sub(counts[at]);
            }
            samples.push(number(vec![("reason", reason.into())], rest));
        }
        page.add(FamilyKind::Counter, "sandpool_denials_total", "Requests that were not let in.", samples);
    }

    fn add_durations(&self, page: &mut Families) {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let samples = calls.iter().map(|((dialect, tool), ends)| {
            let mut all = Calls::default();
            for calls in ends {
                all.count += calls.count;
                all.seconds += calls.seconds;
                all.buckets.iter_mut().zip(calls.buckets).for_each(|(all, count)| *all += count);
            }
            Sample { labels: vec![("dialect", (*dialect).into()), ("tool", (*tool).into())], value: all.histogram() }
        });
        let samples = samples.collect();
        let help = "How long tool calls took.";
        page.add(FamilyKind::Histogram, "sandpool_call_duration_seconds", help, samples);
    }

    fn add_operations(&self, page: &mut Families) {
        let calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let mut samples = Vec::new();
        for ((dialect, tool), ends) in &*calls {
            for (end, calls) in ENDS.into_iter().zip(ends).filter(|(_, calls)| calls.count > 0) {
                let mut labels: Labels = vec![
                    ("mcp.method.name", "tools/call".into()),
                    ("gen_ai.tool.name", (*tool).into()),
                    ("gen_ai.operation.name", "execute_tool".into()),
                    ("sandpool.dialect", (*dialect).into()),
                ];
                let error = match end {
                    "ok" => None,
                    "cancelled" => Some("cancelled"),
                    _ => Some("tool_error"),
                };
                labels.extend(error.map(|error| ("error.type", error.into())));
                samples.push(Sample { labels, value: calls.histogram() });
            }
        }
        let help = "How long tool calls took.";
        page.add(FamilyKind::Histogram, "mcp.server.operation.duration", help, samples);
        page.0.last_mut().into_iter().for_each(|family| family.unit = Some("s"));
    }
}

impl Calls {
    fn histogram(&self) -> SampleValue {
        let longest = self.count - self.buckets.iter().sum::<u64>();
        let buckets = self.buckets.into_iter().chain([longest]).collect();
        SampleValue::Histogram { buckets, bounds: &BUCKETS, sum: self.seconds, count: self.count }
    }
}

/// A call that has not ended.
#[must_use = "a call counts as cancelled when this value is dropped"]
pub(crate) struct InProgress {
    metrics: Metrics,
    labels: (&'static str, &'static str),
    /// The tenant, if tenants are labels.
    tenant: Option<String>,
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
        let inner = &*self.metrics.0;
        inner.calls_in_progress.fetch_sub(1, Ordering::Relaxed);
        if let Some(tenant) = &self.tenant {
            let mut by_tenant = inner.by_tenant();
            let label = by_tenant.label(tenant, inner.most_tenants);
            by_tenant.calls.entry((self.labels.0, self.labels.1, label)).or_default()[self.end as usize] += 1;
        }
        let mut calls = inner.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = &mut calls.entry(self.labels).or_default()[self.end as usize];
        calls.count += 1;
        calls.seconds += seconds;
        if let Some(bucket) = BUCKETS.iter().position(|bound| seconds <= *bound) {
            calls.buckets[bucket] += 1;
        }
    }
}

/// Collects families.
#[derive(Default)]
struct Families(Vec<Family>);

impl Families {
    fn add(&mut self, kind: FamilyKind, name: &'static str, help: &'static str, samples: Vec<Sample>) {
        self.0.push(Family { name, help, unit: None, kind, samples });
    }

    fn gauge(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(FamilyKind::Gauge, name, help, vec![number(Vec::new(), value)]);
    }

    fn counter(&mut self, name: &'static str, help: &'static str, value: u64) {
        self.add(FamilyKind::Counter, name, help, vec![number(Vec::new(), value)]);
    }

    /// Adds one sample for each value of a label, including those that did not occur, because a rate needs a first value.
    fn labelled(
        &mut self,
        name: &'static str,
        help: &'static str,
        label: &'static str,
        counts: impl IntoIterator<Item = (&'static str, u64)>,
    ) {
        let counts = counts.into_iter().map(|(value, count)| number(vec![(label, value.into())], count));
        self.add(FamilyKind::Counter, name, help, counts.collect());
    }
}

impl Family {
    /// Writes Prometheus' text format.
    fn write(&self, page: &mut String) {
        let Self { name, help, kind, .. } = self;
        let kind = match kind {
            FamilyKind::Gauge => "gauge",
            FamilyKind::Counter => "counter",
            FamilyKind::Histogram => "histogram",
        };
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for Sample { labels, value } in &self.samples {
            match value {
                SampleValue::Number(number) => line(page, name, labels, None, &number.to_string()),
                SampleValue::Histogram { buckets, bounds, sum, count } => {
                    let bounds = bounds.iter().map(f64::to_string).chain(["+Inf".into()]);
                    // Buckets are cumulative, as the format demands.
                    let mut all = 0;
                    for (bound, bucket) in bounds.zip(buckets) {
                        all += bucket;
                        line(page, &format!("{name}_bucket"), labels, Some(&bound), &all.to_string());
                    }
                    line(page, &format!("{name}_sum"), labels, None, &sum.to_string());
                    line(page, &format!("{name}_count"), labels, None, &count.to_string());
                }
            }
        }
    }
}

/// Writes a line. Only names of tenants contain characters that have to be escaped.
fn line(page: &mut String, name: &str, labels: &Labels, bound: Option<&str>, value: &str) {
    let escaped = |value: &str| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let all = labels.iter().map(|(label, value)| format!("{label}=\"{}\"", escaped(value)));
    let all: Vec<String> = all.chain(bound.map(|bound| format!("le=\"{bound}\""))).collect();
    let labels = if all.is_empty() { String::new() } else { format!("{{{}}}", all.join(",")) };
    let _ = writeln!(page, "{name}{labels} {value}");
}

#[cfg(test)]
mod tests {
    use engine::op::Tenant;

    use super::*;

    #[test]
    fn the_whole_page() {
        let metrics = Metrics::default();
        metrics.begin("agentrun", "run_code", "blue").end(CallEnd::Ok);
        metrics.begin("agentrun", "run_code", "blue").end(CallEnd::Failed);
        drop(metrics.begin("agentrun", "list_contexts", "blue"));
        metrics.denied(DenialReason::Rate, Some("blue"));
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
            otel_dropped: Some([15, 16, 17]),
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
            metrics.begin("sandpool", "run_code", "blue").end(CallEnd::Ok);
        }
        let page = metrics.text(&Gauges::default());
        let counts = page.lines().filter(|line| line.contains("_bucket{"));
        let counts: Vec<u64> = counts.map(|line| line.rsplit(' ').next().unwrap().parse().unwrap()).collect();
        assert_eq!((counts.len(), counts.last()), (BUCKETS.len() + 1, Some(&3)));
        assert!(counts.is_sorted(), "{counts:?}");
    }

    #[test]
    fn tenants_are_a_label_if_the_operator_wants_it_and_their_number_is_bounded() {
        let metrics = Metrics::with_tenants(2);
        for tenant in ["blue", "gr\"een\n", "red", "white", "blue"] {
            metrics.begin("sandpool", "run_code", tenant).end(CallEnd::Ok);
            metrics.denied(DenialReason::Rate, Some(tenant));
        }
        metrics.denied(DenialReason::Auth, None);
        let page = metrics.text(&Gauges::default());
        let of = |name: &str| page.lines().filter(|line| line.starts_with(name)).collect::<Vec<_>>();
        let call = |rest: &str| {
            format!("sandpool_calls_total{{dialect=\"sandpool\",tool=\"run_code\",outcome=\"ok\",tenant={rest}")
        };
        let expected = [call("\"(others)\"} 2"), call("\"blue\"} 2"), call("\"gr\\\"een\\n\"} 1")];
        assert_eq!(of("sandpool_calls_total{"), expected);
        let denials = of("sandpool_denials_total{");
        assert!(denials.contains(&"sandpool_denials_total{reason=\"rate\",tenant=\"blue\"} 2"), "{denials:?}");
        assert!(denials.contains(&"sandpool_denials_total{reason=\"rate\"} 0"), "{denials:?}");
        assert!(denials.contains(&"sandpool_denials_total{reason=\"auth\"} 1"), "{denials:?}");
        assert!(!of("sandpool_call_duration").iter().any(|line| line.contains("tenant")), "times have no tenant");
    }

    #[test]
    fn w79_tenants_of_the_operator_come_before_those_of_an_identity_provider() {
        let metrics = Metrics::with_tenants(3);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>().into_iter();
        let call = |tenant: &str| {
            metrics.begin("sandpool", "run_code", tenant).end(CallEnd::Ok);
        };
        let counts = || {
            let page = metrics.text(&Gauges::default());
            let lines = page.lines().filter_map(|line| line.split_once("outcome=\"ok\",tenant=\""));
            lines.map(|(_, rest)| rest.replace("\"}", "")).collect::<Vec<_>>().join(", ")
        };
        metrics.configure_tenants(names(&["blue", "green"]));
        ["sub-1", "sub-2", "sub-3", "blue", "green", "sub-1"].into_iter().for_each(call);
        metrics.denied(DenialReason::Rate, Some("sub-1"));
        assert_eq!(counts(), "(others) 2, blue 1, green 1, sub-1 2");
        // A reload adds a tenant, which gets the place of a subject.
        metrics.configure_tenants(names(&["blue", "green", "red"]));
        ["red", "sub-1"].into_iter().for_each(call);
        assert_eq!(counts(), "(others) 5, blue 1, green 1, red 1");
        let page = metrics.text(&Gauges::default());
        assert!(page.contains("sandpool_denials_total{reason=\"rate\",tenant=\"(others)\"} 1\n"), "{page}");
        // A removed tenant keeps its place until another needs it.
        metrics.configure_tenants(names(&["blue", "red", "white"]));
        assert_eq!(counts(), "(others) 5, blue 1, green 1, red 1");
        ["white", "grey"].into_iter().for_each(call);
        assert_eq!(counts(), "(others) 7, blue 1, red 1, white 1");
    }
}
