use std::sync::Arc;

use egress::{Policy, Table};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, RootCertStore};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::place::{Client, Place, echo, host, strings};

/// A TLS greeting for this name; for an address there is none in it.
pub fn greeting(name: &str) -> Vec<u8> {
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(RootCertStore::empty())
        .with_no_client_auth();
    let mut client = ClientConnection::new(Arc::new(config), ServerName::try_from(name.to_owned()).unwrap()).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

pub async fn connect(client: &mut Client, target: &str) -> u16 {
    client.send(format!("CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n")).await;
    client.head().await.status
}

#[tokio::test]
async fn a_tunnel_carries_bytes_both_ways() {
    let port = echo().await;
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("A.TEST.:{port}")).await, 200);
    let text: String = (0..200_000).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
    let (mut read, mut write) = client.0.stream().split();
    let (sent, back) = tokio::join!(
        async {
            write.write_all(text.as_bytes()).await.unwrap();
            write.shutdown().await
        },
        async {
            let mut back = String::new();
            read.read_to_string(&mut back).await.unwrap();
            back
        }
    );
    sent.unwrap();
    assert!(back == text);
}

#[tokio::test]
async fn a_host_that_speaks_first_is_heard() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        stream.write_all(b"SSH-2.0-x\r\n").await.unwrap();
        let _ = stream.read(&mut [0; 16]).await;
    });
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("a.test:{port}")).await, 200);
    assert_eq!(client.exactly(11).await, "SSH-2.0-x\r\n");
}

#[tokio::test]
async fn n10_a_tls_greeting_has_to_be_for_the_name_that_was_asked_for() {
    let (port, heard) = host("").await;
    let place = Place::new(&[port], |_| {});
    for (name, passes) in [("a.test", true), ("b.test", false), ("other.test", false), ("127.0.0.1", false)] {
        let mut client = place.client().await;
        assert_eq!(connect(&mut client, &format!("a.test:{port}")).await, 200);
        let greeting = greeting(name);
        let before = heard.texts().concat().len();
        // In pieces, as a network may deliver it.
        client.send(&greeting[..1]).await;
        client.send(&greeting[1..40]).await;
        client.send(&greeting[40..]).await;
        if passes {
            client.0.half_close().await.unwrap();
            assert_eq!(client.rest().await, b"");
            assert_eq!(heard.texts().last().unwrap().len(), String::from_utf8_lossy(&greeting).len());
        } else {
            assert_eq!(client.rest().await, [21, 3, 3, 0, 2, 2, 49], "{name}");
            assert_eq!(heard.texts().concat().len(), before, "{name}: nothing was passed on");
        }
    }
    assert_eq!(
        place.sentences(),
        [
            format!(
                "CONNECT a.test:{port} was denied: the TLS greeting is for b.test, the connection is for a.test. Both have to be the same."
            ),
            format!(
                "CONNECT a.test:{port} was denied: the TLS greeting is for other.test, the connection is for a.test. Both have to be the same."
            ),
            format!(
                "CONNECT a.test:{port} was denied: the TLS greeting names nobody, and policy \"t\" does not allow this address. \
                 The operator can allow it in sandpool.toml: [network.policy.t] allow = [\"127.0.0.1:{port}\"]."
            ),
        ]
    );
}

#[tokio::test]
async fn n10_a_connection_to_an_address_may_greet_only_names_that_are_allowed() {
    let (port, heard) = host("").await;
    let place = Place::new(&[port], |table| table.allow.push("127.0.0.1".into()));
    for (name, passes) in [("a.test", true), ("other.test", false), ("127.0.0.1", true)] {
        let mut client = place.client().await;
        assert_eq!(connect(&mut client, &format!("127.0.0.1:{port}")).await, 200);
        let before = heard.texts().concat().len();
        client.send(greeting(name)).await;
        client.0.half_close().await.unwrap();
        client.rest().await;
        assert_eq!(heard.texts().concat().len() > before, passes, "{name}");
    }
}

#[tokio::test]
async fn n08_no_dress_makes_a_loopback_address_something_else() {
    let (port, heard) = host("").await;
    let place = Place::with(Policy::of(Table { name: "t".into(), allow: strings(&["*:*"]), ..Table::default() }));
    let dresses = [
        "127.0.0.1",
        "127.0.0.1.",
        "2130706433",
        "0177.0.0.1",
        "0x7f.1",
        "0x7f000001",
        "127.1",
        "0",
        "[::1]",
        "[::]",
        "[::ffff:7f00:1]",
        "[::ffff:127.0.0.1]",
        "[64:ff9b::7f00:1]",
        "[2002:7f00:1::]",
        "[::127.0.0.1]",
        "localhost",
        "LOCALHOST.",
        "a.test",
    ];
    for dress in dresses {
        let answer = place.ask(&format!("GET http://{dress}:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(answer.status, 403, "{dress}: {}", answer.text());
        let answer = place.ask(&format!("CONNECT {dress}:{port} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(answer.status, 403, "{dress}: {}", answer.text());
        let bare = dress.trim_matches(['[', ']']);
        assert_eq!(socks(&place, bare, port).await.1, 2, "{dress}");
    }
    // Only a program that does not go by the standards can say these.
    for dress in ["１２７.０.０.１", "127。0。0。1", "①②⑦.0.0.1", "%31%32%37.0.0.1"] {
        assert_eq!(socks(&place, dress, port).await.1, 2, "{dress}");
    }
    assert_eq!(heard.connections(), 0);
}

/// The client and the code of the reply to a request by name.
async fn socks(place: &Place, name: &str, port: u16) -> (Client, u8) {
    let mut request = vec![5, 1, 0, 5, 1, 0, 3, name.len() as u8];
    request.extend_from_slice(name.as_bytes());
    request.extend_from_slice(&port.to_be_bytes());
    socks_bytes(place, &request).await
}

async fn socks_bytes(place: &Place, request: &[u8]) -> (Client, u8) {
    let mut client = place.client().await;
    client.send(request).await;
    let reply = client.0.exactly(12).await.unwrap();
    assert_eq!(reply[..3], [5, 0, 5]);
    (client, reply[3])
}

#[tokio::test]
async fn socks_connects_by_name_and_by_address_and_does_nothing_else() {
    let port = echo().await;
    let place = Place::new(&[port], |table| table.allow.push("127.0.0.1".into()));
    let [high, low] = port.to_be_bytes();
    let (mut client, code) = socks(&place, "a.test", port).await;
    assert_eq!(code, 0);
    client.send("back").await;
    assert_eq!(client.exactly(4).await, "back");
    assert_eq!(socks_bytes(&place, &[5, 1, 0, 5, 1, 0, 1, 127, 0, 0, 1, high, low]).await.1, 0);
    assert_eq!(socks(&place, "other.test", port).await.1, 2);
    let v6 = [5, 1, 0, 5, 1, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, high, low];
    assert_eq!(socks_bytes(&place, &v6).await.1, 2);
    // BIND and UDP ASSOCIATE.
    for command in [2, 3] {
        assert_eq!(socks_bytes(&place, &[5, 1, 0, 5, command, 0, 1, 127, 0, 0, 1, high, low]).await.1, 7);
    }
    let mut client = place.client().await;
    client.send([5, 1, 2]).await;
    assert_eq!(client.rest().await, [5, 0xff], "a password is not taken");
    assert!(place.sentences()[0].starts_with(&format!("SOCKS5 other.test:{port} was denied: ")));
}
