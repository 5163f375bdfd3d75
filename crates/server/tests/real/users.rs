//! A server of an ordinary user for whom there is no cgroup, and one of root without all capabilities: which limits hold,
//! and what is said about them.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};
use testkit::client::Client;

use crate::support::StateDir;

const NOBODY: u32 = 65_534;
/// Starts the rest of its arguments as an ordinary user who sees the prepared runtimes, wherever they are.
const AS_NOBODY: &str =
    "mount --bind \"$1\" \"$2\" && shift 2 && exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"";

/// Returns a command that starts a copy of the built program as an ordinary user without a cgroup.
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn as_nobody(state: &StateDir, arguments: &[&str]) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP: only root can start a server as another user");
        return None;
    }
    let (home, shown) = (state.0.join("home"), state.0.join("data/sandpool"));
    if !home.exists() {
        std::fs::set_permissions(&state.0, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::create_dir(&home).unwrap();
        std::fs::create_dir_all(&shown).unwrap();
        chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
        for name in ["sandpool", "sandpool-guest", "libsandpool_zygote.so"] {
            let built = Path::new(env!("CARGO_BIN_EXE_sandpool")).with_file_name(name);
            if built.exists() {
                std::fs::copy(built, state.0.join(name)).unwrap();
            }
        }
        let settings = "systemd_scope = false\n[dialect.sandpool]\nmemory_mb = 512\npool_size = 1\n";
        std::fs::write(state.0.join("sandpool.toml"), settings).unwrap();
    }
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from);
    let data = data.unwrap_or_else(|| PathBuf::from(std::env::var_os("HOME").unwrap()).join(".local/share"));
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-c", AS_NOBODY, "sh"]).arg(data.join("sandpool")).arg(shown);
    command.arg(state.0.join("sandpool")).args(arguments);
    command.arg("--config").arg(state.0.join("sandpool.toml")).arg("--state-dir").arg(home.join("state"));
    command
        .env_clear()
        .env("HOME", &home)
        .env("XDG_DATA_HOME", state.0.join("data"))
        .env("PATH", "/usr/bin:/bin:/usr/sbin");
    Some(command)
}

fn called(client: &mut Client, tool: &str, arguments: Value) -> Value {
    client.call(tool, arguments).json().clone()
}

#[test]
fn an_ordinary_user_without_a_cgroup_is_told_only_limits_that_hold() {
    let state = StateDir::new("user-limits");
    let Some(mut doctor) = as_nobody(&state, &["doctor"]) else { return };
    let said = doctor.output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    let row = |name: &str| said.lines().find(|line| line.contains(name)).unwrap_or_default().to_owned();
    assert!(
        row("memory of a context").contains("512 MB") && row("memory of a context").contains("a watchdog"),
        "{said}"
    );
    assert!(
        row("processor of a context").starts_with("  off") && row("processor of a context").contains("none"),
        "{said}"
    );
    assert!(said.contains("Isolation level: basic"), "{said}");

    let mut client = Client::start(as_nobody(&state, &["stdio"]).unwrap());
    let neighbour = called(&mut client, "create_context", json!({"name": "neighbour"}));
    assert_eq!((&neighbour["memory_mb"], &neighbour["cpus"]), (&json!(512), &Value::Null), "{neighbour}");
    called(&mut client, "run_code", json!({"context": "neighbour", "code": "x = 42"}));
    called(&mut client, "create_context", json!({"name": "grows"}));
    let calls = [
        ("run_code", json!({"context": "grows", "code": "x = b'x' * (6 << 30)"})),
        ("run_command", json!({"context": "grows", "command": "python3 -c 'x = b\"x\" * (6 << 30)'"})),
        (
            "run_command",
            json!({"context": "grows", "command": "for i in 1 2 3 4 5 6 7 8; do python3 -c 'import time; x = b\"x\" * (100 << 20); time.sleep(50)' & done; wait"}),
        ),
    ];
    for (tool, arguments) in calls {
        let ended = called(&mut client, tool, arguments.clone());
        assert_eq!(ended["status"], "out_of_memory", "{arguments}: {ended}");
        let note = ended["note"].as_str().unwrap_or_default();
        assert!(note.contains("Out of memory: the sandbox was ended at the limit of 512 MB"), "{ended}");
    }
    let fine = called(&mut client, "run_code", json!({"context": "grows", "code": "print('again')"}));
    assert!(fine["stdout"].as_str().is_some_and(|text| text.contains("again")), "{fine}");
    let fine = called(&mut client, "run_code", json!({"context": "neighbour", "code": "print(x)"}));
    assert!(fine["stdout"].as_str().is_some_and(|text| text.contains("42")), "{fine}");
}

/// W80: a server of root without a capability that each sandbox needs says so, and does not start.
#[test]
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn w80_doctor_and_server_name_the_capability_that_is_missing() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP: only root has capabilities that could be missing");
        return;
    }
    let state = StateDir::new("capabilities");
    let run = |without: &str, arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--bounding-set", without, env!("CARGO_BIN_EXE_sandpool")]).args(arguments);
        let output = command.arg("--state-dir").arg(state.0.join("state")).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    for (without, name, needed) in [
        ("-net_admin", "NET_ADMIN", "NET_ADMIN for its loopback interface"),
        ("-chown", "CHOWN", "CHOWN for the owner of its files"),
        ("-setuid,-setgid", "SETUID", "SETUID for its uid, SETGID for its gid"),
    ] {
        let (ok, said, complaint) = run(without, &["doctor", "--json"]);
        let report: Value = serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said} {complaint}"));
        assert_eq!((ok, &report["can_run"], &report["level"]), (false, &json!(false), &Value::Null), "{without}");
        assert!(report["refusal"].as_str().unwrap().contains(needed), "{report:#}");
        let layers = report["layers"].as_array().unwrap();
        let layer = layers.iter().find(|layer| layer["layer"] == "capabilities").unwrap();
        assert_eq!(layer["state"], "off", "{layer}");
        assert!(layer["what_to_do"].as_str().unwrap().contains(&format!("--cap-add {name}")), "{layer}");
        let (ok, _, complaint) = run(without, &["serve", "--listen", "127.0.0.1:0"]);
        assert!(!ok && complaint.contains(needed), "{without}: {complaint}");
    }
    let (_, said, _) = run("+all", &["doctor", "--json"]);
    let report: Value = serde_json::from_str(&said).unwrap();
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.iter().find(|layer| layer["layer"] == "capabilities").unwrap()["state"], "on", "{report:#}");
}
