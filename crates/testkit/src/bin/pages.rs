//! The test pages, to be looked at by hand: `pages [PORT]`. Ends with its standard input.

use std::io::{self, Read, Write};

use testkit::pages::Pages;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let port = std::env::args().nth(1).map_or(Ok(0), |port| port.parse())?;
    let pages = Pages::start_at(port)?;
    writeln!(io::stdout(), "{}", pages.url("/"))?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
