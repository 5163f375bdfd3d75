//! The languages, the warm interpreter and the browser: what is there, and whether it can be used.

use std::collections::BTreeMap;
use std::path::PathBuf;

use sandbox::WarmSpec;
use sandbox::native::{Fact, State};

use super::fact;
use crate::cli::wiring::{Native, Reach};
use crate::cli::{Context, Failed};
use crate::config::{BrowserChoice, Config, NodeChoice};
use crate::runtimes::{self, Node, SetupError, browser, node, python};

pub struct Found {
    pub facts: Vec<Fact>,
    /// Of Python.
    pub packages: BTreeMap<String, String>,
    /// Python can be used or prepared.
    pub usable: bool,
}

pub async fn find(context: &Context, trial: Result<Trial, Failed>) -> Found {
    let (python, packages, usable) = python(context).await;
    let mut facts = vec![python, node(context).await];
    facts.extend(warm(context, trial).await);
    facts.extend(browser(context).await);
    Found { facts, packages, usable }
}

async fn python(context: &Context) -> (Fact, BTreeMap<String, String>, bool) {
    let (config, env) = (&context.config.runtimes, &context.environment);
    let off = |why: String, what_to_do: &str| fact("Python", State::Off, why, what_to_do);
    match python::find(config).await {
        Some(runtime) => match python::verify(&runtime).await {
            Ok(()) => {
                let why = format!("{} in {}", runtime.marker.version, runtime.dir.display());
                (fact("Python", State::On, why, ""), runtime.marker.packages, true)
            }
            Err(error) => (off(error.to_string(), "run `sandpool setup --force`"), BTreeMap::new(), false),
        },
        None => match python::available(config, env).await {
            Ok(version) => (off(format!("{version} found, not prepared yet"), PREPARE), BTreeMap::new(), true),
            Err(error) => {
                let todo = "install Python 3.11 or newer with its venv module";
                (fact("Python", State::Absent, error.to_string(), todo), BTreeMap::new(), false)
            }
        },
    }
}

const PREPARE: &str = "run `sandpool setup`, or let the first use do it";

async fn node(context: &Context) -> Fact {
    let config = &context.config.runtimes;
    let found = node::find(config, &context.environment).await;
    match found.and_then(|found| found.map(|node| node.verify().map(|()| node)).transpose()) {
        Ok(Some(node)) => {
            let whose = if matches!(node, Node::Host { .. }) { "of this machine" } else { "pinned" };
            fact("Node", State::On, format!("{} ({whose}) at {}", node.version(), node.binary().display()), "")
        }
        Ok(None) => fact("Node", State::Off, "no Node 22 or newer on this machine, none prepared yet", PREPARE),
        Err(error) if matches!(config.node, NodeChoice::Path(_)) => {
            fact("Node", State::Off, error.to_string(), "change `runtimes.node`")
        }
        Err(error) => fact("Node", State::Off, error.to_string(), "run `sandpool setup --force`"),
    }
}

/// A back end of doctor's own, in a directory that goes with it.
pub struct Trial {
    native: Native,
    dir: PathBuf,
}

impl Trial {
    pub fn launch(config: &Config) -> Result<Self, Failed> {
        let dir = std::env::temp_dir().join(format!("sandpool-doctor-{}", uuid::Uuid::new_v4().simple()));
        let native = Native::launch(&Config { state_dir: dir.clone(), ..config.clone() }, Reach::Stdio)?;
        Ok(Self { native, dir })
    }

    async fn warm(self, spec: &WarmSpec) -> Result<(), Failed> {
        let work = async {
            let (backend, _) = self.native.start().await?;
            let warmed = backend.warm(spec).await;
            backend.shutdown().await;
            Ok(warmed?)
        };
        let result = work.await;
        let _ = std::fs::remove_dir_all(&self.dir);
        result
    }
}

/// Whether interpreters are forked here: found out by starting one to fork.
async fn warm(context: &Context, trial: Result<Trial, Failed>) -> Option<Fact> {
    const LAYER: &str = "warm Python";
    let config = &context.config.runtimes;
    if !config.warm {
        return Some(fact(LAYER, State::Off, "each interpreter is started anew", "set `runtimes.warm = true`"));
    }
    let prepared = runtimes::find(config, &context.environment).await.ok()??;
    let spec = prepared.kernels(config, None).warm()?;
    let tried = async { trial?.warm(&spec).await };
    Some(match tried.await {
        Ok(()) => {
            let imported = if config.preload.is_empty() { "nothing".into() } else { config.preload.join(", ") };
            fact(LAYER, State::On, format!("interpreters are forks of one that has imported {imported}"), "")
        }
        Err(Failed(why)) => fact(LAYER, State::Off, why, "each interpreter is started anew, which takes longer"),
    })
}

async fn browser(context: &Context) -> Vec<Fact> {
    const LAYER: &str = "browser";
    let found = browser::find(&context.config.browser, &context.environment).await;
    let browser = match found {
        Ok(Some(browser)) => browser,
        Ok(None) => return vec![fact(LAYER, State::Off, "`browser` is `off`", "")],
        Err(error @ SetupError::NoBrowser(_)) => return vec![fact(LAYER, State::Absent, error.to_string(), "")],
        Err(error) => {
            let named = matches!(context.config.browser, BrowserChoice::Path(_));
            return vec![fact(LAYER, State::Off, error.to_string(), if named { "change `browser`" } else { "" })];
        }
    };
    let kind = if browser.shell { "headless shell" } else { "whole browser; its headless shell takes a third" };
    let why = format!("Chromium {} ({kind}) at {}", browser.version, browser.program.display());
    let fonts = (!browser::has_fonts()).then(|| {
        let todo = "install some (on Debian: apt-get install fonts-liberation)";
        fact("fonts", State::Absent, "pages show boxes instead of text", todo)
    });
    [Some(fact(LAYER, State::On, why, "")), fonts].into_iter().flatten().collect()
}
