//! Ports of the host's own loopback, which the operator opened.

use std::net::{IpAddr, Ipv6Addr};

use egress::{Egress, EgressConfig, HOST_NAME, Policy, Table};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::place::{Client, Place, echo, host, host_on, strings};
use crate::tunnels::{connect, greeting};

const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello";

fn allow(entries: &[&str]) -> Policy {
    Policy::of(Table { name: "command-line".into(), allow: strings(entries), ..Table::default() })
}

#[tokio::test]
async fn a_request_arrives_as_one_of_the_hosts_own_browser() {
    let (port, heard) = host(HELLO).await;
    let place = Place::with(allow(&[&format!("host:{port}")]));
    let own = format!("http://{HOST_NAME}:{port}");
    let request = format!(
        "GET {own}/a HTTP/1.1\r\nHost: {HOST_NAME}:{port}\r\nOrigin: {own}\r\nReferer: {own}/form?x={own}\r\n\r\n"
    );
    assert_eq!(place.ask(&request).await.text(), "hello");
    let local = format!("http://localhost:{port}");
    assert_eq!(
        heard.texts(),
        [format!(
            "GET /a HTTP/1.1\r\nHost: localhost:{port}\r\nOrigin: {local}\r\nReferer: {local}/form?x={own}\r\n\r\n"
        )]
    );
}

#[tokio::test]
async fn a_page_of_another_site_cannot_use_the_port() {
    let (port, heard) = host(HELLO).await;
    let place = Place::with(allow(&[&format!("host:{port}")]));
    let ask = async |headers: &str| {
        let request = format!("GET http://{HOST_NAME}:{port}/a HTTP/1.1\r\nHost: x\r\n{headers}\r\n");
        place.ask(&request).await.status
    };
    for foreign in [
        "Origin: https://evil.test\r\n",
        "Origin: null\r\n",
        "Origin: http://host.sandpool.internal.evil.test\r\n",
        "Referer: https://evil.test/host.sandpool.internal\r\n",
        "Referer: http://host.sandpool.internal@evil.test/\r\n",
        "Origin: http://host.sandpool.internal\r\nReferer: http://evil.test/\r\n",
        "Origin: http://host.sandpool.internal\r\nOrigin: http://evil.test\r\n",
        "Sec-Fetch-Site: cross-site\r\n",
    ] {
        assert_eq!(ask(foreign).await, 403, "{foreign}");
    }
    // In a tunnel, too.
    let target = format!("{HOST_NAME}:{port}");
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &target).await, 200);
    client.send(format!("GET / HTTP/1.1\r\nHost: {target}\r\nOrigin: https://evil.test\r\n\r\n")).await;
    assert_eq!(client.answer().await.status, 403);
    assert_eq!(heard.texts().concat(), "");
    for own in [
        "",
        "Sec-Fetch-Site: none\r\n",
        "Sec-Fetch-Site: same-origin\r\n",
        "Origin: http://host.sandpool.internal:5173\r\nSec-Fetch-Site: same-site\r\n",
        "Origin: http://localhost:5173\r\nSec-Fetch-Site: cross-site\r\n",
        "Referer: http://127.0.0.1:8000/index.html\r\n",
    ] {
        assert_eq!(ask(own).await, 200, "{own}");
    }
}

#[tokio::test]
async fn an_answer_refers_to_the_host_by_the_name_that_the_sandbox_has_for_it() {
    for (header, shown) in [
        ("Location: http://localhost:4000/login", "http://host.sandpool.internal:4000/login"),
        ("Location: https://127.0.0.1/", "https://host.sandpool.internal/"),
        ("Location: /login", "/login"),
        ("Location: http://localhost.evil.test/", "http://localhost.evil.test/"),
        ("Access-Control-Allow-Origin: http://localhost:5173", "http://host.sandpool.internal:5173"),
        ("Access-Control-Allow-Origin: *", "*"),
    ] {
        let answer = format!("HTTP/1.1 302 Found\r\n{header}\r\nContent-Length: 0\r\n\r\n");
        let (port, _) = host(answer.leak()).await;
        let place = Place::with(allow(&[&format!("host:{port}")]));
        let answer = place.ask(&format!("GET http://{HOST_NAME}:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(answer.header(header.split(':').next().unwrap()), Some(shown), "{header}");
    }
}

#[tokio::test]
async fn a_server_on_the_ipv6_loopback_is_found() {
    let Ok(listener) = tokio::net::TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).await else {
        return eprintln!("this machine has no IPv6 loopback");
    };
    let port = listener.local_addr().unwrap().port();
    let heard = host_on(listener, HELLO);
    let place = Place::with(allow(&[&format!("host:{port}")]));
    let answer = place.ask(&format!("GET http://{HOST_NAME}:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert_eq!(answer.text(), "hello");
    assert!(heard.texts()[0].contains(&format!("Host: localhost:{port}\r\n")));
}

/// A server that accepts a WebSocket and then sends back what it gets.
async fn websocket() -> (u16, tokio::sync::oneshot::Receiver<String>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (tell, told) = tokio::sync::oneshot::channel();
    tokio::spawn(async move {
        let mut tell = Some(tell);
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let (mut head, mut bytes) = (Vec::new(), [0; 4096]);
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read(&mut bytes).await {
                    Ok(n @ 1..) => head.extend_from_slice(&bytes[..n]),
                    _ => break,
                }
            }
            if head.is_empty() {
                continue;
            }
            let _ = tell.take().unwrap().send(String::from_utf8_lossy(&head).into_owned());
            let answer = "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
            stream.write_all(answer.as_bytes()).await.unwrap();
            let (mut read, mut write) = stream.split();
            let _ = tokio::io::copy(&mut read, &mut write).await;
            return;
        }
    });
    (port, told)
}

/// Browsers open WebSockets through CONNECT, whatever the port.
#[tokio::test]
async fn a_websocket_works_with_the_hosts_own_name_and_origin() {
    for through_tunnel in [false, true] {
        let (port, told) = websocket().await;
        let place = Place::with(allow(&[&format!("host:{port}")]));
        let mut client = place.client().await;
        let target = format!("{HOST_NAME}:{port}");
        let mut uri = format!("http://{target}/hmr");
        if through_tunnel {
            assert_eq!(connect(&mut client, &target).await, 200);
            uri = "/hmr".into();
        }
        client
            .send(format!(
                "GET {uri} HTTP/1.1\r\nHost: {target}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nOrigin: http://{target}\r\n\r\n"
            ))
            .await;
        assert_eq!(client.head().await.status, 101, "through a tunnel: {through_tunnel}");
        client.send("ping").await;
        assert_eq!(client.exactly(4).await, "ping");
        let head = told.await.unwrap();
        assert!(head.contains(&format!("Host: localhost:{port}\r\n")), "{head}");
        assert!(head.contains(&format!("Origin: http://localhost:{port}\r\n")), "{head}");
    }
}

#[tokio::test]
async fn a_tunnel_to_the_host_carries_other_protocols_too() {
    let port = echo().await;
    let place = Place::with(allow(&[&format!("host:{port}")]));
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("{HOST_NAME}:{port}")).await, 200);
    client.send("\0\0\0\u{8}abcd").await;
    assert_eq!(client.exactly(8).await, "\0\0\0\u{8}abcd");
    // In a tunnel for requests, a request for another host is refused.
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("{HOST_NAME}:{port}")).await, 200);
    client.send("GET / HTTP/1.1\r\nHost: other.test\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 403);
    // As is a TLS greeting for another name.
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("{HOST_NAME}:{port}")).await, 200);
    client.send(greeting("localhost")).await;
    assert_eq!(client.rest().await[..2], [21, 3], "an alert");
}

#[tokio::test]
async fn nothing_else_of_the_host_is_reached_by_any_name() {
    let (open, _) = host(HELLO).await;
    let (closed, heard) = host(HELLO).await;
    // `a.test` is 127.0.0.1, as a name would be whose owner points it there.
    let place = Place::with(allow(&[&format!("host:{open}"), "*:*", "public:*", "*.sandpool.internal:*"]));
    for target in [
        format!("{HOST_NAME}:{closed}"),
        format!("HOST.sandpool.internal.:{closed}"),
        format!("a.test:{closed}"),
        format!("localhost:{closed}"),
        format!("127.0.0.1:{closed}"),
        format!("[::1]:{closed}"),
        format!("[::ffff:127.0.0.1]:{closed}"),
        format!("2130706433:{closed}"),
    ] {
        let answer = place.ask(&format!("GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert!([403, 502, 504].contains(&answer.status), "{target}: {}", answer.status);
        let mut client: Client = place.client().await;
        assert_ne!(connect(&mut client, &target).await, 200, "{target}");
    }
    // The open port has no second name either.
    for name in ["a.test", "localhost", "127.0.0.1"] {
        let answer =
            place.ask(&format!("GET http://{name}:{open}/ HTTP/1.1\r\nHost: {HOST_NAME}:{open}\r\n\r\n")).await;
        assert_eq!(answer.status, 403, "{name}");
    }
    assert_eq!(heard.connections(), 0);
}

#[tokio::test]
async fn a_narrower_policy_takes_the_port_away_and_gives_none() {
    let (port, heard) = host(HELLO).await;
    let entry = format!("host:{port}");
    let request = format!("GET http://{HOST_NAME}:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n");
    let place = Place::with(allow(&[&entry]).and(&allow(&["*:*"])));
    assert_eq!(place.ask(&request).await.status, 403, "a tenant's policy that does not name the port");
    let place = Place::with(allow(&["public"]));
    let wider = place.gate().narrow(Some(allow(&[&entry])));
    assert_eq!(place.ask(&request).await.status, 403, "a call's policy cannot widen");
    drop(wider);
    assert_eq!(heard.connections(), 0);
    let place = Place::with(allow(&[&entry]).and(&allow(&[&entry])));
    assert_eq!(place.ask(&request).await.status, 200);
}

#[test]
fn the_name_cannot_be_given_another_address() {
    let hosts = [("Host.Sandpool.Internal.".to_owned(), IpAddr::from([10, 0, 0, 1]))].into();
    let error = Egress::new(EgressConfig { hosts, ..EgressConfig::default() }).unwrap_err();
    assert!(error.to_string().contains("reserved"), "{error}");
}
