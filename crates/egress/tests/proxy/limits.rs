use std::time::Duration;

use egress::{Policy, Table};
use tokio::net::TcpStream;

use crate::place::{Client, Place, echo, host, strings};
use crate::tunnels::connect;

#[tokio::test]
async fn more_connections_than_allowed_wait_and_are_then_denied() {
    let port = echo().await;
    let place = Place::new(&[port], |table| table.max_connections = Some(2));
    let (mut first, mut second, mut third) = (place.client().await, place.client().await, place.client().await);
    assert_eq!(connect(&mut first, &format!("a.test:{port}")).await, 200);
    assert_eq!(connect(&mut second, &format!("a.test:{port}")).await, 200);
    let answer = third.answer().await;
    assert_eq!(
        (answer.status, answer.text().as_str()),
        (
            403,
            "a connection was denied: policy \"t\" allows no more than 2 connections at once. The operator can allow it in \
             sandpool.toml, by a change of [network.policy.t] max_connections.\n"
        )
    );
    drop(first);
    let mut fourth = place.client().await;
    assert_eq!(connect(&mut fourth, &format!("a.test:{port}")).await, 200);
}

#[tokio::test]
async fn n16_very_many_connections_take_no_more_than_a_few_descriptors() {
    let place = Place::new(&[], |table| table.max_connections = Some(8));
    let mut clients = Vec::new();
    for _ in 0..300 {
        // The kernel's own queue is full after a while: what does not fit there does not reach the server either.
        match tokio::time::timeout(Duration::from_millis(20), TcpStream::connect(place.proxy)).await {
            Ok(Ok(stream)) => clients.push(stream),
            _ => break,
        }
    }
    assert!(clients.len() > 50, "{}", clients.len());
    let accepted = accepted(place.proxy.port());
    assert!((1..=9).contains(&accepted), "eight have a place, and one waits for it: {accepted}");
}

/// How many connections to this port of this machine have a descriptor: those that wait in the kernel's queue have none.
fn accepted(port: u16) -> usize {
    let table = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let rows = table.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>());
    const ESTABLISHED: &str = "01";
    rows.filter(|row| row[1].ends_with(&format!(":{port:04X}")) && row[3] == ESTABLISHED && row[9] != "0").count()
}

#[tokio::test]
async fn bytes_are_counted_and_when_they_are_spent_everything_ends() {
    let port = echo().await;
    let place = Place::new(&[port], |table| table.max_bytes = Some(100_000));
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("a.test:{port}")).await, 200);
    client.send(vec![b'x'; 40_000]).await;
    client.exactly(40_000).await;
    client.send(vec![b'x'; 40_000]).await;
    assert!(client.rest().await.len() <= 40_000);
    let answer = place.ask(&format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert_eq!(answer.status, 403);
    assert!(answer.text().contains("allows no more than 100000 bytes over the life of a sandbox"), "{}", answer.text());
    assert!(place.sentences()[0].starts_with("a connection was denied: policy \"t\" allows no more than 100000 bytes"));
}

#[tokio::test]
async fn what_is_faster_than_allowed_is_slowed_down() {
    let port = echo().await;
    let place = Place::new(&[port], |table| table.bytes_per_second = Some(100_000));
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("a.test:{port}")).await, 200);
    let start = std::time::Instant::now();
    for _ in 0..10 {
        client.send(vec![b'x'; 15_000]).await;
        client.exactly(15_000).await;
    }
    // 300 kB both ways, of which 100 kB are there at once.
    assert!(start.elapsed() > Duration::from_millis(1500), "{:?}", start.elapsed());
}

#[tokio::test]
async fn connections_to_hosts_are_paced_also_behind_one_connection() {
    let (port, heard) = host("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").await;
    let place = Place::new(&[port], |table| table.connections_per_second = Some(5));
    let mut client = place.client().await;
    let begun = std::time::Instant::now();
    for _ in 0..15 {
        client.send(format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
        assert_eq!(client.answer().await.status, 200);
    }
    assert_eq!(heard.connections(), 15);
    assert!(begun.elapsed() > Duration::from_secs(1), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_flood_of_requests_that_come_to_nothing_is_slowed_down() {
    let place = Place::new(&[], |_| {});
    let mut client = place.client().await;
    let begun = std::time::Instant::now();
    for _ in 0..8 {
        client.send("GET http://other.test/ HTTP/1.1\r\nHost: x\r\n\r\n".repeat(100)).await;
        for _ in 0..100 {
            assert_eq!(client.answer().await.status, 403);
        }
    }
    // Five hundred at once, and then a hundred each second.
    assert!(begun.elapsed() > Duration::from_secs(2), "{:?}", begun.elapsed());
}

async fn is_cut(client: &mut Client) -> bool {
    tokio::time::timeout(crate::place::PATIENCE, client.0.peek()).await.expect("an end in time").is_empty()
}

#[tokio::test]
async fn a_narrower_policy_holds_for_what_is_open_already_and_ends_with_its_guard() {
    let port = echo().await;
    let place = Place::new(&[port], |_| {});
    let (mut to_a, mut to_b) = (place.client().await, place.client().await);
    assert_eq!(connect(&mut to_a, &format!("a.test:{port}")).await, 200);
    assert_eq!(connect(&mut to_b, &format!("b.test:{port}")).await, 200);
    let narrower = Table {
        name: "a".into(),
        allow: strings(&["a.test"]),
        private: strings(&["*"]),
        ports: vec![port],
        ..Table::default()
    };
    let only_a = place.gate().narrow(Some(Policy::of(narrower)));
    assert!(is_cut(&mut to_b).await);
    to_a.send("here").await;
    assert_eq!(to_a.exactly(4).await, "here");
    assert_eq!(connect(&mut place.client().await, &format!("b.test:{port}")).await, 403);
    assert_eq!(connect(&mut place.client().await, &format!("a.test:{port}")).await, 200);

    let nothing = place.gate().narrow(None);
    assert!(is_cut(&mut to_a).await);
    let answer = place.ask(&format!("CONNECT a.test:{port} HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert_eq!(
        answer.text(),
        format!("CONNECT a.test:{port} was denied: this call asked for no network. The call can ask for one.\n")
    );
    drop(nothing);
    assert_eq!(connect(&mut place.client().await, &format!("a.test:{port}")).await, 200);
    assert_eq!(connect(&mut place.client().await, &format!("b.test:{port}")).await, 403);
    drop(only_a);
    assert_eq!(connect(&mut place.client().await, &format!("b.test:{port}")).await, 200);
}

#[tokio::test]
async fn an_answer_that_is_on_its_way_is_cut_when_the_policy_becomes_narrower() {
    let (port, _) = host("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf").await;
    let place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    client.send(format!("GET http://a.test:{port}/ HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert_eq!(client.head().await.status, 200);
    assert_eq!(client.exactly(4).await, "half");
    let _nothing = place.gate().narrow(None);
    assert!(is_cut(&mut client).await);
}

#[tokio::test]
async fn a_policy_that_cannot_be_understood_allows_nothing() {
    let port = echo().await;
    let place = Place::new(&[port], |_| {});
    let bad = Table { name: "bad".into(), allow: strings(&["a.test", "b.*"]), ..Table::default() };
    let _held = place.gate().narrow(Some(Policy::of(bad.clone())));
    assert_eq!(connect(&mut place.client().await, &format!("a.test:{port}")).await, 403);
    let egress = egress::Egress::new(egress::EgressConfig::default()).unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let opened = egress.open(listener, "blue", Policy::of(bad), std::sync::Arc::new(|_| {}));
    assert_eq!(opened.err().unwrap().to_string(), "policy `bad`, `allow`: `b.*` has a `*` that is not its first label");
}

#[tokio::test]
async fn n19_a_gate_that_is_gone_lets_nothing_through() {
    let (port, _) = host("").await;
    let mut place = Place::new(&[port], |_| {});
    let mut client = place.client().await;
    assert_eq!(connect(&mut client, &format!("a.test:{port}")).await, 200);
    place.gate.take();
    assert!(is_cut(&mut client).await);
    // The listener goes with the task that had it, which is asked to end and not waited for.
    let refused = async {
        while TcpStream::connect(place.proxy).await.is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(crate::place::PATIENCE, refused).await.expect("the listener is closed");
}
