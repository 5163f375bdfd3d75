//! The only place that reads the environment, and the only list of the variables that are read; `docs/environment.md`
//! is generated from it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use engine::op::SharedVolume;
use runtimes::{HostEnvironment, Resolved};

use super::nearest;
use super::settings::{Fallback, SETTINGS};

/// Variables that are not settings, but say where things are.
const PLACES: &[(&str, &str)] = &[
    ("HOME", "The user's directory; the XDG directories are below it when they are not set"),
    ("PATH", "Where `sandpool setup` looks for Python, Node and npm"),
    ("XDG_CONFIG_HOME", "Configuration directory, else `~/.config`"),
    ("XDG_DATA_HOME", "Data directory, else `~/.local/share`"),
    ("XDG_STATE_HOME", "State directory, else `~/.local/state`"),
    ("NO_COLOR", "If set and not empty, logs have no colour"),
];

/// Variables that are passed unread to `pip` and `npm` while runtimes are prepared, so that proxies, mirrors and
/// certificates work. No others are passed: a `PYTHONPATH`, `NODE_OPTIONS` or `PIP_TARGET` of the caller would change
/// what is installed.
const HANDED_ON: &[&str] = &[
    "HOME",
    "LANG",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
    "no_proxy",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "PIP_CACHE_DIR",
    "PIP_CERT",
    "PIP_CLIENT_CERT",
    "PIP_CONFIG_FILE",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_FIND_LINKS",
    "PIP_INDEX_URL",
    "PIP_NO_INDEX",
    "PIP_PROXY",
    "PIP_RETRIES",
    "PIP_TRUSTED_HOST",
    "NPM_CONFIG_CACHE",
    "NPM_CONFIG_CAFILE",
    "NPM_CONFIG_REGISTRY",
    "NPM_CONFIG_USERCONFIG",
    "npm_config_cache",
    "npm_config_cafile",
    "npm_config_registry",
    "npm_config_userconfig",
];

/// Variables of the systems whose tools Sandpool serves that have no effect here, each with what to do instead. Only
/// whether they are set is looked up.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    // mcp-code-sandbox
    ("FILE_SECRET", "set `SANDPOOL_FILE_SECRET`"),
    ("MCP_HTTP_ADDR", "set `SANDPOOL_LISTEN`"),
    ("SANDBOX_ROOT", "set `SANDPOOL_STATE_DIR`, below which conversations keep their files"),
    ("SANDBOX_HOST_PATH", "set `SANDPOOL_STATE_DIR`, below which conversations keep their files"),
    ("TUNNEL_TOKEN", "start the tunnel separately, and set `SANDPOOL_PUBLIC_URL` to its address"),
    // microsandbox
    ("MSB_SERVER_URL", "unset it: this program makes the sandboxes itself"),
    ("MSB_API_KEY", "unset it, because there is no other server; clients of this one need `SANDPOOL_API_TOKEN`"),
    ("MSB_LOG_LEVEL", "set `SANDPOOL_LOG`"),
    ("MSB_LOG_FORMAT", "set `SANDPOOL_LOG_FORMAT`"),
    ("MSB_SESSION_CLEANUP_INTERVAL", "set `MSB_CLEANUP_INTERVAL`"),
    ("MSB_MAX_EXECUTION_TIME", "set `MSB_EXECUTION_TIMEOUT`"),
    ("MSB_ENABLE_VOLUME_MAPPING", "set `MSB_SHARED_VOLUME_PATH`, which is enough"),
    ("MSB_FLAVOR_CONFIGS", "set `memory_mb` and `cpus` in `[dialect.microsandbox]`, which cap all flavors"),
    ("CONTAINER_RUNTIME", "unset it: no containers are used"),
    ("LOCALSANDBOX_PYTHON_IMAGE", "set `runtimes.python` in `sandpool.toml`: there are no images"),
    ("LOCALSANDBOX_NODE_IMAGE", "set `runtimes.node` in `sandpool.toml`: there are no images"),
    ("LOCALSANDBOX_DEFAULT_TIMEOUT", "set `MSB_EXECUTION_TIMEOUT`"),
    // AgentRun, and the E2B server before it
    ("AGENTRUN_ACCESS_KEY_ID", "unset it: code runs on this machine, without an account"),
    ("AGENTRUN_ACCESS_KEY_SECRET", "unset it: code runs on this machine, without an account"),
    ("AGENTRUN_ACCOUNT_ID", "unset it: code runs on this machine, without an account"),
    ("AGENTRUN_REGION", "unset it: code runs on this machine, without an account"),
    ("E2B_API_KEY", "unset it: code runs on this machine; clients over HTTP need `SANDPOOL_API_TOKEN`"),
    ("ENVD_URL", "unset it: this program makes the sandboxes itself"),
    ("SANDBOX_URL", "unset it: this program makes the sandboxes itself"),
    ("MCP_HOST", "set `MCP_SERVER_HOST` or `SANDPOOL_LISTEN`"),
    ("MCP_PORT", "set `MCP_SERVER_PORT` or `SANDPOOL_LISTEN`"),
    ("LOG_LEVEL", "set `SANDPOOL_LOG`"),
];

/// The environment as it was at the start. It contains only variables that are on the list.
#[derive(Debug, Clone, Default)]
pub(crate) struct Environment(BTreeMap<&'static str, OsString>);

/// Returns a variable that the operator's file names with `value_env`. Such names cannot be on the list.
#[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
pub(crate) fn named(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}

impl Environment {
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub(crate) fn of_process() -> Self {
        Self(listed().filter_map(|name| Some((name, std::env::var_os(name)?))).collect())
    }

    /// Returns set variables that look like ours but are not on the list, each with the one that was probably meant. A
    /// token in a misspelt variable would leave the server without a token.
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub(crate) fn misspelt() -> Vec<(String, &'static str)> {
        std::env::vars_os().filter_map(|(name, _)| misspelt(name.to_str()?)).collect()
    }

    /// Returns the set variables of other systems that have no effect, each with what to do instead.
    #[allow(clippy::disallowed_methods, reason = "the one place that reads the environment")]
    pub(crate) fn without_effect() -> Vec<(&'static str, &'static str)> {
        let is_set = |(name, _): &(&str, &str)| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        WITHOUT_EFFECT.iter().copied().filter(is_set).collect()
    }

    /// Creates an environment of exactly these variables. A name that is not on the list is a mistake in the test.
    #[cfg(test)]
    pub(crate) fn of(pairs: &[(&str, &str)]) -> Self {
        let name = |given: &str| listed().find(|name| *name == given).expect("a listed variable");
        Self(pairs.iter().map(|(key, value)| (name(key), OsString::from(value))).collect())
    }

    /// Returns a variable. An empty value counts as not set, because wrappers and unit files unset variables in this
    /// way.
    pub(crate) fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(name).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// Returns `XDG_<name>_HOME` if it is absolute, as the specification demands, otherwise the default below the home
    /// directory.
    pub(crate) fn xdg(&self, name: &str, below_home: &str) -> Option<PathBuf> {
        let set = self.get(&format!("XDG_{name}_HOME")).map(PathBuf::from).filter(|path| path.is_absolute());
        set.or_else(|| Some(self.home()?.join(below_home)))
    }

    pub(super) fn home(&self) -> Option<&Path> {
        self.get("HOME").map(Path::new).filter(|path| path.is_absolute())
    }

    /// Returns the absolute directories of `PATH`. A relative one would make the choice of a program depend on the
    /// working directory.
    fn path(&self) -> Vec<PathBuf> {
        let path = self.get("PATH").unwrap_or(OsStr::new("/usr/local/bin:/usr/bin:/bin"));
        std::env::split_paths(path).filter(|dir| dir.is_absolute()).collect()
    }

    /// Returns the part of the environment that a set-up of the runtimes needs.
    pub(crate) fn for_runtimes<'a>(&self, shared: impl Iterator<Item = &'a SharedVolume>) -> HostEnvironment {
        let handed_on = HANDED_ON.iter().filter_map(|name| Some((*name, self.get(name)?.to_owned()))).collect();
        let writable = shared.filter(|volume| !volume.read_only).map(|volume| Resolved::of(&volume.host).real);
        let home = self.home().map(Path::to_owned);
        let mut host = HostEnvironment { home, path: self.path(), writable: writable.collect(), handed_on };
        // No program is started from a directory that code can change.
        host.path = host.path.iter().filter(|dir| !host.is_writable(dir)).cloned().collect();
        host
    }
}

fn misspelt(name: &str) -> Option<(String, &'static str)> {
    let is_ours = name.starts_with("SANDPOOL_") || name.starts_with("MSB_");
    let is_known = listed().chain(WITHOUT_EFFECT.iter().map(|(name, _)| *name)).any(|known| known == name);
    if !is_ours || is_known {
        return None;
    }
    Some((name.to_owned(), nearest(name, listed())?))
}

fn listed() -> impl Iterator<Item = &'static str> {
    let settings = SETTINGS.iter().flat_map(|setting| setting.env.iter().copied());
    settings.chain(PLACES.iter().map(|(name, _)| *name)).chain(HANDED_ON.iter().copied())
}

/// Returns the content of `docs/environment.md`.
pub fn page() -> String {
    let mut page = String::from(
        "# Environment variables\n\n\
         This page lists every variable that Sandpool reads, except those that a `value_env` in `sandpool.toml` names. `sandpool config --environment` prints it.\n\n\
         ## Settings\n\
         A flag and a key of `sandpool.toml` in the same row are the same setting: a flag overrides the variable, the variable \
         overrides the file. A variable that is empty counts as not set. [settings.md](settings.md) lists the keys without a variable.\n\n\
         | variable | flag | key in `sandpool.toml` | default | meaning |\n|---|---|---|---|---|\n",
    );
    for setting in SETTINGS.iter() {
        let [env, others @ ..] = setting.env else { continue };
        let others: String = others.iter().map(|name| format!(", also `{name}`")).collect();
        let flag = match setting.flag {
            Some((flag, "")) => format!("`--{flag}`"),
            Some((flag, value)) => format!("`--{flag} {value}`"),
            None => "–".into(),
        };
        let key = if *env == "SANDPOOL_CONFIG" || setting.secret { "–".into() } else { format!("`{}`", setting.key) };
        let default = match setting.default {
            Fallback::Is(value) => format!("`{}`", value.trim_matches('"')),
            Fallback::Unset => "unset".into(),
            Fallback::Computed(how) => how.into(),
        };
        let _ = writeln!(page, "| `{env}`{others} | {flag} | {key} | {default} | {} |", setting.help);
    }
    page.push_str("\n## Places\n\n| variable | meaning |\n|---|---|\n");
    for (name, help) in PLACES {
        let _ = writeln!(page, "| `{name}` | {help} |");
    }
    page.push_str(
        "\n## Of other systems\n\
         These variables of the systems whose tools Sandpool serves have no effect here. `stdio` and `serve` log a warning for each that is set.\n\n\
         | variable | instead |\n|---|---|\n",
    );
    for (name, instead) in WITHOUT_EFFECT {
        let _ = writeln!(page, "| `{name}` | {instead} |");
    }
    page.push_str(
        "\n## Handed on to `pip` and `npm`\n\
         They get these variables and no others, while runtimes are prepared. No variable reaches a sandbox.\n\n",
    );
    let names: Vec<String> = HANDED_ON.iter().map(|name| format!("`{name}`")).collect();
    page.push_str(&names.join(", "));
    page.push('\n');
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misspelt_variable_is_found() {
        assert_eq!(misspelt("SANDPOOL_API_TOKN"), Some(("SANDPOOL_API_TOKN".into(), "SANDPOOL_API_TOKEN")));
        assert_eq!(misspelt("MSB_MAX_SESSION"), Some(("MSB_MAX_SESSION".into(), "MSB_MAX_SESSIONS")));
        for other in ["SANDPOOL_API_TOKEN", "HOME", "EDITOR", "MSB_SERVER_URL"] {
            assert_eq!(misspelt(other), None);
        }
    }

    /// What to do instead names only variables that are read.
    #[test]
    fn no_variable_of_another_system_is_read_or_leads_nowhere() {
        for (name, instead) in WITHOUT_EFFECT {
            assert!(!listed().any(|known| known == *name), "{name} is read");
            let named = instead.split('`').skip(1).step_by(2);
            for named in named.filter(|named| named.chars().all(|c| c.is_ascii_uppercase() || c == '_')) {
                assert!(listed().any(|known| known == named), "{name} leads to {named}");
            }
        }
    }

    #[test]
    fn empty_and_relative_values_count_as_not_set() {
        let env = Environment::of(&[
            ("HOME", "/home/u"),
            ("XDG_DATA_HOME", "here"),
            ("SANDPOOL_LOG", ""),
            ("PATH", ".:/bin:bin"),
        ]);
        assert_eq!(env.xdg("DATA", ".local/share"), Some(PathBuf::from("/home/u/.local/share")));
        assert_eq!(env.get("SANDPOOL_LOG"), None);
        assert_eq!(env.path(), [PathBuf::from("/bin")]);
    }

    #[test]
    fn no_program_is_taken_from_a_directory_that_code_can_write() {
        let env = Environment::of(&[("PATH", "/nowhere/project/.venv/bin:/nowhere/tools:/nowhere/projects/bin")]);
        let mount =
            |read_only| SharedVolume { host: "/nowhere/project".into(), inside: "/workspace".into(), read_only };
        let safe = ["/nowhere/tools", "/nowhere/projects/bin"].map(PathBuf::from);
        assert_eq!(env.for_runtimes([mount(false)].iter()).path, safe);
        assert_eq!(env.for_runtimes([mount(true)].iter()).path.len(), 3);
    }
}
