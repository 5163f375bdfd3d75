//! The proxy on a host of its own with a world of its own around it: network namespaces, a name server that changes its mind, a metadata
//! service, a private host, the host's own services, and a redirector. Each counts who comes.
//!
//! The test starts itself twice: as the host, in namespaces for network and mounts; the host starts the world, in one for the network.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::{Egress, EgressConfig, Policy, Table};
use rustix::process::{Resource, Rlimit};

use crate::place::{Client, PATIENCE, Place, strings};
use crate::tunnels::{connect, greeting};

const PUBLIC: &str = "93.184.216.34";
const PUBLIC_6: &str = "2606:2800:220:1::1";
/// The host's own, as seen from outside.
const OWN: &str = "93.184.216.1";
const CANARIES: [&str; 6] =
    ["169.254.169.254", "10.0.0.5", "192.168.1.1", "100.100.100.200", "fd00:ec2::254", "64:ff9b::a00:5"];
const CONTROL: &str = "10.77.0.2:7777";

#[allow(clippy::disallowed_methods, reason = "this file's one place to start a program")]
fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    command
}

fn run(line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = command(words[0], &words[1..]).output().unwrap();
    assert!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
}

/// This program again, as one of the roles below.
fn role(unshare: &[&str], role: &str) -> Command {
    let own = std::env::current_exe().unwrap();
    let own = own.to_str().unwrap();
    command("unshare", &[unshare, &[own, role, "--exact", "--ignored", "--nocapture"]].concat())
}

/// Elsewhere than in CI it is no failure.
#[allow(clippy::disallowed_methods, reason = "CI says by a variable that nothing may be skipped")]
fn skip(reason: &str) {
    assert!(std::env::var_os("CI").is_none(), "cannot be skipped in CI: {reason}");
    eprintln!("SKIP: {reason}");
}

#[test]
fn n01_n05_n06_nothing_but_the_public_is_ever_reached() {
    if !rustix::process::geteuid().is_root() {
        return skip("this test makes network namespaces, as root");
    }
    let output = role(&["--net", "--mount"], "namespaces::the_host").output().unwrap();
    let said = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// Ends with whoever waits for it.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "not a test: the one above starts it in a network namespace of its own"]
fn the_host() {
    let mut world =
        Ended(role(&["--net"], "namespaces::the_world").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut said = BufReader::new(world.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(said.any(|line| line.contains("here")));
    run("ip link set lo up");
    run("ip link add v0 type veth peer name v1");
    run(&format!("ip link set v1 netns {}", world.0.id()));
    run("ip addr add 10.77.0.1/24 dev v0");
    run(&format!("ip addr add {OWN}/32 dev v0"));
    run("ip -6 addr add fd77::1/64 dev v0 nodad");
    run("ip link set v0 up");
    world.0.stdin.take().unwrap().write_all(b"go\n").unwrap();
    assert!(said.any(|line| line.contains("ready")));
    run("ip route add default via 10.77.0.2");
    run("ip -6 route add default via fd77::2");
    for (file, content) in [
        ("/etc/resolv.conf", "nameserver 127.0.0.1\nsearch corp.test\noptions timeout:30 attempts:2\n"),
        ("/etc/nsswitch.conf", "hosts: files dns\n"),
        ("/etc/hosts", &format!("127.0.0.1 localhost\n{PUBLIC} written-down.test\n")),
    ] {
        let own = std::env::temp_dir().join(format!("sandpool-egress-{}-{}", std::process::id(), file.len()));
        std::fs::write(&own, content).unwrap();
        run(&format!("mount --bind {} {file}", own.to_str().unwrap()));
        // The mount keeps it.
        std::fs::remove_file(own).unwrap();
    }
    let names = Names::serve();
    let own = Hits::default();
    for port in [80, 8080] {
        serve(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap(), own.clone());
    }
    assert_eq!(hits().get(PUBLIC), None, "nobody was there before");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(judged(&names, &own));
    runtime.shutdown_background();
}

fn table() -> Table {
    Table {
        name: "t".into(),
        allow: strings(&["*"]),
        deny: strings(&["*.evil.test"]),
        ports: vec![80, 443, 8080],
        connections_per_second: Some(100_000),
        ..Table::default()
    }
}

async fn judged(names: &Names, own: &Hits) {
    let place = Place::with(Policy::of(table()));
    let get = |target: &str| format!("GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n");

    // What is public is reached, by either protocol.
    for target in ["public.test", "six.test", "intranet", "written-down.test", PUBLIC, &format!("[{PUBLIC_6}]")] {
        let answer = place.ask(&get(target)).await;
        assert_eq!((answer.status, answer.text().as_str()), (200, "world"), "{target}");
    }
    let answer = place.ask(&get("no-such-name.test")).await;
    assert_eq!((answer.status, answer.header("x-sandpool-denied")), (502, None));
    assert_eq!(answer.text(), "the name no-such-name.test was not found\n");
    let before = hits();

    // N01, N03, N04: no canary by its address, in any protocol; N05: nothing of the host's own.
    let mut refused = CANARIES.map(str::to_owned).to_vec();
    refused.extend(strings(&[
        "127.0.0.1",
        "::1",
        "10.77.0.1",
        "fd77::1",
        OWN,
        "0.0.0.0",
        "::ffff:10.0.0.5",
        "::ffff:93.184.216.1",
    ]));
    for address in &refused {
        let literal = if address.contains(':') { format!("[{address}]") } else { address.clone() };
        for port in [80, 8080] {
            let answer = place.ask(&get(&format!("{literal}:{port}"))).await;
            assert_eq!(answer.status, 403, "{literal}:{port}: {}", answer.text());
        }
        assert_eq!(connect(&mut place.client().await, &format!("{literal}:8080")).await, 403, "{literal}");
    }
    // The same by names that lead there.
    for name in ["private.test", "metadata.test", "own.test", "six-private.test", "mapped.test", "loopback.test"] {
        let answer = place.ask(&get(name)).await;
        assert_eq!(answer.status, 403, "{name}: {}", answer.text());
        assert!(answer.text().contains(&format!("{name} leads to ")), "{}", answer.text());
        assert!(!answer.text().contains("10.0.0.5") && !answer.text().contains(OWN), "{}", answer.text());
    }

    // N06: a name that is public when it is asked for first, and private when it is asked for again. It is asked for once a request.
    let (mut passed, mut client) = (0, place.client().await);
    for _ in 0..20 {
        client.send(get("flip.test")).await;
        let answer = client.answer().await;
        assert!(answer.status == 200 || answer.status == 403, "{}", answer.text());
        passed += usize::from(answer.status == 200);
    }
    assert_eq!((passed, names.asked("flip.test")), (10, 20));
    // A name that is both is only what is public.
    for _ in 0..5 {
        assert_eq!(place.ask(&get("mixed.test")).await.status, 200);
    }

    // A redirect is one more request.
    for to in ["metadata", "private", "loopback", "flip"] {
        for proxy in ["http", "socks5h"] {
            let proxy = format!("{proxy}://{}", place.proxy);
            let url = format!("http://public.test/to-{to}");
            let output = tokio::task::spawn_blocking(move || {
                command("curl", &["-sS", "-L", "--noproxy", "", "--max-time", "60", "-x", &proxy, &url])
                    .output()
                    .unwrap()
            });
            let output = output.await.unwrap();
            let said =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
            // SOCKS has a number for it and no room for a sentence.
            let denied = said.contains(" was denied: ") || said.contains("(97)");
            assert!(denied || (to == "flip" && said == "world"), "{to}: {said}");
        }
    }

    // What is denied is not even looked up: a name can carry what was found.
    assert_eq!(place.ask(&get("stolen-data.evil.test")).await.status, 403);
    assert_eq!(names.asked("stolen-data.evil.test"), 0);

    tunnels_of_the_usual_ports(&place).await;
    slow_names(names).await;

    let after = hits();
    for canary in CANARIES {
        assert_eq!(after.get(canary), None, "{canary}: {after:?}");
    }
    assert!(after[PUBLIC] > before[PUBLIC]);
    assert_eq!(own.all(), BTreeMap::new(), "the host's own services");

    // They would have been heard of: what an operator lists is reached, and counted.
    let listed = Place::with(Policy::of(Table { private: strings(&["10.0.0.5", OWN]), ..table() }));
    for target in ["private.test", "own.test"] {
        assert_eq!(listed.ask(&get(target)).await.status, 200, "{target}");
    }
    assert_eq!((hits().get("10.0.0.5"), own.all().get(OWN)), (Some(&1), Some(&1)));
}

/// W24: names that nobody answers for, asked for in 60 sandboxes of one tenant, do not hold up another tenant's.
async fn slow_names(names: &Names) {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let egress = Egress::new(EgressConfig::default()).unwrap();
    let get = |target: &str| format!("GET http://{target}/ HTTP/1.1\r\nHost: x\r\n\r\n");
    let (mut flooding, mut waiting) = (Vec::new(), Vec::new());
    for sandbox in 0..60 {
        let place = Place::of(&egress, "red", Policy::of(table()));
        for name in 0..8 {
            let mut client = place.client().await;
            client.send(get(&format!("slow-{sandbox}-{name}.test"))).await;
            waiting.push(client);
        }
        flooding.push(place);
    }
    names.wait_for_slow(16).await;
    let neighbour = Place::of(&egress, "blue", Policy::of(table()));
    for _ in 0..20 {
        assert_eq!(neighbour.ask(&get("public.test")).await.status, 200);
    }
}

/// Ports 80 and 443 are looked into.
async fn tunnels_of_the_usual_ports(place: &Place) {
    let reading = Place::with(Policy::of(Table { methods: strings(&["GET"]), ..table() }));
    let mut client = reading.client().await;
    assert_eq!(connect(&mut client, "public.test:80").await, 200);
    for (method, host, status) in [
        ("GET", "public.test", 200),
        ("POST", "public.test", 403),
        ("GET", "public.test:80", 200),
        ("GET", "six.test", 403),
        ("CONNECT", "public.test", 400),
    ] {
        client.send(format!("{method} / HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n\r\n")).await;
        let answer = client.answer().await;
        assert_eq!(answer.status, status, "{method} {host}: {}", answer.text());
    }
    let answer = reading.ask("CONNECT public.test:443 HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.text().contains("what is inside this connection cannot be seen"), "{}", answer.text());

    let alert = [21, 3, 3, 0, 2, 2, 49].to_vec();
    for (sent, back) in [
        (greeting("public.test"), b"world".to_vec()),
        (greeting("six.test"), alert.clone()),
        (b"GET / HTTP/1.1\r\n\r\n".to_vec(), alert.clone()),
        (b"SSH-2.0-x\r\n".to_vec(), alert),
    ] {
        let mut client: Client = place.client().await;
        assert_eq!(connect(&mut client, "public.test:443").await, 200);
        client.send(&sent).await;
        assert_eq!(client.rest().await, back);
    }
}

/// How often somebody came, by the address that he came to.
#[derive(Clone, Default)]
struct Hits(Arc<Mutex<BTreeMap<String, usize>>>);

impl Hits {
    fn add(&self, address: IpAddr) {
        *self.0.lock().unwrap().entry(address.to_canonical().to_string()).or_default() += 1;
    }

    fn all(&self) -> BTreeMap<String, usize> {
        self.0.lock().unwrap().clone()
    }
}

/// Those of the world.
fn hits() -> BTreeMap<String, usize> {
    let mut text = String::new();
    TcpStream::connect(CONTROL).unwrap().read_to_string(&mut text).unwrap();
    let pair = |line: &str| line.split_once(' ').map(|(address, n)| (address.to_owned(), n.parse().unwrap()));
    text.lines().filter_map(pair).collect()
}

/// Answers requests, on every address.
fn serve(listener: TcpListener, hits: Hits) {
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            hits.add(stream.local_addr().unwrap().ip());
            std::thread::spawn(move || {
                let mut bytes = [0; 4096];
                let n = stream.read(&mut bytes).unwrap_or(0);
                let asked = String::from_utf8_lossy(&bytes[..n]).into_owned();
                let to = asked.strip_prefix("GET /to-").and_then(|rest| rest.split(' ').next());
                let answer = match to {
                    Some("metadata") => redirect("169.254.169.254/latest/meta-data/"),
                    Some("private") => redirect("10.0.0.5/"),
                    Some("loopback") => redirect("localhost:8080/"),
                    Some(_) => redirect("flip.test/"),
                    None if asked.contains("HTTP/1.1") => {
                        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nworld".into()
                    }
                    None => "world".into(),
                };
                let _ = stream.write_all(answer.as_bytes());
            });
        }
    });
}

fn redirect(to: &str) -> String {
    format!("HTTP/1.1 302 Found\r\nLocation: http://{to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
}

#[test]
#[ignore = "not a test: the one above starts it in a network namespace of its own"]
fn the_world() {
    eprintln!();
    say("here");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    run("ip link set lo up");
    run("ip addr add 10.77.0.2/24 dev v1");
    run("ip -6 addr add fd77::2/64 dev v1 nodad");
    run("ip link set v1 up");
    for address in [PUBLIC, PUBLIC_6].iter().chain(&CANARIES) {
        match address.contains(':') {
            true => run(&format!("ip -6 addr add {address}/128 dev v1 nodad")),
            false => run(&format!("ip addr add {address}/32 dev v1")),
        }
    }
    let hits = Hits::default();
    for port in [80, 443, 8080] {
        serve(TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).unwrap(), hits.clone());
    }
    let control = TcpListener::bind(CONTROL).unwrap();
    say("ready");
    for mut stream in control.incoming().map_while(Result::ok) {
        let text = hits.all().iter().fold(String::new(), |mut text, (address, n)| {
            let _ = writeln!(text, "{address} {n}");
            text
        });
        let _ = stream.write_all(text.as_bytes());
    }
}

fn say(word: &str) {
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{word}").unwrap();
    stdout.flush().unwrap();
}

/// A name server whose answers are good for no time at all.
struct Names(Arc<Mutex<BTreeMap<String, usize>>>);

impl Names {
    fn serve() -> Self {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 53)).unwrap();
        let asked: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
        let own = Arc::clone(&asked);
        std::thread::spawn(move || {
            let mut packet = [0; 1500];
            while let Ok((n, from)) = socket.recv_from(&mut packet) {
                let answer = answer(&packet[..n], &own);
                if !answer.is_empty() {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        Self(asked)
    }

    /// Until so many names were asked for that nothing is said about.
    async fn wait_for_slow(&self, many: usize) {
        let slow = || self.0.lock().unwrap().keys().filter(|name| name.starts_with("slow-")).count();
        tokio::time::timeout(PATIENCE, async {
            while slow() < many {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        })
        .await
        .expect("the names to be asked for");
    }

    /// For an IPv4 address.
    fn asked(&self, name: &str) -> usize {
        self.0.lock().unwrap().get(name).copied().unwrap_or(0)
    }
}

fn addresses(name: &str, nth: usize) -> Vec<IpAddr> {
    let all: &[&str] = match name {
        "public.test" | "intranet.corp.test" => &[PUBLIC],
        "six.test" => &[PUBLIC_6],
        "private.test" => &["10.0.0.5"],
        "metadata.test" => &["169.254.169.254"],
        "own.test" => &[OWN],
        "loopback.test" => &["127.0.0.1"],
        "six-private.test" => &["fd00:ec2::254"],
        "mapped.test" => &["::ffff:10.0.0.5"],
        "mixed.test" => &["10.0.0.5", PUBLIC, "169.254.169.254"],
        "flip.test" if nth.is_multiple_of(2) => &[PUBLIC],
        "flip.test" => &["169.254.169.254"],
        _ => &[],
    };
    all.iter().map(|address| address.parse().unwrap()).collect()
}

fn answer(query: &[u8], asked: &Mutex<BTreeMap<String, usize>>) -> Vec<u8> {
    let mut labels = Vec::new();
    let mut at = 12;
    while query[at] != 0 {
        let length = usize::from(query[at]);
        labels.push(String::from_utf8_lossy(&query[at + 1..=at + length]).to_lowercase());
        at += length + 1;
    }
    let (name, kind) = (labels.join("."), query[at + 2]);
    let question = &query[12..at + 5];
    const A: u8 = 1;
    let mut asked = asked.lock().unwrap();
    if name.starts_with("slow-") {
        // Nothing is said.
        asked.insert(name, 1);
        return Vec::new();
    }
    let count = asked.entry(name.clone()).or_default();
    let found: Vec<Vec<u8>> = addresses(&name, *count)
        .into_iter()
        .filter_map(|address| match address {
            IpAddr::V4(v4) if kind == A => Some(v4.octets().to_vec()),
            IpAddr::V6(v6) if kind == 28 => Some(v6.octets().to_vec()),
            _ => None,
        })
        .collect();
    *count += usize::from(kind == A);
    let mut reply = vec![query[0], query[1], 0x81, 0x80, 0, 1, 0, found.len() as u8, 0, 0, 0, 0];
    reply.extend_from_slice(question);
    for address in found {
        // The name of the question, its kind, class, no time to live.
        reply.extend_from_slice(&[0xc0, 12, 0, kind, 0, 1, 0, 0, 0, 0, 0, address.len() as u8]);
        reply.extend_from_slice(&address);
    }
    reply
}
