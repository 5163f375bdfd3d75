//! Creates the flags that are settings from the table of settings.

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};

use crate::config::settings::{SETTINGS, ValueKind};

/// The settings that are given as flags, as pairs of key and text.
#[derive(Debug, Default)]
pub(crate) struct Flags {
    pub given: Vec<(&'static str, String)>,
}

impl Args for Flags {
    fn augment_args(mut command: Command) -> Command {
        for setting in SETTINGS.iter() {
            let Some((name, value)) = setting.flag else { continue };
            let env = setting.env.first().map(|env| format!(" [env: {env}]")).unwrap_or_default();
            let mut arg =
                Arg::new(setting.key).long(name).help(format!("{}{env}", setting.help)).action(ArgAction::Set);
            arg = match setting.kind {
                // `--cors` without a value means `true`.
                ValueKind::Switch => {
                    arg.num_args(0..=1).require_equals(true).default_missing_value("true").value_name("BOOL")
                }
                ValueKind::Tables => arg.value_name(value).action(ArgAction::Append),
                _ => arg.value_name(value),
            };
            command = command.arg(arg.global(true).help_heading("Settings"));
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Flags {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let flags = SETTINGS.iter().filter(|setting| setting.flag.is_some());
        let given = flags.flat_map(|setting| {
            let values = matches.get_many::<String>(setting.key).into_iter().flatten();
            values.map(|value| (setting.key, value.clone()))
        });
        Ok(Self { given: given.collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}
