//! Usage by tenant and day: creates the `usage` entries that the server writes into the journal each minute, and adds
//! them up.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Mutex, PoisonError};

use engine::TenantUsage;
use engine::op::Tenant;
use serde::{Deserialize, Serialize};

use crate::journal::JournalEntry;

const EVENT: &str = "usage";

/// The number of a tenant's calls, and the bytes of their arguments and answers and of files moved by links.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallUsage {
    pub(crate) calls: u64,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

/// The calls of each tenant since the last [`CallMeter::take`].
#[derive(Default)]
pub(crate) struct CallMeter(Mutex<BTreeMap<String, CallUsage>>);

impl CallMeter {
    pub(crate) fn add(&self, tenant: &str, more: CallUsage) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = match all.get_mut(tenant) {
            Some(sum) => sum,
            None => all.entry(tenant.to_owned()).or_default(),
        };
        sum.calls += more.calls;
        sum.bytes_in += more.bytes_in;
        sum.bytes_out += more.bytes_out;
    }

    pub(crate) fn take(&self) -> BTreeMap<String, CallUsage> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Returns one entry for each tenant that made a call or had a sandbox.
pub(crate) fn entries(
    calls: BTreeMap<String, CallUsage>,
    of_sandboxes: BTreeMap<Tenant, TenantUsage>,
) -> impl Iterator<Item = JournalEntry> {
    let calls = calls.into_iter().map(|(tenant, calls)| (tenant, (calls, None)));
    let mut all: BTreeMap<String, (CallUsage, Option<TenantUsage>)> = calls.collect();
    for (Tenant(tenant), usage) in of_sandboxes {
        all.entry(tenant).or_default().1 = Some(usage);
    }
    all.into_iter().map(|(tenant, (calls, usage))| JournalEntry {
        tenant: Some(tenant),
        calls: Some(calls.calls),
        bytes_in: Some(calls.bytes_in),
        bytes_out: Some(calls.bytes_out),
        cpu_ms: usage.and_then(|usage| usage.cpu_usec).map(|micros| micros.div_ceil(1000)),
        memory_mb_s: usage.and_then(|usage| usage.memory_byte_seconds).map(|bytes| (bytes / MB).ceil() as u64),
        network_bytes: usage.map(|usage| usage.network_bytes),
        ..JournalEntry::event(EVENT)
    })
}

const MB: f64 = (1 << 20) as f64;

/// The usage of one tenant on one day. A figure that the server could not measure is absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct DailyUsage {
    /// Day in UTC, such as `2026-11-16`.
    pub day: String,
    pub tenant: String,
    pub calls: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu_seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_gb_hours: Option<f64>,
    pub bytes_in: u64,
    pub bytes_out: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network_bytes: Option<u64>,
}

/// Selects the entries that [`by_day`] adds up.
#[derive(Debug, Default)]
pub struct UsageFilter {
    pub tenant: Option<String>,
    /// First day in UTC. `until` is the last one.
    pub since: Option<String>,
    pub until: Option<String>,
}

/// A `usage` line of the journal.
#[derive(Deserialize)]
struct UsageLine {
    time: String,
    event: String,
    tenant: String,
    #[serde(default)]
    calls: u64,
    #[serde(default)]
    bytes_in: u64,
    #[serde(default)]
    bytes_out: u64,
    cpu_ms: Option<u64>,
    memory_mb_s: Option<u64>,
    network_bytes: Option<u64>,
}

/// Adds up the `usage` entries among the lines of a journal, by day and tenant. It ignores everything else.
pub fn by_day(lines: impl Iterator<Item = io::Result<String>>, filter: &UsageFilter) -> io::Result<Vec<DailyUsage>> {
    let mut all: BTreeMap<(String, String), DailyUsage> = BTreeMap::new();
    for line in lines {
        let line = line?;
        // Most lines are calls, so they are not parsed.
        if !line.contains("\"event\":\"usage\"") {
            continue;
        }
        let Ok(line) = serde_json::from_str::<UsageLine>(&line) else { continue };
        let Some(day) = line.time.get(..10).filter(|_| line.event == EVENT) else { continue };
        let is_meant = filter.tenant.as_ref().is_none_or(|tenant| *tenant == line.tenant)
            && filter.since.as_ref().is_none_or(|since| day >= since.as_str())
            && filter.until.as_ref().is_none_or(|until| day <= until.as_str());
        if !is_meant {
            continue;
        }
        let sum = all.entry((day.to_owned(), line.tenant.clone())).or_insert_with(|| DailyUsage {
            day: day.to_owned(),
            tenant: line.tenant.clone(),
            ..DailyUsage::default()
        });
        sum.calls += line.calls;
        sum.bytes_in += line.bytes_in;
        sum.bytes_out += line.bytes_out;
        add(&mut sum.cpu_seconds, line.cpu_ms.map(|ms| ms as f64 / 1000.0));
        add(&mut sum.memory_gb_hours, line.memory_mb_s.map(|mb_s| mb_s as f64 / 1024.0 / 3600.0));
        if let Some(bytes) = line.network_bytes {
            *sum.network_bytes.get_or_insert(0) += bytes;
        }
    }
    Ok(all.into_values().collect())
}

fn add(sum: &mut Option<f64>, more: Option<f64>) {
    if let Some(more) = more {
        *sum.get_or_insert(0.0) += more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(day: &str, tenant: &str, rest: &str) -> io::Result<String> {
        Ok(format!("{{\"time\":\"{day}T10:00:00.000Z\",\"seq\":1,\"event\":\"usage\",\"tenant\":\"{tenant}\"{rest}}}"))
    }

    #[test]
    fn entries_add_up_by_day_and_tenant_and_what_is_not_known_is_absent() {
        let lines = || {
            [
                line("2026-11-16", "blue", ",\"calls\":2,\"cpu_ms\":1500,\"memory_mb_s\":3686400,\"bytes_out\":10"),
                line("2026-11-16", "blue", ",\"calls\":1,\"cpu_ms\":500"),
                line("2026-11-16", "green", ",\"calls\":4"),
                line("2026-11-17", "blue", ",\"calls\":1,\"network_bytes\":7"),
                Ok("{\"time\":\"2026-11-17T10:00:00.000Z\",\"event\":\"call\",\"tenant\":\"blue\"}".into()),
                Ok("not a line \"event\":\"usage\"".into()),
            ]
            .into_iter()
        };
        let of = |day: &str, tenant: &str| DailyUsage { day: day.into(), tenant: tenant.into(), ..Default::default() };
        let (cpu_seconds, memory_gb_hours) = (Some(2.0), Some(1.0));
        let first = DailyUsage { calls: 3, cpu_seconds, memory_gb_hours, bytes_out: 10, ..of("2026-11-16", "blue") };
        let second = DailyUsage { calls: 4, ..of("2026-11-16", "green") };
        let third = DailyUsage { calls: 1, network_bytes: Some(7), ..of("2026-11-17", "blue") };
        let all = by_day(lines(), &UsageFilter::default()).unwrap();
        assert_eq!(all, [first.clone(), second, third.clone()]);
        assert!(!serde_json::to_string(&all[1]).unwrap().contains("cpu"), "absent, not zero");
        let (tenant, day) = (Some("blue".to_owned()), |day: &str| Some(day.to_owned()));
        let filter = UsageFilter { tenant: tenant.clone(), ..UsageFilter::default() };
        assert_eq!(by_day(lines(), &filter).unwrap(), [first, third.clone()]);
        let filter = UsageFilter { tenant, since: day("2026-11-17"), until: day("2026-11-17") };
        assert_eq!(by_day(lines(), &filter).unwrap(), [third]);
    }

    #[test]
    fn what_is_written_adds_up_to_what_was_used() {
        let calls = CallMeter::default();
        calls.add("blue", CallUsage { calls: 1, bytes_in: 5, bytes_out: 7 });
        calls.add("blue", CallUsage { calls: 1, bytes_in: 5, bytes_out: 7 });
        let usage = TenantUsage { cpu_usec: Some(2_000_000), memory_byte_seconds: None, network_bytes: 9 };
        let written: Vec<_> = entries(calls.take(), BTreeMap::from([(Tenant("green".into()), usage)])).collect();
        let shown: Vec<_> = written.iter().map(|entry| (entry.tenant.as_deref(), entry.calls, entry.cpu_ms)).collect();
        assert_eq!(shown, [(Some("blue"), Some(2), None), (Some("green"), Some(0), Some(2000))]);
        assert_eq!((written[0].bytes_in, written[1].memory_mb_s), (Some(10), None));
        assert_eq!(calls.take(), BTreeMap::new());
    }
}
