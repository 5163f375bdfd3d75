//! `sandpool config`: the effective configuration, each value with where it came from.

use std::process::ExitCode;

use super::{Context, Done, output};
use crate::config::environment;

/// Print the configuration in effect, and where each value came from
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print it as JSON
    #[arg(long)]
    json: bool,
    /// Print instead the list of environment variables, as it is in docs/environment.md
    #[arg(long, conflicts_with = "json")]
    environment: bool,
}

pub fn main(args: Args, context: &Context) -> Done {
    let effective = &context.config.effective;
    if args.environment {
        output::line(environment::page().trim_end());
    } else if args.json {
        let entry = |value: &Option<toml::Value>, origin: String| serde_json::json!({"value": value, "origin": origin});
        let all: serde_json::Map<_, _> = effective
            .iter()
            .map(|(setting, given)| (setting.key.into(), entry(&given.value, given.origin.to_string())))
            .collect();
        output::line(&serde_json::to_string_pretty(&all)?);
    } else {
        let rows: Vec<Vec<String>> = effective
            .iter()
            .map(|(setting, given)| {
                let value = given.value.as_ref().map_or("(unset)".into(), toml::Value::to_string);
                vec![setting.key.into(), format!("= {value}"), format!("# {}", given.origin)]
            })
            .collect();
        output::line(&output::table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}
