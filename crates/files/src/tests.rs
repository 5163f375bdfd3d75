//! Tests the whole path of a request, mostly over a real connection, with a store of numbers instead of an engine.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use dialects::links::{Expiring, Links};
use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use telemetry::journal::{self, Journal, JournalConfig};
use telemetry::usage::{self, UsageFilter};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::*;

const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
const OTHER: &str = "ff112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

/// Files whose byte at `n` is `n` modulo 251, and the paths that were opened.
#[derive(Clone)]
struct Numbers {
    sizes: Vec<(&'static str, u64)>,
    asked: Arc<Mutex<Vec<String>>>,
    /// Offset from which reading fails, as if the file had changed.
    changed_from: u64,
}

struct Numbered {
    size: u64,
    changed_from: u64,
}

fn numbers(from: u64, length: usize) -> Vec<u8> {
    (from..).take(length).map(|n| (n % 251) as u8).collect()
}

impl Numbers {
    fn new(sizes: &[(&'static str, u64)]) -> Self {
        Self { sizes: sizes.to_vec(), asked: Arc::default(), changed_from: u64::MAX }
    }
}

impl Store for Numbers {
    type File = Numbered;

    fn owner(&self, _: &str) -> Option<String> {
        Some("somebody".into())
    }

    async fn open(&self, key: &str, path: &str) -> Result<Numbered, EngineError> {
        self.asked.lock().unwrap().push(path.into());
        let found = self.sizes.iter().find(|(name, _)| key == KEY && *name == path);
        match found {
            Some((_, size)) => Ok(Numbered { size: *size, changed_from: self.changed_from }),
            None if path == "busy" => Err(EngineError::Busy(Duration::from_secs(30))),
            None if path == "broken" => Err(EngineError::Sandbox("/host/path".into())),
            None => Err(EngineError::FileNotFound(path.into())),
        }
    }
}

impl StoredFile for Numbered {
    fn stat(&self) -> Stat {
        Stat { size: self.size, modified_ns: 1_700_000_000_000_000_000, inode: 7 }
    }

    async fn read(&self, offset: u64, length: u32) -> Result<Vec<u8>, EngineError> {
        if offset >= self.changed_from {
            return Err(EngineError::FileNotFound("changed".into()));
        }
        Ok(if self.size < 1 << 30 { numbers(offset, length as usize) } else { vec![0; length as usize] })
    }
}

fn request(method: &str, target: &str, headers: &[(&str, &str)]) -> Parts {
    let request = http::Request::builder().method(method).uri(target);
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    request.body(()).unwrap().into_parts().0
}

async fn whole(response: Response<Body>) -> (StatusCode, HeaderMap, Vec<u8>) {
    let (parts, body) = response.into_parts();
    (parts.status, parts.headers, body.collect().await.unwrap().to_bytes().to_vec())
}

/// Serves on loopback until the test ends.
async fn serve(store: Numbers, settings: Settings) -> SocketAddr {
    let files = Arc::new(FileServer::new(store, settings));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let files = files.clone();
            tokio::spawn(http1::Builder::new().serve_connection(
                TokioIo::new(stream),
                service_fn(move |request: http::Request<hyper::body::Incoming>| {
                    let files = files.clone();
                    async move { Ok::<_, Infallible>(files.answer(&request.into_parts().0).await) }
                }),
            ));
        }
    });
    address
}

/// Returns everything that is received until the connection ends: headers and body.
async fn raw(address: SocketAddr, request: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n").unwrap() + 4;
    (String::from_utf8(answer[..end].to_vec()).unwrap(), answer[end..].to_vec())
}

/// Covers hostile rows A14 and A15: the test reads the header as it goes over the wire.
#[tokio::test]
async fn a_page_out_of_a_sandbox_is_a_file_to_keep_and_nothing_else() {
    let name = "é \"x\"\r\nSet-Cookie: a=1.html";
    let address = serve(Numbers::new(&[(name, 3)]), Settings::default()).await;
    let link = Links { base: Some(String::new()), expiring: None }.to(KEY, name).unwrap();
    let (head, body) = raw(address, &format!("GET {link} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).await;
    let mut lines: Vec<&str> = head.trim_end().split("\r\n").filter(|line| !line.starts_with("date:")).collect();
    lines[1..].sort_unstable();
    let etag = Version::of(&Stat { size: 3, modified_ns: 1_700_000_000_000_000_000, inode: 7 }, SystemTime::now());
    let etag = format!("etag: {}", etag.headers()["etag"].to_str().unwrap());
    assert_eq!(
        lines,
        [
            "HTTP/1.1 200 OK",
            "accept-ranges: bytes",
            "cache-control: private, no-cache",
            "connection: close",
            "content-disposition: attachment; filename=\"_ _x___Set-Cookie: a=1.html\"; \
             filename*=UTF-8''%C3%A9%20%22x%22%0D%0ASet-Cookie%3A%20a%3D1.html",
            "content-length: 3",
            "content-security-policy: sandbox; default-src 'none'",
            "content-type: text/html; charset=utf-8",
            "cross-origin-resource-policy: cross-origin",
            &etag,
            "last-modified: Tue, 14 Nov 2023 22:13:20 GMT",
            "referrer-policy: no-referrer",
            "x-content-type-options: nosniff",
        ]
    );
    assert_eq!(body, [0, 1, 2]);
}

/// Covers hostile rows A07, A12 and X24: malformed, unknown and foreign addresses get the same answer, and the store is
/// never asked about malformed ones.
#[tokio::test]
async fn everything_that_is_not_there_gets_the_same_answer() {
    let store = Numbers::new(&[("a.txt", 3)]);
    let asked = store.asked.clone();
    let files = FileServer::new(store, Settings::default());
    let get = async |target: &str| whole(files.answer(&request("GET", target, &[])).await).await;
    let (status, headers, body) = get(&format!("/files/{KEY}/none.txt")).await;
    assert_eq!((status, body.as_slice()), (StatusCode::NOT_FOUND, b"no such file\n".as_slice()));
    assert_eq!(headers["content-security-policy"], "sandbox; default-src 'none'");
    assert_eq!(std::mem::take(&mut *asked.lock().unwrap()), ["none.txt"]);

    let targets = [
        format!("/files/{OTHER}/a.txt"),
        format!("/files/{}/a.txt", KEY.to_uppercase()),
        format!("/files/{KEY}"),
        format!("/files/{KEY}/"),
        format!("/files/{KEY}/../{KEY}/a.txt"),
        format!("/files/{KEY}/%2e%2e/a.txt"),
        format!("/files/{KEY}/a%2fb"),
        format!("/files/{KEY}//a.txt"),
        format!("/files/{KEY}/a.txt%00"),
        format!("/files/{KEY}/a.txt%20"),
        format!("/files/{KEY}/A.TXT"),
        format!("/files/{KEY}/a.txt/"),
        format!("/files/{KEY}/%FF"),
        format!("/files/{KEY}/{}", "x".repeat(5_000)),
        "/files".into(),
        "/files/".into(),
        "/files/..".into(),
    ];
    for target in targets {
        assert_eq!(get(&target).await, (status, headers.clone(), body.clone()), "{target}");
    }
    assert_eq!(*asked.lock().unwrap(), ["a.txt", "a.txt ", "A.TXT"]);
}

#[tokio::test]
async fn parts_of_a_file() {
    let size = 3 * PIECE + 5;
    let files = FileServer::new(Numbers::new(&[("n.bin", size)]), Settings::default());
    let target = format!("/files/{KEY}/n.bin");
    let get = async |headers: &[(&str, &str)]| whole(files.answer(&request("GET", &target, headers)).await).await;

    let (status, all, body) = get(&[]).await;
    assert_eq!((status, body), (StatusCode::OK, numbers(0, size as usize)));
    assert_eq!(
        (&all["content-length"], &all["content-type"]),
        (&"786437".parse().unwrap(), &"application/octet-stream".parse().unwrap())
    );

    let (status, part, body) =
        get(&[("range", "bytes=262143-524288"), ("if-range", all["etag"].to_str().unwrap())]).await;
    assert_eq!((status, body), (StatusCode::PARTIAL_CONTENT, numbers(262_143, 262_146)));
    assert_eq!(part["content-range"], "bytes 262143-524288/786437");
    assert_eq!(part["content-length"], "262146");
    assert_eq!(part["etag"], all["etag"]);

    let (status, _, body) = get(&[("range", "bytes=-2")]).await;
    assert_eq!((status, body), (StatusCode::PARTIAL_CONTENT, numbers(size - 2, 2)));

    let (status, none, _) = get(&[("range", "bytes=786437-")]).await;
    assert_eq!(
        (status, &none["content-range"]),
        (StatusCode::RANGE_NOT_SATISFIABLE, &"bytes */786437".parse().unwrap())
    );

    let (status, same, body) = get(&[("if-none-match", all["etag"].to_str().unwrap())]).await;
    assert_eq!((status, body.len(), &same["etag"]), (StatusCode::NOT_MODIFIED, 0, &all["etag"]));
    assert_eq!(same.get("content-length"), None);

    let (status, ..) = get(&[("if-match", "\"other\"")]).await;
    assert_eq!(status, StatusCode::PRECONDITION_FAILED);
}

#[tokio::test]
async fn a_head_says_all_but_the_content_and_the_connection_goes_on() {
    let address = serve(Numbers::new(&[("n.csv", 5)]), Settings::default()).await;
    let two = format!(
        "HEAD /files/{KEY}/n.csv HTTP/1.1\r\nHost: x\r\nRange: bytes=0-1\r\n\r\n\
         GET /files/{KEY}/n.csv HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    );
    let (head, rest) = raw(address, &two).await;
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains("\r\ncontent-length: 5\r\n"), "{head}");
    assert!(rest.starts_with(b"HTTP/1.1 200 OK\r\n") && rest.ends_with(b"\r\n\r\n\x00\x01\x02\x03\x04"));
}

#[tokio::test]
async fn no_other_method() {
    let files = FileServer::new(Numbers::new(&[("a", 1)]), Settings::default());
    for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "PROPFIND"] {
        let (status, headers, _) = whole(files.answer(&request(method, &format!("/files/{KEY}/a"), &[])).await).await;
        assert_eq!((status, &headers["allow"]), (StatusCode::METHOD_NOT_ALLOWED, &"GET, HEAD".parse().unwrap()));
    }
}

#[tokio::test]
async fn the_engine_s_troubles_are_told_without_its_words() {
    let files = FileServer::new(Numbers::new(&[]), Settings::default());
    let get = async |name: &str| whole(files.answer(&request("GET", &format!("/files/{KEY}/{name}"), &[])).await).await;
    let (status, headers, _) = get("busy").await;
    assert_eq!((status, &headers["retry-after"]), (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap()));
    let (status, _, body) = get("broken").await;
    assert_eq!(
        (status, body.as_slice()),
        (StatusCode::INTERNAL_SERVER_ERROR, b"the file could not be read\n".as_slice())
    );
}

#[tokio::test]
async fn a_file_that_changes_meanwhile_ends_the_connection() {
    let store = Numbers { changed_from: 5 * PIECE, ..Numbers::new(&[("n", 10 * PIECE)]) };
    let address = serve(store, Settings::default()).await;
    let (head, body) = raw(address, &format!("GET /files/{KEY}/n HTTP/1.1\r\nHost: x\r\n\r\n")).await;
    assert!(head.contains("\r\ncontent-length: 2621440\r\n"), "{head}");
    assert!(body.len() as u64 <= 5 * PIECE, "{} bytes", body.len());
    assert_eq!(body, numbers(0, body.len()));
}

#[tokio::test]
async fn downloads_of_one_key_are_bounded() {
    let settings = Settings { limits: TransferLimits { per_key: 1, per_owner: 2, total: 2 }, ..Settings::default() };
    let files = FileServer::new(Numbers::new(&[("n", 2 * PIECE)]), settings);
    let get = async || files.answer(&request("GET", &format!("/files/{KEY}/n"), &[])).await;
    let first = get().await;
    let (status, headers, _) = whole(get().await).await;
    assert_eq!((status, &headers["retry-after"]), (StatusCode::SERVICE_UNAVAILABLE, &"1".parse().unwrap()));
    assert_eq!(whole(first).await.0, StatusCode::OK);
    drop(get().await);
    assert_eq!(get().await.status(), StatusCode::OK, "a download that is given up frees its place");
}

/// Covers hostile row X20.
#[tokio::test]
async fn where_links_end_only_signed_ones_are_served() {
    let signer = Signer::new(b"secret");
    let settings = Settings { signer: Some(signer.clone()), ..Settings::default() };
    let files = FileServer::new(Numbers::new(&[("a b", 1)]), settings);
    let get = async |target: &str| whole(files.answer(&request("GET", target, &[])).await).await;
    let expiring = Expiring { signer, ttl: Duration::from_secs(60), now: 0 };
    let links = Links { base: Some(String::new()), expiring: Some(expiring) };
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
    let link = links.at(now).to(KEY, "a b").unwrap();

    assert_eq!(get(&link).await.0, StatusCode::OK);
    assert_eq!(files.answer(&request("HEAD", &link, &[])).await.status(), StatusCode::OK);
    let (status, _, body) = get(&links.at(now - 61).to(KEY, "a b").unwrap()).await;
    assert_eq!(
        (status, body.as_slice()),
        (StatusCode::FORBIDDEN, b"this link has expired; ask for a new one\n".as_slice())
    );
    let missing = get(&links.at(now).to(KEY, "none").unwrap()).await;
    assert_eq!(missing.0, StatusCode::NOT_FOUND);
    let unsigned = link.split_once('?').unwrap().0;
    for target in [unsigned, &link[..link.len() - 1], &link.replace("a%20b", "a"), &link.replace(KEY, OTHER)] {
        assert_eq!(get(target).await, missing, "{target}");
    }
}

/// Covers hostile row A13 and the promise of constant memory: only one piece and the connection's buffers are in
/// flight.
#[tokio::test(flavor = "multi_thread")]
async fn two_gibibytes_need_no_more_memory_than_two_megabytes() {
    const SIZE: u64 = 2 << 30;
    let address = serve(Numbers::new(&[("big", SIZE)]), Settings::default()).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /files/{KEY}/big HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut buffer = vec![0; 1 << 20];
    let (mut total, mut warm, mut most) = (0, None, 0);
    loop {
        let n = stream.read(&mut buffer).await.unwrap() as u64;
        if n == 0 {
            break;
        }
        // Measured about every 64 MiB; the first measurement is taken when all buffers exist.
        if total >> 26 != (total + n) >> 26 {
            let now = resident_kib();
            warm.get_or_insert(now);
            most = most.max(now);
        }
        total += n;
    }
    assert!(total > SIZE && total < SIZE + 1024, "{total}");
    let growth = most.saturating_sub(warm.unwrap());
    assert!(growth < 32 * 1024, "grew by {growth} KiB");
}

fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

/// The framework hands on the path unchanged.
#[tokio::test]
async fn the_router_hands_on_the_path_as_it_was_sent() {
    let store = Numbers::new(&[("a b/%2e", 1)]);
    let router = routes(store, Settings::default());
    let get = async |target: &str| {
        let request = http::Request::get(target).body(Body::empty()).unwrap();
        hyper::service::Service::call(&hyper_util::service::TowerToHyperService::new(router.clone()), request)
            .await
            .unwrap()
    };
    assert_eq!(get(&format!("/files/{KEY}/a%20b/%252e")).await.status(), StatusCode::OK);
    for target in ["/files", "/files/", "/files/x", &format!("/files/{KEY}/a%20b/%2e")] {
        assert_eq!(whole(get(target).await).await.2, b"no such file\n", "{target}");
    }
}

/// W78: a download counts the bytes that were sent, and its entry in the journal says whether it was complete.
#[tokio::test]
async fn w78_a_download_counts_the_bytes_that_were_sent() {
    let dir = testkit::scratch::Scratch::new();
    let journal = Journal::open(JournalConfig::new(dir.0.join("journal"))).unwrap();
    let owner = |_: &str| Some((engine::Tenant("blue".into()), "ctx".to_owned()));
    let observer = Arc::new(Observer::new(Some(journal)).with_link_owners(owner));
    let store = Numbers { changed_from: 5 * PIECE, ..Numbers::new(&[("n", 10 * PIECE), ("whole", 7), ("empty", 0)]) };
    let files = FileServer::new(store, Settings { observer: observer.clone(), ..Settings::default() });
    let get = async |name: &str| files.answer(&request("GET", &format!("/files/{KEY}/{name}"), &[])).await.into_body();
    let mut given_up = get("n").await;
    given_up.frame().await.unwrap().unwrap();
    drop(given_up);
    let mut changed = get("n").await;
    while let Some(Ok(_)) = changed.frame().await {}
    drop(changed);
    get("whole").await.collect().await.unwrap();
    get("empty").await.collect().await.unwrap();
    files.answer(&request("HEAD", &format!("/files/{KEY}/n"), &[])).await;
    observer.record_usage(std::collections::BTreeMap::new());
    observer.journal().unwrap().flush();
    let lines: Vec<String> = journal::lines(&dir.0.join("journal")).unwrap().map(Result::unwrap).collect();
    let is_read = |line: &&String| line.contains("\"event\":\"file_read\"");
    let bytes = |line: &str| {
        let (_, rest) = line.split_once("\"bytes_out\":").unwrap();
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap()
    };
    let read = lines.iter().filter(is_read).map(|line| (bytes(line), line.contains("\"outcome\":\"incomplete\"")));
    assert_eq!(read.collect::<Vec<_>>(), [(PIECE, true), (5 * PIECE, true), (7, false), (0, false)]);
    let days = usage::by_day(lines.into_iter().map(Ok), &UsageFilter::default()).unwrap();
    assert_eq!((days.len(), days[0].tenant.as_str(), days[0].bytes_out), (1, "blue", 6 * PIECE + 7));
}
