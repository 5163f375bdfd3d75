//! The protocol over lines, with a fake engine behind it: every trap of PROTOCOL and of the `A` rows that lines can carry.

#[path = "../mcp_fake/mod.rs"]
mod mcp_fake;

mod tasks;
mod tools;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use dialects::{Dialect, Lang, Links, Options, agentrun};
use engine::Hold;
use mcp::stdio::{StdioEnd, StdioError, StdioOptions, serve};
use mcp_fake::FakeEngine;
use serde_json::{Value, json};
use server::handler::{Handlers, Surface};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

struct Client {
    input: Option<WriteHalf<DuplexStream>>,
    output: Lines<BufReader<ReadHalf<DuplexStream>>>,
    engine: Arc<FakeEngine>,
    shutdown: CancellationToken,
    server: JoinHandle<Result<StdioEnd, StdioError>>,
    transcript: String,
}

impl Client {
    fn new() -> Self {
        Self::with(&agentrun::DIALECT, StdioOptions::default())
    }

    fn with(dialect: &'static Dialect, options: StdioOptions) -> Self {
        Self::speaking(dialect, None, options)
    }

    fn speaking(dialect: &'static Dialect, lang: Option<Lang>, options: StdioOptions) -> Self {
        let surface = Arc::new(Surface::new(dialect, lang, Options::default(), Links::default()));
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (input, output) = tokio::io::split(theirs);
        let (from_server, to_server) = tokio::io::split(ours);
        let engine = Arc::new(FakeEngine::default());
        let shutdown = CancellationToken::new();
        let executor = engine.clone();
        let make = move |caller| Handlers::new(executor, surface).of(caller, Hold::default());
        let server = tokio::spawn(serve(input, output, make, options, shutdown.clone()));
        let output = BufReader::new(from_server).lines();
        Self { input: Some(to_server), output, engine, shutdown, server, transcript: String::new() }
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.input.as_mut().unwrap().write_all(bytes).await.unwrap();
    }

    async fn line(&mut self) -> Option<String> {
        tokio::time::timeout(Duration::from_secs(20), self.output.next_line())
            .await
            .expect("an answer in time")
            .unwrap()
    }

    async fn answer(&mut self) -> Value {
        let line = self.line().await.expect("an answer, not the end");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("not JSON ({error}): {line}"))
    }

    /// Sends a line and writes it down together with its answers.
    async fn say(&mut self, line: impl AsRef<[u8]>, answers: usize) {
        self.write(&[line.as_ref(), b"\n"].concat()).await;
        writeln!(self.transcript, "> {}", shortened(&String::from_utf8_lossy(line.as_ref()))).unwrap();
        for _ in 0..answers {
            let line = self.line().await.expect("an answer, not the end");
            let line =
                line.replace(concat!("\"version\":\"", env!("CARGO_PKG_VERSION"), "\""), "\"version\":\"[version]\"");
            writeln!(self.transcript, "< {}", shortened(&line)).unwrap();
        }
    }

    async fn request(&mut self, id: impl Into<Value>, method: &str, params: Value) -> Value {
        let request = json!({ "jsonrpc": "2.0", "id": id.into(), "method": method, "params": params });
        self.write(format!("{request}\n").as_bytes()).await;
        self.answer().await
    }

    /// The object in the first block, which is also the structured content unless it is an error.
    async fn call(&mut self, tool: &str, arguments: Value) -> Value {
        let answer = self.request(1, "tools/call", json!({ "name": tool, "arguments": arguments })).await;
        let result = &answer["result"];
        let text = result["content"][0]["text"].as_str().unwrap_or_else(|| panic!("no text in {answer}"));
        let object: Value = serde_json::from_str(text).unwrap();
        let is_error = object.get("code").is_some();
        assert_eq!(result["isError"], json!(is_error), "{answer}");
        assert_eq!(result.get("structuredContent"), (!is_error).then_some(&object));
        object
    }

    async fn context(&mut self, name: &str) -> String {
        let created = self.call("create_context", json!({ "name": name })).await;
        created["context_id"].as_str().unwrap().to_owned()
    }

    /// Closes the input; nothing may come any more.
    async fn end(mut self) -> String {
        let mut input = self.input.take().unwrap();
        input.shutdown().await.unwrap();
        drop(input);
        assert_eq!(self.line().await, None, "an answer too many");
        assert_eq!(self.server.await.unwrap().unwrap(), StdioEnd::EndOfInput);
        self.transcript
    }
}

fn shortened(line: &str) -> String {
    match line.char_indices().nth(600) {
        Some((cut, _)) => format!("{}… {} bytes", &line[..cut], line.len()),
        None => line.to_owned(),
    }
}

async fn transcript(lines: &[(&str, usize)]) -> String {
    let mut client = Client::new();
    for (line, answers) in lines {
        client.say(line, *answers).await;
    }
    client.end().await
}

macro_rules! golden {
    ($name:ident, $($line:expr => $answers:expr),+ $(,)?) => {
        #[tokio::test]
        async fn $name() {
            insta::assert_snapshot!(transcript(&[$(($line, $answers)),+]).await);
        }
    };
}

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;
const OLDEST: &str = r#"{"jsonrpc":"2.0","id":0,"method":"initialize","params":{"protocolVersion":"2024-11-05","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
const CREATE: &str = r#"{"jsonrpc":"2.0","id":"c","method":"tools/call","params":{"name":"create_context","arguments":{"name":"alice"}}}"#;
const LIST: &str = r#"{"jsonrpc":"2.0","id":"l","method":"tools/call","params":{"name":"list_contexts"}}"#;
const MODERN: &str = r#""_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{},"io.modelcontextprotocol/clientInfo":{"name":"t","version":"1"}}"#;

golden!(the_legacy_handshake, INITIALIZE => 1, INITIALIZED => 0, CREATE => 1, LIST => 1);

golden!(
    an_initialize_with_members_missing_is_filled_in,
    r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"initialize","params":{"protocolVersion":"1999-01-01","capabilities":null,"clientInfo":{}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"initialize","params":{"protocolVersion":5}}"# => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"initialize"}"# => 1,
    r#"{"jsonrpc":"2.0","id":5,"method":"initialize","params":{"protocolVersion":"2026-07-28","capabilities":{},"clientInfo":{"name":"t","version":"1"}}}"# => 1,
);

golden!(
    what_comes_before_initialize_is_answered,
    INITIALIZED => 0,
    r#"{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}"# => 0,
    r#"{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":99}}"# => 0,
    r#"{"jsonrpc":"2.0","method":"notifications/nonsense","params":7}"# => 0,
    r#"{"jsonrpc":"2.0","id":1,"result":{}}"# => 0,
    r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"# => 1,
    LIST => 1,
    INITIALIZE => 1,
);

golden!(
    malformed_json_is_a_parse_error,
    "junk" => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/li"# => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":"ping"} trailing"# => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":"ping","params":{"x":NaN}}"# => 1,
    "Content-Length: 52" => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"ping"}"# => 1,
);

golden!(
    a_bad_envelope_is_an_invalid_request,
    "7" => 1,
    "null" => 1,
    r#""text""# => 1,
    "{}" => 1,
    r#"{"id":1,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"1.0","id":1,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":1}"# => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":7}"# => 1,
    r#"{"jsonrpc":"2.0","id":1,"Method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":null,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":1.5,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":[1],"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":18446744073709551616,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":9007199254740993,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":18446744073709551615,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":-1,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":"","method":"ping"}"# => 1,
);

golden!(
    duplicate_keys_are_refused,
    r#"{"jsonrpc":"2.0","id":1,"method":"ping","method":"tools/list"}"# => 1,
    r#"{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"list_contexts","arguments":{},"arguments":{"a":1}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"list_contexts","name":"stop_context"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"run_code","arguments":{"code":"x","\u0063ode":"y"}}}"# => 1,
);

golden!(
    params_of_the_wrong_shape_are_invalid_params,
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call"}"# => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{}}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":7}}"# => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"run_code","arguments":"{\"code\":\"1\"}"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":5,"method":"tools/call","params":{"name":"run_code","arguments":[1]}}"# => 1,
    r#"{"jsonrpc":"2.0","id":6,"method":"tools/call","params":["run_code"]}"# => 1,
    r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"run_code","_meta":1}}"# => 1,
    r#"{"jsonrpc":"2.0","id":8,"method":"tools/list","params":{"cursor":1}}"# => 1,
    r#"{"jsonrpc":"2.0","id":9,"method":"tools/list","params":{"cursor":"page 2"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":10,"method":"tools/call","params":{"name":"no_such_tool"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":11,"method":"tools/call","params":{"name":"list_contexts","arguments":null}}"# => 1,
);

golden!(
    files_are_resources,
    INITIALIZE => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"create_context","arguments":{"name":"a"}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"upload_file","arguments":{"context_id":"a","path":"x.txt","content":"hello"}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"resources/list"}"# => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"resources/list","params":{"cursor":"page 2"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":5,"method":"resources/templates/list"}"# => 1,
    r#"{"jsonrpc":"2.0","id":6,"method":"resources/read","params":{"uri":"file:///etc/passwd"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":7,"method":"resources/read","params":{"uri":7}}"# => 1,
);

golden!(
    what_was_not_declared_is_not_found,
    INITIALIZE => 1,
    r#"{"jsonrpc":"2.0","id":1,"method":"prompts/list"}"# => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"prompts/get","params":{"name":"x"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"resources/subscribe","params":{"uri":"sandpool://files/x"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"resources/subscribe"}"# => 1,
    r#"{"jsonrpc":"2.0","id":6,"method":"completion/complete","params":{}}"# => 1,
    r#"{"jsonrpc":"2.0","id":7,"method":"logging/setLevel","params":{"level":"debug"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":8,"method":"tasks/get","params":{"taskId":"1"}}"# => 1,
    r#"{"jsonrpc":"2.0","id":9,"method":"subscriptions/listen","params":{"notifications":{}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":10,"method":"no/such/method"}"# => 1,
);

golden!(
    a_batch_is_answered_as_a_batch_where_the_revision_has_them,
    OLDEST => 1,
    r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"# => 1,
    r#"[{"jsonrpc":"2.0","method":"notifications/initialized"},{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":1}}]"# => 0,
    r#"[{"jsonrpc":"2.0","method":"notifications/initialized"},7,[],{"jsonrpc":"2.0","id":2}]"# => 1,
    r#"[{"jsonrpc":"2.0","id":3,"method":"initialize","params":{"protocolVersion":"2024-11-05"}}]"# => 1,
    "[]" => 1,
    &format!("[{}1]", "1,".repeat(50)) => 1,
    r#"{"jsonrpc":"2.0","id":4,"method":"ping"}"# => 1,
);

golden!(
    a_batch_is_refused_where_the_revision_has_none,
    INITIALIZE => 1,
    r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"# => 1,
);

golden!(
    odd_numbers_are_named_in_the_dialect_s_form,
    r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"create_context","arguments":{"name":1e309}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":2,"method":"tools/call","params":{"name":"create_context","arguments":{"name":-1e400,"language":9007199254740993}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":3,"method":"tools/call","params":{"name":"create_context","arguments":{"name":"a","language":1e999}}}"# => 1,
    r#"{"jsonrpc":"2.0","id":1e309,"method":"ping"}"# => 1,
);

#[tokio::test]
async fn the_modern_revision_needs_no_handshake() {
    let mut client = Client::speaking(&agentrun::DIALECT, Some(Lang::En), StdioOptions::default());
    client.say(format!(r#"{{"jsonrpc":"2.0","id":1,"method":"server/discover","params":{{{MODERN}}}}}"#), 1).await;
    client.say(r#"{"jsonrpc":"2.0","id":2,"method":"server/discover","params":{}}"#, 1).await;
    let list = format!(r#"{{"jsonrpc":"2.0","id":3,"method":"tools/list","params":{{{MODERN}}}}}"#);
    client.write(format!("{list}\n").as_bytes()).await;
    let tools = client.answer().await;
    assert_eq!(tools["result"]["resultType"], "complete");
    assert_eq!(tools["result"]["ttlMs"], 300_000);
    assert_eq!(tools["result"]["cacheScope"], "private");
    let call =
        r#"{"jsonrpc":"2.0","id":4,"method":"tools/call","params":{"name":"list_contexts","arguments":{},META}}"#;
    client.say(call.replace("META", MODERN), 1).await;
    client.say(call.replace("META", &MODERN.replace("2026-07-28", "2031-01-01")), 1).await;
    client.say(r#"{"jsonrpc":"2.0","id":6,"method":"ping","params":{META}}"#.replace("META", MODERN), 1).await;
    client.say(r#"[{"jsonrpc":"2.0","id":7,"method":"tools/list"}]"#, 1).await;
    insta::assert_snapshot!(client.end().await);
}

#[tokio::test]
async fn carriage_returns_blank_lines_and_a_byte_order_mark_are_no_trouble() {
    let mut client = Client::new();
    client.write(b"\xef\xbb\xbf{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\r\n\r\n\n   \n").await;
    assert_eq!(client.answer().await, json!({ "jsonrpc": "2.0", "id": 1, "result": {} }));
    client.end().await;
}

#[tokio::test]
async fn the_last_line_needs_no_newline() {
    let mut client = Client::new();
    client.write(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}").await;
    let mut input = client.input.take().unwrap();
    input.shutdown().await.unwrap();
    assert_eq!(client.answer().await["id"], 1);
    assert_eq!(client.line().await, None);
}

#[tokio::test]
async fn what_is_no_text_is_answered_with_its_id() {
    let mut client = Client::new();
    client.say(br#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"run_code","arguments":{"code":"\ud800"}}}"#, 1).await;
    client.say(b"{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":\"tools/call\",\"params\":{\"name\":\"\xff\xfe\"}}", 1).await;
    client.say(b"\xff\xfe", 1).await;
    client.say(br#"{"jsonrpc":"2.0","id":"\udfff","method":"ping"}"#, 1).await;
    insta::assert_snapshot!(client.end().await);
}

#[tokio::test]
async fn depth_and_breadth_are_refused_without_harm() {
    let mut client = Client::new();
    let deep = |n| {
        format!(r#"{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{"a":{}{}}}}}"#, "[".repeat(n), "]".repeat(n))
    };
    client.say(deep(100_000), 1).await;
    client.say("[".repeat(1_000_000), 1).await;
    client
        .say(format!(r#"{{"jsonrpc":"2.0","id":2,"method":"ping","params":{{"a":[{}0]}}}}"#, "0,".repeat(1_000_000)), 1)
        .await;
    client.say(format!(r#"{{"jsonrpc":"2.0","id":"{}","method":"ping"}}"#, "i".repeat(100_000)), 1).await;
    insta::assert_snapshot!(client.end().await);
}

#[tokio::test]
async fn a_line_over_24_mib_is_answered_and_the_next_one_is_read() {
    let mut client = Client::new();
    let code = "x".repeat(25 << 20);
    for line in [
        format!(
            r#"{{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{{"name":"run_code","arguments":{{"code":"{code}"}}}}}}"#
        ),
        format!(
            r#"{{"method":"tools/call","params":{{"name":"run_code","arguments":{{"code":"{code}"}}}},"jsonrpc":"2.0", "id": "last" }}"#
        ),
        format!(r#"{{"method":"tools/call","params":{{"code":"{code}","id":5}}}}"#),
        code.clone(),
        r#"{"jsonrpc":"2.0","id":8,"method":"ping"}"#.to_owned(),
    ] {
        client.say(line, 1).await;
    }
    let said: String =
        client.end().await.lines().filter(|line| line.starts_with('<')).fold(String::new(), |a, l| a + l + "\n");
    insta::assert_snapshot!(said);
}

#[tokio::test]
async fn an_answer_over_8_mib_is_never_sent() {
    let mut client = Client::new();
    client.context("a").await;
    let answer = client
        .request(5, "tools/call", json!({ "name": "run_code", "arguments": { "code": "huge", "context_id": "a" } }))
        .await;
    assert_eq!((&answer["id"], &answer["error"]["code"]), (&json!(5), &json!(-32603)));
    assert!(answer["error"]["message"].as_str().unwrap().contains("over the limit"));
    client.end().await;
}

#[tokio::test]
async fn the_answers_of_a_batch_stay_below_8_mib_together() {
    let mut client = Client::new();
    client.context("a").await;
    let one = |id| json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": { "name": "run_code", "arguments": { "code": "big", "context_id": "a" } } });
    client.write(format!("{}\n", json!([one(1), one(2), one(3)])).as_bytes()).await;
    let line = client.line().await.unwrap();
    assert!(line.len() < 9 << 20, "{}", line.len());
    let answers: Vec<Value> = serde_json::from_str(&line).unwrap();
    assert_eq!(answers.iter().filter(|a| a.get("result").is_some()).count(), 1);
    let mut ids: Vec<i64> = answers.iter().map(|a| a["id"].as_i64().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 2, 3]);
    client.end().await;
}

#[tokio::test]
async fn a_panic_is_answered_and_the_server_goes_on() {
    let mut client = Client::new();
    client.context("a").await;
    let answer = client
        .request(1, "tools/call", json!({ "name": "run_code", "arguments": { "code": "panic", "context_id": "a" } }))
        .await;
    assert_eq!(
        answer["error"],
        json!({ "code": -32603, "message": "internal error in run_code: the call was given up" })
    );
    assert_eq!(client.call("list_contexts", json!({})).await["total"], 1);
    client.end().await;
}

fn run(id: impl Into<Value>, code: &str) -> String {
    format!(
        "{}\n",
        json!({ "jsonrpc": "2.0", "id": id.into(), "method": "tools/call", "params": { "name": "run_code", "arguments": { "code": code, "context_id": "a" } } })
    )
}

#[tokio::test]
async fn an_id_in_use_is_refused_and_free_again_afterwards() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run(7, "sleep").as_bytes()).await;
    client.write(run(7, "x = 1").as_bytes()).await;
    client.write(run("7", "x = 1").as_bytes()).await;
    let first = client.answer().await;
    assert_eq!(first["error"]["message"], "a request with this `id` is still running");
    assert_eq!(client.answer().await["id"], "7");
    assert_eq!(client.answer().await["result"]["structuredContent"]["stdout"], "slept\n");
    assert_eq!(client.request(7, "ping", json!({})).await["result"], json!({}));
    client.end().await;
}

#[tokio::test]
async fn a_cancelled_call_reaches_the_engine_and_has_no_answer() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run(7, "forever").as_bytes()).await;
    client.write(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{\"requestId\":7,\"reason\":\"enough\"}}\n").await;
    // The id is free at once, and the answer of the cancelled call never takes its place.
    assert_eq!(client.request(7, "ping", json!({})).await["result"], json!({}));
    until(|| client.engine.cancelled.load(Ordering::SeqCst) == 1).await;
    client.end().await;
}

#[tokio::test]
async fn a_cancelled_call_of_a_batch_leaves_the_others_their_answers() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(format!("[{},{}]\n", run(1, "forever").trim(), run(2, "sleep").trim()).as_bytes()).await;
    client.write(b"{\"jsonrpc\":\"2.0\",\"method\":\"notifications/cancelled\",\"params\":{\"requestId\":1}}\n").await;
    let answers = client.answer().await;
    assert_eq!((answers.as_array().unwrap().len(), &answers[0]["id"]), (1, &json!(2)));
    client.end().await;
}

async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the condition in time");
}

#[tokio::test]
async fn at_the_end_of_input_calls_in_flight_still_get_their_answers() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run(7, "sleep").as_bytes()).await;
    let mut input = client.input.take().unwrap();
    input.shutdown().await.unwrap();
    assert_eq!(client.answer().await["result"]["structuredContent"]["stdout"], "slept\n");
    assert_eq!(client.line().await, None);
    assert_eq!(client.server.await.unwrap().unwrap(), StdioEnd::EndOfInput);
}

#[tokio::test]
async fn after_the_grace_time_calls_are_cancelled_and_answered() {
    let mut client =
        Client::with(&agentrun::DIALECT, StdioOptions { grace: Duration::from_millis(50), ..StdioOptions::default() });
    client.context("a").await;
    client.write(run(7, "forever").as_bytes()).await;
    until(|| client.engine.running.load(Ordering::SeqCst) == 1).await;
    client.shutdown.cancel();
    let answer = client.answer().await;
    assert_eq!(answer["result"]["structuredContent"]["stderr"], "Execution was cancelled: variables are kept.\n");
    assert_eq!(client.line().await, None);
    assert_eq!(client.server.await.unwrap().unwrap(), StdioEnd::Shutdown);
}

#[tokio::test]
async fn a_client_that_no_longer_reads_ends_the_calls_at_once() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run(7, "forever").as_bytes()).await;
    until(|| client.engine.running.load(Ordering::SeqCst) == 1).await;
    let Client { input, output, engine, server, .. } = client;
    let mut input = input.unwrap();
    // The write that finds out.
    drop(output);
    let _ = input.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}\n").await;
    drop(input);
    let end = tokio::time::timeout(Duration::from_secs(10), server)
        .await
        .expect("an end before the grace time")
        .unwrap()
        .unwrap();
    assert!(matches!(end, StdioEnd::ClientGone | StdioEnd::EndOfInput));
    assert_eq!(engine.cancelled.load(Ordering::SeqCst), 1);
}

fn run_with_token(code: &str, token: Value) -> String {
    format!(
        "{}\n",
        json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": { "name": "run_code", "arguments": { "code": code, "context_id": "a" }, "_meta": { "progressToken": token } } })
    )
}

#[tokio::test]
async fn output_lines_come_as_progress_before_the_answer() {
    let mut client = Client::new();
    client.say(INITIALIZE, 1).await;
    client.context("a").await;
    client.write(run_with_token("ticks", json!("tok")).as_bytes()).await;
    let mut lines = String::new();
    let mut last = 0.0;
    let answer = loop {
        let message = client.answer().await;
        if message.get("id").is_some() {
            break message;
        }
        assert_eq!(
            (&message["method"], &message["params"]["progressToken"]),
            (&json!("notifications/progress"), &json!("tok"))
        );
        let progress = message["params"]["progress"].as_f64().unwrap();
        assert!(progress > last);
        last = progress;
        writeln!(lines, "{}", message["params"]["message"].as_str().unwrap()).unwrap();
    };
    assert_eq!(lines, "tick 0\ntick 1\ntick 2\n");
    assert_eq!(answer["result"]["structuredContent"]["stdout"], lines);
    client.end().await;
}

#[tokio::test]
async fn without_a_token_there_is_no_progress() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run(7, "ticks").as_bytes()).await;
    assert_eq!(client.answer().await["id"], 7);
    client.end().await;
}

#[tokio::test]
async fn a_flood_of_output_becomes_a_few_bounded_notifications() {
    let mut client = Client::new();
    client.context("a").await;
    client.write(run_with_token("flood", json!(1)).as_bytes()).await;
    let mut notes = 0;
    while client.answer().await.get("id").is_none() {
        notes += 1;
    }
    assert!(notes <= 20, "{notes}");
    client.end().await;
}

#[tokio::test]
async fn a_long_silent_call_is_kept_alive() {
    let mut client =
        Client::with(&agentrun::DIALECT, StdioOptions { grace: Duration::ZERO, ..StdioOptions::default() });
    client.say(INITIALIZE, 1).await;
    client.context("a").await;
    client.write(run_with_token("forever", json!(1)).as_bytes()).await;
    assert_eq!(client.answer().await["params"]["message"], "still running after 10 s");
    client.shutdown.cancel();
    assert_eq!(client.answer().await["id"], 7);
}

/// X14: two clients of one engine use the same ids at the same time.
#[tokio::test]
async fn answers_never_cross() {
    let mut client = Client::new();
    client.context("a").await;
    for round in 0..50 {
        let mut lines = String::new();
        for id in 0..100 {
            let line = json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": { "name": format!("marker-{round}-{id}") } });
            writeln!(lines, "{line}").unwrap();
        }
        client.write(lines.as_bytes()).await;
        for _ in 0..100 {
            let answer = client.answer().await;
            assert_eq!(answer["error"]["message"], format!("Unknown tool: marker-{round}-{}", answer["id"]));
        }
    }
    client.end().await;
}

/// A client need not wait for an answer before its next call: they begin in the order of their lines.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_begin_in_the_order_of_their_lines() {
    let mut client = Client::new();
    client.context("a").await;
    let codes: Vec<String> = (0..200).map(|n| format!("cell {n}")).collect();
    let lines: String = codes.iter().enumerate().map(|(id, code)| run(id, code)).collect();
    client.write(lines.as_bytes()).await;
    for _ in &codes {
        client.answer().await;
    }
    assert_eq!(*client.engine.ran.lock().unwrap(), codes);
    client.end().await;
}

#[tokio::test]
async fn a_flood_of_notifications_and_pings_is_survived() {
    let mut client = Client::new();
    let mut lines = String::new();
    for id in 0..200 {
        for _ in 0..50 {
            lines.push_str("{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\",\"params\":{\"progressToken\":1,\"progress\":1}}\n");
        }
        writeln!(lines, "{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"ping\"}}").unwrap();
    }
    client.write(lines.as_bytes()).await;
    for _ in 0..200 {
        assert_eq!(client.answer().await["result"], json!({}));
    }
    client.end().await;
}

/// The document's examples 1 to 4 send `{code}` alone.
#[tokio::test]
async fn the_default_context_is_made_once_at_the_first_call() {
    let mut client = Client::with(&agentrun::WITH_DEFAULT_CONTEXT, StdioOptions::default());
    let line = |id: i64, arguments: Value| {
        format!(
            "{}\n",
            json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": { "name": "run_code", "arguments": arguments } })
        )
    };
    let together: String = (0..20).map(|id| line(id, json!({ "code": "x = 1" }))).collect();
    client.write(together.as_bytes()).await;
    for _ in 0..20 {
        assert_eq!(client.answer().await["result"]["structuredContent"]["success"], true);
    }
    let contexts = client.call("list_contexts", json!({})).await;
    assert_eq!((&contexts["total"], &contexts["contexts"][0]["name"]), (&json!(1), &json!("default")));
    assert_eq!(client.call("run_code", json!({ "code": "print(x)" })).await["stdout"], "1\n");
    client.call("stop_context", json!({ "context_id": "default" })).await;
    assert_eq!(client.call("run_code", json!({ "code": "print(x)" })).await["success"], false);
    assert_eq!(
        client.call("run_code", json!({ "code": "1", "context_id": "other" })).await["code"],
        "CONTEXT_NOT_FOUND"
    );
    assert_eq!(client.call("run_code", json!({})).await["error"], "Invalid arguments: code is required");
    client.end().await;
}

/// Bytes of a client that has lost its mind, grown from lines that mean something. Each line has at most one answer, every
/// answer is JSON-RPC, and the server goes on.
#[tokio::test]
async fn mutated_lines_never_silence_the_server() {
    let seeds: Vec<&[u8]> =
        include_bytes!("../fixtures/lines.txt").split(|b| *b == b'\n').filter(|l| !l.is_empty()).collect();
    let mut random = Random(0x5EED);
    let mut client =
        Client::with(&agentrun::DIALECT, StdioOptions { grace: Duration::ZERO, ..StdioOptions::default() });
    for round in 0..3000 {
        let line = mutated(&seeds, &mut random);
        let ping = format!("{{\"jsonrpc\":\"2.0\",\"id\":\"sync-{round}\",\"method\":\"ping\"}}\n");
        client.write(&[&line[..], b"\n", ping.as_bytes()].concat()).await;
        let sync = json!(format!("sync-{round}"));
        let mut answers = 0;
        loop {
            let message = client.answer().await;
            let messages = message.as_array().cloned().unwrap_or_else(|| vec![message.clone()]);
            assert!(messages.iter().all(|m| m["jsonrpc"] == "2.0"), "{message}");
            if message["id"] == sync {
                break;
            }
            answers += 1;
        }
        assert!(answers <= 2, "{answers} answers to {}", String::from_utf8_lossy(&line));
    }
}

/// xorshift64: the same lines on every machine.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n.max(1) as u64) as usize
    }
}

fn mutated(seeds: &[&[u8]], random: &mut Random) -> Vec<u8> {
    let mut line = seeds[random.below(seeds.len())].to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(line.len() + 1);
        match random.below(6) {
            0 => line.truncate(at),
            1 => line.insert(at, random.below(256) as u8),
            2 if at < line.len() => line[at] ^= 1 << random.below(8),
            3 => line.extend_from_slice(seeds[random.below(seeds.len())]),
            4 => {
                let token: &[u8] =
                    [&b"null"[..], b"1e999", b"-0", b"\"", b"[", b"}", b"\\ud800", b"\xff", b",\"id\":1"]
                        [random.below(9)];
                line.splice(at..at, token.iter().copied());
            }
            _ => {
                let end = at + random.below(line.len() - at + 1);
                line.drain(at..end);
            }
        }
    }
    // A newline would make two lines of one.
    line.retain(|b| *b != b'\n');
    line
}
