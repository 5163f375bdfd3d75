//! Connects the export to OpenTelemetry with HTTP.

use telemetry::otel::Post;

use super::{CommandEnv, Failed};
use crate::outgoing;

/// Maximum number of bytes of an answer that are read. The answer is read so that the connection can be used again.
const MOST_BYTES: u64 = 64 << 10;

/// Starts the export, if there is one.
pub(super) fn start(context: &CommandEnv) -> Result<(), Failed> {
    let (Some(otel), Some(config)) = (&context.otel, &context.config.telemetry.export) else { return Ok(()) };
    let urls = [&config.traces, &config.metrics, &config.logs].into_iter().flatten().map(String::as_str);
    let agent = outgoing::agent(urls, config.timeout).map_err(|why| Failed(format!("`otel`: {why}")))?;
    Ok(otel.start(move |post| send(&agent, post))?)
}

/// Sends one request and returns the status of the answer.
fn send(agent: &ureq::Agent, post: &Post<'_>) -> Result<u16, String> {
    let request = agent.post(post.url).header("content-type", post.content_type);
    let request = post.headers.iter().fold(request, |request, (name, value)| request.header(name, value));
    let mut answer = request.send(post.body).map_err(|error| error.to_string())?;
    let _ = answer.body_mut().with_config().limit(MOST_BYTES).read_to_vec();
    Ok(answer.status().as_u16())
}

/// Sends the records that still wait, but only for a short time.
pub(super) fn finish(context: &CommandEnv) {
    if let Some(otel) = &context.otel {
        otel.finish();
    }
}
