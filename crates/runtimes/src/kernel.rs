//! Defines how a sandbox starts the interpreters: the command line, the environment, and the paths of the host that it
//! sees.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use engine::config::{KernelCommand, PACKAGES, Runtimes, WORKSPACE};

use super::browser::InstalledBrowser;
use super::python::Python;
use super::store::Runtime;
use super::{Prepared, RuntimeConfig};

const PYTHON_DRIVER: &str = include_str!("../../guest/kernels/driver.py");
const NODE_DRIVER: &str = include_str!("../../guest/kernels/driver.cjs");
const PICTURE: &str = include_str!("../../guest/kernels/picture.py");
const SITE_HOOK: &str = include_str!("python/sitecustomize.py");
/// Directory of the drivers inside the sandbox.
const DRIVERS: &str = "/opt/sandpool";
/// Name of Python's environment inside the sandbox: a link to its directory, whose own path may contain the name of the
/// user. The interpreter is started by this name, so tracebacks show it.
pub(crate) const PYTHON: &str = "/opt/sandpool/runtime";
/// Name of the npm packages inside the sandbox. Node resolves it, and the driver shows it in tracebacks.
const NPM: &str = "/opt/sandpool/npm";
/// Name of the packages inside the sandbox that the operator added.
const ADDED: &str = "/opt/sandpool/added";

impl Prepared {
    pub fn kernels(&self, config: &RuntimeConfig, browser: Option<&InstalledBrowser>) -> Runtimes {
        let node = self.node.as_ref().ok().map(super::Node::binary);
        let env = self.environment(node.as_deref(), config.threads, browser);
        let driver = |name: &str| format!("{DRIVERS}/{name}");
        // `-B` keeps `__pycache__` out of the user's files.
        let flags = ["-I", "-B", "-X", "utf8"].map(String::from);
        let argv = [vec![format!("{PYTHON}/bin/python")], flags.into(), vec![driver("driver.py")]].concat();
        let python = KernelCommand {
            label: format!("python-{}", first(self.python.version(), 2)),
            warm: if config.warm { warm(&argv, &config.preload) } else { Vec::new() },
            argv,
            env: env.clone(),
            binds: python_binds(self),
        };
        let version = self.node.as_ref().map_or("", |node| node.version());
        let packages = self.node_packages().map(|packages| packages.dir.clone());
        let node = node.map(|binary| KernelCommand {
            label: format!("node-{}", first(version, 1)),
            argv: vec![text(&binary), "--no-force-async-hooks-checks".into(), driver("driver.cjs")],
            env,
            binds: outside_usr(self.node.as_ref().ok().map(super::Node::visible_path).into_iter().chain(packages)),
            warm: Vec::new(),
        });
        let files = [
            ("driver.py", PYTHON_DRIVER),
            ("picture.py", PICTURE),
            ("driver.cjs", NODE_DRIVER),
            ("python/sitecustomize.py", SITE_HOOK),
        ];
        let files = files.map(|(name, content)| (PathBuf::from(driver(name)), content.as_bytes().to_vec())).to_vec();
        let browser = browser.map(|browser| browser.command(self.python.fontconfig()));
        let added = self.python.added.as_ref().map(|added| (PathBuf::from(ADDED), added.dir.clone()));
        let unpinned = added.iter().flat_map(|(link, dir)| [link.clone(), dir.clone()]).collect();
        let npm = self.node_packages().map(|packages| (PathBuf::from(NPM), packages.dir.clone()));
        let python_link = (PathBuf::from(PYTHON), self.python.base.dir.clone());
        let links = [python_link].into_iter().chain(npm).chain(added).collect();
        Runtimes { python, node, browser, files, links, unpinned }
    }

    fn node_packages(&self) -> Option<&Runtime> {
        self.node_packages.as_ref().ok()?.as_ref()
    }

    /// Returns the complete environment of an interpreter and of the processes that it starts. Caches go to the private
    /// `/tmp`, outside of the user's files. `threads` is for the numeric libraries, which by default start one thread
    /// for each core, each with a stack and a buffer.
    fn environment(
        &self,
        node: Option<&Path>,
        threads: u32,
        browser: Option<&InstalledBrowser>,
    ) -> BTreeMap<String, String> {
        let installed = Path::new(PACKAGES).join("bin");
        let python_bin = Path::new(PYTHON).join("bin");
        let added_bin = self.python.added.as_ref().map(|_| Path::new(ADDED).join("bin"));
        let node_bin = self.node_packages().map(|_| Path::new(NPM).join("node_modules/.bin"));
        let bins = [Some(installed), Some(python_bin), added_bin, node.and_then(Path::parent).map(Path::to_owned)];
        let mut path: Vec<String> = bins.iter().chain([&node_bin]).flatten().map(|dir| text(dir)).collect();
        path.extend(["/usr/local/bin", "/usr/bin", "/bin"].map(String::from));
        path.dedup();
        let mut env: BTreeMap<String, String> = [
            ("HOME", WORKSPACE),
            ("USER", "sandbox"),
            ("LANG", "C.UTF-8"),
            ("TERM", "dumb"),
            ("TMPDIR", "/tmp"),
            ("XDG_CACHE_HOME", "/tmp/.cache"),
            ("IPYTHONDIR", "/tmp/.ipython"),
            ("MPLCONFIGDIR", "/tmp/.matplotlib"),
            ("MPLBACKEND", "module://matplotlib_inline.backend_inline"),
            // plotly gives its charts to the driver, which makes pictures and pages of them.
            ("PLOTLY_RENDERER", "plotly_mimetype"),
            ("PYTHONDONTWRITEBYTECODE", "1"),
            ("PYTHONUTF8", "1"),
        ]
        .map(|(name, value)| (name.into(), value.into()))
        .into();
        env.insert("PATH".into(), path.join(":"));
        env.insert("FONTCONFIG_FILE".into(), text(&self.python.fontconfig()));
        let added = self.python.added_site(Path::new(ADDED)).map(|site| ("SANDPOOL_ADDED".into(), text(&site)));
        let chromium = browser.map(|browser| ("SANDPOOL_CHROMIUM".into(), text(&browser.program)));
        env.extend(added.into_iter().chain(chromium));
        env.extend(installs(self.node_packages().is_some()).map(|(name, value)| (name.into(), value)));
        for name in ["OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"] {
            env.insert(name.into(), threads.to_string());
        }
        env
    }
}

/// Returns the command line of the same interpreter as a zygote; see `guest/kernels/PROTOCOL.md`.
fn warm(argv: &[String], preload: &[String]) -> Vec<String> {
    argv.iter().cloned().chain(["--warm".into()]).chain(preload.iter().cloned()).collect()
}

/// Returns the first `numbers` components of a version.
fn first(version: &str, numbers: usize) -> String {
    version.split('.').take(numbers).collect::<Vec<_>>().join(".")
}

fn python_binds(prepared: &Prepared) -> Vec<PathBuf> {
    let Python { base, added } = &prepared.python;
    let added = added.as_ref().map(|added| added.dir.clone());
    outside_usr([base.dir.clone()].into_iter().chain(base.marker.base_prefix.clone()).chain(added))
}

/// Removes the paths below `/usr`, which every sandbox sees anyway.
pub(crate) fn outside_usr(paths: impl IntoIterator<Item = PathBuf>) -> Vec<PathBuf> {
    paths.into_iter().filter(|path| !path.starts_with("/usr")).collect()
}

/// Makes `pip install` and `npm install -g` write where the sandbox may write, and makes the result importable. Caches
/// are off because they would only take disk space of the sandbox; hints about new versions are off because they are of
/// no use here.
fn installs(has_node_packages: bool) -> [(&'static str, String); 13] {
    let own = format!("{PACKAGES}/lib/node_modules");
    let pinned = has_node_packages.then(|| format!(":{NPM}/node_modules"));
    [
        ("SANDPOOL_PACKAGES", PACKAGES.into()),
        ("PYTHONPATH", format!("{DRIVERS}/python")),
        ("PIP_NO_CACHE_DIR", "1".into()),
        ("PIP_NO_INPUT", "1".into()),
        ("PIP_DISABLE_PIP_VERSION_CHECK", "1".into()),
        // Without a network retries are useless; a sandbox with a network gets other values.
        ("PIP_RETRIES", "0".into()),
        ("npm_config_fetch_retries", "0".into()),
        ("NODE_PATH", own + &pinned.unwrap_or_default()),
        ("npm_config_prefix", PACKAGES.into()),
        ("npm_config_cache", "/tmp/.cache/npm".into()),
        ("npm_config_update_notifier", "false".into()),
        ("npm_config_fund", "false".into()),
        ("npm_config_audit", "false".into()),
    ]
}

fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SetupError;
    use crate::store::Marker;
    use crate::tests::config;

    fn runtime(dir: &str) -> Runtime {
        Runtime { dir: dir.into(), marker: Marker { version: "3.11.2".into(), ..Marker::default() } }
    }

    #[test]
    fn w65_the_warm_interpreter_gets_no_added_package() {
        let python = Python { base: runtime("/srv/base"), added: Some(runtime("/srv/added")) };
        let prepared = Prepared { python, node: Err(SetupError::NoNode(String::new())), node_packages: Ok(None) };
        let runtimes = prepared.kernels(&config(None, &[]), None);
        let warm = runtimes.warm().unwrap();
        let site = "/opt/sandpool/added/lib/python3.11/site-packages";
        assert_eq!(runtimes.python.env["SANDPOOL_ADDED"], site);
        assert_eq!(runtimes.python.binds, [PathBuf::from("/srv/base"), "/srv/added".into()]);
        let mut without = runtimes.python.env.clone();
        without.remove("SANDPOOL_ADDED");
        assert_eq!(warm.env, without);
        assert_eq!(warm.runtime, [PathBuf::from("/srv/base")]);
        let is_added = |path: &Path| path.starts_with("/opt/sandpool/added");
        assert!(runtimes.links.iter().any(|(path, _)| is_added(path)));
        assert!(warm.files.iter().any(|file| file.path == Path::new(PYTHON)));
        assert!(!warm.files.iter().any(|file| is_added(&file.path)));
    }
}
