//! Remembers the preset and the packages that `sandpool setup` was given, so that servers and later set-ups prepare the
//! same.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{RuntimeConfig, SetupError, SetupRequest};

const FILE: &str = "chosen.json";
/// Beginning of the name of a package for JavaScript.
const NPM: &str = "npm:";

/// The pinned packages that a set-up installs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Preset {
    /// Contains what kernels need, with numpy, pandas, matplotlib and the like.
    Slim,
    /// Contains `Slim`, packages for tables, charts, machine learning and databases, and packages for JavaScript.
    #[default]
    Data,
}

impl Preset {
    pub fn named(name: &str) -> Option<Self> {
        [Self::Slim, Self::Data].into_iter().find(|preset| preset.name() == name)
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Slim => "slim",
            Self::Data => "data",
        }
    }
}

/// The choices of earlier set-ups. Packages are stored by their name, with the requirement as it was given.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Chosen {
    preset: Option<Preset>,
    python: BTreeMap<String, String>,
    node: BTreeMap<String, String>,
}

/// The content that the runtimes need according to the configuration and the choices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub preset: Preset,
    /// Python packages besides those of the preset, sorted.
    pub python: Vec<String>,
    /// Packages for JavaScript besides those of the preset, sorted.
    pub node: Vec<String>,
}

impl Chosen {
    pub(crate) fn read(store: &Path) -> Result<Self, SetupError> {
        let path = store.join(FILE);
        let bytes = match fs::read(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Self::default()),
            read => read.map_err(SetupError::io(&path))?,
        };
        serde_json::from_slice(&bytes).map_err(|error| SetupError::io(&path)(error.into()))
    }

    /// Replaces the file atomically.
    pub(crate) fn write(&self, store: &Path) -> Result<(), SetupError> {
        let (path, new) = (store.join(FILE), store.join(format!(".{FILE}")));
        let text = serde_json::to_vec_pretty(self).map_err(|error| SetupError::io(&path)(error.into()))?;
        fs::write(&new, text).and_then(|()| fs::rename(&new, &path)).map_err(SetupError::io(&path))
    }

    /// Returns the choices after a request.
    pub(crate) fn after(mut self, request: &SetupRequest) -> Result<Self, SetupError> {
        self.preset = request.preset.or(self.preset);
        for package in &request.add {
            let (list, name) = self.place(package)?;
            list.insert(name, package.trim_start_matches(NPM).into());
        }
        for package in &request.remove {
            let (list, name) = self.place(package)?;
            if list.remove(&name).is_none() {
                return Err(SetupError::NotAdded(package.clone()));
            }
        }
        Ok(self)
    }

    /// Returns the list to which a package belongs, and its name there.
    fn place(&mut self, package: &str) -> Result<(&mut BTreeMap<String, String>, String), SetupError> {
        let refused = || SetupError::NoPackageName(package.into());
        match package.strip_prefix(NPM) {
            Some(package) => Ok((&mut self.node, npm_name(package).ok_or_else(refused)?)),
            None => Ok((&mut self.python, python_name(package).ok_or_else(refused)?)),
        }
    }

    pub(crate) fn wanted(&self, config: &RuntimeConfig) -> Wanted {
        let mut python = self.python.clone();
        for package in &config.packages {
            python.insert(python_name(package).unwrap_or_else(|| package.clone()), package.clone());
        }
        Wanted {
            preset: config.preset.or(self.preset).unwrap_or_default(),
            python: python.into_values().collect(),
            node: self.node.values().cloned().collect(),
        }
    }
}

/// Returns the name in a requirement such as `polars`, `polars==1.2.3` or `dask[array]>=2024,<2026`. Addresses, paths
/// and options have none.
fn python_name(requirement: &str) -> Option<String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.[],=<>!~*+".contains(c);
    let end = requirement.find(|c: char| "[=<>!~".contains(c)).unwrap_or(requirement.len());
    let name = &requirement[..end];
    let is_name = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
    (is_name && requirement.chars().all(allowed)).then(|| name.to_ascii_lowercase().replace(['_', '.'], "-"))
}

/// Returns the name in `lodash`, `lodash@4` or `@scope/name@^1.2`. Addresses, paths and repositories have none.
fn npm_name(package: &str) -> Option<String> {
    let plain = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let (scope, rest) = match package.strip_prefix('@') {
        Some(scoped) => scoped.split_once('/').map(|(scope, rest)| (Some(scope), rest))?,
        None => (None, package),
    };
    let (name, version) = rest.split_once('@').map_or((rest, None), |(name, version)| (name, Some(version)));
    let is_version =
        |v: &str| !v.is_empty() && v.chars().all(|c| c.is_ascii_alphanumeric() || "-_.^~+*<>=".contains(c));
    let valid = plain(name) && scope.is_none_or(plain) && version.is_none_or(is_version);
    valid.then(|| scope.map_or_else(|| name.to_owned(), |scope| format!("@{scope}/{name}")))
}

#[cfg(test)]
mod tests {
    use testkit::scratch::Scratch;

    use super::*;
    use crate::tests::config;

    fn add(packages: &[&str]) -> SetupRequest {
        SetupRequest { add: packages.iter().map(|&name| name.into()).collect(), ..SetupRequest::default() }
    }

    #[test]
    fn what_was_added_is_remembered_replaced_and_removed_by_its_name() {
        let place = Scratch::new();
        assert_eq!(Chosen::read(&place.0).unwrap(), Chosen::default());
        let chosen = Chosen::default().after(&add(&["Polars", "npm:lodash", "npm:@types/node@22"])).unwrap();
        chosen.write(&place.0).unwrap();
        let chosen = Chosen::read(&place.0).unwrap().after(&add(&["polars==1.2.3"])).unwrap();
        let wanted = chosen.wanted(&config(None, &["duckdb", "polars>=2"]));
        let expected = (Preset::Data, vec!["duckdb".to_owned(), "polars>=2".into()]);
        assert_eq!((wanted.preset, wanted.python), expected, "the configuration is stronger");
        assert_eq!(wanted.node, ["@types/node@22", "lodash"]);

        let remove =
            SetupRequest { remove: vec!["POLARS".into()], preset: Some(Preset::Slim), ..SetupRequest::default() };
        let chosen = chosen.after(&remove).unwrap();
        let wanted = chosen.wanted(&config(None, &[]));
        assert_eq!((wanted.preset, wanted.python.len()), (Preset::Slim, 0));
        assert_eq!(chosen.wanted(&config(Some(Preset::Data), &[])).preset, Preset::Data);
        assert!(matches!(chosen.after(&remove), Err(SetupError::NotAdded(_))), "it is not there any more");
    }

    #[test]
    fn only_names_and_versions_are_packages() {
        for good in
            ["polars", "scikit_learn", "dask[array]>=2024,<2026", "a", "npm:lodash", "npm:@a/b@^1.2", "npm:x@latest"]
        {
            assert!(Chosen::default().after(&add(&[good])).is_ok(), "{good}");
        }
        let bad = [
            "",
            "-r/etc/passwd",
            "--index-url=http://x",
            "./here",
            "/abs",
            "git+https://x/y",
            "https://x/y.whl",
            "a b",
            "a;b",
            "a @ https://x",
            "npm:",
            "npm:-g",
            "npm:user/repository",
            "npm:../x",
            "npm:https://x/y.tgz",
            "npm:a@file:../x",
            "npm:@a",
        ];
        for bad in bad {
            let error = Chosen::default().after(&add(&[bad])).unwrap_err();
            assert!(matches!(error, SetupError::NoPackageName(_)), "{bad}: {error}");
        }
    }
}
