//! `sandpool config` prints the effective configuration and the source of each value.

use std::process::ExitCode;

use super::{CommandEnv, CommandResult, output};
use crate::config::environment;

/// Print the configuration in effect and where each value came from
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print docs/environment.md, the list of environment variables, instead
    #[arg(long, conflicts_with = "json")]
    environment: bool,
}

pub(crate) fn main(args: Args, context: &CommandEnv) -> CommandResult {
    let effective = &context.config.effective;
    if args.environment {
        output::line(environment::page().trim_end());
    } else if args.json {
        let all: serde_json::Map<_, _> = effective
            .iter()
            .map(|(setting, given)| {
                let value = given.shown(setting);
                (setting.key.into(), serde_json::json!({"value": value, "origin": given.origin.to_string()}))
            })
            .collect();
        output::line(&serde_json::to_string_pretty(&all)?);
    } else {
        let rows: Vec<Vec<String>> = effective
            .iter()
            .map(|(setting, given)| {
                let value = given.shown(setting).map_or("(unset)".into(), |value| value.to_string());
                vec![setting.key.into(), format!("= {value}"), format!("# {}", given.origin)]
            })
            .collect();
        output::line(&output::table(&rows));
    }
    Ok(ExitCode::SUCCESS)
}
