//! Logs go to stderr, either for people, in the wording that the documents prescribe, or as JSON lines for machines.
//!
//! This module sets up the subscriber and formats lines. The callers decide what is worth a line; the wording of the
//! documents is in [`lines`].

mod escape;
mod human;
pub mod lines;
mod sink;

use tracing::Level;
use tracing_subscriber::filter::{FilterExt, filter_fn};
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::{Filter, SubscriberExt};
use tracing_subscriber::util::{SubscriberInitExt, TryInitError};
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

pub use escape::escaped;
pub use sink::{detach, finish};

use crate::otel::Otel;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    Human,
    Json,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("`--log {filter}` is not a filter")]
    Filter { filter: String, source: tracing_subscriber::filter::ParseError },
    #[error("cannot start the log")]
    Start(#[from] TryInitError),
}

/// Sends all further log lines to stderr, because stdout belongs to the protocol. `colour` applies only to the human
/// format. The lines are also exported, if `otel` exports logs.
pub fn start(filter: &str, format: LogFormat, colour: bool, otel: Option<&Otel>) -> Result<(), LogError> {
    let refused = |source| LogError::Filter { filter: filter.into(), source };
    let filter = EnvFilter::try_new(filter).map(quiet).map_err(refused)?;
    let export = otel.and_then(Otel::log_layer);
    let layers = layer(format, colour, || sink::Stderr).and_then(export).with_filter(filter);
    Ok(Registry::default().with(layers).try_init()?)
}

/// Reduces rmcp to errors whatever the filter says: its lines about a request contain code and environment values, and
/// its spans hide the span with the request's id.
fn quiet(filter: EnvFilter) -> impl Filter<Registry> + Send + Sync + 'static {
    filter.and(filter_fn(|line| !line.target().starts_with("rmcp") || *line.level() == Level::ERROR))
}

fn layer<W>(format: LogFormat, colour: bool, writer: W) -> Box<dyn Layer<Registry> + Send + Sync>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let layer = fmt::layer().with_writer(writer).with_ansi(colour);
    match format {
        LogFormat::Human => layer.fmt_fields(human::fields()).event_format(human::Human::default()).boxed(),
        // The span around a call carries `request_id` and `tenant`, which tell the lines of different calls apart.
        LogFormat::Json => {
            layer.with_ansi(false).json().flatten_event(true).with_current_span(true).with_span_list(false).boxed()
        }
    }
}

#[cfg(test)]
pub mod testing {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use tracing_subscriber::filter::LevelFilter;

    use super::*;

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// Returns the lines that `work` logs for people, without their times.
    pub fn worded(work: impl FnOnce()) -> String {
        let without_time = |line: &str| {
            let (time, rest) = line.split_once(' ').unwrap_or_default();
            assert!(time.starts_with("20") && time.ends_with('Z') && time.contains('T'), "no time: {line}");
            format!("{}\n", rest.trim_start())
        };
        logged(LogFormat::Human, work).lines().map(without_time).collect()
    }

    /// Returns what `work` logs at all levels, in this format.
    pub fn logged(format: LogFormat, work: impl FnOnce()) -> String {
        filtered(format, LevelFilter::TRACE, work)
    }

    pub fn filtered(
        format: LogFormat,
        filter: impl Filter<Registry> + Send + Sync + 'static,
        work: impl FnOnce(),
    ) -> String {
        let captured = Captured::default();
        let writer = captured.clone();
        let subscriber = Registry::default().with(layer(format, false, move || writer.clone()).with_filter(filter));
        tracing::subscriber::with_default(subscriber, work);
        let bytes = captured.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::lines::{MCP_LOG, STARTUP_LOG};
    use super::testing::{filtered, logged, worded};
    use super::*;

    /// Start-up lines as docs/dialects/agentrun.md prints them.
    const START_UP: &str = "\
[INFO] AgentRun 初始化开始...
[INFO] 创建 Code Interpreter: ci-abc123def456
[INFO] ✓ Session 池健康 (3/3 可用)
[INFO] MCP Server 就绪，等待请求...
";

    fn start_up() {
        tracing::info!(target: STARTUP_LOG, "AgentRun 初始化开始...");
        tracing::info!(target: STARTUP_LOG, "创建 Code Interpreter: ci-{}", "abc123def456");
        tracing::info!(target: STARTUP_LOG, "✓ Session 池健康 ({}/{} 可用)", 3, 3);
        tracing::info!(target: STARTUP_LOG, pool = 3, "MCP Server 就绪，等待请求...");
    }

    #[test]
    fn no_filter_makes_the_sdk_print_what_clients_send() {
        for filter in ["trace", "debug,rmcp=trace", "rmcp::service=debug"] {
            let log = filtered(LogFormat::Human, quiet(EnvFilter::new(filter)), || {
                tracing::debug!(target: "rmcp::service", "received request with secrets");
                tracing::error!(target: "rmcp::service", "broken");
            });
            assert!(log.ends_with("ERROR rmcp::service: broken\n") && !log.contains("secrets"), "{filter}: {log}");
        }
    }

    #[test]
    fn start_up_lines_are_printed_as_the_document_has_them() {
        assert_eq!(worded(start_up), START_UP);
    }

    #[test]
    fn the_json_form_has_the_same_message_and_the_fields() {
        let log = logged(LogFormat::Json, || {
            let call = tracing::info_span!("call", request_id = "r-1", tenant = "blue");
            call.in_scope(|| tracing::info!(target: MCP_LOG, tool = "code_run", "[MCP] Tool call: code_run"));
        });
        let line: serde_json::Value = serde_json::from_str(&log).unwrap();
        assert_eq!(line["message"], "[MCP] Tool call: code_run");
        assert_eq!((&line["level"], &line["target"]), (&"INFO".into(), &MCP_LOG.into()));
        assert_eq!(line["tool"], "code_run");
        assert_eq!((&line["span"]["request_id"], &line["span"]["tenant"]), (&"r-1".into(), &"blue".into()));
    }

    #[test]
    fn every_line_for_people_begins_with_its_time() {
        let lines = worded(|| {
            tracing::info!(target: STARTUP_LOG, "ready");
            tracing::info!(target: MCP_LOG, "[MCP] Tool call: code_run");
            tracing::info!(target: mcp::http::HTTP_LOG, "[HTTP] Sending response for method=ping");
            tracing::warn!(target: "engine", "a session is gone");
        });
        let expected = "[INFO] ready\n[MCP] Tool call: code_run\n[HTTP] Sending response for method=ping\n\
                        WARN engine: a session is gone\n";
        assert_eq!(lines, expected);
    }

    #[test]
    fn other_lines_have_time_level_target_span_and_fields() {
        let log = logged(LogFormat::Human, || {
            let call = tracing::info_span!("call", request_id = "r-1");
            call.in_scope(|| tracing::warn!(target: "engine::pool", left = 2, "a session is gone"));
        });
        let (time, rest) = log.split_once("  WARN ").unwrap();
        assert!(time.starts_with("20") && time.ends_with('Z'), "{time}");
        assert_eq!(rest, "call{request_id=\"r-1\"}: engine::pool: a session is gone left=2\n");
    }

    #[test]
    fn what_a_client_sent_cannot_make_a_line_or_a_colour_of_its_own() {
        let evil = "a\r\n[INFO] all is well\x1b[31m\u{2028}\u{202e}b\u{9b}c";
        for target in [0, 1, 2] {
            let work = || match target {
                0 => tracing::info!(target: STARTUP_LOG, "{evil}"),
                1 => tracing::info!(target: MCP_LOG, "{evil}"),
                _ => {
                    let span = tracing::info_span!("call", id = evil, display = %evil);
                    span.in_scope(|| tracing::info!(target: "engine", id = evil, display = %evil, "{evil}"));
                }
            };
            for format in [LogFormat::Human, LogFormat::Json] {
                let log = logged(format, work);
                assert_eq!(log.lines().count(), 1, "{log:?}");
                assert!(!log.trim_end().contains(|c: char| c.is_ascii_control()), "{log:?}");
                let turned = log.contains(['\u{2028}', '\u{202e}', '\u{9b}']);
                assert!(format == LogFormat::Json || !turned, "{log:?}");
            }
        }
    }

    #[test]
    fn a_filter_that_is_none_is_named() {
        let error = start("engine=loud", LogFormat::Human, false, None).unwrap_err();
        assert_eq!(error.to_string(), "`--log engine=loud` is not a filter");
    }
}
