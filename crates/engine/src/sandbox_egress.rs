//! The egress of one sandbox: its tenant, what a run may use of it, and the reports of denials.
//!
//! The egress is opened with the sandbox, which is not created without it, and closed before the sandbox ends. The
//! `egress` crate decides what may pass.

use std::io;
use std::net::TcpListener;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::{Denial, Egress, Gate, Narrowed, Policy, Watched};
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::guest::lock;
use crate::op::{Network, Notice, NoticeKind, Realm, StageInProgress, Tenant};
use crate::registry::one_line;

/// Maximum number of sentences in the result of one run. The remaining denials are only counted.
const IN_A_RESULT: usize = 10;
/// Maximum number of denials of one sandbox that are reported individually within `REPORT_WINDOW`.
const MAX_REPORTED: usize = 20;
/// Maximum number of connections of one run that are recorded as its stages.
const MAX_RECORDED: usize = 32;
const REPORT_WINDOW: Duration = Duration::from_secs(60);

/// The tenant and realm of a sandbox, and the egress and the policy for its network.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EgressSpec {
    pub(crate) egress: Option<Egress>,
    pub(crate) tenant: Tenant,
    pub(crate) realm: Realm,
    pub(crate) policy: Policy,
}

/// The receivers of denials: the subscribers of notices, and the metrics.
#[derive(Clone)]
pub(crate) struct DenialSinks {
    pub(crate) notices: broadcast::Sender<Notice>,
    pub(crate) denials: Arc<AtomicU64>,
}

pub(crate) struct SandboxEgress {
    /// The gate of the sandbox, or `None` once it is closed.
    gate: Mutex<Option<Gate>>,
    /// Number of bytes that passed the gate.
    bytes: Arc<AtomicU64>,
    reporter: Arc<DenialReporter>,
}

impl SandboxEgress {
    pub(crate) fn open(
        egress: &Egress,
        listener: TcpListener,
        spec: EgressSpec,
        sinks: DenialSinks,
    ) -> io::Result<Self> {
        let reporter = Arc::new(DenialReporter { spec, sinks, window: Mutex::new(DenialWindow::new()) });
        let (of, EgressSpec { tenant, policy, .. }) = (reporter.clone(), &reporter.spec);
        let gate =
            egress.open(listener, &tenant.0, policy.clone(), Arc::new(move |denial: &Denial| of.report(denial)))?;
        let bytes = gate.bytes();
        Ok(Self { gate: Mutex::new(Some(gate)), bytes, reporter })
    }

    /// Returns the number of bytes that passed, also after the gate was closed.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(crate) fn spec(&self) -> &EgressSpec {
        &self.reporter.spec
    }

    /// Attributes denials from now on to this context.
    pub(crate) fn belongs_to(&self, id: &str) {
        lock(&self.reporter.window).id = id.into();
    }

    /// Closes the gate: nothing passes any more, and open connections end.
    pub(crate) fn close(&self) {
        lock(&self.gate).take();
    }
}

/// The use of a sandbox's egress by one run. Dropping it ends the narrowing of the policy for that run.
pub(crate) struct RunEgress<'a> {
    egress: Option<&'a SandboxEgress>,
    mark: u64,
    _narrowed: Option<Narrowed>,
    _watched: Option<Watched>,
}

impl<'a> RunEgress<'a> {
    pub(crate) fn through(egress: Option<&'a SandboxEgress>, network: Network, stage: &StageInProgress) -> Self {
        let gate = egress.map(|egress| lock(&egress.gate));
        let gate = gate.as_ref().and_then(|gate| gate.as_ref());
        let narrowed = gate.filter(|_| network == Network::Off).map(|gate| gate.narrow(None));
        let watched = gate.and_then(|gate| Some(gate.watch(stage.connections(MAX_RECORDED)?)));
        Self { egress, mark: gate.map_or(0, Gate::mark), _narrowed: narrowed, _watched: watched }
    }

    /// Returns the distinct denials since the run began, and the number of further ones.
    pub(crate) fn denials(&self) -> (Vec<Denial>, u64) {
        let Some(egress) = self.egress else { return (Vec::new(), 0) };
        lock(&egress.gate).as_ref().map(|gate| gate.denied_since(self.mark)).unwrap_or_default()
    }

    /// Returns the denials since the run began as a few sentences.
    pub(crate) fn denied(&self) -> Vec<String> {
        let (denials, more) = self.denials();
        sentences(&denials, more)
    }
}

pub(crate) fn sentences(denials: &[Denial], more: u64) -> Vec<String> {
    let more = more + denials.len().saturating_sub(IN_A_RESULT) as u64;
    let rest = (more > 0).then(|| format!("and {more} more that were not let out"));
    denials.iter().take(IN_A_RESULT).map(|denial| one_line(&denial.sentence)).chain(rest).collect()
}

/// Reports the denials of one sandbox, and limits how many are reported individually.
struct DenialReporter {
    spec: EgressSpec,
    sinks: DenialSinks,
    window: Mutex<DenialWindow>,
}

struct DenialWindow {
    /// Id of the context; empty as long as no tenant's code can have run in the sandbox.
    id: String,
    since: Instant,
    reported: Vec<String>,
    unreported: u64,
}

impl DenialWindow {
    fn new() -> Self {
        Self { id: String::new(), since: Instant::now(), reported: Vec::new(), unreported: 0 }
    }

    /// Returns the sentences to report now.
    fn take(&mut self, sentence: String, now: Instant) -> Vec<String> {
        let mut sentences = Vec::new();
        if now.duration_since(self.since) >= REPORT_WINDOW {
            let unreported = std::mem::take(&mut self.unreported);
            sentences.extend(
                (unreported > 0).then(|| format!("{unreported} earlier denials were not reported individually")),
            );
            (self.since, self.reported) = (now, Vec::new());
        }
        if self.reported.contains(&sentence) || self.reported.len() >= MAX_REPORTED {
            self.unreported += 1;
        } else {
            self.reported.push(sentence.clone());
            sentences.push(sentence);
        }
        sentences
    }
}

impl DenialReporter {
    fn report(&self, denial: &Denial) {
        self.sinks.denials.fetch_add(1, Ordering::Relaxed);
        let (id, sentences) = {
            let mut window = lock(&self.window);
            let sentences = window.take(one_line(&denial.sentence), Instant::now());
            (window.id.clone(), sentences)
        };
        for detail in sentences {
            let EgressSpec { tenant, realm, .. } = &self.spec;
            let (tenant, id, detail) = (tenant.clone(), id.clone(), Some(detail));
            // Sending fails if there is no subscriber, which is fine.
            let _ = self.sinks.notices.send(Notice { tenant, realm: *realm, id, what: NoticeKind::Denied, detail });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_denials_is_told_in_part_and_counted() {
        let mut window = DenialWindow::new();
        let begun = window.since;
        let told: usize = (0..1000).map(|n| window.take(format!("no {}", n % 50), begun).len()).sum();
        assert_eq!((told, window.unreported), (MAX_REPORTED, 1000 - MAX_REPORTED as u64));
        let later = window.take("no 1".into(), begun + REPORT_WINDOW);
        assert_eq!(later, ["980 earlier denials were not reported individually", "no 1"]);
        assert_eq!(window.take("no 1".into(), begun + REPORT_WINDOW), [""; 0]);
    }
}
