//! Secrets, by real client programs through the real proxy to a TLS server of our own that repeats whatever it is sent.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use egress::{Egress, EgressConfig, Gate, Policy, SandboxSetup, Secret, Table, UpstreamProxy, Upstreams, Value};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use testkit::http::Connection;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio_rustls::client::TlsStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

const VALUE: &str = "the-very-secret-value-0123456789";
const NAMES: [&str; 2] = ["api.test", "other.test"];

/// What the host was sent: the head of each request and its body.
type Heard = Arc<Mutex<Vec<String>>>;

struct Place {
    dir: PathBuf,
    gate: Option<Gate>,
    env: BTreeMap<String, String>,
    heard: Heard,
    port: u16,
    denials: Arc<Mutex<Vec<String>>>,
    setup: SandboxSetup,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.take();
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Place {
    /// A host with a certificate that this `Egress` trusts, a secret for `api.test`, and a way out to it.
    async fn new(label: &str, certificate_for: &[&str], extra: impl FnOnce(&mut Table)) -> Self {
        let local = IpAddr::from(Ipv4Addr::LOCALHOST);
        let directly = |config: &mut EgressConfig, _| config.hosts = NAMES.map(|name| (name.to_owned(), local)).into();
        Self::with(label, certificate_for, extra, directly).await
    }

    /// As above, where `way` says how the port of the host is reached.
    async fn with(
        label: &str,
        certificate_for: &[&str],
        extra: impl FnOnce(&mut Table),
        way: impl FnOnce(&mut EgressConfig, u16),
    ) -> Self {
        let heard = Heard::default();
        let (root, port) = host(certificate_for, Arc::clone(&heard)).await;
        let secret = Secret {
            name: "API_KEY".into(),
            hosts: vec![format!("api.test:{port}")],
            header: "Authorization".into(),
            format: None,
            tenants: vec!["blue".into(), "red".into()],
            value: Value::parse(format!("{VALUE}\n")).unwrap(),
        };
        let mut config = EgressConfig {
            secrets: vec![secret],
            roots: vec![root],
            certutil: Some("/usr/bin/certutil".into()).filter(|path: &PathBuf| path.exists()),
            ..EgressConfig::default()
        };
        way(&mut config, port);
        let egress = Egress::new(config).unwrap();
        let mut table = Table {
            name: "t".into(),
            allow: NAMES.map(|name| format!("{name}:{port}")).into(),
            private: vec!["127.0.0.1".into()],
            ..Table::default()
        };
        extra(&mut table);
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let proxy = listener.local_addr().unwrap();
        let denials: Arc<Mutex<Vec<String>>> = Arc::default();
        let told = Arc::clone(&denials);
        let sink = Arc::new(move |denial: &egress::Denial| told.lock().unwrap().push(denial.sentence.clone()));
        let gate = egress.open(listener, "blue", Policy::of(table), sink).unwrap();

        let dir = std::env::temp_dir().join(format!("sandpool-secrets-{label}-{}", std::process::id()));
        let setup = SandboxSetup::clone(&*egress.setup("blue").await);
        for (path, content) in &setup.files {
            let path = inside(&dir, path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        // As a sandbox has it, but for the place of the files and the port of the proxy.
        let mut env = setup.env.clone();
        for value in env.values_mut() {
            *value = value
                .replace("127.0.0.1:3128", &proxy.to_string())
                .replace("/opt/", &format!("{}/opt/", dir.display()));
        }
        env.insert("PATH".into(), "/usr/local/bin:/usr/bin:/bin".into());
        env.insert("URL".into(), format!("https://api.test:{port}/echo"));
        env.insert("OTHER".into(), format!("https://other.test:{port}/echo"));
        Self { dir, gate: Some(gate), env, heard, port, denials, setup }
    }

    /// Output of both streams.
    #[allow(clippy::disallowed_methods, reason = "the clients under test")]
    async fn run(&self, program: &str, arguments: &[&str]) -> String {
        let mut command = tokio::process::Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .envs(&self.env)
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let output = tokio::time::timeout(std::time::Duration::from_secs(60), command.output()).await.unwrap().unwrap();
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    }

    fn heard(&self) -> String {
        std::mem::take(&mut *self.heard.lock().unwrap()).join("\n")
    }
}

fn inside(dir: &Path, path: &Path) -> PathBuf {
    dir.join(path.strip_prefix("/").unwrap())
}

/// Repeats the head and the body of each request, a few bytes at a time. The authority it is vouched for by, and its port.
async fn host(names: &[&str], heard: Heard) -> (CertificateDer<'static>, u16) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let key = KeyPair::generate().unwrap();
    let root = params.self_signed(&key).unwrap().der().clone();
    let issuer = Issuer::new(params, key);
    let key = KeyPair::generate().unwrap();
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let leaf = CertificateParams::new(names).unwrap().signed_by(&key, &issuer).unwrap().der().clone();
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let config = config.with_no_client_auth().with_single_cert(vec![leaf], key).unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            stream.set_nodelay(true).unwrap();
            let (acceptor, heard) = (acceptor.clone(), Arc::clone(&heard));
            tokio::spawn(async move {
                if let Ok(mut stream) = acceptor.accept(stream).await {
                    while let Some(request) = request(&mut stream).await {
                        heard.lock().unwrap().push(request.clone());
                        if request.contains("/paused/") {
                            paused(&mut stream, &request).await;
                            continue;
                        }
                        let authorization =
                            request.lines().find(|line| line.to_lowercase().starts_with("authorization:"));
                        let echo = authorization.and_then(|line| line.split_once(": ")).map_or("", |(_, value)| value);
                        let length = format!("Content-Length: {}", request.len());
                        // Ways to say it that are neither the value of a header nor the body.
                        let token = echo.rsplit(' ').next().unwrap_or_default();
                        let (reason, more) = match request.split(' ').nth(1).unwrap_or_default() {
                            "/reason" => (echo, length),
                            "/name" => ("OK", format!("X-{token}: 1\r\n{length}")),
                            "/coded" => ("OK", "Transfer-Encoding: gzip\r\nConnection: close".into()),
                            "/hidden" => {
                                ("OK", format!("Connection: content-encoding\r\nContent-Encoding: gzip\r\n{length}"))
                            }
                            _ => ("OK", length),
                        };
                        let head = format!(
                            "HTTP/1.1 200 {reason}\r\nX-Echo: {echo}\r\nContent-Type: text/plain\r\n{more}\r\n\r\n"
                        );
                        stream.write_all(head.as_bytes()).await.unwrap();
                        for piece in request.as_bytes().chunks(7) {
                            stream.write_all(piece).await.unwrap();
                            stream.flush().await.unwrap();
                        }
                    }
                }
            });
        }
    });
    (root, port)
}

/// For the second half of an answer of [`paused`].
static GO_ON: Semaphore = Semaphore::const_new(0);

/// Repeats the body of a request; and, once the client has seen something of it, sends a second half.
async fn paused(stream: &mut (impl AsyncWriteExt + Unpin), request: &str) {
    let (head, first) = request.split_once("\r\n\r\n").unwrap();
    let second = "z".repeat(100);
    let chunked = head.contains("/paused/chunked");
    let part = |text: &str| if chunked { format!("{:x}\r\n{text}\r\n", text.len()) } else { text.to_owned() };
    let framing = match chunked {
        true => "Transfer-Encoding: chunked".into(),
        false => format!("Content-Length: {}", first.len() + second.len()),
    };
    stream.write_all(format!("HTTP/1.1 200 OK\r\n{framing}\r\n\r\n{}", part(first)).as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
    GO_ON.acquire().await.unwrap().forget();
    let end = if chunked { "0\r\n\r\n" } else { "" };
    stream.write_all(format!("{}{end}", part(&second)).as_bytes()).await.unwrap();
    stream.flush().await.unwrap();
}

async fn request(stream: &mut (impl AsyncReadExt + Unpin)) -> Option<String> {
    let mut bytes = Vec::new();
    loop {
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length =
                head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length: ")?.parse().ok());
            if body.len() >= length.unwrap_or(0) {
                return Some(text);
            }
        }
        match stream.read_buf(&mut bytes).await {
            Ok(read) if read > 0 => {}
            _ => return None,
        }
    }
}

/// A test that needs a program which is absent fails in CI.
#[allow(clippy::disallowed_methods, reason = "the prepared runtimes, and whether this is CI")]
fn program(variable: Option<&str>, otherwise: &str) -> Option<String> {
    let found = variable.and_then(|variable| std::env::var(variable).ok()).unwrap_or_else(|| otherwise.into());
    if Path::new(&found).exists() {
        return Some(found);
    }
    assert!(std::env::var_os("CI").is_none(), "cannot be skipped in CI: there is no {found}");
    eprintln!("SKIP: there is no {found}");
    None
}

const PYTHON: &str = "
import os, sys, urllib.request
headers = {'Authorization': 'Bearer ' + os.environ['API_KEY'], 'X-Other': os.environ['API_KEY']}
request = urllib.request.Request(os.environ['URL'], headers=headers, data=b'in the body ' + os.environ['API_KEY'].encode())
answer = urllib.request.urlopen(request)
print(answer.headers['X-Echo'], answer.read().decode())
print(open('/proc/self/environ').read())
";

const REQUESTS: &str = "
import os, requests
answer = requests.get(os.environ['URL'], auth=('user', os.environ['API_KEY']))
print(answer.status_code, answer.headers['X-Echo'], answer.text)
";

const NODE: &str = "
fetch(process.env.URL, {headers: {authorization: `Bearer ${process.env.API_KEY}`}})
    .then(async answer => console.log(answer.status, answer.headers.get('x-echo'), await answer.text()))
    .catch(error => console.log(String(error), String(error.cause)));
";

/// A proxy that leads every tunnel to one port, and writes down what it was asked.
fn upstream(port: u16, asked: Heard) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let own = listener.local_addr().unwrap().port();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let asked = Arc::clone(&asked);
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(stream.read_u8().await.unwrap());
                }
                asked.lock().unwrap().push(String::from_utf8_lossy(&head).into_owned());
                let mut host = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await.unwrap();
                stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
                let _ = tokio::io::copy_bidirectional(&mut stream, &mut host).await;
            });
        }
    });
    own
}

#[tokio::test(flavor = "multi_thread")]
async fn n21_a_secret_is_inserted_before_the_upstream_proxy_which_does_not_see_it() {
    let asked = Heard::default();
    let own = Arc::clone(&asked);
    let place = Place::with(
        "upstream",
        &["api.test"],
        |_| (),
        |config, port| {
            let proxy = UpstreamProxy::parse(&format!("http://127.0.0.1:{}", upstream(port, own))).unwrap();
            config.upstreams = Upstreams { http: None, https: Some(proxy), except: Vec::new() };
        },
    );
    let place = place.await;
    let Some(curl) = program(None, "/usr/bin/curl") else { return };
    let output = place.run(&curl, &["-sS", "-i", "--oauth2-bearer", &place.env["API_KEY"], &place.env["URL"]]).await;
    assert!(output.contains("200 OK") && !output.contains(VALUE), "{output}");
    assert!(place.heard().to_lowercase().contains(&format!("authorization: bearer {VALUE}")));
    let asked = asked.lock().unwrap().concat();
    assert!(asked.starts_with(&format!("CONNECT api.test:{} HTTP/1.1\r\n", place.port)), "{asked}");
    assert!(!asked.contains(VALUE), "{asked}");
}

#[tokio::test(flavor = "multi_thread")]
async fn real_clients_use_a_secret_and_never_see_it() {
    let place = Place::new("clients", &["api.test"], |_| ()).await;
    let clients: [(&str, Option<String>, Vec<&str>); 4] = [
        (
            "curl",
            program(None, "/usr/bin/curl"),
            vec!["-sS", "-i", "--oauth2-bearer", &place.env["API_KEY"], &place.env["URL"]],
        ),
        ("urllib", program(None, "/usr/bin/python3"), vec!["-c", PYTHON]),
        ("requests", program(Some("SANDPOOL_TEST_PYTHON"), "/nowhere/python"), vec!["-c", REQUESTS]),
        ("node", program(Some("SANDPOOL_TEST_NODE"), "/nowhere/node"), vec!["-e", NODE]),
    ];
    for (name, program, arguments) in clients {
        let Some(program) = program else { continue };
        let output = place.run(&program, &arguments).await;
        let heard = place.heard();
        let sent = match name {
            "requests" => format!("Basic {}", base64(&format!("user:{VALUE}"))),
            _ => format!("Bearer {VALUE}"),
        };
        assert!(
            heard.to_lowercase().contains(&format!("authorization: {}", sent.to_lowercase())),
            "{name}: {heard}\n{output}"
        );
        assert!(output.contains("200") || name == "urllib", "{name}: {output}");
        assert!(!output.contains(VALUE) && !output.contains(&sent), "{name}: {output}");
        // The header and the body of the answer had it.
        assert!(output.matches("********").count() > 1, "{name}: {output}");
        if name == "urllib" {
            let placeholder = &place.env["API_KEY"];
            assert!(
                heard.contains(&format!("X-Other: {placeholder}"))
                    || heard.contains(&format!("X-other: {placeholder}")),
                "{heard}"
            );
            assert!(heard.contains(&format!("in the body {placeholder}")), "{heard}");
            assert_eq!(heard.matches(VALUE).count(), 1, "{heard}");
        }
    }
    let shown = format!("{:?} {:?}", place.setup.env, place.denials.lock().unwrap());
    assert!(!shown.contains(VALUE), "{shown}");
    for (path, content) in &place.setup.files {
        assert!(!content.windows(VALUE.len()).any(|part| part == VALUE.as_bytes()), "{}", path.display());
    }
}

fn base64(text: &str) -> String {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.encode(text)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_repeats_a_secret_in_an_odd_place_does_not_hand_it_out() {
    let place = Place::new("odd", &["api.test"], |_| ()).await;
    let Some(curl) = program(None, "/usr/bin/curl") else { return };
    let bearer = place.env["API_KEY"].clone();
    for (path, answer) in [
        ("/reason", "HTTP/1.1 200 OK"),
        ("/name", "HTTP/1.1 200 OK"),
        ("/coded", "HTTP/1.1 502"),
        ("/hidden", "HTTP/1.1 502"),
    ] {
        let url = place.env["URL"].replace("/echo", path);
        let output = place.run(&curl, &["-sS", "-i", "-m", "20", "--oauth2-bearer", &bearer, &url]).await;
        assert!(place.heard().contains(VALUE), "{path}: {output}");
        assert!(!output.to_lowercase().contains(VALUE) && output.contains(answer), "{path}: {output}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_host_is_not_looked_into_and_gets_the_placeholder() {
    let place = Place::new("other", &["other.test"], |_| ()).await;
    let Some(curl) = program(None, "/usr/bin/curl") else { return };
    // TLS goes through as it is, so the client sees the certificate of the host's own authority, which it does not know.
    let bearer = place.env["API_KEY"].clone();
    let refused = place.run(&curl, &["-sS", "--oauth2-bearer", &bearer, &place.env["OTHER"]]).await;
    assert!(refused.contains("certificate"), "{refused}");
    let output = place.run(&curl, &["-sSk", "--oauth2-bearer", &bearer, &place.env["OTHER"]]).await;
    let heard = place.heard();
    assert!(heard.contains(&format!("Bearer {bearer}")) && !heard.contains(VALUE), "{heard} {output}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_is_not_who_it_says_gets_no_secret() {
    // It has a certificate for another name.
    let place = Place::new("impostor", &["other.test"], |_| ()).await;
    let Some(curl) = program(None, "/usr/bin/curl") else { return };
    let bearer = place.env["API_KEY"].clone();
    let output = place.run(&curl, &["-sS", "--oauth2-bearer", &bearer, &place.env["URL"]]).await;
    assert!(output.contains("TLS is not to be trusted"), "{output}");
    assert_eq!(place.heard(), "");
}

#[tokio::test(flavor = "multi_thread")]
async fn methods_are_seen_inside_and_a_denied_request_gets_no_secret() {
    let place = Place::new("methods", &["api.test"], |table| table.methods = vec!["GET".into()]).await;
    let Some(curl) = program(None, "/usr/bin/curl") else { return };
    let bearer = place.env["API_KEY"].clone();
    let get = place.run(&curl, &["-sS", "--oauth2-bearer", &bearer, &place.env["URL"]]).await;
    assert!(get.contains("GET /echo"), "{get}");
    assert!(place.heard().contains(VALUE));
    let post = place.run(&curl, &["-sS", "-d", "x", "--oauth2-bearer", &bearer, &place.env["URL"]]).await;
    assert!(post.contains("does not allow the method POST"), "{post}");
    assert_eq!(place.heard(), "");
    assert_eq!(place.denials.lock().unwrap().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_authority_is_good_for_its_hosts_alone() {
    let place = Place::new("constraint", &["api.test"], |_| ()).await;
    let Some(openssl) = program(None, "/usr/bin/openssl") else { return };
    let authority = inside(&place.dir, Path::new("/opt/sandpool/trust/authority.pem")).to_string_lossy().into_owned();
    let shown = place.run(&openssl, &["x509", "-in", &authority, "-noout", "-text"]).await;
    for part in [
        "Permitted:\n                  DNS:api.test\n",
        "Excluded:",
        "CA:TRUE, pathlen:0",
        "Name Constraints: critical",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(!shown.contains(&place.port.to_string()));
    let days = place.run(&openssl, &["x509", "-in", &authority, "-noout", "-checkend", "34300800"]).await;
    assert!(days.contains("will expire"), "no more than 397 days: {days}");
}

/// Code that watches in which pieces answers arrive.
struct Watcher {
    connection: Connection<TlsStream<TcpStream>>,
    host: String,
}

impl Watcher {
    async fn new(place: &Place) -> Self {
        let proxy = place.env["HTTP_PROXY"]["http://".len()..].parse().unwrap();
        let mut tunnel = Connection::open(proxy).await.unwrap();
        let host = format!("api.test:{}", place.port);
        tunnel.send("CONNECT", &host, &[("host", &host)], b"").await.unwrap();
        assert_eq!(tunnel.head().await.unwrap().status, 200);
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(
            CertificateDer::pem_file_iter(&place.env["NODE_EXTRA_CA_CERTS"]).unwrap().map(Result::unwrap),
        );
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("api.test").unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, tunnel.into_stream()).await.unwrap();
        Self { connection: Connection::over(stream), host }
    }

    /// The sizes of the pieces of an answer that has this text at the end of its first half.
    async fn sizes(&mut self, form: &str, text: &str) -> Vec<usize> {
        let body = format!("{}{text}", "x".repeat(100));
        let (path, host) = (format!("/paused/{form}"), [("host", self.host.as_str())]);
        self.connection.send("POST", &path, &host, body.as_bytes()).await.unwrap();
        let mut answer = self.connection.head().await.unwrap();
        if form == "plain" {
            let sizes = vec![self.connection.peek().await.len()];
            GO_ON.add_permits(1);
            self.connection.body(&mut answer).await.unwrap();
            return sizes;
        }
        let mut sizes = Vec::new();
        loop {
            let chunk = self.connection.chunk().await.unwrap();
            if sizes.is_empty() {
                GO_ON.add_permits(1);
            }
            match chunk {
                None => return sizes,
                Some(chunk) => sizes.push(chunk.len()),
            }
        }
    }
}

/// W21: the attack of the audit. Whoever lets a host repeat a guess and looks at the sizes of the pieces finds no letter of the secret.
#[tokio::test(flavor = "multi_thread")]
async fn w21_the_pieces_of_an_answer_tell_no_letter_of_a_secret() {
    let place = Place::new("pieces", &["api.test"], |_| ()).await;
    let watching = async {
        let mut watcher = Watcher::new(&place).await;
        for form in ["chunked", "plain"] {
            let mut found = String::new();
            while found.len() < VALUE.len() {
                let mut guesses: BTreeMap<Vec<usize>, Vec<char>> = BTreeMap::new();
                for letter in "abcdefghijklmnopqrstuvwxyz0123456789-".chars() {
                    let sizes = watcher.sizes(form, &format!("{found}{letter}")).await;
                    guesses.entry(sizes).or_default().push(letter);
                }
                // Of the right letter the most is held back.
                match guesses.first_key_value() {
                    Some((_, letters)) if letters.len() == 1 => found.extend(letters),
                    _ => break,
                }
            }
            assert_eq!(found, "", "{form}");
            // Nor does it help to know the beginning.
            for length in 1..VALUE.len() {
                let (right, wrong) = (&VALUE[..length], "#".repeat(length));
                assert_eq!(watcher.sizes(form, right).await, watcher.sizes(form, &wrong).await, "{form}: {right}");
            }
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(120), watching).await.unwrap();
}

/// W28: what a sandbox is given says nothing about secrets that its tenant does not have.
#[tokio::test(flavor = "multi_thread")]
async fn w28_a_sandbox_knows_the_secrets_of_its_own_tenant_alone() {
    let secret = |name: &str, host: &str, tenants: &[&str]| Secret {
        name: name.into(),
        hosts: vec![host.into()],
        header: "Authorization".into(),
        format: None,
        tenants: tenants.iter().map(ToString::to_string).collect(),
        value: Value::parse(VALUE.into()).unwrap(),
    };
    let all = [("BLUE_KEY", "blue-only.test"), ("BOTH_KEY", "both.test"), ("RED_KEY", "red-only.test")];
    let owners: [&[&str]; 3] = [&["blue"], &["blue", "red"], &["red"]];
    let certutil = Some("/usr/bin/certutil".into()).filter(|path: &PathBuf| path.exists());
    let secrets = all.iter().zip(owners).map(|((name, host), tenants)| secret(name, host, tenants)).collect();
    let egress = Egress::new(EgressConfig { secrets, certutil, ..EgressConfig::default() }).unwrap();
    for tenant in ["blue", "red", "green", ""] {
        let setup = egress.setup(tenant).await;
        // Certificates are base64 in files: their own bytes count.
        let mut given = format!("{:?}", setup.env).into_bytes();
        for (path, content) in &setup.files {
            given.extend_from_slice(path.to_str().unwrap().as_bytes());
            given.extend_from_slice(content);
            if path.ends_with("authority.pem") {
                given.extend_from_slice(&CertificateDer::from_pem_slice(content).unwrap());
            }
        }
        let has = |text: &str| given.windows(text.len()).any(|part| part == text.as_bytes());
        for ((name, host), tenants) in all.iter().zip(owners) {
            let own = tenants.contains(&tenant);
            assert_eq!((has(name), has(host)), (own, own), "{tenant}: {name}");
        }
        assert_eq!(has("sandpool-placeholder-"), tenant == "blue" || tenant == "red", "{tenant}");
    }
    // Those who have the same are given the same, and it is made once.
    assert!(Arc::ptr_eq(&egress.setup("green").await, &egress.setup("yellow").await));
}
