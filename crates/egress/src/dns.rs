//! Resolves names as the system's resolver does: first `/etc/hosts`, then the name servers of `/etc/resolv.conf` in
//! their order, with its search list. Other sources in `nsswitch.conf` are not consulted.
//!
//! The C library's resolver blocks a thread that cannot be interrupted. In this module a query is a future, and
//! dropping it releases everything that it uses.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Message, MessageType, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::lock;

const PORT: u16 = 53;
/// Maximum number of name servers that are asked, as in the system's resolver.
const MAX_SERVERS: usize = 3;
const MAX_SEARCHED: usize = 6;
/// Maximum number of aliases (CNAME records) that are followed from one name.
const MAX_ALIASES: usize = 16;
/// Size of the buffer for a UDP answer. Queries do not request answers longer than 512 bytes.
const DATAGRAM: usize = 4096;

/// The reason why a look-up found no address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LookupError {
    /// An authoritative source says that the name has no address.
    NoSuchName,
    /// No name server answered in time, or none could answer.
    NoAnswer,
}

/// The contents of `resolv.conf` and `hosts`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResolverConfig {
    pub servers: Vec<SocketAddr>,
    pub search: Vec<String>,
    pub ndots: usize,
    /// Timeout for one query to one server.
    pub timeout: Duration,
    pub attempts: usize,
    pub hosts: HashMap<String, Vec<IpAddr>>,
}

impl ResolverConfig {
    /// Parses both files and skips lines that it does not understand. `hostname` is the name of this machine.
    fn parse(resolv_conf: &str, hosts: &str, hostname: &str) -> Self {
        let mut config = Self {
            servers: Vec::new(),
            search: hostname.split_once('.').map(|(_, domain)| domain.to_owned()).into_iter().collect(),
            ndots: 1,
            timeout: Duration::from_secs(5),
            attempts: 2,
            hosts: HashMap::new(),
        };
        for line in resolv_conf.lines().filter(|line| !line.starts_with(['#', ';'])) {
            let mut words = line.split_whitespace();
            match words.next() {
                Some("nameserver") => config.servers.extend(words.next().and_then(server)),
                Some("search" | "domain") => {
                    let domains = words.map(|domain| domain.trim_matches('.').to_ascii_lowercase());
                    config.search = domains.filter(|domain| !domain.is_empty()).take(MAX_SEARCHED).collect();
                }
                Some("options") => words.for_each(|option| config.option(option)),
                _ => {}
            }
        }
        config.servers.truncate(MAX_SERVERS);
        if config.servers.is_empty() {
            config.servers.push((Ipv4Addr::LOCALHOST, PORT).into());
        }
        for line in hosts.lines() {
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(address) = words.next().and_then(|word| word.parse::<IpAddr>().ok()) else { continue };
            for name in words {
                config.hosts.entry(name.trim_end_matches('.').to_ascii_lowercase()).or_default().push(address);
            }
        }
        config
    }

    fn option(&mut self, option: &str) {
        let Some((name, Ok(value))) = option.split_once(':').map(|(name, value)| (name, value.parse::<u8>())) else {
            return;
        };
        match name {
            "ndots" => self.ndots = usize::from(value.min(15)),
            "timeout" => self.timeout = Duration::from_secs(u64::from(value.clamp(1, 30))),
            "attempts" => self.attempts = usize::from(value.clamp(1, 5)),
            _ => {}
        }
    }

    /// Returns the fully qualified names to query for `name`, in the order in which they are queried.
    fn names(&self, name: &str) -> Vec<String> {
        let searched = self.search.iter().map(|domain| format!("{name}.{domain}"));
        let mut names: Vec<String> = searched.collect();
        let at = if name.matches('.').count() >= self.ndots { 0 } else { names.len() };
        names.insert(at, name.to_owned());
        names
    }

    /// Returns the addresses of a name, alternating between IPv4 and IPv6. The name has to be in lower case and
    /// without a trailing dot.
    pub(crate) async fn addresses(&self, name: &str) -> Result<Vec<IpAddr>, LookupError> {
        if let Some(addresses) = self.hosts.get(name) {
            return Ok(addresses.clone());
        }
        // RFC 6761 says that no name server is asked for these names.
        if name == "localhost" || name.ends_with(".localhost") {
            return Ok(vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]);
        }
        let mut failed = LookupError::NoSuchName;
        for name in self.names(name) {
            let (four, six) = tokio::join!(self.ask(&name, RecordType::A), self.ask(&name, RecordType::AAAA));
            if four == Err(LookupError::NoAnswer) || six == Err(LookupError::NoAnswer) {
                failed = LookupError::NoAnswer;
            }
            let (four, six) = (four.unwrap_or_default(), six.unwrap_or_default());
            if !four.is_empty() || !six.is_empty() {
                let most = four.len().max(six.len());
                return Ok((0..most).flat_map(|n| [four.get(n), six.get(n)]).flatten().copied().collect());
            }
        }
        Err(failed)
    }

    async fn ask(&self, name: &str, kind: RecordType) -> Result<Vec<IpAddr>, LookupError> {
        // A domain from the search list may make the name too long.
        let Ok(name) = Name::from_ascii(format!("{name}.")) else { return Err(LookupError::NoSuchName) };
        for server in (0..self.attempts).flat_map(|_| &self.servers) {
            let question = Query::query(name.clone(), kind);
            let Ok(Ok(answer)) = timeout(self.timeout, exchange(*server, question)).await else { continue };
            match answer.metadata.response_code {
                ResponseCode::NoError => return Ok(found(&answer, name)),
                ResponseCode::NXDomain => return Err(LookupError::NoSuchName),
                // This server cannot answer, but the next one may.
                _ => {}
            }
        }
        Err(LookupError::NoAnswer)
    }
}

fn server(word: &str) -> Option<SocketAddr> {
    // The scope after `%` is the name or the index of an interface.
    let (address, scope) = word.split_once('%').map_or((word, None), |(address, scope)| (address, Some(scope)));
    let mut server = SocketAddr::new(address.parse().ok()?, PORT);
    if let (SocketAddr::V6(server), Some(scope)) = (&mut server, scope) {
        let index = || fs::read_to_string(Path::new("/sys/class/net").join(scope).join("ifindex")).ok();
        server.set_scope_id(scope.parse().ok().or_else(|| index()?.trim().parse().ok())?);
    }
    Some(server)
}

/// Sends one question to one server by UDP, and by TCP if the answer does not fit.
async fn exchange(server: SocketAddr, question: Query) -> io::Result<Message> {
    let mut message = Message::query();
    message.metadata.recursion_desired = true;
    message.add_query(question);
    let bytes = message.to_vec().map_err(io::Error::other)?;
    let any: IpAddr = if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    // The socket is connected, so datagrams from other addresses do not arrive.
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0; DATAGRAM];
    loop {
        let length = socket.recv(&mut buffer).await?;
        match answer_to(&message, &buffer[..length]) {
            Some(answer) if answer.metadata.truncation => break,
            Some(answer) => return Ok(answer),
            None => {}
        }
    }
    drop(socket);
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), bytes.as_slice()].concat()).await?;
    let mut buffer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut buffer).await?;
    answer_to(&message, &buffer).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidData))
}

fn answer_to(question: &Message, bytes: &[u8]) -> Option<Message> {
    let answer = Message::from_vec(bytes).ok()?;
    let fits = answer.metadata.id == question.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.queries == question.queries;
    fits.then_some(answer)
}

/// Returns the addresses of the name and of the names that it is an alias for.
fn found(answer: &Message, name: Name) -> Vec<IpAddr> {
    let (mut names, mut addresses, mut at) = (vec![name], Vec::new(), 0);
    while at < names.len().min(MAX_ALIASES) {
        let name = names[at].clone();
        for record in answer.answers.iter().filter(|record| record.name == name) {
            addresses.extend(record.data.ip_addr());
            if let RData::CNAME(other) = &record.data
                && !names.contains(&other.0)
            {
                names.push(other.0.clone());
            }
        }
        at += 1;
    }
    addresses
}

/// The resolver files of this machine. They are read again when they have changed.
#[derive(Debug)]
pub(crate) struct System {
    resolv_conf: PathBuf,
    hosts: PathBuf,
    read: Mutex<Option<(Stamps, Arc<ResolverConfig>)>>,
}

/// The identity of both files: device, inode, modification time and length.
type Stamps = [Option<(u64, u64, i64, i64, u64)>; 2];

impl Default for System {
    fn default() -> Self {
        Self::of("/etc/resolv.conf".into(), "/etc/hosts".into())
    }
}

impl System {
    #[cfg(test)]
    pub(crate) fn fixed(config: ResolverConfig) -> Self {
        Self { read: Mutex::new(Some(([None; 2], Arc::new(config)))), ..Self::of(PathBuf::new(), PathBuf::new()) }
    }

    fn of(resolv_conf: PathBuf, hosts: PathBuf) -> Self {
        Self { resolv_conf, hosts, read: Mutex::default() }
    }

    pub(crate) fn config(&self) -> Arc<ResolverConfig> {
        let stamps = [&self.resolv_conf, &self.hosts].map(|path| {
            let found = fs::metadata(path).ok()?;
            Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec(), found.len()))
        });
        let mut read = lock(&self.read);
        if let Some((before, config)) = &*read
            && *before == stamps
        {
            return Arc::clone(config);
        }
        let text = |path: &Path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
        let hostname = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let config = Arc::new(ResolverConfig::parse(&text(&self.resolv_conf), &text(&self.hosts), &hostname));
        *read = Some((stamps, Arc::clone(&config)));
        config
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Starts a name server on loopback. It ignores questions about names that begin with `slow`. Other names have
    /// the address 192.0.2.1: `long` by TCP only, `alias` through another name; `none` has no address.
    pub(crate) async fn server() -> ResolverConfig {
        use hickory_proto::rr::rdata::{A, CNAME};
        use hickory_proto::rr::{RData, Record};
        // A port that is free for one protocol may be in use for the other, by another test.
        let (socket, listener, address) = loop {
            let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let address = listener.local_addr().unwrap();
            if let Ok(socket) = UdpSocket::bind(address).await {
                break (socket, listener, address);
            }
        };
        let reply = |bytes: &[u8], by_tcp: bool| {
            let question = Message::from_vec(bytes).unwrap();
            let asked = question.queries[0].clone();
            let name = asked.name().clone();
            let text = name.to_string();
            let mut answer = Message::response(question.metadata.id, question.metadata.op_code);
            answer.add_query(asked.clone());
            let record = |name: Name, data: RData| Record::from_rdata(name, 0, data);
            let here = RData::A(A(Ipv4Addr::new(192, 0, 2, 1)));
            match (text.as_str(), asked.query_type()) {
                (text, _) if text.starts_with("slow") => return None,
                ("none.test.", _) => answer.metadata.response_code = ResponseCode::NXDomain,
                ("broken.test.", _) => answer.metadata.response_code = ResponseCode::ServFail,
                (_, RecordType::AAAA) => {}
                ("long.test.", _) if !by_tcp => answer.metadata.truncation = true,
                ("alias.test.", _) => {
                    let other = Name::from_ascii("other.test.").unwrap();
                    answer.add_answer(record(other.clone(), here));
                    answer.add_answer(record(name, RData::CNAME(CNAME(other))));
                }
                ("stray.test.", _) => {
                    answer.add_answer(record(Name::from_ascii("else.test.").unwrap(), here));
                }
                (text, _) if text.ends_with(".test.") => {
                    answer.add_answer(record(name, here));
                }
                _ => answer.metadata.response_code = ResponseCode::NXDomain,
            }
            answer.to_vec().ok()
        };
        tokio::spawn(async move {
            let mut buffer = [0; DATAGRAM];
            loop {
                let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
                if let Some(answer) = reply(&buffer[..length], false) {
                    socket.send_to(&answer, from).await.unwrap();
                }
            }
        });
        tokio::spawn(async move {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                let mut question = vec![0; usize::from(stream.read_u16().await.unwrap())];
                stream.read_exact(&mut question).await.unwrap();
                let answer = reply(&question, true).unwrap();
                stream.write_u16(answer.len() as u16).await.unwrap();
                stream.write_all(&answer).await.unwrap();
            }
        });
        ResolverConfig { servers: vec![address], ..ResolverConfig::parse("", "", "") }
    }

    #[tokio::test]
    async fn names_are_found_as_the_system_finds_them() {
        let here: Vec<IpAddr> = vec!["192.0.2.1".parse().unwrap()];
        let mut config = server().await;
        for name in ["a.test", "long.test", "alias.test"] {
            assert_eq!(config.addresses(name).await, Ok(here.clone()), "{name}");
        }
        for (name, failed) in [
            ("none.test", LookupError::NoSuchName),
            ("stray.test", LookupError::NoSuchName),
            ("broken.test", LookupError::NoAnswer),
            ("single", LookupError::NoSuchName),
        ] {
            assert_eq!(config.addresses(name).await, Err(failed), "{name}");
        }
        config.search = vec!["nowhere".into(), "corp.test".into()];
        for name in ["single", "with.dot"] {
            assert_eq!(config.addresses(name).await, Ok(here.clone()), "{name}");
        }
        // A server that does not answer is skipped.
        let silent = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        config.servers.insert(0, silent.local_addr().unwrap());
        config.timeout = Duration::from_millis(200);
        config.attempts = 5;
        assert_eq!(config.addresses("a.test").await, Ok(here));
        config.hosts.insert("slow.test".into(), vec!["192.0.2.7".parse().unwrap()]);
        assert_eq!(config.addresses("slow.test").await, Ok(vec!["192.0.2.7".parse().unwrap()]));
    }

    #[test]
    fn the_systems_files_are_understood() {
        let resolv_conf = "; comment\n# comment\nnameserver 10.0.0.1\nnameserver what\nnameserver fe80::1%1\ndomain a.test\n\
            search Corp.Test. b.test\nnameserver ::1\nnameserver 10.0.0.9\noptions ndots:2 timeout:3 attempts:0 rotate edns0\n";
        let hosts = "127.0.0.1 localhost\n::1 localhost # not this\n10.0.0.7\tWiki.Test wiki\nnonsense here\n";
        let config = ResolverConfig::parse(resolv_conf, hosts, "own.example");
        let servers: Vec<String> = config.servers.iter().map(ToString::to_string).collect();
        assert_eq!(servers, ["10.0.0.1:53", "[fe80::1%1]:53", "[::1]:53"]);
        assert_eq!(config.search, ["corp.test", "b.test"]);
        assert_eq!((config.ndots, config.timeout, config.attempts), (2, Duration::from_secs(3), 1));
        assert_eq!(config.hosts["wiki.test"], config.hosts["wiki"]);
        assert_eq!(config.hosts["localhost"].len(), 2);
        assert!(!config.hosts.contains_key("not") && !config.hosts.contains_key("here"));
        assert_eq!(config.names("a.b"), ["a.b.corp.test", "a.b.b.test", "a.b"]);
        assert_eq!(config.names("a.b.c"), ["a.b.c", "a.b.c.corp.test", "a.b.c.b.test"]);
        let none = ResolverConfig::parse("", "", "host.own.example");
        assert_eq!((none.servers[0].to_string().as_str(), none.search[0].as_str()), ("127.0.0.1:53", "own.example"));
    }

    #[test]
    fn files_that_change_are_read_again() {
        let dir = std::env::temp_dir().join(format!("sandpool-dns-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let system = System::of(dir.join("resolv.conf"), dir.join("hosts"));
        assert_eq!(system.config().servers, ["127.0.0.1:53".parse().unwrap()]);
        for server in ["10.0.0.1", "10.0.0.11"] {
            fs::write(dir.join("resolv.conf"), format!("nameserver {server}\n")).unwrap();
            assert_eq!(system.config().servers, [format!("{server}:53").parse().unwrap()]);
        }
        assert!(Arc::ptr_eq(&system.config(), &system.config()));
        fs::write(dir.join("hosts"), "10.0.0.7 wiki.test\n").unwrap();
        assert!(system.config().hosts.contains_key("wiki.test"));
        fs::remove_dir_all(dir).unwrap();
    }
}
