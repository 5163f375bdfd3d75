//! A server on the user's own machine, reached by code and browser in a real sandbox, and nothing else of that machine.

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use testkit::client::Client;

use crate::browsing::Web;
use crate::support::{StateDir, stdio_of};

/// Answers every request with a page that shows its `Host`. Returns the port and the number of requests.
fn serve() -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&requests);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let counted = Arc::clone(&counted);
            std::thread::spawn(move || {
                let mut stream = stream.unwrap();
                let lines = BufReader::new(stream.try_clone().unwrap()).lines();
                let head: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
                let Some((_, host)) = head
                    .iter()
                    .find_map(|line| line.split_once(": ").filter(|(name, _)| name.eq_ignore_ascii_case("host")))
                else {
                    return;
                };
                counted.fetch_add(1, Ordering::Relaxed);
                let page = format!("<title>mine</title><h1>at {host}</h1>");
                let head = format!("Content-Type: text/html\r\nContent-Length: {}\r\nConnection: close", page.len());
                let _ = write!(stream, "HTTP/1.1 200 OK\r\n{head}\r\n\r\n{page}");
            });
        }
    });
    (port, requests)
}

const CODE: &str = r#"
import subprocess, urllib.request, urllib.error
def get(url):
    try:
        return urllib.request.urlopen(url).read().decode()
    except urllib.error.URLError as error:
        return f"refused: {error}"
"#;

#[test]
fn an_open_port_of_the_host_is_reached_by_its_name_and_nothing_else_of_the_host_is() {
    let ((open, requests), (closed, secret)) = (serve(), serve());
    let state = StateDir::new("host-ports");
    let settings = format!("[network]\nallow = [\"host:{open}\"]\n");
    let mut client = Client::start(stdio_of("sandpool", &state.0, &settings));
    let url = format!("http://host.sandpool.internal:{open}/");
    let code = client.call("run_code", json!({ "code": format!("{CODE}\nprint(get('{url}'))") }));
    assert!(code.field("stdout").contains(&format!("at localhost:{open}<")), "{}", code.0);
    let node = json!({ "code": format!("await (await fetch('{url}')).text()"), "language": "javascript" });
    let node = client.call("run_code", node);
    assert!(node.field("result").contains(&format!("at localhost:{open}<")), "{}", node.0);
    assert!(requests.load(Ordering::Relaxed) >= 2);

    let others = format!(
        "for url in ['http://host.sandpool.internal:{closed}/', 'http://127.0.0.1:{closed}/', 'http://localhost:{closed}/']:\n\
         \x20   print(get(url))\n\
         for name in ['host.sandpool.internal', '127.0.0.1', 'localhost', '[::1]', '2130706433', 'a.host.sandpool.internal']:\n\
         \x20   print(subprocess.run(['curl', '-sS', '-m', '20', '--noproxy', '', '-x', 'http://127.0.0.1:3128', \
         f'http://{{name}}:{closed}/'], capture_output=True, text=True).stdout)\n"
    );
    let refused = client.call("run_code", json!({ "code": others }));
    let said = refused.field("stdout");
    assert_eq!(said.matches("refused: ").count(), 3, "{}", refused.0);
    assert_eq!(said.matches(" was denied").count(), 7, "{}", refused.0);
    assert!(refused.0.to_string().contains(&format!("`host:{closed}` in --network-allow")), "{}", refused.0);
    if Web::start().is_some() {
        let page = client.call("browser_open", json!({ "url": url }));
        assert_eq!(page.facts()["title"], "mine", "{}", page.0);
        let snapshot = client.call("browser_snapshot", json!({}));
        assert!(snapshot.0.to_string().contains(&format!("at localhost:{open}")), "{}", snapshot.0);
        let page = client.call("browser_open", json!({ "url": format!("http://host.sandpool.internal:{closed}/") }));
        assert!(page.is_error(), "{}", page.0);
    }
    assert_eq!(secret.load(Ordering::Relaxed), 0, "a port that is not open was reached");
    assert!(client.finish().success());
}
