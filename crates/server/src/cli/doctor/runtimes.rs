//! Reports whether the languages, the warm interpreter and the browser exist and can be used.

use std::collections::BTreeMap;
use std::path::PathBuf;

use runtimes::node::{self, Node};
use runtimes::{BrowserChoice, NodeChoice, SetupError, browser, python};
use sandbox::ZygoteSpec;
use sandbox::native::{Fact, FactState};

use super::fact;
use crate::cli::wiring::Native;
use crate::cli::{CommandEnv, Failed};
use crate::config::Config;

pub(crate) struct Found {
    pub facts: Vec<Fact>,
    /// Packages of Python with their versions.
    pub packages: BTreeMap<String, String>,
    /// Whether Python can be used or prepared.
    pub usable: bool,
}

pub(crate) async fn find(context: &CommandEnv, trial: Result<Trial, Failed>) -> Found {
    let (python, packages, usable) = python(context).await;
    let mut facts = vec![python, node(context).await];
    facts.extend(warm(context, trial).await);
    facts.extend(browser(context).await);
    Found { facts, packages, usable }
}

async fn python(context: &CommandEnv) -> (Fact, BTreeMap<String, String>, bool) {
    let (config, env) = (&context.config.runtimes, &context.environment);
    let off = |why: String, what_to_do: &str| fact("Python", FactState::Off, why, what_to_do);
    let force = |error: SetupError| (off(error.to_string(), "run `sandpool setup --force`"), BTreeMap::new(), false);
    match python::find(config, env).await {
        Err(error) => force(error),
        Ok(Some(python)) => match python.verify().await {
            Ok(()) => {
                let why = format!("{} in {}", python.version(), python.base.dir.display());
                (fact("Python", FactState::On, why, ""), python.packages(), true)
            }
            Err(error) => force(error),
        },
        Ok(None) => match python::available(config, env).await {
            Ok(version) => (off(format!("{version} found, not prepared yet"), PREPARE), BTreeMap::new(), true),
            Err(error) => {
                let todo = "install Python 3.11, 3.12, 3.13 or 3.14 with its venv module";
                (fact("Python", FactState::Absent, error.to_string(), todo), BTreeMap::new(), false)
            }
        },
    }
}

const PREPARE: &str = "run `sandpool setup`, or let the first use do it";

async fn node(context: &CommandEnv) -> Fact {
    let config = &context.config.runtimes;
    let found = node::find(config, &context.environment).await;
    match found.and_then(|found| found.map(|node| node.verify().map(|()| node)).transpose()) {
        Ok(Some(node)) => {
            let whose = if matches!(node, Node::Host { .. }) { "of this machine" } else { "pinned" };
            fact("Node", FactState::On, format!("{} ({whose}) at {}", node.version(), node.binary().display()), "")
        }
        Ok(None) => fact("Node", FactState::Off, "no Node 22 or newer on this machine, none prepared yet", PREPARE),
        Err(error) if matches!(config.node, NodeChoice::Path(_)) => {
            fact("Node", FactState::Off, error.to_string(), "change `runtimes.node`")
        }
        Err(error) => fact("Node", FactState::Off, error.to_string(), "run `sandpool setup --force`"),
    }
}

/// A separate back end for this command. Its directory is removed afterwards.
pub(crate) struct Trial {
    native: Native,
    dir: PathBuf,
}

impl Trial {
    pub(crate) fn launch(config: &Config) -> Result<Self, Failed> {
        let dir = std::env::temp_dir().join(format!("sandpool-doctor-{}", uuid::Uuid::new_v4().simple()));
        let native = Native::launch_trial(&Config { state_dir: dir.clone(), ..config.clone() })?;
        Ok(Self { native, dir })
    }

    /// Starts a zygote and returns the modules that could not be imported.
    async fn warm(self, spec: &ZygoteSpec) -> Result<BTreeMap<String, String>, Failed> {
        let work = async {
            let (backend, _) = self.native.start_quietly().await?;
            let started = backend.start_zygote(spec).await;
            let status = backend.zygote_status().await.unwrap_or_default();
            backend.shutdown().await;
            started?;
            Ok(status.not_imported)
        };
        let result = work.await;
        let _ = std::fs::remove_dir_all(&self.dir);
        result
    }
}

/// Reports whether kernels are forked from a warm interpreter. It finds out by starting a zygote.
async fn warm(context: &CommandEnv, trial: Result<Trial, Failed>) -> Option<Fact> {
    const LAYER: &str = "warm Python";
    let config = &context.config.runtimes;
    if !config.warm {
        return Some(fact(LAYER, FactState::Off, "each kernel is started separately", "set `runtimes.warm = true`"));
    }
    let prepared = runtimes::find(config, &context.environment).await.ok()??;
    let spec = prepared.kernels(config, None).warm()?;
    let tried = async { trial?.warm(&spec).await };
    Some(match tried.await {
        Ok(failed) => imports(LAYER, &config.preload, &failed),
        Err(Failed(why)) => fact(LAYER, FactState::Off, why, "each kernel is started separately, which takes longer"),
    })
}

/// Reports which of the requested modules the zygote could import.
fn imports(layer: &str, wanted: &[String], failed: &BTreeMap<String, String>) -> Fact {
    let done: Vec<&str> = wanted.iter().filter(|name| !failed.contains_key(*name)).map(String::as_str).collect();
    let done = if done.is_empty() { "nothing".into() } else { done.join(", ") };
    let why = format!("kernels are forked from an interpreter that has imported {done}");
    if failed.is_empty() {
        return fact(layer, FactState::On, why, "");
    }
    let failed: Vec<String> = failed.iter().map(|(name, why)| format!("{name} cannot be imported ({why})")).collect();
    let why = format!("{why}; {}", failed.join("; "));
    fact(
        layer,
        FactState::Off,
        why,
        "change `runtimes.preload`; packages that `sandpool setup --add` added cannot be preloaded",
    )
}

async fn browser(context: &CommandEnv) -> Vec<Fact> {
    const LAYER: &str = "browser";
    let found = browser::find(&context.config.browser, &context.environment).await;
    let browser = match found {
        Ok(Some(browser)) => browser,
        Ok(None) => return vec![fact(LAYER, FactState::Off, "`browser` is `off`", "")],
        Err(error @ SetupError::NoBrowser(_)) => return vec![fact(LAYER, FactState::Absent, error.to_string(), "")],
        Err(error) => {
            let named = matches!(context.config.browser, BrowserChoice::Path(_));
            return vec![fact(LAYER, FactState::Off, error.to_string(), if named { "change `browser`" } else { "" })];
        }
    };
    let kind =
        if browser.shell { "headless shell" } else { "whole browser; the headless shell needs a third of its memory" };
    let why = format!("Chromium {} ({kind}) at {}", browser.version, browser.program.display());
    let fonts = (!browser::has_fonts()).then(|| {
        let todo = "install some (on Debian: apt-get install fonts-liberation)";
        fact("fonts", FactState::Absent, "pages have only the font of the runtime, Noto Sans CJK", todo)
    });
    [Some(fact(LAYER, FactState::On, why, "")), fonts].into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// W42 of the hostile list.
    #[test]
    fn w42_only_what_was_imported_is_said_to_be() {
        let wanted = ["numpy".to_owned(), "pandas".to_owned()];
        let all = imports("warm Python", &wanted, &BTreeMap::new());
        assert_eq!((all.state, all.why.ends_with("has imported numpy, pandas")), (FactState::On, true));
        let failed = BTreeMap::from([("numpy".to_owned(), "RuntimeError: no x86-64-v2".to_owned())]);
        let some = imports("warm Python", &wanted, &failed);
        assert_eq!(some.state, FactState::Off);
        assert_eq!(
            some.why,
            "kernels are forked from an interpreter that has imported pandas; numpy cannot be imported (RuntimeError: no x86-64-v2)"
        );
        let none = imports("warm Python", &wanted[..1], &failed);
        assert!(
            none.why.starts_with("kernels are forked from an interpreter that has imported nothing;"),
            "{}",
            none.why
        );
    }
}
