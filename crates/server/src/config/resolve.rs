//! Merges file, environment and flags, and checks each value against the table of settings. Its only side effect is
//! reading the file.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::de::DeserializeOwned;

use super::environment::Environment;
use super::mounts;
use super::settings::{Fallback, SETTINGS, Setting, ValueKind, find};

/// The sources from which a configuration is made.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    pub environment: Environment,
    /// Flags, as the key of the setting and the given text.
    pub flags: Vec<(&'static str, String)>,
    pub is_root: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf),
    Environment(&'static str),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Environment(name) => write!(f, "${name}"),
            Self::Flag(name) => write!(f, "--{name}"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("cannot read configuration file `{}`: {source}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("configuration file `{}` is not valid TOML: {why}", path.display())]
    Syntax { path: PathBuf, why: String },
    #[error("unknown key `{key}` in `{}`{}", path.display(), hint(nearest))]
    UnknownKey { path: PathBuf, key: String, nearest: Option<&'static str> },
    #[error("`{key}` in `{}`: a secret does not belong in this file; set `{env}`", path.display())]
    Secret { path: PathBuf, key: String, env: &'static str },
    #[error("`{key}` (from {origin}): {why}")]
    Value { key: String, origin: Origin, why: String },
    #[error("neither `HOME` nor the XDG directories are set; set `HOME`, or `{0}` in a file given with `--config`")]
    NoHome(&'static str),
}

fn hint(nearest: &Option<&'static str>) -> String {
    nearest.map(|key| format!("; did you mean `{key}`?")).unwrap_or_default()
}

/// A value and its source; no value means that the setting is unset.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GivenValue {
    pub value: Option<toml::Value>,
    pub origin: Origin,
}

impl GivenValue {
    /// Returns the value for display. The value of a secret setting is not shown.
    pub(crate) fn shown(&self, setting: &Setting) -> Option<toml::Value> {
        match self.value {
            Some(_) if setting.secret => Some(toml::Value::String("(set)".into())),
            ref value => value.clone(),
        }
    }
}

/// The effective configuration, with one entry for each setting of the table.
#[derive(Debug, Clone)]
pub(crate) struct Effective(BTreeMap<&'static str, GivenValue>);

impl Effective {
    /// Iterates over the settings in the order of the table.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static Setting, &GivenValue)> {
        SETTINGS.iter().map(|setting| (setting, &self.0[setting.key]))
    }

    /// Returns the settings that have another value in `other`.
    pub(crate) fn changes(&self, other: &Self) -> Vec<&'static Setting> {
        let differs = |setting: &&Setting| self.0[setting.key].value != other.0[setting.key].value;
        SETTINGS.iter().filter(differs).collect()
    }

    /// Returns the value of a setting. An `Option` is `Some` only if the setting has a value.
    pub(super) fn get<T: DeserializeOwned>(&self, key: &str) -> Result<T, ConfigError> {
        let value = &self.0[key].value;
        // The conversion goes through JSON, because JSON has a null for `Option` to read.
        serde_json::to_value(value)
            .and_then(serde_json::from_value)
            .map_err(|error| self.error(key, &error.to_string()))
    }

    pub(super) fn value(&self, key: &str) -> Option<&toml::Value> {
        self.0[key].value.as_ref()
    }

    pub(super) fn number(&self, key: &str) -> Result<f64, ConfigError> {
        let value = self.0[key].value.as_ref();
        value.and_then(as_number).ok_or_else(|| self.error(key, "expected a number"))
    }

    pub(super) fn time(&self, key: &str) -> Result<Duration, ConfigError> {
        self.optional_time(key).ok_or_else(|| self.error(key, "expected a time"))
    }

    /// Returns a time, or `None` if the setting is unset. The value was checked when it was read.
    pub(super) fn optional_time(&self, key: &str) -> Option<Duration> {
        self.0[key].value.as_ref().and_then(as_seconds).map(Duration::from_secs_f64)
    }

    pub(super) fn absolute(&self, key: &'static str) -> Result<PathBuf, ConfigError> {
        let path = self.get::<Option<PathBuf>>(key)?.ok_or(ConfigError::NoHome(key))?;
        std::path::absolute(&path).map_err(|error| self.error(key, &error.to_string()))
    }

    /// Returns the strength of a value's source: flags over the environment over the file over the default.
    pub(super) fn strength(&self, key: &str) -> u8 {
        match self.0[key].origin {
            Origin::Default => 0,
            Origin::File(_) => 1,
            Origin::Environment(_) => 2,
            Origin::Flag(_) => 3,
        }
    }

    pub(super) fn is_from_file(&self, key: &str) -> bool {
        matches!(self.0[key].origin, Origin::File(_))
    }

    pub(super) fn error(&self, key: &str, why: &str) -> ConfigError {
        self.error_in(key, "", why)
    }

    /// Returns an error about a part of a setting that is a table; `rest` is its path, such as `.corp.allow`.
    pub(super) fn error_in(&self, key: &str, rest: &str, why: &str) -> ConfigError {
        ConfigError::Value { key: format!("{key}{rest}"), origin: self.0[key].origin.clone(), why: why.into() }
    }
}

pub(super) fn resolve(sources: &Sources) -> Result<Effective, ConfigError> {
    let mut values = defaults(sources);
    if let Some((path, origin)) = config_file(sources) {
        for (key, value) in read_file(&path)? {
            values.insert(key, GivenValue { value: Some(value), origin: Origin::File(path.clone()) });
        }
        values.insert("config", GivenValue { value: Some(text(&path)), origin });
    }
    for setting in SETTINGS.iter().filter(|setting| setting.kind != ValueKind::ConfigFile) {
        let set = setting.env.iter().find_map(|name| Some((*name, sources.environment.get(name)?)));
        if let Some((name, given)) = set {
            values.insert(setting.key, from_text(setting, &given.to_string_lossy(), Origin::Environment(name))?);
        }
    }
    for (key, given) in &sources.flags {
        let Some((setting, name)) = find(key).and_then(|setting| Some((setting, setting.flag?.0))) else { continue };
        if setting.kind == ValueKind::ConfigFile {
            continue;
        }
        let mut given = from_text(setting, given, Origin::Flag(name))?;
        // A flag adds to an array of tables and replaces every other value.
        if let (ValueKind::Tables, Some(toml::Value::Array(more))) = (setting.kind, &mut given.value)
            && let Some(toml::Value::Array(others)) = values.get(key).and_then(|others| others.value.clone())
        {
            more.splice(0..0, others);
        }
        values.insert(setting.key, given);
    }
    for (key, given) in &values {
        if let (Some(setting), Some(value)) = (find(key), &given.value) {
            check(setting.kind, value).map_err(|why| ConfigError::Value {
                key: (*key).into(),
                origin: given.origin.clone(),
                why,
            })?;
        }
    }
    Ok(Effective(values))
}

fn defaults(sources: &Sources) -> BTreeMap<&'static str, GivenValue> {
    let mut values = BTreeMap::new();
    for setting in SETTINGS.iter() {
        let value = match (setting.default, setting.key) {
            (Fallback::Is(toml), key) => {
                Some(parse_toml(toml).unwrap_or_else(|| panic!("the default of `{key}` is TOML")))
            }
            (Fallback::Computed(_), "state_dir") if sources.is_root => Some(text(Path::new("/var/lib/sandpool"))),
            (Fallback::Computed(_), "state_dir") => {
                sources.environment.xdg("STATE", ".local/state").map(|d| text(&d.join("sandpool")))
            }
            (Fallback::Computed(_), "runtimes.dir") => {
                sources.environment.xdg("DATA", ".local/share").map(|d| text(&d.join("sandpool/runtimes")))
            }
            (Fallback::Computed(_) | Fallback::Unset, _) => None,
        };
        values.insert(setting.key, GivenValue { value, origin: Origin::Default });
    }
    values
}

/// Returns the requested configuration file, or the first of the usual places that exists. The working directory is
/// never one of them: a client may start this program in a directory that somebody else filled, and the file decides
/// which interpreter is executed.
fn config_file(sources: &Sources) -> Option<(PathBuf, Origin)> {
    if let Some((_, given)) = sources.flags.iter().rev().find(|(key, _)| *key == "config") {
        return Some((given.into(), Origin::Flag("config")));
    }
    if let Some(given) = sources.environment.get("SANDPOOL_CONFIG") {
        return Some((given.into(), Origin::Environment("SANDPOOL_CONFIG")));
    }
    usual_files(&sources.environment).find(|path| path.exists()).map(|path| (path, Origin::Default))
}

/// Returns the usual places of the configuration file, whether it is there or not.
pub(super) fn usual_files(environment: &Environment) -> impl Iterator<Item = PathBuf> {
    let user = environment.xdg("CONFIG", ".config").map(|dir| dir.join("sandpool/sandpool.toml"));
    user.into_iter().chain([PathBuf::from("/etc/sandpool/sandpool.toml")])
}

fn read_file(path: &Path) -> Result<Vec<(&'static str, toml::Value)>, ConfigError> {
    let content = std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })?;
    let table: toml::Table = content
        .parse()
        .map_err(|error: toml::de::Error| ConfigError::Syntax { path: path.into(), why: error.to_string() })?;
    let mut leaves = Vec::new();
    flatten("", table, &mut leaves);
    leaves
        .into_iter()
        .map(|(key, value)| match find(&key) {
            Some(setting) if setting.secret => Err(ConfigError::Secret { path: path.into(), key, env: setting.env[0] }),
            Some(setting) if setting.kind != ValueKind::ConfigFile => Ok((setting.key, value)),
            _ => Err(ConfigError::UnknownKey { path: path.into(), nearest: nearest(&key), key }),
        })
        .collect()
}

fn flatten(prefix: &str, table: toml::Table, leaves: &mut Vec<(String, toml::Value)>) {
    for (name, value) in table {
        let key = if prefix.is_empty() { name } else { format!("{prefix}.{name}") };
        let whole = find(&key).is_some_and(|setting| setting.kind == ValueKind::Table);
        match value {
            toml::Value::Table(table) if !whole => flatten(&key, table, leaves),
            value => leaves.push((key, value)),
        }
    }
}

fn nearest(key: &str) -> Option<&'static str> {
    let last = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let likeness = |known: &str| {
        if known.starts_with(&format!("{key}.")) {
            return 1.0; // A value stands in place of a table, and the first key of the table is the likely one.
        }
        let whole = strsim::normalized_damerau_levenshtein(key, known);
        // `timeout = 5` at the top level most likely means the setting in its table.
        whole.max(0.9 * strsim::normalized_damerau_levenshtein(&last(key), &last(known)))
    };
    let known = SETTINGS.iter().filter(|setting| setting.kind != ValueKind::ConfigFile).map(|setting| setting.key);
    let (best, key) = known.map(|known| (likeness(known), known)).rev().max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best > 0.5).then_some(key)
}

/// Parses a value that was given as one string, by a flag or a variable.
fn from_text(setting: &Setting, given: &str, origin: Origin) -> Result<GivenValue, ConfigError> {
    if setting.kind == ValueKind::Tables {
        let wrong = |why| ConfigError::Value { key: setting.key.into(), origin: origin.clone(), why };
        let table = mounts::from_flag(given).map_err(wrong)?;
        return Ok(GivenValue { value: Some(toml::Value::Array(vec![table.into()])), origin });
    }
    let value = match setting.kind {
        ValueKind::Text | ValueKind::OneOf(_) | ValueKind::ConfigFile => Some(toml::Value::String(given.into())),
        // The microsandbox wrapper writes lists as JSON.
        ValueKind::List if given.trim_start().starts_with('[') => {
            serde_json::from_str::<Vec<String>>(given).ok().map(toml::Value::from)
        }
        ValueKind::List => {
            let items = given.split(',').map(str::trim).filter(|item| !item.is_empty());
            Some(toml::Value::Array(items.map(toml::Value::from).collect()))
        }
        ValueKind::Switch => match given.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" => Some(true.into()),
            "false" | "0" | "no" => Some(false.into()),
            _ => None,
        },
        ValueKind::Whole(..) => given.parse::<i64>().ok().map(Into::into),
        ValueKind::Number(..) => given.parse::<f64>().ok().map(Into::into),
        ValueKind::Time(..) => Some(given.parse::<f64>().map_or_else(|_| given.into(), Into::into)),
        ValueKind::Table | ValueKind::Tables => None,
    };
    match value {
        Some(value) => Ok(GivenValue { value: Some(value), origin }),
        None => Err(ConfigError::Value {
            key: setting.key.into(),
            origin,
            why: match setting.secret {
                true => format!("not {}", expected(setting.kind)),
                false => format!("`{given}` is not {}", expected(setting.kind)),
            },
        }),
    }
}

fn check(kind: ValueKind, value: &toml::Value) -> Result<(), String> {
    let fits = match kind {
        ValueKind::Text | ValueKind::ConfigFile => value.as_str().is_some_and(|text| !text.is_empty()),
        ValueKind::OneOf(names) => value.as_str().is_some_and(|text| names.contains(&text)),
        ValueKind::List => value.as_array().is_some_and(|items| items.iter().all(toml::Value::is_str)),
        ValueKind::Switch => value.is_bool(),
        ValueKind::Whole(min, max) => value.as_integer().is_some_and(|n| (min..=max).contains(&n)),
        ValueKind::Number(min, max) => as_number(value).is_some_and(|n| (min..=max).contains(&n)),
        ValueKind::Time(min, max) => as_seconds(value).is_some_and(|n| (min..=max).contains(&n)),
        ValueKind::Table => value.is_table(),
        ValueKind::Tables => value.as_array().is_some_and(|items| items.iter().all(toml::Value::is_table)),
    };
    match kind {
        _ if fits => Ok(()),
        // The value may be a secret in the wrong place, so the message does not show it.
        ValueKind::Table | ValueKind::Tables => Err(format!("expected {}", expected(kind))),
        _ => Err(format!("`{value}` is not {}", expected(kind))),
    }
}

fn expected(kind: ValueKind) -> String {
    match kind {
        ValueKind::Text | ValueKind::ConfigFile => "a text".into(),
        ValueKind::OneOf(names) => format!("one of `{}`", names.join("`, `")),
        ValueKind::List => "a list of texts".into(),
        ValueKind::Switch => "`true` or `false`".into(),
        ValueKind::Whole(min, max) => format!("a whole number from {min} to {max}"),
        ValueKind::Number(min, max) => format!("a number from {min} to {max}"),
        ValueKind::Time(min, max) => format!("a time from {min} to {max} seconds (a number, or `90s`, `10m`, `1h`)"),
        ValueKind::Table => "a table".into(),
        ValueKind::Tables => "an array of tables, each of which begins with the key in double brackets".into(),
    }
}

fn as_number(value: &toml::Value) -> Option<f64> {
    value.as_float().or_else(|| value.as_integer().map(|n| n as f64))
}

fn as_seconds(value: &toml::Value) -> Option<f64> {
    let Some(text) = value.as_str() else { return as_number(value) };
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic())?);
    let scale = match unit {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return None,
    };
    Some(number.trim().parse::<f64>().ok()? * scale)
}

fn parse_toml(value: &str) -> Option<toml::Value> {
    format!("value = {value}").parse::<toml::Table>().ok()?.remove("value")
}

fn text(path: &Path) -> toml::Value {
    toml::Value::String(path.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    struct Case<'a> {
        file: &'a str,
        env: &'a [(&'a str, &'a str)],
        flags: &'a [(&'static str, &'a str)],
    }

    fn load(case: Case<'_>) -> Result<Config, ConfigError> {
        let dir = std::env::temp_dir().join(format!("sandpool-config-{}", uuid::Uuid::new_v4()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("sandpool.toml");
        std::fs::write(&path, case.file).unwrap();
        let mut flags = vec![("config", path.to_string_lossy().into_owned())];
        flags.extend(case.flags.iter().map(|(key, value)| (*key, value.to_string())));
        let mut env = vec![("HOME", "/home/u")];
        env.extend(case.env);
        let loaded = Config::load(&Sources { environment: Environment::of(&env), flags, is_root: false });
        std::fs::remove_dir_all(&dir).unwrap();
        loaded
    }

    fn refused(file: &'static str) -> String {
        let error = load(Case { file, env: &[], flags: &[] }).unwrap_err().to_string();
        let Some(start) = error.find("/") else { return error };
        let end = error.find("sandpool.toml").unwrap_or(start);
        format!("{}{}", &error[..start], &error[end..])
    }

    #[test]
    fn flags_win_over_the_environment_and_that_over_the_file() {
        let config = load(Case {
            file: "log = 'a'\nlang = 'en'\nstate_dir = '/s'",
            env: &[("SANDPOOL_LOG", "b"), ("SANDPOOL_LANG", "zh")],
            flags: &[("log", "c")],
        })
        .unwrap();
        assert_eq!(
            (config.log.as_deref().unwrap(), config.lang.as_deref(), config.state_dir),
            ("c", Some("zh"), "/s".into())
        );
        let origins: BTreeMap<_, _> = config.effective.iter().map(|(s, given)| (s.key, given.origin.clone())).collect();
        assert_eq!(origins["log"], Origin::Flag("log"));
        assert_eq!(origins["lang"], Origin::Environment("SANDPOOL_LANG"));
        assert!(matches!(origins["state_dir"], Origin::File(_)));
        assert_eq!(origins["floor"], Origin::Default);
    }

    #[test]
    fn limits_of_a_dialect_are_read_from_its_table() {
        let config = load(Case {
            file: "[dialect.agentrun]\ntimeout = '2m'\nmemory_mb = 512\ncpus = 1\nshutdown_grace = 0.5",
            env: &[],
            flags: &[],
        });
        let limits = config.unwrap().dialects.of("agentrun").clone();
        assert_eq!(limits.timeout, Duration::from_secs(120));
        assert_eq!((limits.memory_mb, limits.cpus, limits.shutdown_grace), (512, 1.0, Duration::from_millis(500)));
        assert_eq!(limits.max_contexts, 50);
    }

    #[test]
    fn a_longest_time_below_the_usual_one_is_refused() {
        let said = refused("[dialect.sandpool]\nmax_timeout = 30\n");
        assert!(said.contains("is less than `dialect.sandpool.timeout`"), "{said}");
    }

    #[test]
    fn a_setting_without_effect_is_refused() {
        for (key, file) in [
            ("pool_size", "[dialect.conversation]\npool_size = 60"),
            ("session_ttl", "[dialect.conversation]\nsession_ttl = 60"),
        ] {
            let refused = refused(file);
            assert!(refused.starts_with(&format!("unknown key `dialect.conversation.{key}`")), "{refused}");
        }
    }

    #[test]
    fn what_is_wrong_in_a_file_is_named_with_the_nearest_right_thing() {
        assert_eq!(
            refused("[dialect.agentrun]\ntimout = 3"),
            "unknown key `dialect.agentrun.timout` in `sandpool.toml`; did you mean `dialect.agentrun.timeout`?"
        );
        assert_eq!(
            refused("memory_mb = 3"),
            "unknown key `memory_mb` in `sandpool.toml`; did you mean `quota.memory_mb`?"
        );
        assert_eq!(
            refused("dialect = 'agentrun'"),
            "unknown key `dialect` in `sandpool.toml`; did you mean `dialect.default`?"
        );
        assert_eq!(
            refused("floor = 'high'"),
            "`floor` (from sandpool.toml): `\"high\"` is not one of `basic`, `reduced`, `full`"
        );
        assert_eq!(
            refused("[dialect.agentrun]\npool_size = 0"),
            "`dialect.agentrun.pool_size` (from sandpool.toml): `0` is not a whole number from 1 to 64"
        );
        assert_eq!(
            refused("[dialect.agentrun]\ntimeout = -1"),
            "`dialect.agentrun.timeout` (from sandpool.toml): `-1` is not a time from 0.1 to 86400 seconds (a number, or `90s`, `10m`, `1h`)"
        );
    }

    #[test]
    fn the_defaults_are_a_configuration() {
        let config = load(Case { file: "", env: &[], flags: &[] }).unwrap();
        assert_eq!(config.dialect, "sandpool");
        assert_eq!(config.runtimes.dir, Path::new("/home/u/.local/share/sandpool/runtimes"));
        let root = Sources { environment: Environment::of(&[("HOME", "/root")]), flags: Vec::new(), is_root: true };
        assert_eq!(Config::load(&root).unwrap().state_dir, Path::new("/var/lib/sandpool"));
    }

    #[test]
    fn the_address_comes_whole_or_in_parts() {
        let listen = |case: Case<'_>| load(case).unwrap().serve.listen;
        assert_eq!(listen(Case { file: "", env: &[], flags: &[] }), "127.0.0.1:8775");
        let host = [("MCP_SERVER_HOST", "::1"), ("MCP_SERVER_PORT", "9000")];
        assert_eq!(listen(Case { file: "serve.listen = '127.0.0.1:1'", env: &host, flags: &[] }), "[::1]:9000");
        let both = [("MCP_SERVER_PORT", "9000"), ("SANDPOOL_LISTEN", "127.0.0.1:2")];
        assert_eq!(listen(Case { file: "", env: &both, flags: &[] }), "127.0.0.1:2");
        assert_eq!(listen(Case { file: "", env: &host, flags: &[("serve.listen", "localhost:3")] }), "localhost:3");
        assert!(load(Case { file: "serve.listen = 'here'", env: &[], flags: &[] }).is_err());
    }

    #[test]
    fn shared_volumes_come_in_three_forms() {
        let volumes = |text: &str| {
            let env = [("MSB_SHARED_VOLUME_PATH", text)];
            let config = load(Case { file: "", env: &env, flags: &[] })?;
            let shown = |v: &crate::config::VolumeConfig| {
                let engine::op::SharedVolume { host, inside, read_only } = &v.volume;
                assert_eq!(std::path::absolute(&v.written).unwrap(), *host);
                format!("{}>{}>{read_only}", v.written, inside.display())
            };
            Ok::<_, ConfigError>(config.dialects.microsandbox.volumes.iter().map(shown).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(volumes("/a:/b").unwrap(), "/a>/b>false");
        assert_eq!(volumes("/a:/b, /c:/d:ro").unwrap(), "/a>/b>false /c>/d>true");
        assert_eq!(volumes(r#"["/a:/b:rw", "/c,d:/e"]"#).unwrap(), "/a>/b>false /c,d>/e>false");
        // The original's own example.
        assert_eq!(volumes("./data:/workspace").unwrap(), "./data>/workspace>false");
        // Directories that no mount may have, either.
        for wrong in ["/home/u:/x", "/:/x:ro", "/proc:/x:ro", "/dev:/x"] {
            assert!(volumes(wrong).is_err(), "{wrong}");
        }
        for wrong in ["/a", ":/b", "/a:b", "/a:/b:/c", "[1]"] {
            assert!(volumes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_relative_volume_of_the_file_starts_beside_the_file() {
        let dir = testkit::scratch::Scratch::new();
        let file = dir.write("sandpool.toml", "microsandbox.volumes = ['./data:/workspace:ro']");
        let environment = Environment::of(&[("HOME", "/home/u")]);
        let flags = vec![("config", file.display().to_string())];
        let config = Config::load(&Sources { environment, flags, is_root: false }).unwrap();
        let [volume] = &config.dialects.microsandbox.volumes[..] else { panic!("one volume") };
        assert_eq!((&*volume.written, &volume.volume.host), ("./data", &dir.0.join("data")));
    }

    #[test]
    fn a_secret_is_not_shown_and_not_read_from_the_file() {
        let config = load(Case { file: "", env: &[("MCP_API_TOKEN", "hush")], flags: &[] }).unwrap();
        assert_eq!(config.auth.token.as_ref().unwrap().0, "hush");
        let shown: Vec<_> = config.effective.iter().filter_map(|(s, given)| given.shown(s)).collect();
        assert!(!format!("{shown:?} {:?}", config.auth).contains("hush"));
        assert!(refused("auth.token = 'x'").contains("does not belong in this file"));
    }

    #[test]
    fn a_missing_home_is_said_and_not_guessed() {
        let error = Config::load(&Sources::default()).unwrap_err().to_string();
        assert!(error.starts_with("neither `HOME` nor the XDG directories are set"), "{error}");
    }
}
