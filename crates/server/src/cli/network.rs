//! Creates the egress of sandboxes and their browsers from the settings, and reads the values of secrets once.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use egress::{Egress, EgressConfig, Secret, Value};
use runtimes::BrowserChoice;
use sandbox::BrowserRoom;

use super::Failed;
use crate::config::{Config, DialectLimits, SecretConfig, SecretSource, environment};

/// Returns the egress, or `None` if no sandbox has a network.
pub(crate) fn egress(config: &Config) -> Result<Option<Egress>, Failed> {
    let network = &config.network;
    if network.dialects.is_empty() {
        return Ok(None);
    }
    let secrets = network.secrets.iter().map(secret).collect::<Result<_, _>>()?;
    let hosts = network.hosts.clone();
    let egress = Egress::new(EgressConfig { secrets, hosts, roots: Vec::new(), certutil: certutil() });
    egress.map(Some).map_err(|error| Failed(format!("cannot set up the network of sandboxes: {error}")))
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
