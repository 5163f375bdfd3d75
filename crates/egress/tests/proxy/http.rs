use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;

use crate::place::{Place, host, strings};

const HELLO: &str = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nKeep-Alive: timeout=5\r\nX-Own: 1\r\n\r\nhello";

#[tokio::test]
async fn a_request_is_written_anew_for_the_host() {
    let (port, heard) = host(HELLO).await;
    let place = Place::new(&[port], |_| {});
    let request = format!(
        "GET http://user:secret@A.test.:{port}/path?q=1 HTTP/1.1\r\nHost: evil.test\r\nProxy-Authorization: Basic eA==\r\n\
         Proxy-Connection: keep-alive\r\nConnection: X-Mine\r\nX-Mine: 1\r\nTE: trailers\r\nUpgrade: h2c\r\nX-Kept: 1\r\n\r\n"
    );
    let answer = place.ask(&request).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "hello"));
    assert_eq!((answer.header("x-own"), answer.header("keep-alive")), (Some("1"), None));
    assert_eq!(heard.texts(), [format!("GET /path?q=1 HTTP/1.1\r\nHost: a.test:{port}\r\nX-Kept: 1\r\n\r\n")]);
}

#[tokio::test]
async fn one_connection_serves_requests_for_several_hosts_each_judged() {
    let (port, heard) = host(HELLO).await;
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    for (name, status) in [("a.test", 200), ("b.test", 200), ("other.test", 403), ("a.test", 200)] {
        client.send(format!("GET http://{name}:{port}/ HTTP/1.1\r\nHost: {name}:{port}\r\n\r\n")).await;
        assert_eq!(client.answer().await.status, status, "{name}");
    }
    // A request that does not know of the proxy says in `Host` whom it is for.
    client.send(format!("GET /direct HTTP/1.1\r\nHost: a.test:{port}\r\n\r\n")).await;
    assert_eq!(client.answer().await.status, 200);
    assert!(heard.texts().concat().contains("GET /direct HTTP/1.1\r\n"));
}

#[tokio::test]
async fn a_connection_to_a_host_is_used_again_by_the_same_client() {
    let (port, heard) = host(HELLO).await;
    let (closing, closed) = host("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello").await;
    let place = Place::new(&[port, closing], |_| {});
    let mut client = place.client().await;
    for (port, times) in [(port, 5), (closing, 3), (port, 2)] {
        for _ in 0..times {
            client.send(format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
            assert_eq!(client.answer().await.text(), "hello");
        }
    }
    assert_eq!((heard.connections(), closed.connections()), (2, 3));
}

#[tokio::test]
async fn a_denial_is_a_sentence_in_the_answer_in_the_sink_and_at_the_gate() {
    let (port, heard) = host(HELLO).await;
    let place = Place::new(&[port], |_| {});
    let mark = place.gate().mark();
    let answer = place.ask("GET http://user:pw@other.test/a/path?token=1 HTTP/1.1\r\nHost: x\r\n\r\n").await;
    let sentence = "GET http://other.test/a/path was denied: policy \"t\" does not allow this name. The operator can allow it in \
                    sandpool.toml: [network.policy.t] allow = [\"other.test\"].";
    assert_eq!((answer.status, answer.header("x-sandpool-denied")), (403, Some("1")));
    assert_eq!(answer.header("content-type"), Some("text/plain; charset=utf-8"));
    assert_eq!((answer.text().as_str(), answer.reason.as_str()), (format!("{sentence}\n").as_str(), sentence));
    assert_eq!(place.sentences(), [sentence]);
    let (denials, more) = place.gate().denied_since(mark);
    assert_eq!((denials.len(), denials[0].what.as_str(), more), (1, "GET http://other.test/a/path", 0));
    assert_eq!(heard.connections(), 0);
}

#[tokio::test]
async fn what_fails_behind_the_proxy_is_said_and_is_no_denial() {
    let unused = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = unused.local_addr().unwrap().port();
    drop(unused);
    let (garbage, _) = host("this is not HTTP\r\n\r\n").await;
    let place = Place::new(&[port, garbage], |_| ());
    for (target, status, sentence) in [
        (format!("a.test:{port}"), 502, format!("a.test:{port} could not be reached: the connection was refused\n")),
        (
            format!("a.test:{garbage}"),
            502,
            format!("a.test:{garbage} could not be reached: its answer is not HTTP, or was cut off\n"),
        ),
    ] {
        let answer = place.ask(&format!("GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!((answer.status, answer.header("x-sandpool-denied")), (status, None));
        assert_eq!(answer.text(), sentence);
    }
    let answer = place.ask("GET https://a.test/ HTTP/1.1\r\nHost: a.test\r\n\r\n").await;
    assert_eq!(answer.status, 400);
    assert_eq!(place.sentences(), Vec::<String>::new());
}

#[tokio::test]
async fn bodies_stream_both_ways() {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let (got_first, first_arrived) = oneshot::channel();
    let (go_on, told_to_go_on) = oneshot::channel::<()>();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut heard = String::new();
        let mut bytes = [0; 4096];
        while !heard.contains("first") {
            let n = stream.read(&mut bytes).await.unwrap();
            heard += &String::from_utf8_lossy(&bytes[..n]);
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n").await.unwrap();
        got_first.send(()).unwrap();
        told_to_go_on.await.unwrap();
        stream.write_all(b"3\r\ntwo\r\n0\r\n\r\n").await.unwrap();
        while stream.read(&mut bytes).await.is_ok_and(|n| n > 0) {}
    });
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    client
        .send(format!(
            "POST http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n"
        ))
        .await;
    first_arrived.await.unwrap();
    assert_eq!(client.head().await.status, 200);
    assert_eq!(client.chunk().await, "one");
    go_on.send(()).unwrap();
    assert_eq!(client.chunk().await, "two");
}

#[tokio::test]
async fn a_request_cannot_hide_another_one() {
    for request in [
        "POST http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\nTransfer-Encoding: chunked\r\n\r\n\
         0\r\n\r\nGET /hidden HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "POST http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 50\r\n\r\n\
         12345GET /hidden HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "POST http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nConnection: content-length\r\nContent-Length: 43\r\n\r\n\
         GET /hidden HTTP/1.1\r\nHost: a.test:1\r\nx: y\r\n\r\n",
        "GET http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\nGET /hidden HTTP/1.1\r\n\r\n",
        "GET http://a.test:PORT/a\rGET HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET http://a.test:PORT/\r\n /hidden HTTP/1.1\r\nHost: x\r\n\r\n",
    ] {
        let (port, heard) = host(HELLO).await;
        let place = Place::new(&[port], |_| {});
        let mut client = place.client().await;
        client.send(request.replace("PORT", &port.to_string())).await;
        client.0.half_close().await.unwrap();
        client.rest().await;
        // Each message that the host heard is whole: its length is what its head says.
        for text in heard.texts() {
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            let head = head.to_lowercase();
            match head.split_once("content-length: ") {
                Some((_, rest)) => assert_eq!(rest.lines().next().unwrap().parse(), Ok(body.len()), "{text}"),
                None if head.contains("transfer-encoding: chunked") => assert_eq!(body, "0\r\n\r\n", "{text}"),
                None => assert_eq!(body, "", "{text}"),
            }
            assert!(!(head.contains("content-length") && head.contains("transfer-encoding")), "{text}");
        }
    }
}

#[tokio::test]
async fn a_request_that_can_be_read_in_two_ways_is_not_sent() {
    let (port, heard) = host(HELLO).await;
    let place = Place::new(&[port], |_| {});
    for (request, status) in [
        // Whom it is for.
        ("GET http://a.test:0/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 400),
        ("GET http://a.test:99999/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 400),
        ("GET http://a.test:PORT:80/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 400),
        ("GET http://a.test:PORT@other.test:PORT/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 403),
        ("GET http://other.test:PORT#@a.test:PORT/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 403),
        ("GET http://other.test:PORT\\@a.test:PORT/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: a.test:PORT\r\nHost: other.test:PORT\r\n\r\n", 400),
        ("GET https://a.test:PORT/ HTTP/1.1\r\nHost: a.test:PORT\r\n\r\n", 400),
        ("GET / HTTP/1.0\r\n\r\n", 400),
        // Where it ends.
        ("POST http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
        ("POST http://a.test:PORT/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n", 400),
    ] {
        let answer = place.ask(&request.replace("PORT", &port.to_string())).await;
        assert_eq!(answer.status, status, "{request}: {}", answer.text());
    }
    assert_eq!(heard.connections(), 0);
}

#[tokio::test]
async fn methods_are_judged() {
    let (port, heard) = host(HELLO).await;
    let place = Place::new(&[port], |table| table.methods = strings(&["GET", "HEAD"]));
    let ask = |method: &str| format!("{method} http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
    assert_eq!(place.ask(&ask("GET")).await.status, 200);
    let answer = place.ask(&ask("POST")).await;
    assert_eq!(answer.status, 403);
    assert!(answer.text().contains("does not allow the method POST"), "{}", answer.text());
    let answer = place.ask(&format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert!(answer.text().contains("what is inside this connection cannot be seen"), "{}", answer.text());
    assert_eq!(heard.connections(), 1);
}

#[tokio::test]
async fn a_websocket_passes_and_no_other_protocol() {
    let (port, heard) =
        host("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nserver first").await;
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    client
        .send(format!(
            "GET http://a.test:{port}/ws HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: k\r\n\r\n"
        ))
        .await;
    let head = client.head().await;
    assert_eq!((head.status, head.header("upgrade")), (101, Some("websocket")));
    assert_eq!(client.exactly(12).await, "server first");
    client.send("\x01\x02then\r\n\r\n").await;
    assert_eq!(client.exactly(12).await, "HTTP/1.1 101");
    assert!(heard.texts()[0].ends_with("\x01\x02then\r\n\r\n"));
    let answer = place
        .ask(&format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"))
        .await;
    assert_eq!(answer.status, 502, "a host that changes the protocol unasked");
}

#[tokio::test]
async fn heads_are_bounded() {
    let place = Place::new(&[], |_| {});
    let many: String = (0..500).map(|n| format!("X-{n}: 1\r\n")).collect();
    assert_eq!(place.ask(&format!("GET http://a.test/ HTTP/1.1\r\n{many}\r\n")).await.status, 431);
    let mut client = place.client().await;
    let long = format!("GET http://a.test/ HTTP/1.1\r\nX: {}\r\n\r\n", "a".repeat(1 << 20));
    // It may be cut off before all of it is taken.
    let _ = client.0.write(long.as_bytes()).await;
    let rest = client.rest().await;
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&rest));
}
