//! The log format for people. Every line begins with its time. After it, lines that a dialect's document prescribes
//! appear exactly as the document prints them; all others appear in tracing's usual form.

use std::cell::RefCell;
use std::fmt::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use mcp::http::HTTP_LOG;
use text::iso8601;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{self, Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::escape::Escaped;
use super::lines::{MCP_LOG, STARTUP_LOG};

#[derive(Default)]
pub(super) struct Human(Format<Full>);

impl<S, N> FormatEvent<S, N> for Human
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let metadata = event.metadata();
        if ![STARTUP_LOG, MCP_LOG, HTTP_LOG].contains(&metadata.target()) {
            return self.0.format_event(context, out, event);
        }
        write_time(&mut out)?;
        if metadata.target() == STARTUP_LOG {
            write!(out, "[{}] ", metadata.level())?;
        }
        let mut message = MessageVisitor(&mut out, Ok(()));
        event.record(&mut message);
        message.1?;
        writeln!(out)
    }
}

thread_local! {
    /// The second of this thread's last line, since 1970 and as text.
    static SECOND: RefCell<(u64, String)> = const { RefCell::new((0, String::new())) };
}

/// Writes the present time. A call writes several lines, and most of them share a second.
fn write_time(out: &mut Writer<'_>) -> fmt::Result {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    SECOND.with_borrow_mut(|(second, text)| {
        if text.is_empty() || *second != now.as_secs() {
            *second = now.as_secs();
            *text = iso8601(i64::try_from(*second).unwrap_or(i64::MAX));
        }
        write!(out, "{}.{:06}Z ", text.trim_end_matches('Z'), now.subsec_micros())
    })
}

/// Writes only the message, because the lines that documents prescribe have no fields.
struct MessageVisitor<'a, 'w>(&'a mut Writer<'w>, fmt::Result);

impl Visit for MessageVisitor<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.1 = write!(Escaped(&mut *self.0), "{value:?}");
        }
    }
}

/// Formats `message name=value …`, without any character that a terminal would interpret.
pub(super) fn fields() -> impl for<'a> FormatFields<'a> + Send + Sync + 'static {
    format::debug_fn(|out: &mut Writer<'_>, field, value| match field.name() {
        "message" => write!(Escaped(out), "{value:?}"),
        // Fields of the `log` crate say where a line came from; its target is shown already.
        name if name.starts_with("log.") => Ok(()),
        name => {
            write!(out, "{name}=")?;
            write!(Escaped(out), "{value:?}")
        }
    })
    .delimited(" ")
}
