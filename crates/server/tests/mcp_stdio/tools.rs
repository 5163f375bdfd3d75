//! The list of tools as a client of `sandpool` receives it.

use dialects::{Lang, Options, sandpool};
use mcp::stdio::StdioOptions;
use serde_json::{Value, json};

use crate::{Client, INITIALIZE, INITIALIZED};

/// What a model reads before it does anything. A tool that is added later may take 800 characters.
#[tokio::test]
async fn the_list_of_sandpool_s_tools_is_short() {
    const FIRST: [&str; 14] = [
        "run_code",
        "run_command",
        "wait_run",
        "cancel_run",
        "create_context",
        "list_contexts",
        "stop_context",
        "read_file",
        "write_file",
        "list_files",
        "browser_open",
        "browser_act",
        "browser_snapshot",
        "browser_screenshot",
    ];
    for lang in [Lang::En, Lang::Zh] {
        let mut client = Client::speaking(&sandpool::DIALECT, Some(lang), StdioOptions::default());
        client.say(INITIALIZE, 1).await;
        client.say(INITIALIZED, 0).await;
        let answer = client.request(1, "tools/list", json!({})).await;
        let tools = answer["result"]["tools"].as_array().unwrap();
        let length = |value: &Value| value.to_string().chars().count();
        assert_eq!(tools.len(), sandpool::DIALECT.tools.len());
        let lengths: Vec<(&str, usize)> =
            tools.iter().map(|tool| (tool["name"].as_str().unwrap(), length(tool))).collect();
        let most = 16_000 + 800 * (tools.len() - 17);
        assert!(length(&answer["result"]) <= most, "{lang:?}: {} {lengths:?}", length(&answer["result"]));
        for (name, length) in lengths.into_iter().filter(|(name, _)| !FIRST.contains(name)) {
            assert!(length <= 800, "{lang:?} {name}: {length}");
        }
        client.end().await;
    }
}

#[test]
fn the_browser_tools_are_not_listed_where_the_operator_turned_the_browser_off() {
    let names = |options: &Options| sandpool::DIALECT.offered(options).map(|row| row.name).collect::<Vec<_>>();
    assert_eq!(names(&Options::default()).len(), sandpool::DIALECT.tools.len());
    let without = names(&Options { browser: false, ..Options::default() });
    assert_eq!(without.len(), sandpool::DIALECT.tools.len() - 4);
    assert!(without.iter().all(|name| !name.starts_with("browser_")), "{without:?}");
    // The other dialects list what their documents do.
    let workbench = dialects::find("workbench", &Options::default()).unwrap();
    assert_eq!(workbench.offered(&Options { browser: false, ..Options::default() }).count(), workbench.tools.len());
}
