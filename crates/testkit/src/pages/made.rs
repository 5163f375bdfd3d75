//! Pages too large, or too regular, to be written down.

use std::fmt::Write as _;
use std::io;

use super::Wire;

const HEAD: &str = "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>\
                    <link rel=stylesheet href=/style.css>";
const KINDS: [&str; 5] = ["Teapot", "Kettle", "Lamp", "Clock", "Chair"];
const COLOURS: [&str; 7] = ["Red", "Blue", "Green", "White", "Black", "Oak", "Brass"];

/// A shop's list: what the benchmark reads, searches and clicks.
pub fn shop(items: usize) -> String {
    let mut page = format!(
        "{HEAD}<title>Fifty things</title><header><strong>Fifty things</strong><nav aria-label=Shop><a href=/list50>All</a>\
         <a href='/list50?kind=new'>New</a><a href='/list50?kind=sale'>Sale</a></nav><output id=cart>Cart: 0</output></header>\
         <main><h1>Everything we have</h1><form onsubmit='event.preventDefault()'><label>Search <input id=search></label>\
         <label><input type=checkbox id=stock> Only what is in stock</label></form><p id=shown>{items} things</p><ul class=grid>"
    );
    for n in 1..=items {
        let (colour, kind) = (COLOURS[n % 7], KINDS[n % 5]);
        let _ = write!(
            page,
            "<li class=card><h3><a href='/list50#{n}'>{colour} {kind} {n}</a></h3><p>A {} for the house, in {}.</p>\
             <p class=price>{}.{:02} €</p><button>Buy {n}</button></li>",
            kind.to_lowercase(),
            colour.to_lowercase(),
            5 + n * 3,
            n * 7 % 100,
        );
    }
    page + "</ul></main><script>
let bought = 0;
addEventListener('click', e => { if (e.target.tagName === 'BUTTON') cart.textContent = `Cart: ${++bought}`; });
search.addEventListener('input', () => {
  let count = 0;
  for (const card of document.querySelectorAll('.card')) {
    card.hidden = !card.textContent.toLowerCase().includes(search.value.toLowerCase());
    count += !card.hidden;
  }
  shown.textContent = `${count} things`;
});
</script>"
}

/// About so many elements: entries with a link, a box and a button.
pub fn big(nodes: usize) -> String {
    let mut page = format!("{HEAD}<title>A large page</title><main><h1>A large page</h1><ul>");
    for n in 1..=nodes / 5 {
        let _ = write!(
            page,
            "<li><span>{n}</span> <a href='#{n}'>Entry {n}</a> <input type=checkbox aria-label='Pick {n}'> <button>Open {n}</button>"
        );
    }
    page + "</ul></main>"
}

/// One element in the other.
pub fn deep(levels: usize) -> String {
    // The parser nests no deeper than 512 by itself.
    format!(
        "{HEAD}<title>A deep page</title><h1>A deep page</h1><script>
let inner = document.body;
for (let i = 0; i < {levels}; i++) inner = inner.appendChild(document.createElement(i % 100 ? 'div' : 'section'));
inner.innerHTML = '<button>At the bottom</button>';
</script>"
    )
}

/// So many megabytes in one paragraph, written as they are made.
pub fn text(wire: &mut Wire<'_>, megabytes: usize) -> io::Result<()> {
    let megabytes = megabytes.min(200);
    let head = format!("{HEAD}<title>A long text</title><button>Before</button><p>");
    let line = "All work and no play makes a dull page. ".repeat(26_214);
    let length = head.len() + megabytes * line.len() + "</p><button>After</button>".len();
    wire.write(
        format!("HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {length}\r\n\r\n{head}").as_bytes(),
    )?;
    for _ in 0..megabytes {
        wire.write(line.as_bytes())?;
    }
    wire.write(b"</p><button>After</button>")
}

pub fn items(from: u64, count: u64) -> String {
    let items: Vec<String> = (from + 1..=from + count).map(|n| format!("\"Message {n}\"")).collect();
    format!("[{}]", items.join(","))
}

/// What arrived of a form.
pub fn sent(form: &[(String, String)]) -> String {
    let mut page = format!("{HEAD}<title>Thank you</title><main><h1>Thank you</h1><table><tr><th>Field<th>Value");
    for (name, value) in form {
        let _ = write!(page, "<tr><td>{}<td>{}", escaped(name), escaped(value));
    }
    page + "</table><p><a href=/forms>Back to the form</a></main>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
