//! A secret of the operator's, used by code and by the browser in a real sandbox, and seen by neither.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use serde_json::json;
use testkit::host::StateDir;

use crate::serve::{Serve, TOKEN, free_port};

const VALUE: &str = "the-very-secret-value-0123456789";

/// Ends with the test.
struct Host {
    child: Child,
    port: u16,
}

impl Host {
    #[allow(clippy::disallowed_methods, reason = "the test's own host")]
    fn start(dir: &Path) -> Self {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/real/echo.py");
        let mut child = Command::new("python3").arg(script).arg(dir).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { port: line.trim().parse().unwrap(), child }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Clients of different kinds, and then everything that code can look at.
const CODE: &str = r#"
import os, requests, subprocess, urllib.request
url = os.environ["URL"]
print(requests.get(f"{url}/requests").text)
print(requests.get(f"{url}/password", auth=("user", os.environ["API_KEY"])).headers["X-Echo"])
print(urllib.request.urlopen(f"{url}/urllib").read().decode())
print(subprocess.run(["curl", "-sSi", f"{url}/curl"], capture_output=True, text=True))
print(subprocess.run(["node", "-e", "fetch(process.env.URL + '/node').then(async a => console.log(await a.text()))"], capture_output=True, text=True))
print(subprocess.run("cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline; grep -rs very-secret /opt /tmp /workspace /etc; env", shell=True, capture_output=True))
"#;

/// Files below a directory that hold the value.
fn holding(dir: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(holding(&path));
        } else if std::fs::read(&path).is_ok_and(|text| text.windows(VALUE.len()).any(|part| part == VALUE.as_bytes()))
        {
            found.push(path.display().to_string());
        }
    }
    found
}

#[test]
fn code_and_browser_use_a_secret_and_it_is_nowhere_to_be_seen() {
    let place = StateDir::new("secret-host");
    let host = Host::start(&place.0);
    let port = host.port;
    let settings = format!(
        "[journal]\ncontents = true\n[network]\ndefault = 'api'\n[network.hosts]\n'api.test' = '127.0.0.1'\n\
         [network.policy.api]\nallow = ['api.test:{port}']\nprivate = ['127.0.0.1:{port}']\n\
         [[network.secret]]\nname = 'API_KEY'\nhosts = ['api.test:{port}']\nheader = 'Authorization'\nformat = 'Bearer {{}}'\n\
         value_env = 'THE_KEY_OF_THE_TEST'\n"
    );
    let config = place.0.join("sandpool.toml");
    std::fs::write(&config, settings).unwrap();
    let (listen, roots) = (format!("127.0.0.1:{}", free_port()), place.0.join("root.pem"));
    let variables = [
        ("SANDPOOL_CONFIG", config.to_str().unwrap()),
        ("SANDPOOL_LISTEN", &listen),
        ("SANDPOOL_API_TOKEN", TOKEN),
        ("SSL_CERT_FILE", roots.to_str().unwrap()),
        ("THE_KEY_OF_THE_TEST", VALUE),
        ("SANDPOOL_LOG", "debug"),
    ];
    let server = Serve::start("secrets", &variables);
    let url = format!("https://api.test:{port}");
    let mut client = server.client("sandpool");
    let ran = client.good("run_code", json!({ "code": CODE, "env": { "URL": url }, "timeout": 60 }));
    let mut seen = ran.to_string();
    let heard = || std::fs::read_to_string(place.0.join("heard")).unwrap();
    for path in ["requests", "urllib", "curl", "node"] {
        assert!(heard().contains(&format!("/{path} Bearer {VALUE}")), "{}\n{seen}", heard());
    }
    assert!(heard().contains("/password Basic ") && seen.contains("Basic ****"), "{}\n{seen}", heard());
    assert!(seen.matches("Bearer ****").count() > 3 && seen.contains("sandpool-placeholder-"), "{seen}");

    if Path::new("/usr/lib/chromium").exists() && Path::new("/usr/bin/certutil").exists() {
        let opened = client.good("browser_open", json!({ "url": format!("{url}/browser") }));
        let page = client.good("browser_snapshot", json!({}));
        seen = format!("{seen}{opened}{page}");
        assert!(heard().contains(&format!("/browser Bearer {VALUE}")), "{}\n{seen}", heard());
        assert!(page.to_string().contains("Bearer ****"), "{page}");
    }
    let log = server.log();
    let state = server.state.clone();
    assert!(server.finish().success());
    assert!(!seen.contains(VALUE) && !log.contains(VALUE), "{seen}\n{log}");
    assert_eq!(holding(&state.0), Vec::<String>::new(), "the journal, with contents, among them");
}
