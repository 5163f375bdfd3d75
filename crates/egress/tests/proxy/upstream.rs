//! A proxy of the operator's network as the only way out. It alone knows where names lead.

use std::net::Ipv4Addr;

use egress::{Egress, EgressConfig, Policy, Table, UpstreamProxy, Upstreams};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::place::{Client, Heard, Place, echo, host, strings};
use crate::tunnels::{connect, greeting};

const CREDENTIALS: &str = "corp-user:corp-password";
/// The base64 of these credentials.
const ENCODED: &str = "Y29ycC11c2VyOmNvcnAtcGFzc3dvcmQ=";
const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// An upstream proxy that leads every name to one port of this machine. It answers with `answer` instead if there is
/// one.
async fn upstream(port: u16, answer: Option<&'static str>) -> (u16, Heard) {
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let own = listener.local_addr().unwrap().port();
    let heard = Heard::default();
    let all = heard.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let heard = all.clone();
            let connection = heard.begin();
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    let Ok(byte) = stream.read_u8().await else { return };
                    head.push(byte);
                }
                heard.add(connection, &head);
                if let Some(answer) = answer {
                    let _ = stream.write_all(answer.as_bytes()).await;
                    let _ = stream.shutdown().await;
                    return;
                }
                let mut host = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
                if head.starts_with(b"CONNECT ") {
                    stream.write_all(b"HTTP/1.1 200 OK\r\nVia: corp\r\n\r\n").await.unwrap();
                } else {
                    host.write_all(&head).await.unwrap();
                }
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut host).await;
            });
        }
    });
    (own, heard)
}

fn place(upstream: u16, allow: &[&str], change: impl FnOnce(&mut Table, &mut EgressConfig)) -> Place {
    let proxy = UpstreamProxy::parse(&format!("http://127.0.0.1:{upstream}")).unwrap();
    let proxy = proxy.with_credentials(format!("{CREDENTIALS}\n")).unwrap();
    let upstreams = Upstreams { http: Some(proxy.clone()), https: Some(proxy), except: Vec::new() };
    let mut config = EgressConfig { upstreams, ..EgressConfig::default() };
    let mut table = Table { name: "t".into(), allow: strings(allow), ..Table::default() };
    change(&mut table, &mut config);
    Place::of(&Egress::new(config).unwrap(), "blue", Policy::of(table))
}

fn get(url: &str) -> String {
    format!("GET {url} HTTP/1.1\r\nHost: x\r\n\r\n")
}

#[tokio::test]
async fn n21_requests_are_forwarded_by_the_upstream_and_tunnels_are_opened_by_it() {
    let (port, heard) = host(OK).await;
    let (upstream, asked) = upstream(port, None).await;
    let place = place(upstream, &["nowhere.example", "nowhere.example:7000"], |_, _| {});

    // No resolver knows these names. The client's own `Max-Forwards` and credentials go no further.
    let request =
        "GET http://nowhere.example/a?b=c HTTP/1.1\r\nHost: x\r\nMax-Forwards: 0\r\nProxy-Authorization: mine\r\n\r\n";
    let answer = place.ask(request).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "ok"));
    let said = asked.texts().concat();
    assert!(said.starts_with("GET http://nowhere.example/a?b=c HTTP/1.1\r\n"), "{said}");
    assert!(said.to_lowercase().contains("\r\nhost: nowhere.example\r\n"), "{said}");
    assert!(said.contains(&format!(": Basic {ENCODED}\r\n")) && !said.contains("mine"), "{said}");
    assert!(!said.to_lowercase().contains("max-forwards"), "{said}");

    // A tunnel with TLS, one on port 80 whose requests are seen, and one for any other protocol.
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, "nowhere.example:443").await, 200);
    assert!(asked.texts()[1].starts_with("CONNECT nowhere.example:443 HTTP/1.1\r\n"), "{:?}", asked.texts());
    assert!(asked.texts()[1].contains(ENCODED));
    client.send(greeting("nowhere.example")).await;
    client.0.half_close().await.unwrap();
    client.rest().await;
    assert!(!heard.texts()[1].is_empty() && !heard.texts()[1].contains(ENCODED));
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, "nowhere.example:80").await, 200);
    client.send("GET /inside HTTP/1.1\r\nHost: nowhere.example\r\n\r\n").await;
    assert_eq!(client.answer().await.status, 200);
    assert!(asked.texts()[2].starts_with("GET http://nowhere.example/inside "), "{:?}", asked.texts());
    let (bytes, tunnels) = (echo().await, &["nowhere.example:7000"]);
    let (upstream, _) = self::upstream(bytes, None).await;
    let place = self::place(upstream, tunnels, |_, _| {});
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, "nowhere.example:7000").await, 200);
    client.send("any bytes").await;
    assert_eq!(client.exactly(9).await, "any bytes");
}

#[tokio::test]
async fn n21_a_host_that_speaks_first_is_heard_through_the_upstream() {
    let answer = "HTTP/1.1 200 Connection established\r\n\r\nSSH-2.0-x\r\n";
    let (upstream, _) = upstream(0, Some(answer)).await;
    let place = place(upstream, &["nowhere.example:22"], |_, _| {});
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, "nowhere.example:22").await, 200);
    assert_eq!(client.exactly(11).await, "SSH-2.0-x\r\n");
}

#[tokio::test]
async fn n21_policies_decide_before_the_upstream_is_asked() {
    let (port, _) = host(OK).await;
    let (upstream, asked) = upstream(port, None).await;
    let place = place(upstream, &["*", "wiki", "127.0.0.1:*"], |table, _| {
        table.deny = strings(&["evil.example"]);
        table.methods = strings(&["GET"]);
        // It opens the port for the address alone, and nobody here knows where a name leads.
        table.private = vec![format!("127.0.0.1:{port}")];
    });
    let own = format!("http://127.0.0.1:{upstream}/");
    let named = format!("http://named.example:{port}/");
    for (url, rule) in [
        ("http://evil.example/", "policy \"t\" denies \"evil.example\""),
        ("http://a.example:8443/", "policy \"t\" does not allow port 8443"),
        (named.as_str(), "policy \"t\" does not allow port"),
        ("http://169.254.169.254/", "169.254.169.254 is the cloud's metadata address"),
        ("http://10.1.2.3/", "10.1.2.3 is a private address"),
        ("http://0x7f.1/", "127.0.0.1 is a loopback address"),
        ("http://[::ffff:10.0.0.5]/", "is a private address"),
        ("http://localhost/", "localhost is a name of the upstream proxy's own network"),
        ("http://metadata.google.internal/", "metadata.google.internal is a name of the upstream proxy's own network"),
        ("http://intranet/", "intranet is a name of the upstream proxy's own network"),
        (own.as_str(), "is a loopback address"),
    ] {
        let answer = place.ask(&get(url)).await;
        assert_eq!((answer.status, answer.header("x-sandpool-denied")), (403, Some("1")), "{url}");
        assert!(answer.text().contains(rule), "{url}: {}", answer.text());
    }
    let answer = place.ask("POST http://a.example/ HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n").await;
    assert_eq!(answer.status, 403);
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, "a.example:443").await, 403, "its methods cannot be seen");
    assert_eq!(asked.connections(), 0);
    // What is listed passes: a name of that network through the upstream, and an address of this one directly.
    assert_eq!(place.ask(&get("http://wiki/")).await.status, 200);
    assert_eq!(asked.connections(), 1);
    assert_eq!(place.ask(&get(&format!("http://127.0.0.1:{port}/"))).await.status, 200);
    assert_eq!(asked.connections(), 1);
}

#[tokio::test]
async fn n21_nobody_speaks_with_the_upstream_itself_or_hides_a_name_from_it() {
    let (port, _) = host(OK).await;
    let (upstream, asked) = upstream(port, None).await;
    let place = place(upstream, &["*:*", "127.0.0.1:*"], |table, _| table.private = strings(&["127.0.0.1"]));
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("127.0.0.1:{upstream}")).await, 403);
    assert!(
        place.sentences()[0].contains("this is the upstream proxy of the server itself"),
        "{:?}",
        place.sentences()
    );
    assert_eq!(asked.connections(), 0);
    for (name, rule) in [
        ("127.0.0.1", "the TLS greeting names nobody, and the upstream proxy chooses the address"),
        ("b.example", "the TLS greeting is for b.example, the connection is for a.example"),
    ] {
        let mut client = place.client().await;
        assert_eq!(connect(&mut client, "a.example:443").await, 200);
        client.send(greeting(name)).await;
        assert_eq!(client.rest().await, [21, 3, 3, 0, 2, 2, 49], "{name}");
        assert!(place.sentences().last().unwrap().contains(rule), "{:?}", place.sentences());
    }
    // The upstream could answer this itself, with what it was sent.
    for method in ["TRACE", "trace", "Trace"] {
        let ask = format!("{method} http://a.example/ HTTP/1.1\r\nHost: x\r\nMax-Forwards: 0\r\n\r\n");
        let answer = place.ask(&ask).await;
        let refused = "TRACE does not pass through the upstream proxy of this server\n";
        assert_eq!((answer.status, answer.text().as_str()), (400, refused), "{method}");
    }
}

#[tokio::test]
async fn n21_hosts_that_are_excepted_or_have_an_address_are_reached_directly() {
    let (port, _) = host(OK).await;
    let (upstream, asked) = upstream(port, None).await;
    let place = place(upstream, &["a.test", "b.test"], |table, config| {
        table.private = vec![format!("127.0.0.1:{port}")];
        config.hosts = [("a.test".to_owned(), Ipv4Addr::LOCALHOST.into())].into();
        config.upstreams.except = strings(&["b.test"]);
    });
    assert_eq!(place.ask(&get(&format!("http://a.test:{port}/"))).await.status, 200);
    assert_eq!(place.ask(&get(&format!("http://b.test:{port}/"))).await.text(), "the name b.test was not found\n");
    assert_eq!(asked.connections(), 0);
}

#[tokio::test]
async fn n21_what_the_upstream_refuses_is_said_and_its_credentials_are_not() {
    let closed = {
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        listener.local_addr().unwrap().port()
    };
    let auth = "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=\"corp\"\r\nContent-Length: 0\r\n\r\n";
    let (wrong, _) = upstream(0, Some(auth)).await;
    let (refusing, _) = upstream(0, Some("HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")).await;
    let (babbling, _) = upstream(0, Some("SSH-2.0-x\r\n\r\n")).await;
    let (silent, _) = upstream(0, Some("")).await;
    let why = "the upstream proxy of this server failed";
    for (upstream, tunnel, request) in [
        (closed, "the connection was refused", Some("the connection was refused")),
        (
            wrong,
            "it does not accept the credentials in `network.upstream_credentials` (status 407)",
            Some("it does not accept the credentials in `network.upstream_credentials` (status 407)"),
        ),
        (refusing, "it refused the connection to a.example:443 with status 403", None),
        (babbling, "its answer is not HTTP", None),
        (silent, "it closed the connection", None),
    ] {
        let place = place(upstream, &["a.example"], |_, _| {});
        let mut client = place.client().await;
        client.send("CONNECT a.example:443 HTTP/1.1\r\nHost: a.example\r\n\r\n").await;
        let answer = client.answer().await;
        assert_eq!((answer.status, answer.text()), (502, format!("{why}: {tunnel}\n")));
        if let Some(request) = request {
            let answer = place.ask(&get("http://a.example/")).await;
            assert_eq!((answer.status, answer.text()), (502, format!("{why}: {request}\n")));
            assert_eq!(answer.header("proxy-authenticate"), None);
        }
        assert_eq!(place.sentences(), [""; 0], "a failure is no denial");
    }
}

#[tokio::test]
async fn n21_credentials_that_come_back_are_masked() {
    let echoed = "HTTP/1.1 502 Bad Gateway\r\nX-Sent: Basic Y29ycC11c2VyOmNvcnAtcGFzc3dvcmQ=\r\nContent-Length: 38\r\n\r\n\
                  Basic Y29ycC11c2VyOmNvcnAtcGFzc3dvcmQ=";
    let (upstream, _) = upstream(0, Some(echoed)).await;
    let place = place(upstream, &["a.example"], |_, _| {});
    let answer = place.ask(&get("http://a.example/")).await;
    assert_eq!(answer.header("x-sent"), Some(format!("Basic {}", "*".repeat(32)).as_str()));
    assert_eq!(answer.text(), format!("Basic {}", "*".repeat(32)));
}

/// W91: a client that gets the answer in parts of its own choice could put the credentials together from them.
#[tokio::test]
async fn w91_a_client_does_not_choose_the_part_of_an_answer_that_is_searched_for_credentials() {
    let (upstream, asked) = upstream(0, Some(OK)).await;
    let place = place(upstream, &["a.example"], |_, _| {});
    let chosen = "Range: bytes=0-9\r\nIf-Range: \"x\"\r\nAccept-Charset: utf-16\r\nX-Own: 1\r\n";
    assert_eq!(place.ask(&format!("GET http://a.example/ HTTP/1.1\r\nHost: x\r\n{chosen}\r\n")).await.text(), "ok");
    let sent = asked.texts()[0].to_lowercase();
    assert!(sent.contains("proxy-authorization: ") && sent.contains("x-own: 1"), "{sent}");
    for header in ["\r\nrange:", "\r\nif-range:", "\r\naccept-charset:"] {
        assert!(!sent.contains(header), "{sent}");
    }
}

/// W93: the upstream proxy is asked for the host that the policy judged, whatever the path is.
#[tokio::test]
async fn w93_a_request_without_a_path_names_the_host_that_was_judged() {
    let (upstream, asked) = upstream(0, Some(OK)).await;
    let place = place(upstream, &["a.example"], |_, _| {});
    assert_eq!(place.ask("OPTIONS * HTTP/1.1\r\nHost: a.example\r\n\r\n").await.text(), "ok");
    let sent = asked.texts()[0].clone();
    assert!(sent.starts_with("OPTIONS http://a.example/ HTTP/1.1\r\n"), "{sent}");
}

#[tokio::test]
async fn n21_an_answer_that_could_hide_credentials_is_refused() {
    let packed = "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd";
    let (upstream, asked) = upstream(0, Some(packed)).await;
    let place = place(upstream, &["a.example"], |_, _| {});
    let ask = "GET http://a.example/ HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\n\r\n";
    let answer = place.ask(ask).await;
    assert_eq!(answer.status, 502, "{}", answer.text());
    assert!(answer.text().contains("is compressed, although the request forbade it"), "{}", answer.text());
    let sent = asked.texts()[0].to_lowercase();
    assert!(sent.contains("accept-encoding: identity") && !sent.contains("gzip"), "{sent}");
}

#[tokio::test]
async fn n21_a_websocket_and_socks_pass_through_tunnels_of_the_upstream() {
    let switching = "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n";
    let (port, _) = host(switching).await;
    let (upstream, asked) = upstream(port, None).await;
    let place = place(upstream, &["a.example"], |_, _| {});
    let answer = place
        .ask("GET http://a.example/ HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n")
        .await;
    assert_eq!(answer.status, 101);
    assert!(asked.texts()[0].starts_with("CONNECT a.example:80 "), "{:?}", asked.texts());
    let mut client = Client::to(place.proxy).await;
    client.send(b"\x05\x01\x00\x05\x01\x00\x03\x09a.example\x01\xbb").await;
    assert_eq!(client.exactly(4).await.as_bytes(), b"\x05\x00\x05\x00");
    assert!(asked.texts()[1].starts_with("CONNECT a.example:443 "), "{:?}", asked.texts());
}
