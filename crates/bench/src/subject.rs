//! The `sandpool` binary under test, and the facts that its command line reports.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::BenchError;
use crate::process::{Children, command, run};

/// Variables of the caller that a server gets: they say where its files are and how it reaches package registries.
const PASSED_ON: [&str; 8] =
    ["HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"];

#[derive(Debug)]
pub(crate) struct Subject {
    pub executable: PathBuf,
    pub python: PathBuf,
    pub node: Option<PathBuf>,
    /// Path of Chromium.
    pub browser: Option<PathBuf>,
    /// Names and versions of the software that the binary runs.
    pub versions: Vec<(String, String)>,
    /// Settings as lines of TOML: the runtimes and the browser that it would use, without other settings of the caller.
    pub settings: String,
    /// Number of threads of the numeric libraries in its kernels.
    pub threads: u64,
    /// Modules that its warm interpreter has imported.
    pub preload: Vec<String>,
    pub environment: Vec<(&'static str, OsString)>,
}

impl Subject {
    /// Queries the binary, which prepares its runtimes if they are missing.
    pub(crate) fn of(executable: &Path, children: &Children) -> Result<Self, BenchError> {
        let executable = std::path::absolute(executable).map_err(BenchError::io("cannot find the binary"))?;
        let environment = environment();
        let ask = |arguments: &[&str]| -> Result<String, BenchError> {
            let mut command = command(&executable);
            let output =
                run(command.args(arguments).envs(environment.iter().map(|(name, value)| (name, value))), children)?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let paths = shell_variables(&ask(&["setup", "--shell"])?);
        let config: BTreeMap<String, Value> = parse(&ask(&["config", "--json"])?)?;
        let doctor: Value = parse(&ask(&["doctor", "--json"])?)?;
        let value = |key: &str| config.get(key).map_or(&Value::Null, |setting| &setting["value"]);
        let python = paths.get("SANDPOOL_TEST_PYTHON").map(PathBuf::from);
        let (browser_version, browser) = browser(&doctor).unzip();
        Ok(Self {
            python: python.ok_or_else(|| BenchError::Said("`setup --shell` names no Python".into()))?,
            node: paths.get("SANDPOOL_TEST_NODE").map(PathBuf::from),
            browser,
            versions: versions(&doctor, browser_version),
            settings: settings(&config),
            threads: value("runtimes.threads").as_u64().unwrap_or(1),
            preload: strings(value("runtimes.preload")),
            executable,
            environment,
        })
    }
}

#[allow(clippy::disallowed_methods, reason = "the one place in which the benchmark reads the environment")]
fn environment() -> Vec<(&'static str, OsString)> {
    PASSED_ON.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?))).collect()
}

fn parse<T: serde::de::DeserializeOwned>(json: &str) -> Result<T, BenchError> {
    serde_json::from_str(json).map_err(|error| BenchError::Said(format!("the binary's JSON cannot be read: {error}")))
}

/// Parses lines of the form `NAME='value'`.
fn shell_variables(text: &str) -> BTreeMap<String, String> {
    let pair = |line: &str| {
        let (name, value) = line.split_once('=')?;
        Some((name.to_owned(), value.trim_matches('\'').to_owned()))
    };
    text.lines().filter_map(pair).filter(|(_, value)| !value.is_empty()).collect()
}

/// Converts settings to TOML. JSON values of settings are valid TOML as well: strings, numbers, lists of strings.
fn settings(config: &BTreeMap<String, Value>) -> String {
    let chosen = config.iter().filter(|(key, _)| key.starts_with("runtimes.") || *key == "browser");
    let given = chosen.map(|(key, setting)| (key, &setting["value"])).filter(|(_, value)| !value.is_null());
    given.map(|(key, value)| format!("{key} = {value}\n")).collect()
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Parses the line of `doctor` about the browser: `Chromium 156.0.8078.79 (headless shell) at /usr/lib/…`.
fn browser(doctor: &Value) -> Option<(String, PathBuf)> {
    let (what, path) = layer(doctor, "browser")?.rsplit_once(" at ")?;
    Some((what.split(' ').nth(1)?.to_owned(), path.into()))
}

fn layer<'a>(doctor: &'a Value, name: &str) -> Option<&'a str> {
    let layers = doctor["runtimes"].as_array()?;
    layers.iter().find(|layer| layer["layer"] == name && layer["state"] == "on")?["why"].as_str()
}

fn versions(doctor: &Value, browser: Option<String>) -> Vec<(String, String)> {
    let first_word = |name: &str| Some((name.to_owned(), layer(doctor, name)?.split(' ').next()?.to_owned()));
    let package = |name: &str| Some((name.to_owned(), doctor["packages"][name].as_str()?.to_owned()));
    let languages = ["Python", "Node"].into_iter().filter_map(first_word);
    let browser = browser.map(|version| ("Chromium".to_owned(), version));
    let packages = ["ipython", "numpy", "pandas", "matplotlib"].into_iter().filter_map(package);
    let own = doctor["version"].as_str().map(|version| ("sandpool".to_owned(), version.to_owned()));
    own.into_iter().chain(languages).chain(browser).chain(packages).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_a_binary_says_about_itself_is_read() {
        let paths = shell_variables("SANDPOOL_TEST_PYTHON='/a/python'\nSANDPOOL_TEST_NODE=''\n");
        assert_eq!(paths, BTreeMap::from([("SANDPOOL_TEST_PYTHON".into(), "/a/python".into())]));

        let setting = |value: Value| json!({ "origin": "default", "value": value });
        let config = BTreeMap::from([
            ("browser".to_owned(), setting(json!("auto"))),
            ("log".to_owned(), setting(json!("debug"))),
            ("runtimes.preload".to_owned(), setting(json!(["numpy"]))),
            ("runtimes.python".to_owned(), setting(Value::Null)),
        ]);
        assert_eq!(settings(&config), "browser = \"auto\"\nruntimes.preload = [\"numpy\"]\n");

        let on = |layer: &str, why: &str| json!({ "layer": layer, "state": "on", "why": why });
        let doctor = json!({
            "version": "0.1.0",
            "packages": { "numpy": "2.4.6" },
            "runtimes": [on("Python", "3.11.2 in /a"), on("browser", "Chromium 156.0.1 (headless shell) at /b/shell")],
        });
        assert_eq!(browser(&doctor), Some(("156.0.1".into(), "/b/shell".into())));
        let named = |name: &str, version: &str| (name.to_owned(), version.to_owned());
        let expected = [
            named("sandpool", "0.1.0"),
            named("Python", "3.11.2"),
            named("Chromium", "156.0.1"),
            named("numpy", "2.4.6"),
        ];
        assert_eq!(versions(&doctor, Some("156.0.1".into())), expected);
    }
}
