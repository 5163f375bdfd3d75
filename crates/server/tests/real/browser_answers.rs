//! What a model gets from the actions of the browser: through the built server and the real Chromium.

use serde_json::json;
use testkit::http::{Era, Mcp};

use crate::browsing::Web;
use crate::serve::Serve;
use crate::ways::Way;

const PAGE: &str = "<title>Shop</title><h1>Tea</h1><ul id=list></ul>\
    <button onclick=\"list.innerHTML += '<li>green tea</li>'\">Add tea</button><button>Pay now</button><button>Pay later</button>\
    <a href=list.csv download>List</a>";

#[test]
fn sp53_to_sp56_a_download_targets_an_explanation_and_what_changed() {
    let Some(_web) = Web::start() else { return };
    let server = Serve::start("browser-answers", &[]);
    let mut client = Mcp::new(&server.account(), "sandpool", Era::Modern);
    let way = &mut client as &mut dyn Way;
    way.good("write_file", json!({ "path": "shop.html", "content": PAGE }));
    way.good("write_file", json!({ "path": "list.csv", "content": "tea,4\n" }));
    way.good("browser_open", json!({ "url": "/workspace/shop.html" }));
    let click = |target: &str| json!({ "action": "click", "target": target });

    let added = way.good("browser_act", click("button \"Add tea\""));
    let changed = added.facts["changed"].as_str().unwrap();
    assert!(changed.contains("+ ") && changed.contains("green tea") && !changed.contains("heading"), "{changed}");
    let mut quiet = click("text=Add tea");
    quiet["changes"] = json!(false);
    assert_eq!(way.good("browser_act", quiet).facts.get("changed"), None);

    let unclear = way.bad("browser_act", click("text=Pay"));
    let error = unclear.facts["error"].as_str().unwrap();
    assert!(error.starts_with("`text=Pay` matches 2 elements; name one of them; there are: [ref_"), "{error}");
    assert!(error.contains("button \"Pay now\"; [ref_") && error.ends_with("button \"Pay later\""), "{error}");
    let missing = way.bad("browser_act", click("button \"Pay tomorrow\""));
    assert!(missing.facts["error"].as_str().unwrap().contains("button \"Pay now\""), "{}", missing.text);
    assert!(missing.facts["note"].as_str().unwrap().contains("text=Go"), "{}", missing.text);

    let saved = way.good("browser_act", click("//a[text()='List']"));
    let happened = saved.facts["happened"][0].as_str().unwrap_or_else(|| panic!("{}", saved.text));
    assert_eq!(happened, "downloaded downloads/list.csv (6 bytes) from file:///workspace/list.csv");
    assert!(server.finish().success());
}
