//! What is where.

use std::io;
use std::time::Duration;

use super::{Asked, Wire, made};

/// Pages that are files. `{{other}}` in them is the other site.
const FILES: &[(&str, &str)] = &[
    ("/", include_str!("html/index.html")),
    ("/busy", include_str!("html/busy.html")),
    ("/canvas", include_str!("html/canvas.html")),
    ("/dialogs", include_str!("html/dialogs.html")),
    ("/downloads", include_str!("html/downloads.html")),
    ("/files", include_str!("html/files.html")),
    ("/forms", include_str!("html/forms.html")),
    ("/frames", include_str!("html/frames.html")),
    ("/frames/address", include_str!("html/address.html")),
    ("/frames/nest", include_str!("html/nest.html")),
    ("/frames/payment", include_str!("html/payment.html")),
    (
        "/frames/stuck",
        "<!doctype html><title>Stuck</title><p>Not for long<script>setTimeout(() => { for (;;); }, 100)</script>",
    ),
    ("/hostile", include_str!("html/hostile.html")),
    ("/infinite", include_str!("html/infinite.html")),
    ("/kinds", include_str!("html/kinds.html")),
    ("/login", include_str!("html/login.html")),
    ("/popups", include_str!("html/popups.html")),
    ("/race", include_str!("html/race.html")),
    ("/shadow", include_str!("html/shadow.html")),
    ("/spa", include_str!("html/spa.html")),
    ("/tables", include_str!("html/tables.html")),
    ("/waiting", include_str!("html/waiting.html")),
];

const STYLE: &str = include_str!("html/style.css");
const REPORT: &str = "item,amount\ntea,4\ncoffee,7\n";
/// The one user of `/login`, and what the cookie of a login says.
const USER: (&str, &str) = ("ada", "lovelace");
const COOKIE: &str = "session=ada";

pub fn answer(asked: &Asked, wire: &mut Wire<'_>) -> io::Result<()> {
    if asked.method == "POST" {
        return posted(asked, wire);
    }
    if let Some((_, page)) = FILES.iter().find(|(path, _)| *path == asked.path) {
        return wire.html(&page.replace("{{other}}", &asked.other_origin()));
    }
    let count = |default| asked.number("n", default).min(2_000_000) as usize;
    match asked.path.as_str() {
        "/style.css" => wire.answer("200 OK", &[("content-type", "text/css")], STYLE.as_bytes()),
        "/favicon.ico" => wire.answer("204 No Content", &[], b""),
        "/list50" => wire.html(&made::shop(50)),
        "/big" => wire.html(&made::big(count(50_000))),
        "/deep" => wire.html(&made::deep(count(50_000))),
        "/text" => made::text(wire, count(1)),
        "/api/items" => {
            wire.pause(Duration::from_millis(asked.number("delay", 80).min(30_000)));
            wire.json(r#"["Lisbon","Oslo","Kyoto"]"#)
        }
        "/api/list" => wire.json(&made::items(asked.number("from", 0), 20)),
        // Does what its parent tells it.
        "/puppet" => wire.html("<!doctype html><title>Puppet</title><script>onmessage = async e => parent.postMessage(await eval(e.data), '*')</script>"),
        "/api/poll" => {
            wire.pause(Duration::from_secs(25));
            wire.json("{}")
        }
        "/slow" => {
            wire.pause(Duration::from_millis(asked.number("ms", 1000).min(60_000)));
            wire.html("<!doctype html><title>Slow</title><link rel=stylesheet href=/style.css><h1>Here at last</h1>")
        }
        "/download/report.csv" => {
            let headers =
                [("content-type", "text/csv"), ("content-disposition", "attachment; filename=\"report.csv\"")];
            wire.answer("200 OK", &headers, REPORT.as_bytes())
        }
        // It arrives later than an action waits for ordinary requests.
        "/download/slow.csv" => {
            wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\ncontent-type: text/csv\r\n")?;
            wire.write(b"content-disposition: attachment; filename=slow.csv\r\n\r\ntea")?;
            wire.pause(Duration::from_secs(2));
            wire.write(b",4\n")
        }
        "/download/broken.bin" => {
            wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\ncontent-type: application/octet-stream\r\n")?;
            wire.write(b"content-disposition: attachment; filename=broken.bin\r\n\r\nonly this")
        }
        // More than any disk has, and it never ends.
        "/download/endless.bin" => {
            wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1152921504606846976\r\n")?;
            wire.write(b"content-disposition: attachment; filename=endless.bin\r\n\r\n")?;
            loop {
                wire.write(&[b'x'; 4096])?;
                wire.pause(Duration::from_millis(10));
            }
        }
        "/download/traversal" => {
            let headers = [("content-disposition", "attachment; filename=\"../../../../etc/owned\"")];
            wire.answer("200 OK", &headers, b"nothing")
        }
        "/redirect" => match asked.number("n", 3) {
            0 => wire.redirect("/forms"),
            n => wire.redirect(&format!("/redirect?n={}", n - 1)),
        },
        "/redirect/loop" => wire.redirect("/redirect/loop"),
        "/redirect/to" => wire.redirect(asked.parameter("url").unwrap_or("/")),
        "/refresh" => {
            let to = asked.parameter("url").unwrap_or("/refresh");
            wire.html(&format!(
                "<!doctype html><title>One moment</title><meta http-equiv=refresh content=\"0; url={to}\"><p>One moment…"
            ))
        }
        "/account" if asked.cookie.contains(COOKIE) => wire.html(include_str!("html/account.html")),
        "/account" => wire.redirect("/login"),
        "/logout" => wire.answer("302 Found", &[("location", "/login"), ("set-cookie", "session=; Max-Age=0")], b""),
        "/broken/close" => Ok(()),
        "/broken/half" => wire.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\ncontent-type: text/html\r\n\r\n<h1>Half a page</h1><p>The",
        ),
        "/broken/chunk" => {
            wire.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/html\r\n\r\n")?;
            wire.write(b"14\r\n<h1>One chunk</h1>..\r\nnothing hexadecimal\r\n")
        }
        "/broken/garbage" => wire.write(b"\x00\x01\x02 this is not HTTP\r\n\r\n"),
        "/broken/500" => {
            let html = "<!doctype html><title>500</title><link rel=stylesheet href=/style.css><h1>Something broke</h1>";
            wire.answer("500 Internal Server Error", &[("content-type", "text/html")], html.as_bytes())
        }
        "/broken/stuck" => {
            wire.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10000\r\ncontent-type: text/html\r\n\r\n<h1>The rest never comes</h1>")?;
            wire.pause(Duration::from_secs(60));
            Ok(())
        }
        _ => {
            let html = "<!doctype html><title>404</title><link rel=stylesheet href=/style.css><h1>No such page</h1>";
            wire.answer("404 Not Found", &[("content-type", "text/html")], html.as_bytes())
        }
    }
}

fn posted(asked: &Asked, wire: &mut Wire<'_>) -> io::Result<()> {
    let form = asked.form();
    let field = |name: &str| form.iter().find(|(key, _)| key == name).map_or("", |(_, value)| value.as_str());
    match asked.path.as_str() {
        "/login" if (field("user"), field("password")) == USER => {
            let cookie = format!("{COOKIE}; HttpOnly; Path=/; SameSite=Lax");
            wire.answer("302 Found", &[("location", "/account"), ("set-cookie", &cookie)], b"")
        }
        "/login" => wire.redirect("/login?wrong"),
        "/forms" => wire.html(&made::sent(&form)),
        _ => wire.answer("404 Not Found", &[], b""),
    }
}
