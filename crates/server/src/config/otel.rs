//! The settings of the export to OpenTelemetry. Their variables are those that the OpenTelemetry specification defines.
//!
//! Other programs read the same variables, for which they may have values that this one does not support. Such a value
//! is named in the log and does not prevent the start.

use std::time::Duration;

use telemetry::otel::{OtelConfig, RequestHeaders, Sampler, resource_attributes};

use super::Secret;
use super::resolve::{ConfigError, Effective};

/// What is exported, and what the operator should know about it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Telemetry {
    /// `None` if nothing is exported.
    pub export: Option<OtelConfig>,
    pub warnings: Vec<String>,
}

const USUAL_SAMPLER: Sampler = Sampler { parent_based: true, ratio: 1.0 };

impl Telemetry {
    pub(super) fn typed(effective: &Effective) -> Result<Self, ConfigError> {
        let mut warnings = Vec::new();
        let text = |key: &str| effective.get::<Option<String>>(key);
        let disabled: bool = effective.get("otel.disabled")?;
        let mut url = |signal: &str| -> Result<Option<String>, ConfigError> {
            let own = text(&format!("otel.{signal}_endpoint"))?;
            let base = text("otel.endpoint")?.map(|base| format!("{}/v1/{signal}", base.trim_end_matches('/')));
            let Some(url) = own.or(base) else { return Ok(None) };
            let exporter = text(&format!("otel.{signal}"))?.unwrap_or_default();
            if !url.starts_with("http://") && !url.starts_with("https://") {
                warnings.push(format!("`otel`: no {signal} are exported: an address begins with http:// or https://"));
                return Ok(None);
            }
            match exporter.as_str() {
                "none" => return Ok(None),
                "otlp" => {}
                other => warnings.push(format!("`otel.{signal}`: `{other}` is not `otlp` or `none`; `otlp` is used")),
            }
            Ok(Some(url))
        };
        let (traces, metrics, logs) = (url("traces")?, url("metrics")?, url("logs")?);
        if disabled || (traces.is_none() && metrics.is_none() && logs.is_none()) {
            return Ok(Self { export: None, warnings: if disabled { Vec::new() } else { warnings } });
        }
        let json = match text("otel.protocol")?.as_deref() {
            Some("http/json") => true,
            Some("http/protobuf") | None => false,
            Some(other) => {
                warnings.push(format!(
                    "`otel.protocol`: `{other}` is not `http/protobuf` or `http/json`; nothing is exported"
                ));
                return Ok(Self { export: None, warnings });
            }
        };
        let ratio = text("otel.sampler_arg")?.and_then(|ratio| ratio.parse().ok()).unwrap_or(1.0f64).clamp(0.0, 1.0);
        let sampler = match text("otel.sampler")? {
            None => USUAL_SAMPLER,
            Some(name) => Sampler::named(&name, ratio).unwrap_or_else(|| {
                warnings.push(format!("`otel.sampler`: there is no `{name}` here; all traces are exported"));
                USUAL_SAMPLER
            }),
        };
        let headers: Option<Secret> = effective.get("otel.headers")?;
        let milliseconds = |key: &str| effective.get(key).map(Duration::from_millis);
        let export = OtelConfig {
            traces,
            metrics,
            logs,
            json,
            headers: headers.map(|headers| RequestHeaders::parse(&headers.0)).unwrap_or_default(),
            timeout: milliseconds("otel.timeout_ms")?,
            resource: resource(effective)?,
            sampler,
            delay: milliseconds("otel.delay_ms")?,
            queue: effective.get("otel.queue")?,
            metric_interval: milliseconds("otel.metric_interval_ms")?,
        };
        Ok(Self { export: Some(export), warnings })
    }
}

/// Returns the attributes of the resource. A service name that is set as such overrides one among the attributes.
fn resource(effective: &Effective) -> Result<Vec<(String, String)>, ConfigError> {
    let given: Option<String> = effective.get("otel.resource_attributes")?;
    let name: Option<String> = effective.get("otel.service_name")?;
    let mut all = resource_attributes(&given.unwrap_or_default());
    if name.is_some() {
        all.retain(|(key, _)| key != "service.name");
    }
    if !all.iter().any(|(key, _)| key == "service.name") {
        all.push(("service.name".into(), name.unwrap_or_else(|| "sandpool".into())));
    }
    if !all.iter().any(|(key, _)| key == "service.version") {
        all.push(("service.version".into(), env!("CARGO_PKG_VERSION").into()));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Environment, Sources};

    fn telemetry(env: &[(&str, &str)]) -> Telemetry {
        let env: Vec<_> = [("HOME", "/home/u")].iter().chain(env).copied().collect();
        let sources = Sources { environment: Environment::of(&env), flags: Vec::new(), is_root: false };
        Config::load(&sources).unwrap().telemetry
    }

    fn export(env: &[(&str, &str)]) -> OtelConfig {
        telemetry(env).export.expect("something is exported")
    }

    const ENDPOINT: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318/");

    #[test]
    fn an_address_turns_the_export_on_and_others_refine_it() {
        assert_eq!(telemetry(&[("OTEL_SERVICE_NAME", "x")]).export, None);
        let usual = export(&[ENDPOINT]);
        assert_eq!(usual.traces.as_deref(), Some("http://127.0.0.1:4318/v1/traces"));
        assert_eq!(usual.logs.as_deref(), Some("http://127.0.0.1:4318/v1/logs"));
        assert_eq!((usual.json, usual.sampler, usual.timeout.as_secs(), usual.queue), (false, USUAL_SAMPLER, 10, 2048));
        assert_eq!(usual.resource[0], ("service.name".into(), "sandpool".into()));
        let own = export(&[
            ENDPOINT,
            ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "https://m.example.com/in"),
            ("OTEL_LOGS_EXPORTER", "none"),
            ("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
            ("OTEL_EXPORTER_OTLP_TIMEOUT", "1500"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=a,deployment.environment.name=test"),
            ("OTEL_SERVICE_NAME", "b"),
            ("OTEL_TRACES_SAMPLER", "traceidratio"),
            ("OTEL_TRACES_SAMPLER_ARG", "0.5"),
        ]);
        assert_eq!((own.metrics.as_deref(), own.logs), (Some("https://m.example.com/in"), None));
        assert_eq!((own.headers.0, own.json), (vec![("x-key".into(), "a b".into())], true));
        assert_eq!(own.timeout, Duration::from_millis(1500));
        let names: Vec<&str> = own.resource.iter().filter(|(k, _)| k == "service.name").map(|(_, v)| &**v).collect();
        assert_eq!(names, ["b"]);
        assert_eq!(own.sampler, Sampler { parent_based: false, ratio: 0.5 });
        assert_eq!(telemetry(&[ENDPOINT, ("OTEL_SDK_DISABLED", "true")]).export, None);
    }

    /// A client that starts the server over stdio has variables for itself.
    #[test]
    fn values_for_other_programs_do_not_prevent_the_start() {
        let grpc = telemetry(&[ENDPOINT, ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")]);
        assert_eq!(grpc.export, None);
        assert!(grpc.warnings[0].contains("`grpc` is not `http/protobuf`"), "{:?}", grpc.warnings);
        let odd = telemetry(&[ENDPOINT, ("OTEL_TRACES_SAMPLER", "jaeger_remote"), ("OTEL_LOGS_EXPORTER", "console")]);
        assert_eq!(odd.export.unwrap().sampler, USUAL_SAMPLER);
        assert_eq!(odd.warnings.len(), 2);
        assert_eq!(telemetry(&[("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4317")]).warnings.len(), 3);
    }

    #[test]
    fn the_headers_are_secret() {
        let config = export(&[ENDPOINT, ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hush")]);
        assert_eq!(config.headers.0.len(), 1);
        assert!(!format!("{config:?}").contains("hush"), "{config:?}");
    }
}
