//! The form for people. Lines the documents print stand as they are printed there; all others in tracing's usual form.

use std::fmt::{self, Write};

use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::fmt::format::{self, Format, Full, Writer};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::escape::Escaped;
use super::lines::{HTTP_LOG, MCP_LOG};

#[derive(Default)]
pub struct Human(Format<Full>);

impl<S, N> FormatEvent<S, N> for Human
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        match event.metadata().target() {
            engine::STARTUP_LOG => write!(out, "[{}] ", event.metadata().level())?,
            MCP_LOG | HTTP_LOG => {}
            _ => return self.0.format_event(context, out, event),
        }
        let mut message = MessageVisitor(&mut out, Ok(()));
        event.record(&mut message);
        message.1?;
        writeln!(out)
    }
}

/// The message alone: the documents' lines have no fields.
struct MessageVisitor<'a, 'w>(&'a mut Writer<'w>, fmt::Result);

impl Visit for MessageVisitor<'_, '_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.1 = write!(Escaped(&mut *self.0), "{value:?}");
        }
    }
}

/// `message name=value …`, with nothing in it that a terminal would obey.
pub fn fields() -> impl for<'a> FormatFields<'a> + Send + Sync + 'static {
    format::debug_fn(|out: &mut Writer<'_>, field, value| match field.name() {
        "message" => write!(Escaped(out), "{value:?}"),
        // Where a line of the `log` crate came from; its target is shown already.
        name if name.starts_with("log.") => Ok(()),
        name => {
            write!(out, "{name}=")?;
            write!(Escaped(out), "{value:?}")
        }
    })
    .delimited(" ")
}
