//! Creates the egress of sandboxes and their browsers from the settings, and reads the values of secrets.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egress::{Egress, EgressConfig, Secret, UpstreamProxy, Upstreams, Value};
use runtimes::BrowserChoice;
use sandbox::BrowserRoom;

use super::Failed;
use crate::config::{Config, DialectLimits, Network, SecretConfig, SecretSource, UpstreamSource, environment};

/// Returns the egress, or `None` if no sandbox has a network.
pub(crate) fn egress(config: &Config) -> Result<Option<Egress>, Failed> {
    Ok(reload(config, None)?.0)
}

/// Returns the egress with the current secrets, host names and certificates, and names those that differ from `before`.
pub(crate) fn reload(config: &Config, before: Option<&Egress>) -> Result<(Option<Egress>, Vec<&'static str>), Failed> {
    let network = &config.network;
    if network.dialects.is_empty() {
        // Sandboxes that exist still use it, and its totals go on.
        return Ok((before.cloned(), Vec::new()));
    }
    let secrets = network.secrets.iter().map(secret).collect::<Result<_, _>>()?;
    let egress = EgressConfig {
        secrets,
        hosts: network.hosts.clone(),
        roots: Vec::new(),
        certutil: certutil(),
        upstreams: upstreams(network, environment::named)?,
        fake_ip_dns: network.fake_ip_dns,
    };
    let egress = match before {
        Some(before) => before.reload(egress),
        None => Egress::new(egress).map(|egress| (egress, Vec::new())),
    };
    let failed = |error| Failed(format!("cannot set up the network of sandboxes: {error}"));
    egress.map(|(egress, changes)| (Some(egress), changes)).map_err(failed)
}

/// Returns the upstream proxies with their credentials.
fn upstreams(network: &Network, variable: impl Fn(&str) -> Option<OsString>) -> Result<Upstreams, Failed> {
    let mut upstreams = match &network.upstream {
        None => return Ok(Upstreams::default()),
        Some(UpstreamSource::Given(proxy)) => {
            Upstreams { http: Some(proxy.clone()), https: Some(proxy.clone()), except: Vec::new() }
        }
        Some(UpstreamSource::Environment) => of_environment(variable)?,
    };
    upstreams.except.extend(network.upstream_except.iter().cloned());
    if let Some(path) = &network.upstream_credentials {
        let wrong = |why: &str| Failed(format!("`network.upstream_credentials`: `{}`: {why}", path.display()));
        let text = read(path).map_err(|why| wrong(&why))?;
        for proxy in [&mut upstreams.http, &mut upstreams.https].into_iter().flatten() {
            *proxy = proxy.clone().with_credentials(text.clone()).map_err(wrong)?;
        }
    }
    Ok(upstreams)
}

/// Returns the upstream proxies that the variables of the server name, as other programs read them: a name in
/// `NO_PROXY` also stands for the names below it.
fn of_environment(variable: impl Fn(&str) -> Option<OsString>) -> Result<Upstreams, Failed> {
    let text = |names: [&str; 2]| {
        let set = names.into_iter().find_map(|name| Some((name.to_owned(), variable(name)?.into_string().ok()?)));
        set.filter(|(_, value)| !value.is_empty())
    };
    let proxy = |names| match text(names) {
        None => Ok(None),
        Some((name, value)) => {
            let value = if value.contains("://") { value } else { format!("http://{value}") };
            UpstreamProxy::parse(&value).map(Some).map_err(|why| Failed(format!("the variable `{name}`: {why}")))
        }
    };
    let (http, https) = (proxy(["http_proxy", "HTTP_PROXY"])?, proxy(["https_proxy", "HTTPS_PROXY"])?);
    if http.is_none() && https.is_none() {
        let why = "`network.upstream` is `environment`, but neither `HTTPS_PROXY` nor `HTTP_PROXY` is set";
        return Err(Failed(why.into()));
    }
    let mut except = Vec::new();
    let entries = text(["no_proxy", "NO_PROXY"]).map_or_else(String::new, |(_, value)| value);
    for entry in entries.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
        let name = entry.trim_start_matches("*.").trim_start_matches('.');
        let forms = [name.to_owned(), format!("*.{name}")];
        let known = forms
            .into_iter()
            .filter(|form| Upstreams { except: vec![form.clone()], ..Upstreams::default() }.check().is_ok());
        let before = except.len();
        except.extend(known);
        if except.len() == before {
            tracing::warn!(
                "an entry of `NO_PROXY` is none of a name, an address and a network, and is ignored: `{entry}`"
            );
        }
    }
    Ok(Upstreams { http, https, except })
}

/// Returns the path of `certutil`, if this machine has it. The program of NSS makes browsers trust hosts with a secret.
pub(crate) fn certutil() -> Option<PathBuf> {
    ["/usr/local/bin/certutil", "/usr/bin/certutil"].map(PathBuf::from).into_iter().find(|path| path.is_file())
}

fn secret(config: &SecretConfig) -> Result<Secret, Failed> {
    let SecretConfig { name, hosts, header, format, tenants, .. } = config.clone();
    let wrong = |why: &str| Failed(format!("`network.secret.{name}`: {why}"));
    let (source, text) = match &config.from {
        SecretSource::File(path) => (format!("`{}`", path.display()), read(path)),
        SecretSource::Variable(variable) => {
            let value = environment::named(variable).and_then(|value| value.into_string().ok());
            (format!("the variable `{variable}`"), value.ok_or_else(|| "it is not set".to_owned()))
        }
    };
    let text = text.map_err(|why| wrong(&format!("no value in {source}: {why}")))?;
    let value = Value::parse(text).map_err(|why| wrong(&format!("the value in {source} is refused: {why}")))?;
    Ok(Secret { name, hosts, header, format, tenants, value })
}

fn read(path: &Path) -> Result<String, String> {
    let found = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if found.mode() & 0o077 != 0 {
        tracing::warn!("the secret in `{}` can be read by other users; `chmod 600` it", path.display());
    }
    // The error for a file that is not text may contain its content, so only its kind is reported.
    std::fs::read_to_string(path).map_err(|error| error.kind().to_string())
}

/// Returns the part of a context's limits that its browser may use.
pub(crate) fn browser(config: &Config, limits: &DialectLimits) -> Option<BrowserRoom> {
    let memory_mb = limits.browser_memory_mb.filter(|_| config.browser != BrowserChoice::Off)?;
    Some(BrowserRoom { memory_bytes: memory_mb << 20, pids: limits.pids })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, Sources};
    use testkit::scratch::Scratch;

    fn network(file: &str) -> Network {
        let dir = Scratch::new();
        let path = dir.write("sandpool.toml", file).to_string_lossy().into_owned();
        let environment = Environment::of(&[("HOME", "/home/u")]);
        Config::load(&Sources { environment, flags: vec![("config", path)], is_root: false }).unwrap().network
    }

    fn of(file: &str, variables: &[(&str, &str)]) -> Result<String, String> {
        let variable = |name: &str| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.into());
        let found = upstreams(&network(file), variable).map_err(|failed| failed.0)?;
        Ok(format!("{:?} {:?} {:?}", found.http, found.https, found.except))
    }

    #[test]
    fn n21_the_proxies_of_the_environment_count_only_if_the_operator_says_so() {
        let variables = [
            ("HTTPS_PROXY", "http://me:hunter2@proxy.test:3128"),
            ("http_proxy", "plain.test:8080"),
            ("HTTP_PROXY", "http://other.test:1"),
            ("NO_PROXY", "localhost, .corp.test,10.0.0.0/8,[bad"),
        ];
        assert_eq!(of("", &variables).unwrap(), "None None []");
        let expected = "Some(http://plain.test:8080) Some(http://proxy.test:3128 with credentials) \
                        [\"localhost\", \"*.localhost\", \"corp.test\", \"*.corp.test\", \"10.0.0.0/8\"]";
        assert_eq!(of("network.upstream = 'environment'", &variables).unwrap(), expected);
        let refused = of("network.upstream = 'environment'", &[]).unwrap_err();
        assert!(refused.contains("neither `HTTPS_PROXY` nor `HTTP_PROXY` is set"), "{refused}");
        let refused = of("network.upstream = 'environment'", &[("HTTPS_PROXY", "socks5://me:hunter2@a")]).unwrap_err();
        assert!(refused.starts_with("the variable `HTTPS_PROXY`: ") && !refused.contains("hunter2"), "{refused}");
    }

    #[test]
    fn n21_the_credentials_of_the_upstream_come_from_a_file_and_are_never_shown() {
        let dir = Scratch::new();
        let path = dir.write("proxy", "me:hunter2hunter2\n");
        let file = |path: &Path| {
            format!("network.upstream = 'http://a.test:1'\nnetwork.upstream_credentials = '{}'", path.display())
        };
        let both = "Some(http://a.test:1 with credentials) Some(http://a.test:1 with credentials) []";
        assert_eq!(of(&file(&path), &[]).unwrap(), both);
        dir.write("proxy", "hunter2hunter2");
        let refused = of(&file(&path), &[]).unwrap_err();
        assert!(refused.contains("credentials are one line with `user:password`"), "{refused}");
        assert!(!refused.contains("hunter2") && of(&file(&dir.0.join("none")), &[]).is_err());
    }
}
