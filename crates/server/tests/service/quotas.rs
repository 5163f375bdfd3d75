//! What one tenant may take, for real. `noisy.rs` shows what others notice of a tenant that takes all of it.

use std::time::Duration;

use serde_json::{Value, json};
use testkit::http::Mcp;

use crate::support::{Service, Setup, eventually, report, text};

/// Quotas of one tenant over all tool sets. The others have none of them.
#[test]
fn a_tenant_gets_what_its_quotas_say_and_no_more() {
    let quotas = [("blue", "{ contexts = 3, runs = 1, memory_mb = 300 }"), ("green", "{ calls_per_second = 5 }")];
    let service = Service::with("quotas", Setup { quotas: &quotas, ..Setup::default() });
    let mut canary = service.canary();
    let mut blue = service.client("blue", "sandpool");

    // Contexts, in all tool sets together.
    let contexts = [0, 1].map(|n| made(&mut blue, n));
    let mut agentrun = service.client("blue", "agentrun");
    let third = agentrun.good("create_context", json!({ "name": "third" }))["context_id"].clone();
    for (dialect, tool, arguments) in [
        ("sandpool", "create_context", json!({ "name": "more" })),
        ("agentrun", "create_context", json!({ "name": "more" })),
        ("workbench", "sandbox_create", json!({})),
        ("microsandbox", "execute_code", json!({ "code": "1" })),
    ] {
        let answer = service.client("blue", dialect).call(tool, arguments);
        let refused = answer.get("error").is_some() || answer["result"]["isError"] == true;
        assert!(refused && answer.to_string().contains("contexts"), "{dialect}: {answer}");
        assert!(answer.to_string().contains('3'), "the limit is named: {answer}");
    }
    made(&mut service.client("canary", "sandpool"), 9);
    agentrun.good("stop_context", json!({ "context_id": third }));
    let other = made(&mut blue, 2);
    report(
        "quota contexts",
        "the fourth of three, in any tool set: refused with the limit's name; one that ends makes room",
    );

    // Runs: in contexts of their own, and still one after another.
    let code = "import time\na = time.time()\ntime.sleep(0.4)\nprint(a, time.time())";
    let mut spans: Vec<(f64, f64)> = std::thread::scope(|scope| {
        let runs: Vec<_> = contexts
            .iter()
            .chain([&other])
            .map(|context| {
                let service = &service;
                scope.spawn(move || {
                    let ran = service
                        .client("blue", "sandpool")
                        .good("run_code", json!({ "code": code, "context": context }));
                    let mut times =
                        ran["stdout"].as_str().unwrap().split_whitespace().map(|time| time.parse::<f64>().unwrap());
                    (times.next().unwrap(), times.next().unwrap())
                })
            })
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    spans.sort_by(|a, b| a.0.total_cmp(&b.0));
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "two ran at once: {spans:?}");
    report("quota runs", "three runs of a tenant that may have one at a time: one after another");

    // Memory: each is below its own limit, together they are over the tenant's.
    let fill = "x = bytearray(b'1') * (180 << 20)\nprint(len(x) >> 20)";
    let ends: Vec<Value> =
        contexts.iter().map(|c| blue.call("run_code", json!({ "code": fill, "context": c }))).collect();
    let killed = |answer: &Value| answer["result"]["isError"] == true && text(answer).contains("emory");
    let last = blue.call("run_code", json!({ "code": "print(len(x) >> 20)", "context": contexts[0] }));
    assert!(ends.iter().any(killed) || last["result"]["isError"] == true, "{ends:?} {last}");
    canary.sings("a tenant without memory");
    for context in &contexts {
        blue.good("run_code", json!({ "code": "print('again')", "context": context }));
    }
    report(
        "quota memory_mb",
        "two contexts that together want more than their tenant has: killed within the tenant, usable again",
    );

    calls_per_second(&service);
    canary.sings("quotas");
    service.finish();
}

fn made(client: &mut Mcp, number: usize) -> String {
    let made = client.good("create_context", json!({ "name": format!("context-{number}") }));
    made["context"].as_str().unwrap().to_owned()
}

fn calls_per_second(service: &Service) {
    let mut green = service.client("green", "sandpool");
    let mut hasty = || green.send(&testkit::http::request(1, "tools/list", json!({}))).unwrap();
    let mut refused = None;
    for _ in 0..200 {
        let answer = hasty();
        if answer.status == 429 {
            refused = Some(answer);
            break;
        }
        assert_eq!(answer.status, 200);
    }
    let refused = refused.expect("200 calls in a row are too many for five a second");
    let wait: u64 = refused.header("retry-after").expect("when to come back").parse().unwrap();
    assert!((1..=60).contains(&wait), "{refused:?}");
    assert!(refused.json()["error"].is_object() || refused.json()["error"].is_string(), "{}", refused.text());
    // The others are not held up.
    let mut canary = service.client("canary", "sandpool");
    for _ in 0..100 {
        canary.request("tools/list", json!({}));
    }
    std::thread::sleep(Duration::from_secs(wait));
    eventually("it may call again", || hasty().status == 200);
    report(
        "quota calls_per_second",
        "more than five calls a second: 429 with Retry-After; others go on, and so does it later",
    );
}
