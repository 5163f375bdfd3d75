//! Metering: the processor time, the memory and the traffic of each tenant's sandboxes.
//!
//! A sandbox is counted from the moment at which it belongs to a context or a conversation. Its counters are read
//! periodically and once more when it ends, so at most the usage since the last reading can be missing.

use std::collections::BTreeMap;
use std::sync::Mutex;

use tokio::time::Instant;

use crate::guest::lock;
use crate::op::Tenant;

/// What a tenant used. A figure that nothing on this machine counts is `None`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct TenantUsage {
    /// Processor time in microseconds, including that of the start of sandboxes.
    pub cpu_usec: Option<u64>,
    /// Memory multiplied by the time for which it was occupied.
    pub memory_byte_seconds: Option<f64>,
    /// Bytes to and from the network.
    pub network_bytes: u64,
}

/// The usage of each tenant since the last [`Meter::take`].
#[derive(Default)]
pub(crate) struct Meter(Mutex<BTreeMap<Tenant, TenantUsage>>);

/// The counters of one sandbox.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Counters {
    pub(crate) cpu_usec: Option<u64>,
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) network_bytes: u64,
}

/// The usage of a sandbox that was already counted; `None` before it belongs to a tenant, and after its end.
#[derive(Default)]
pub(crate) struct SandboxMeter(Mutex<Option<Counted>>);

struct Counted {
    tenant: Tenant,
    at: Instant,
    counters: Counters,
}

impl SandboxMeter {
    /// Begins to count the usage of the sandbox for this tenant.
    pub(crate) fn begin(&self, tenant: &Tenant) {
        let (at, counters) = (Instant::now(), Counters::default());
        lock(&self.0).get_or_insert_with(|| Counted { tenant: tenant.clone(), at, counters });
    }

    /// Returns whether the usage of the sandbox is being counted.
    pub(crate) fn counts(&self) -> bool {
        lock(&self.0).is_some()
    }
}

impl Meter {
    /// Adds what a sandbox used since it was counted last.
    pub(crate) fn count(&self, of: &SandboxMeter, now: Counters) {
        if let Some(counted) = &mut *lock(&of.0) {
            self.add(counted, now);
        }
    }

    /// Adds what a sandbox used until its end.
    pub(crate) fn count_last(&self, of: &SandboxMeter, now: Counters) {
        if let Some(mut counted) = lock(&of.0).take() {
            self.add(&mut counted, now);
        }
    }

    fn add(&self, counted: &mut Counted, now: Counters) {
        let (at, before) = (Instant::now(), counted.counters);
        let mut totals = lock(&self.0);
        let total = totals.entry(counted.tenant.clone()).or_default();
        if let Some(cpu) = now.cpu_usec {
            *total.cpu_usec.get_or_insert(0) += cpu.saturating_sub(before.cpu_usec.unwrap_or(0));
        }
        // Between two readings the memory is taken as the mean of both.
        let known = [before.memory_bytes, now.memory_bytes].into_iter().flatten();
        let (sum, readings) = known.fold((0.0, 0.0), |(sum, readings), bytes| (sum + bytes as f64, readings + 1.0));
        if readings > 0.0 {
            let seconds = at.duration_since(counted.at).as_secs_f64();
            *total.memory_byte_seconds.get_or_insert(0.0) += sum / readings * seconds;
        }
        total.network_bytes += now.network_bytes.saturating_sub(before.network_bytes);
        counted.at = at;
        counted.counters = Counters { cpu_usec: now.cpu_usec.or(before.cpu_usec), ..now };
    }

    /// Returns the usage of each tenant since the last call.
    pub(crate) fn take(&self) -> BTreeMap<Tenant, TenantUsage> {
        std::mem::take(&mut lock(&self.0))
    }
}
