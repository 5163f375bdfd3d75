//! Uploads by link, over the transport, into the real engine (its sandboxes are scripted).

use engine::op::{ContextSelector, FileOwner, Language, NewContext, Op, Outcome, Target, UploadLink};

use crate::client::{Answer, Client, eventually};
use crate::files::Service;

type Headers<'a> = &'a [(&'a str, &'a str)];

const HTML: (&str, &str) = ("accept", "text/html,application/xhtml+xml");
const FORM: (&str, &str) = ("content-type", "multipart/form-data; boundary=b0");

fn target() -> Target {
    Target::existing(ContextSelector::Named("box".into()))
}

async fn service() -> Service {
    let service = Service::start(None).await;
    service.execute("alice", Op::CreateContext(NewContext::named("box", Language::Python))).await;
    service
}

async fn link(service: &Service, path: &str) -> UploadLink {
    match service.execute("alice", Op::UploadLink { target: target(), path: path.into() }).await {
        Outcome::UploadLink(link) => link,
        other => panic!("{other:?}"),
    }
}

fn address(link: &UploadLink) -> String {
    format!("/upload/{}", link.id)
}

async fn names(service: &Service) -> Vec<String> {
    match service
        .execute("alice", Op::ListFiles { owner: FileOwner::workspace(target()), path: ".".into(), depth: None })
        .await
    {
        Outcome::Files(files) => files.entries.into_iter().map(|entry| entry.path).collect(),
        other => panic!("{other:?}"),
    }
}

async fn stored(service: &Service, path: &str) -> Vec<u8> {
    match service.execute("alice", Op::ReadFile { owner: FileOwner::workspace(target()), path: path.into() }).await {
        Outcome::File { content, .. } => content,
        other => panic!("{other:?}"),
    }
}

async fn send(service: &Service, method: &str, to: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
    Client::connect(service.address).await.ask(method, to, headers, body).await
}

fn form(content: &str) -> String {
    let head = "--b0\r\nContent-Disposition: form-data; name=\"file\"; filename=\"C:\\\\x\\\\my.csv\"\r\nContent-Type: text/csv";
    format!("{head}\r\n\r\n{content}\r\n--b0--\r\n")
}

#[tokio::test]
async fn a_file_is_put_once_under_the_path_of_its_link() {
    let service = service().await;
    let link = link(&service, "in/data.bin").await;
    let at = address(&link);
    let bytes: Vec<u8> = (0..1_500_000u32).map(|n| (n * 7) as u8).collect();
    let put = send(&service, "PUT", &at, &[("x-tenant", "nobody")], &bytes).await;
    assert_eq!((put.status, put.text().as_str()), (201, "1500000 bytes are stored as /workspace/in/data.bin\n"));
    assert_eq!(stored(&service, "in/data.bin").await, bytes);
    let ways: [(&str, Headers<'_>); 3] = [("PUT", &[]), ("POST", &[FORM]), ("GET", &[])];
    for (method, headers) in ways {
        let again = send(&service, method, &at, headers, form("x").as_bytes()).await;
        assert_eq!((again.status, again.text().as_str()), (410, "this link was used; ask for a new one\n"), "{method}");
    }
    let page = send(&service, "GET", &at, &[HTML], b"").await;
    assert_eq!((page.status, page.header("content-type")), (410, Some("text/html; charset=utf-8")));
    assert!(page.text().contains("this link was used; ask for a new one"), "{}", page.text());
    service.end().await;
}

#[tokio::test]
async fn the_form_is_a_plain_page_and_its_file_arrives() {
    let service = service().await;
    let link = link(&service, "<b>&\"x'.csv").await;
    let at = address(&link);
    // Looking does not use it, however often.
    for _ in 0..2 {
        let page = send(&service, "GET", &at, &[HTML], b"").await;
        assert_eq!(page.status, 200);
        let csp = "default-src 'none'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'";
        assert_eq!(page.header("content-security-policy"), Some(csp));
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(page.header("referrer-policy"), Some("same-origin"));
        assert_eq!(page.header("cache-control"), Some("no-store"));
        let text = page.text();
        assert!(text.contains("<html lang=\"en\">") && text.contains("<label for=\"file\">"), "{text}");
        assert!(text.contains("/workspace/&lt;b&gt;&amp;&quot;x&#39;.csv"), "{text}");
        for absent in ["<b>", "<script", "src=", "http:", "https:", "alice", "style"] {
            assert!(!text.contains(absent), "{absent}: {text}");
        }
    }
    let host = service.address.to_string();
    let own = format!("http://{host}");
    let sent = [HTML, FORM, ("host", &host), ("origin", &own), ("sec-fetch-site", "same-origin")];
    let page = send(&service, "POST", &at, &sent, form("a,b\r\n--b\r\n").as_bytes()).await;
    assert_eq!(page.status, 201, "{}", page.text());
    assert!(page.text().contains("<h1>The file was uploaded</h1>"), "{}", page.text());
    assert_eq!(stored(&service, "<b>&\"x'.csv").await, b"a,b\r\n--b\r\n", "under the link's path, not the form's name");
    service.end().await;
}

#[tokio::test]
async fn what_is_wrong_is_refused_and_leaves_the_link_as_it_was() {
    let service = service().await;
    let (full_link, link) = (link(&service, "full").await, link(&service, "f").await);
    let at = address(&link);
    let other_port = format!("http://127.0.0.1:{}", service.address.port() ^ 1);
    let encoded = ("content-encoding", "gzip");
    let form = form("x");
    let cases: &[(&str, Headers<'_>, &str, u16)] = &[
        ("DELETE", &[], "", 405),
        ("PUT", &[("origin", "https://evil.test")], "x", 403),
        ("PUT", &[("origin", "null")], "x", 403),
        ("POST", &[FORM, ("origin", &other_port)], &form, 403),
        ("POST", &[FORM, ("sec-fetch-site", "cross-site")], &form, 403),
        ("PUT", &[("host", "evil.test")], "x", 403),
        ("PUT", &[("content-range", "bytes 0-0/9")], "x", 400),
        ("PUT", &[encoded], "x", 400),
        ("POST", &[("content-type", "text/plain")], "x", 400),
        ("POST", &[FORM], "nonsense", 400),
        ("POST", &[FORM], &form[..form.len() - 6], 400),
    ];
    for (method, headers, body, status) in cases {
        let answer = send(&service, method, &at, headers, body.as_bytes()).await;
        assert_eq!(answer.status, *status, "{method} {headers:?}: {}", answer.text());
    }
    for wrong in
        ["/upload/", "/upload/x", &format!("{at}/"), &format!("{at}?x=1"), &at.to_uppercase(), &at[..at.len() - 1]]
    {
        assert_eq!(send(&service, "GET", wrong, &[], b"").await.status, 404, "{wrong}");
        assert_eq!(send(&service, "PUT", wrong, &[], b"x").await.status, 404, "{wrong}");
    }
    assert_eq!(names(&service).await, Vec::<String>::new());
    assert_eq!(send(&service, "PUT", &at, &[], b"").await.status, 201, "an empty file is one, too");
    assert_eq!(stored(&service, "f").await, b"");
    let full = address(&full_link);
    let answer = send(&service, "PUT", &full, &[], &[0; 1 << 20]).await;
    assert_eq!(
        (answer.status, answer.text().as_str()),
        (507, "no space is left in the sandbox, whose disk has 1024 MB\n")
    );
    service.end().await;
}

#[tokio::test]
async fn an_upload_that_breaks_off_leaves_nothing() {
    let service = service().await;
    let link = link(&service, "f").await;
    let at = address(&link);
    let head = |length: &str| format!("PUT {at} HTTP/1.1\r\nhost: localhost\r\n{length}\r\n\r\n");
    for (length, body) in
        [("content-length: 100000", vec![b'x'; 50_000]), ("transfer-encoding: chunked", b"5\r\nabcde\r\n".to_vec())]
    {
        let mut client = Client::connect(service.address).await;
        client.write(head(length).as_bytes()).await;
        client.write(&body).await;
        let engine = service.engine.clone();
        eventually("the upload has begun", || engine.upload_offer(&link.id).is_err()).await;
        // Meanwhile nobody else can use the link.
        assert_eq!(send(&service, "PUT", &at, &[], b"other").await.status, 409);
        drop(client);
        eventually("the link is open again", || engine.upload_offer(&link.id).is_ok()).await;
        assert_eq!(names(&service).await, Vec::<String>::new());
    }
    assert_eq!(send(&service, "PUT", &at, &[], b"whole").await.status, 201);
    assert_eq!(stored(&service, "f").await, b"whole");
    service.end().await;
}

#[tokio::test]
async fn a_link_ends_with_its_context() {
    let service = service().await;
    let at = address(&link(&service, "f").await);
    service.execute("alice", Op::StopContext { which: ContextSelector::Named("box".into()) }).await;
    let gone = send(&service, "PUT", &at, &[], b"x").await;
    assert_eq!((gone.status, gone.text().as_str()), (410, "the sandbox of this link is gone; ask for a new link\n"));
    service.end().await;
}

/// W69: the client is told at once, although it is in the middle of the file and sends nothing more.
#[tokio::test]
async fn w69_an_upload_is_answered_when_its_context_is_stopped() {
    let service = service().await;
    let link = link(&service, "f").await;
    let mut client = Client::connect(service.address).await;
    let head = format!("PUT {} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n", address(&link));
    client.write(head.as_bytes()).await;
    client.write(&[b'x'; 50_000]).await;
    eventually("the upload has begun", || service.engine.upload_offer(&link.id).is_err()).await;
    service.execute("alice", Op::StopContext { which: ContextSelector::Named("box".into()) }).await;
    let gone = client.answer().await;
    assert_eq!((gone.status, gone.text().as_str()), (410, "the sandbox of this link is gone; ask for a new link\n"));
    service.end().await;
}
