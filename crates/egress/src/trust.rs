//! The setup of a sandbox with egress: the address of the proxy, the trusted certificates and the placeholders of
//! secrets.
//!
//! Programs read the location of certificates from different variables, so all of these are set. The browser has a
//! certificate database, which only NSS's `certutil` can create.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;

use crate::SandboxSetup;
use crate::tls::Trusted;

/// Address of the proxy's socket inside the sandbox; it has to match `sandbox::PROXY`, which creates the socket.
const PROXY: &str = "http://127.0.0.1:3128";
/// Hosts that programs reach without the proxy, because they are inside the sandbox.
const DIRECT: &str = "localhost,127.0.0.1,::1";

/// Path of the authority's certificate inside the sandbox. `BUNDLE` and `NSSDB` are paths inside the sandbox, too.
const AUTHORITY: &str = "/opt/sandpool/trust/authority.pem";
const BUNDLE: &str = "/opt/sandpool/trust/bundle.pem";
const NSSDB: &str = "/opt/sandpool/trust/nssdb";
const BUNDLE_VARIABLES: [&str; 7] = [
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
    "GIT_SSL_CAINFO",
    "PIP_CERT",
    "CARGO_HTTP_CAINFO",
    "npm_config_cafile",
];
const NSSDB_FILES: [&str; 3] = ["cert9.db", "key4.db", "pkcs11.txt"];

/// File with the authorities that this machine trusts. Sandboxes see it at the same path.
const SYSTEM_BUNDLE: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Returns the setup for a sandbox whose tenant has no secrets.
pub(crate) fn plain() -> SandboxSetup {
    let mut setup = SandboxSetup { env: proxy(), ..SandboxSetup::default() };
    // Requests and npm ship their own lists of authorities, which lack any that the operator has added.
    if fs::canonicalize(SYSTEM_BUNDLE).is_ok_and(|path| path.starts_with("/etc/ssl/certs")) {
        for variable in ["REQUESTS_CA_BUNDLE", "npm_config_cafile"] {
            setup.env.insert(variable.into(), SYSTEM_BUNDLE.into());
        }
    }
    setup
}

/// Returns the setup for a sandbox with secrets. `certutil` is the path of the program, if it is installed.
pub(crate) fn setup(trusted: Trusted, certutil: Option<&Path>) -> SandboxSetup {
    let mut setup = SandboxSetup { env: proxy(), ..SandboxSetup::default() };
    let Trusted { authority, roots, placeholders } = trusted;
    let bundle: String = roots.iter().map(|root| pem(root)).chain([authority.clone()]).collect();
    for variable in BUNDLE_VARIABLES {
        setup.env.insert(variable.into(), BUNDLE.into());
    }
    // Node includes the usual authorities, and reads this file each time it starts.
    setup.env.insert("NODE_EXTRA_CA_CERTS".into(), AUTHORITY.into());
    setup.env.extend(placeholders);
    setup.files.push((AUTHORITY.into(), authority.clone().into_bytes()));
    setup.files.push((BUNDLE.into(), bundle.into_bytes()));
    match certutil.map(|certutil| database(certutil, &authority)) {
        Some(Ok(files)) => {
            setup.files.extend(files);
            setup.nssdb = Some(NSSDB.into());
        }
        Some(Err(error)) => tracing::warn!("browsers cannot reach hosts with a secret: `certutil` failed: {error}"),
        None => {}
    }
    setup
}

fn proxy() -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    for variable in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"] {
        // Clients without SOCKS support would reject a SOCKS address in `ALL_PROXY`.
        env.insert(variable.to_owned(), PROXY.to_owned());
        env.insert(variable.to_lowercase(), PROXY.to_owned());
    }
    env.insert("NO_PROXY".into(), DIRECT.into());
    env.insert("no_proxy".into(), DIRECT.into());
    env.insert("NODE_USE_ENV_PROXY".into(), "1".into());
    // Retrying helps with a host that is slow or busy, but a denial does not change by itself.
    env.insert("PIP_RETRIES".into(), "2".into());
    env.insert("npm_config_fetch_retries".into(), "1".into());
    env
}

fn pem(certificate: &[u8]) -> String {
    let text = STANDARD.encode(certificate);
    let lines: Vec<&str> = text.as_bytes().chunks(64).filter_map(|line| std::str::from_utf8(line).ok()).collect();
    format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
}

/// Creates the browser's certificate database with our authority in it, as paths inside the sandbox and contents.
fn database(certutil: &Path, authority: &str) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let dir = Scratch::new()?;
    let certificate = dir.0.join("authority.pem");
    fs::write(&certificate, authority)?;
    let database_dir = format!("sql:{}", dir.0.display());
    run(certutil, &["-N", "-d", &database_dir, "--empty-password"])?;
    let certificate = certificate.to_string_lossy();
    run(certutil, &["-A", "-d", &database_dir, "-n", "sandpool", "-t", "C,,", "-i", &certificate])?;
    let read = |name: &str| {
        let mut content = fs::read(dir.0.join(name))?;
        if name == "pkcs11.txt" {
            // The file contains the path where it was created, which NSS does not need and the sandbox must not see.
            let text = String::from_utf8_lossy(&content).replace(&*dir.0.to_string_lossy(), NSSDB);
            content = text.into_bytes();
        }
        Ok((Path::new(NSSDB).join(name), content))
    };
    NSSDB_FILES.into_iter().map(read).collect()
}

#[allow(clippy::disallowed_methods, reason = "the one program this crate starts, once for each set of secrets")]
fn run(program: &Path, arguments: &[&str]) -> io::Result<()> {
    let output = std::process::Command::new(program).args(arguments).env_clear().output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

/// A temporary directory in which the database is created. It is removed when this value is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> io::Result<Self> {
        use std::os::unix::fs::DirBuilderExt;
        let mut number = [0; 8];
        rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty())?;
        let dir = std::env::temp_dir().join(format!("sandpool-trust-{:016x}", u64::from_ne_bytes(number)));
        fs::DirBuilder::new().mode(0o700).create(&dir)?;
        Ok(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
