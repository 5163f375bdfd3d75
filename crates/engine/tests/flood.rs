//! Memory under floods, measured: in a program of its own, so that no other test disturbs the figure.

mod support;

use engine::op::RunOutcome;
use support::*;
use testkit::fake::FakeBackend;

/// The most memory the process ever had, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// HOSTILE R14, R16: a guest that ignores `forward_bytes` and sends half a gigabyte without a line end.
#[tokio::test]
async fn a_flood_of_output_keeps_memory_bounded_and_is_counted() {
    let backend = FakeBackend::new();
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    let before = peak();
    let flooded = run(&engine, &context, "print head\nflood 536870912\nprint tail").await;
    assert_eq!(flooded.end, RunOutcome::Ok);
    assert_eq!(flooded.stdout.total_bytes, 536_870_912 + 10);
    assert!(flooded.stdout.text.starts_with("head\nxxx") && flooded.stdout.text.ends_with("xxxtail\n"));
    assert!(flooded.stdout.text.contains("… [536850922 bytes left out] …"), "{}", &flooded.stdout.text[11_900..12_100]);
    let grown = peak() - before;
    assert!(grown < 32 << 20, "grew by {grown} bytes");
}
