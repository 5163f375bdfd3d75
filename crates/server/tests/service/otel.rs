//! Traces, metrics and logs for OpenTelemetry, from the built server to a collector of the test's own.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::collector::{Collector, attribute};

use crate::support::{Service, Setup, eventually, token};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

fn settings(collector: &Collector, more: &str) -> String {
    let address = collector.address;
    format!("[otel]\nendpoint = \"http://{address}\"\ndelay_ms = 20\nmetric_interval_ms = 100\n{more}")
}

/// The code that runs has this word in it, and the answer another one. Neither is anybody's business.
fn run(parent: &str) -> Value {
    let code = "import os\nprint('hunter' + '2')\nprint(os.environ.get('TRACEPARENT'))";
    json!({ "name": "run_code", "arguments": { "code": code }, "_meta": { "traceparent": parent } })
}

fn named<'a>(spans: &'a [Value], name: &str) -> Vec<&'a Value> {
    spans.iter().filter(|span| span["name"] == name).collect()
}

/// A call is a span of the client's trace, and its stages are spans below it.
#[test]
fn otel_a_call_is_a_trace() {
    let collector = Collector::start(Some(200));
    let settings = settings(&collector, "protocol = \"http/json\"\nservice_name = \"lab\"\n");
    let service = Service::with("otel", Setup { settings: &settings, ..Setup::default() });
    let mut blue = service.client("blue", "sandpool");
    let answer = blue.request("tools/call", run(&format!("00-{TRACE}-{PARENT}-01")));
    let failed = blue.call("run_code", json!({ "code": "1 / 0" }));
    assert_eq!(failed["result"]["isError"], true, "{failed}");
    let unknown = blue.call("no_such_tool", json!({}));
    assert!(unknown["error"].is_object(), "{unknown}");
    blue.request("tools/list", json!({}));
    eventually("the spans arrive", || {
        let spans = collector.spans();
        named(&spans, "tools/call run_code").len() == 2
            && named(&spans, "run").len() == 2
            && named(&spans, "tools/call").len() == 1
            && named(&spans, "tools/list").len() == 1
    });

    let spans = collector.spans();
    let call = named(&spans, "tools/call run_code").into_iter().find(|span| span["traceId"] == TRACE).unwrap();
    assert_eq!((&call["parentSpanId"], &call["kind"]), (&json!(PARENT), &json!(2)), "{call}");
    for (name, value) in [
        ("mcp.method.name", "tools/call"),
        ("gen_ai.tool.name", "run_code"),
        ("gen_ai.operation.name", "execute_tool"),
        ("jsonrpc.request.id", "0"),
        ("network.transport", "tcp"),
        ("sandpool.tenant", "blue"),
        ("sandpool.dialect", "sandpool"),
    ] {
        assert_eq!(attribute(call, name), value, "{name}: {call}");
    }
    assert_eq!(attribute(call, "error.type"), &Value::Null);
    let below = |name: &str| spans.iter().find(|span| span["name"] == name && span["traceId"] == TRACE).unwrap();
    for stage in ["create", "run"] {
        assert_eq!(below(stage)["parentSpanId"], call["spanId"], "{spans:#?}");
    }
    let within = |one: &Value, name: &str| one[name].as_str().unwrap().parse::<u64>().unwrap();
    assert!(within(below("run"), "startTimeUnixNano") >= within(call, "startTimeUnixNano"));
    assert!(within(below("run"), "endTimeUnixNano") <= within(call, "endTimeUnixNano"));
    // The code can continue the trace.
    let expected = format!("00-{TRACE}-{}-01", below("run")["spanId"].as_str().unwrap());
    assert!(answer.to_string().contains(&expected), "{answer}");

    let wrong = named(&spans, "tools/call run_code").into_iter().find(|span| span["traceId"] != TRACE).unwrap();
    assert_eq!(
        (attribute(wrong, "error.type"), &wrong["status"]["code"]),
        (&json!("tool_error"), &json!(2)),
        "{wrong}"
    );
    assert_eq!(wrong.get("parentSpanId"), None, "no parent was given: {wrong}");
    let unknown = named(&spans, "tools/call")[0];
    assert_eq!(attribute(unknown, "error.type"), &attribute(unknown, "rpc.response.status_code").clone());
    assert!(attribute(unknown, "error.type").as_str().is_some_and(|code| code.starts_with("-32")), "{unknown}");

    logs_and_metrics(&collector);
    service.finish();
    // The last metrics come with the end of the server, and nothing tells what only the tenant may know.
    for received in collector.received() {
        let body = String::from_utf8_lossy(&received.body).into_owned();
        assert!(body.contains("\"lab\""), "{body}");
        for secret in ["hunter", "ZeroDivision", &token("blue")] {
            assert!(!body.contains(secret), "`{secret}`: {body}");
        }
    }
}

fn logs_and_metrics(collector: &Collector) {
    let line_of_the_call = || {
        let is_it = |line: &Value| {
            line["traceId"] == TRACE && line["body"]["stringValue"].as_str().is_some_and(|s| s.contains("run_code ok"))
        };
        collector.log_lines().into_iter().find(is_it)
    };
    eventually("the line of the call arrives", || line_of_the_call().is_some());
    let line = line_of_the_call().unwrap();
    assert_eq!((&line["severityText"], &line["severityNumber"]), (&json!("INFO"), &json!(9)), "{line}");
    let newest = |name: &str| collector.metrics().into_iter().rfind(|metric| metric["name"] == name);
    let points = || {
        let metric = newest("mcp.server.operation.duration")?;
        Some(metric["histogram"]["dataPoints"].as_array()?.clone())
    };
    eventually("both calls are counted", || {
        let is_call = |point: &&Value| attribute(point, "gen_ai.tool.name") == "run_code";
        points().is_some_and(|points| points.iter().filter(is_call).count() == 2)
    });
    let errors: Vec<Value> = points().unwrap().iter().map(|point| attribute(point, "error.type").clone()).collect();
    assert!(errors.contains(&Value::Null) && errors.contains(&json!("tool_error")), "{errors:?}");
    let contexts = newest("sandpool_contexts").unwrap();
    assert!(contexts["gauge"]["dataPoints"][0]["asInt"].is_string(), "{contexts}");
}

/// The usual encoding is protobuf. The test reads it by the numbers of the fields.
#[test]
fn otel_protobuf_is_the_usual_encoding() {
    let collector = Collector::start(Some(200));
    let settings = settings(&collector, "");
    let service = Service::with("otel-pb", Setup { settings: &settings, ..Setup::default() });
    service.client("blue", "sandpool").good("run_code", json!({ "code": "1" }));
    let names = || -> Vec<String> {
        let traces = collector.received().into_iter().filter(|received| received.path == "/v1/traces");
        // ExportTraceServiceRequest.resource_spans.scope_spans.spans.name
        let names = traces.flat_map(|received| fields(&received.body, &[1, 2, 2, 5]));
        names.map(|name| String::from_utf8(name).unwrap()).collect()
    };
    eventually("the spans arrive", || names().iter().any(|name| name == "tools/call run_code"));
    let types: Vec<String> = collector
        .received()
        .into_iter()
        .flat_map(|received| received.headers)
        .filter_map(|(name, value)| (name == "content-type").then_some(value))
        .collect();
    assert!(types.iter().all(|content| content == "application/x-protobuf"), "{types:?}");
    service.finish();
}

/// The contents of the fields with these numbers, one below the other.
fn fields(message: &[u8], path: &[u64]) -> Vec<Vec<u8>> {
    let Some((wanted, below)) = path.split_first() else { return vec![message.to_vec()] };
    let (mut rest, mut found) = (message, Vec::new());
    let varint = |rest: &mut &[u8]| {
        let mut number = 0;
        for shift in (0..).step_by(7) {
            let byte = rest[0];
            *rest = &rest[1..];
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return number;
            }
        }
        unreachable!()
    };
    while !rest.is_empty() {
        let key = varint(&mut rest);
        let length = match key & 7 {
            0 => {
                varint(&mut rest);
                continue;
            }
            1 => 8,
            2 => varint(&mut rest) as usize,
            5 => 4,
            kind => panic!("kind {kind}"),
        };
        let (content, after) = rest.split_at(length);
        rest = after;
        if key >> 3 == *wanted {
            found.extend(fields(content, below));
        }
    }
    found
}

/// A collector that accepts and never answers costs records, and no call.
#[test]
fn otel_a_collector_that_hangs_delays_no_call() {
    let collector = Collector::start(None);
    let settings = settings(&collector, "queue = 4\n");
    let service = Service::with("otel-stuck", Setup { settings: &settings, ..Setup::default() });
    let mut blue = service.client("blue", "sandpool");
    let begun = Instant::now();
    for _ in 0..20 {
        blue.good("run_code", json!({ "code": "1" }));
    }
    // One request to the collector may last ten seconds.
    assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    let page = service.account("blue").ask("GET", "/metrics", &[], b"").unwrap().text();
    let dropped = page.lines().find_map(|line| line.strip_prefix("sandpool_otel_dropped_total{signal=\"traces\"} "));
    assert!(dropped.is_some_and(|count| count.parse::<u64>().unwrap() > 0), "{page}");
    service.finish();
}

/// Without a collector there is no trace, for the code neither.
#[test]
fn otel_without_a_collector_code_sees_no_trace() {
    let service = Service::start("otel-off");
    let answer = service.client("blue", "sandpool").request("tools/call", run(&format!("00-{TRACE}-{PARENT}-01")));
    assert!(answer.to_string().contains("None"), "{answer}");
    let page = service.account("blue").ask("GET", "/metrics", &[], b"").unwrap().text();
    assert!(!page.contains("sandpool_otel"), "{page}");
    service.finish();
}
