//! Directories of the host in contexts: over stdio, over HTTP with tenants, and with `sandpool run`.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use testkit::client::Client;
use testkit::http::{Account, Era, Mcp, Wire};

use crate::serve::Serve;
use crate::support::{self, StateDir, stdio_of};

/// The owner of the directories, if the tests run as root: one that is not root may be mounted for writing.
const OWNER: u32 = 4711;

/// A directory with a file `f`.
fn directory(state: &StateDir, name: &str) -> PathBuf {
    let dir = state.0.join(name);
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("f"), format!("of {name}\n")).unwrap();
    if rustix::process::geteuid().is_root() {
        [&dir, &dir.join("f")].iter().for_each(|path| chown(path, Some(OWNER), Some(OWNER)).unwrap());
    }
    dir
}

fn owner(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().uid()
}

fn program(state: &StateDir, words: &[&str]) -> Command {
    let config = state.0.join("sandpool.toml");
    if !config.exists() {
        std::fs::write(&config, "").unwrap();
    }
    let mut command = support::program();
    command.args(words).arg("--config").arg(config).arg("--state-dir").arg(state.0.join("state"));
    command
}

#[test]
fn a_project_is_read_changed_and_listed_over_stdio() {
    let state = StateDir::new("mounts");
    let (project, data) = (directory(&state, "project"), directory(&state, "data"));
    std::fs::write(state.0.join("outside"), "outside\n").unwrap();
    symlink("../outside", project.join("escape")).unwrap();
    symlink(state.0.join("outside"), project.join("absolute")).unwrap();
    // One relative to the working directory, one relative to the configuration file.
    let mut command =
        stdio_of("sandpool", &state.0, "[[mount]]\nhost = \"data\"\nguest = \"/data\"\naccess = \"rw\"\n");
    command.args(["--mount", "project"]).current_dir(&state.0);
    let mut client = Client::start(command);

    let made = client.call("create_context", json!({ "name": "one" }));
    assert_eq!(made.json()["mounts"], json!(["/data rw", "/workspace/project ro"]), "{}", made.0);
    assert_eq!(made.field("note"), "No disk quota holds in /data: files there are the host's.");
    assert_eq!(client.call("list_contexts", json!({})).json()["contexts"][0]["mounts"], made.json()["mounts"]);
    let mut call = |tool: &str, mut arguments: Value| {
        arguments["context"] = json!("one");
        client.call(tool, arguments)
    };
    let code = "print(open('/workspace/project/f').read(), open('/data/f').read(), sep='', end='')
open('/data/made', 'w').write('inside')
open('/workspace/project/made', 'w')";
    let ran = call("run_code", json!({ "code": code }));
    assert_eq!(ran.field("stdout"), "of project\nof data\n", "{}", ran.0);
    assert_eq!(
        ran.json()["error"]["value"],
        "[Errno 30] Read-only file system: '/workspace/project/made'",
        "{}",
        ran.0
    );
    assert_eq!(std::fs::read_to_string(data.join("made")).unwrap(), "inside");
    assert_eq!(owner(&data.join("made")), owner(&data));
    // What changes outside is seen inside, without a new context.
    std::fs::write(project.join("f"), "changed\n").unwrap();
    let read = call("read_file", json!({ "path": "project/f" }));
    assert!(read.0.to_string().contains("changed"), "{}", read.0);
    let written = call("write_file", json!({ "path": "project/new", "content": "x" }));
    assert!(written.is_error() && !project.join("new").exists(), "{}", written.0);
    // W74: nothing is damaged or lost, and the answer does not say so.
    let said = written.0.to_string();
    assert!(
        said.contains("The path project/new is refused: `project/new` is on a file system that can only be read"),
        "{said}"
    );
    let secret = call("run_command", json!({ "command": "touch secret; chmod 0 secret" }));
    assert!(!secret.is_error(), "{}", secret.0);
    let said = call("read_file", json!({ "path": "secret" })).0.to_string();
    assert!(said.contains("is refused: `secret` is there, but its permissions do not allow this"), "{said}");
    let listed = call("list_files", json!({ "path": "project" }));
    assert!(listed.0.to_string().contains("project/f"), "{}", listed.0);
    // Symlinks that lead out on the host lead into the sandbox, for code and for the tools.
    for path in ["project/escape", "project/absolute"] {
        let read = call("read_file", json!({ "path": path }));
        assert!(read.is_error() && !read.0.to_string().contains("outside\\n"), "{}", read.0);
        let line = call("run_command", json!({ "command": format!("cat {path}") }));
        assert!(line.is_error() && line.field("stdout").is_empty(), "{}", line.0);
    }
    assert!(client.finish().success());
}

/// Files and packages are there again after the server was ended, and the next answer says what is not.
#[test]
fn a_workspace_lasts_and_its_packages_too() {
    let state = StateDir::new("workspace");
    let project = directory(&state, "project");
    let start = || {
        let mut command = stdio_of("sandpool", &state.0, "");
        command.args(["--workspace", "project"]).current_dir(&state.0);
        Client::start(command)
    };
    let mut client = start();
    let version = "import os, sys
packages = f'/tmp/.packages/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'";
    let install =
        format!("{version}\nos.makedirs(packages)\nopen(packages + '/installed.py', 'w').write('x = 7')\nx = 1");
    let first = client.call("run_code", json!({ "code": format!("{install}\nopen('made', 'w').write('kept')") }));
    assert_eq!(first.json()["success"], true, "{}", first.0);
    assert_eq!(std::fs::read_to_string(project.join("made")).unwrap(), "kept");
    let installed = project.join(".sandpool/packages/lib");
    assert!(installed.is_dir() && owner(&installed) == owner(&project));
    assert!(client.finish().success());

    // The call that makes the context anew misses nothing. The next one that does is told.
    let mut client = start();
    let kept = client.call("run_code", json!({ "code": "print(open('made').read())" }));
    assert_eq!((kept.field("stdout"), kept.json().get("note")), ("kept\n".into(), None), "{}", kept.0);
    let lost = client.call("run_code", json!({ "code": "x" }));
    assert_eq!(lost.json()["error"]["name"], "NameError", "{}", lost.0);
    let note = "A recent call made the context anew: it has no variables of earlier calls, but their files in \
                /workspace, /tmp/.packages.";
    assert_eq!(lost.field("note"), note, "{}", lost.0);
    let found = client.call("run_code", json!({ "code": "import installed\ninstalled.x" }));
    assert_eq!(found.field("result"), "7", "{}", found.0);
    assert!(client.finish().success());
}

#[test]
fn w66_code_that_replaces_its_packages_stops_no_context_and_no_server() {
    let state = StateDir::new("no-packages-directory");
    let project = directory(&state, "project");
    // A sandbox that waits ready has the directory that code removed.
    let settings = "ready_max = 0\n[dialect.sandpool]\npool_size = 0\n";
    let start = || {
        let mut command = stdio_of("sandpool", &state.0, settings);
        command.args(["--workspace", "project"]).current_dir(&state.0);
        Client::start(command)
    };
    let mut client = start();
    for (attack, is_there) in [("rm -rf .sandpool", true), ("rm -rf .sandpool; ln -s /tmp .sandpool", false)] {
        let attacked = client.call("run_command", json!({ "command": attack }));
        assert_eq!(attacked.json()["success"], true, "{}", attacked.0);
        for _ in 0..2 {
            let made = client.call("create_context", json!({}));
            assert!(!made.is_error(), "{attack}: {}", made.0);
            let install = json!({ "command": "echo x > /tmp/.packages/f", "context": made.field("context") });
            let installed = client.call("run_command", install);
            assert_eq!(installed.json()["success"], true, "{attack}: {}", installed.0);
            assert_eq!(project.join(".sandpool/packages/f").is_file(), is_there, "{attack}");
            // The next server starts, too.
            assert!(client.finish().success());
            client = start();
        }
    }
    assert!(client.finish().success());
}

#[test]
fn without_a_workspace_the_next_answer_says_that_all_is_gone() {
    let state = StateDir::new("no-workspace");
    let mut client = Client::start(stdio_of("sandpool", &state.0, ""));
    let lost = client.call("run_code", json!({ "code": "x" }));
    let note = "This call made the context: it has no variables, packages or files of earlier calls.";
    assert_eq!(lost.field("note"), note, "{}", lost.0);
    let again = client.call("run_code", json!({ "code": "x" }));
    assert_eq!(again.json().get("note"), None, "once is enough: {}", again.0);
    assert!(client.finish().success());
}

#[test]
fn a_mount_in_place_of_the_workspace() {
    let state = StateDir::new("mounts-workspace");
    let project = directory(&state, "project");
    let mut command = stdio_of("sandpool", &state.0, "");
    command.arg("--mount").arg(format!("{}:/workspace:rw", project.display()));
    let mut client = Client::start(command);
    let written = client.call("write_file", json!({ "path": "d/new", "content": "by a tool" }));
    assert!(!written.is_error(), "{}", written.0);
    assert_eq!(std::fs::read_to_string(project.join("d/new")).unwrap(), "by a tool");
    assert_eq!([owner(&project.join("d")), owner(&project.join("d/new"))], [owner(&project); 2]);
    let ran = client.call("run_command", json!({ "command": "pwd; cat f d/new; ls -A" }));
    assert_eq!(ran.field("stdout"), "/workspace\nof project\nby a tool.sandpool\nd\nf\n", "{}", ran.0);
    let rows = client.call("list_contexts", json!({})).json();
    let note = "No disk quota holds in /workspace, /tmp/.packages: files there are the host's.";
    assert_eq!(rows["contexts"][0]["note"], note, "{rows}");
    assert!(client.finish().success());
}

/// The browser is another user, who may not write to a directory of the host.
#[test]
fn downloads_work_with_a_mount_in_place_of_the_workspace_and_files_have_links() {
    let Some(_web) = crate::browsing::Web::start() else { return };
    let state = Arc::new(StateDir::new("mounts-downloads"));
    let project = directory(&state, "project");
    std::fs::set_permissions(&project, Permissions::from_mode(0o700)).unwrap();
    let server =
        Serve::with_settings(state, "\n[[mount]]\nhost = \"project\"\nguest = \"/workspace\"\naccess = \"rw\"\n", &[]);
    let mut client = Mcp::new(&server.account(), "sandpool", Era::Bare);
    let page = "<title>Shop</title><a href=list.csv download>List</a>";
    let written = client.good("write_file", json!({ "path": "shop.html", "content": page }));
    let at = written["url"].as_str().unwrap().split_once("/files/").unwrap().1.to_owned();
    let linked = server.account().ask("GET", &format!("/files/{at}"), &[], b"").unwrap();
    assert_eq!((linked.status, linked.body.as_slice()), (200, page.as_bytes()));
    client.good("write_file", json!({ "path": "list.csv", "content": "tea,4\n" }));
    client.good("browser_open", json!({ "url": "/workspace/shop.html" }));
    let saved = client.good("browser_act", json!({ "action": "click", "target": "link \"List\"" }));
    assert_eq!(
        saved["happened"],
        json!(["downloaded /tmp/downloads/list.csv (6 bytes) from file:///workspace/list.csv"]),
        "{saved}"
    );
    let read = client
        .good("run_command", json!({ "command": "cat /tmp/downloads/list.csv; cp /tmp/downloads/list.csv copy; ls" }));
    assert_eq!(read["stdout"], "tea,4\ncopy\nf\nlist.csv\nshop.html\n", "{read}");
    assert_eq!(owner(&project.join("copy")), owner(&project));
    assert!(server.finish().success());
}

/// W69: stopping the context in the middle of an upload leaves nothing in the directory of the host.
#[test]
fn w69_an_interrupted_upload_leaves_nothing_on_a_mount() {
    let state = StateDir::new("mounts-upload");
    let project = directory(&state, "project");
    let mut command = stdio_of("sandpool", &state.0, "");
    command.arg("--mount").arg(format!("{}:/workspace:rw", project.display()));
    let mut client = Client::start(command);
    let link = client.call("upload_link", json!({ "path": "large" })).field("url");
    let (host, path) = link.strip_prefix("http://").unwrap().split_once('/').unwrap();
    let mut wire = Wire::open(host.parse().unwrap()).unwrap();
    wire.write(format!("PUT /{path} HTTP/1.1\r\nhost: {host}\r\ncontent-length: 99000000\r\n\r\n").as_bytes()).unwrap();
    // More than the connections and the server keep, so the guest has begun to write.
    wire.write(&vec![b'x'; 32 << 20]).unwrap();
    let names = || {
        let entries = std::fs::read_dir(&project).unwrap().map(|entry| entry.unwrap().file_name());
        let names: BTreeSet<String> = entries.map(|name| name.into_string().unwrap()).collect();
        names
    };
    let before = names();
    client.call("stop_context", json!({ "context": "default" }));
    let answer = wire.answer().unwrap();
    assert_eq!(answer.status, 410, "{}", answer.text());
    assert!(client.finish().success());
    assert_eq!(names(), BTreeSet::from([".sandpool", "f"].map(String::from)));
    assert_eq!(before, names(), "nothing of the file is to be seen before it is complete");
}

#[test]
fn run_mounts_too() {
    let state = StateDir::new("mounts-run");
    directory(&state, "project");
    let code = "print(open('project/f').read(), end='')";
    let ran = program(&state, &["run", "--mount", "project", "-c", code]).current_dir(&state.0).output().unwrap();
    let said = String::from_utf8_lossy(&ran.stderr).into_owned();
    assert_eq!(String::from_utf8_lossy(&ran.stdout), "of project\n", "{said}");
}

#[test]
fn a_wrong_mount_is_refused_in_one_line_before_anything_starts() {
    let state = StateDir::new("mounts-refused");
    let own = state.0.join("state");
    std::fs::create_dir_all(&own).unwrap();
    directory(&state, "project");
    let mut cases = vec![
        (own.display().to_string(), "`state_dir`"),
        ("/".into(), "is a part of the system"),
        (format!("{}:/usr", state.0.join("project").display()), "is not a place for a mount"),
    ];
    if rustix::process::geteuid().is_root() {
        let dir = state.0.join("roots");
        std::fs::create_dir(&dir).unwrap();
        cases.push((format!("{}:rw", dir.display()), "belongs to root"));
    }
    for (mount, why) in &cases {
        for command in ["stdio", "serve", "run", "config"] {
            let ended =
                program(&state, &[command, "--mount", mount]).stdin(std::process::Stdio::null()).output().unwrap();
            let said = String::from_utf8(ended.stderr).unwrap();
            assert!(!ended.status.success() && said.contains(why), "{command} {mount}: {said}");
            assert_eq!(said.trim_end().lines().count(), 1, "{said}");
        }
    }
}

#[test]
fn a_tenant_sees_only_what_the_configuration_names_for_it() {
    let state = Arc::new(StateDir::new("mounts-tenants"));
    for name in ["blue", "all", "local"] {
        directory(&state, name);
    }
    let token = |tenant: &str| format!("token-of-{tenant}");
    let hash = |tenant: &str| text::hex(digest(&SHA256, token(tenant).as_bytes()).as_ref());
    let entry = |tenant: &str| format!("[[tenant]]\nname = \"{tenant}\"\ntoken_sha256 = \"{}\"\n", hash(tenant));
    let tenants = state.0.join("tenants");
    std::fs::write(&tenants, ["blue", "green"].map(entry).concat()).unwrap();
    std::fs::set_permissions(&tenants, Permissions::from_mode(0o600)).unwrap();
    let tenants = ("SANDPOOL_TENANTS", tenants.to_str().unwrap());

    // Where there are tenants, a mount has to name its own.
    for (settings, why) in [
        ("[[mount]]\nhost = \"blue\"", "does not say which tenants may use it"),
        ("[[mount]]\nhost = \"blue\"\ntenants = [\"blu\"]", "there is no tenant `blu`"),
    ] {
        std::fs::write(state.0.join("sandpool.toml"), settings).unwrap();
        let ended = program(&state, &["serve"]).envs([tenants]).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        assert!(!ended.status.success() && said.contains(why), "{said}");
    }

    let settings = "\n[[mount]]\nhost = \"blue\"\ntenants = [\"blue\"]\ndialects = [\"sandpool\"]\n\
                    [[mount]]\nhost = \"all\"\ntenants = [\"*\"]\n[[mount]]\nhost = \"local\"\ntenants = [\"local\"]\n";
    let server = Serve::with_settings(state.clone(), settings, &[tenants]);
    let list = |tenant: &str, dialect: &str, tool: &str, arguments: Value| {
        let account = Account { token: Some(token(tenant)), ..server.account() };
        Mcp::new(&account, dialect, Era::Bare).good(tool, arguments)["stdout"].as_str().unwrap().to_owned()
    };
    let command = json!({ "command": "cat */f" });
    assert_eq!(list("blue", "sandpool", "run_command", command.clone()), "of all\nof blue\n");
    assert_eq!(list("green", "sandpool", "run_command", command), "of all\n");
    let code = json!({ "code": "import glob; print(sorted(glob.glob('/workspace/*/f')))", "session_id": "s" });
    assert_eq!(list("blue", "microsandbox", "execute_code", code), "['/workspace/all/f']\n");
    assert!(server.finish().success());
}

#[test]
fn a_named_context_persists_with_files_and_packages_until_it_is_removed() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP: workspaces on disk need root");
        return;
    }
    let state = StateDir::new("persist");
    let start = || Client::start(stdio_of("sandpool", &state.0, "[dialect.sandpool]\npersist = true\ndisk_mb = 64\n"));
    let workspaces = || {
        let listed = program(&state, &["workspace", "list", "--json"]).output().unwrap();
        serde_json::from_slice::<Value>(&listed.stdout).unwrap()
    };
    let mut client = start();
    assert!(!client.call("create_context", json!({ "name": "notes" })).is_error());
    let code = "import os, sys
packages = f'/tmp/.packages/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'
os.makedirs(packages)
open(packages + '/installed.py', 'w').write('x = 7')
open('made', 'w').write('kept')
x = 1";
    let ran = client.call("run_code", json!({ "code": code, "context": "notes" }));
    assert_eq!(ran.json()["success"], true, "{}", ran.0);
    let found = &workspaces()[0];
    assert_eq!(found["owner"], json!({ "tenant": "local", "dialect": "sandpool", "context": "notes" }));
    assert_eq!((&found["in_use"], &found["quota_bytes"]), (&json!(true), &json!(64 << 20)));
    let refused = program(&state, &["workspace", "remove", "notes"]).output().unwrap();
    assert!(!refused.status.success() && String::from_utf8_lossy(&refused.stderr).contains("a server has it open"));
    // Two servers never have it at once.
    let mut other = start();
    let refused = other.call("create_context", json!({ "name": "notes" }));
    assert!(refused.is_error() && refused.0.to_string().contains("another server has these files"), "{}", refused.0);
    assert!(client.finish().success());

    assert!(!other.call("create_context", json!({ "name": "notes" })).is_error());
    let lost = other.call("run_code", json!({ "code": "print(open('made').read())\nx", "context": "notes" }));
    assert_eq!(
        (lost.field("stdout"), &lost.json()["error"]["name"]),
        ("kept\n".into(), &json!("NameError")),
        "{}",
        lost.0
    );
    let note =
        "[the context was opened again: variables are gone; files in /workspace and installed packages are kept]";
    assert_eq!(lost.field("note"), note, "{}", lost.0);
    let found = other.call("run_code", json!({ "code": "import installed\ninstalled.x", "context": "notes" }));
    assert_eq!(found.field("result"), "7", "{}", found.0);
    // One of another name has other files. A stop keeps them.
    let new = other.call("run_code", json!({ "code": "import os\nset(os.listdir()) - {'downloads'}" }));
    assert_eq!(new.field("result"), "{'.packages'}", "{}", new.0);
    other.call("stop_context", json!({ "context": "notes" }));
    assert!(!other.call("create_context", json!({ "name": "notes" })).is_error());
    let read = other.call("read_file", json!({ "path": "made", "context": "notes" }));
    assert!(read.0.to_string().contains("kept"), "{}", read.0);
    assert!(other.finish().success());
    assert_eq!(workspaces().as_array().unwrap().len(), 2);
    let shown = program(&state, &["workspace", "show", "notes"]).output().unwrap();
    let shown: Value = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(shown["owner"], json!({ "tenant": "local", "dialect": "sandpool", "context": "notes" }));
    assert_eq!((&shown["in_use"], &shown["quota_bytes"]), (&json!(false), &json!(64 << 20)), "{shown}");
    assert!(shown["used_bytes"].as_u64().unwrap() < 64 << 20 && shown["last_used"].as_u64().unwrap() > 0, "{shown}");
    for words in [&["workspace", "show", "none"][..], &["workspace", "show", "notes", "--tenant", "other"]] {
        let refused = program(&state, words).output().unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("has no workspace of a context"), "{said}");
    }
    assert!(program(&state, &["workspace", "remove", "notes"]).output().unwrap().status.success());
    assert_eq!(workspaces()[0]["owner"]["context"], "default");
}

/// W62: code makes the names and the directory to which the command will write symlinks.
#[test]
fn w62_what_run_saves_goes_through_no_symlink_of_the_code() {
    let state = StateDir::new("run-symlinks");
    let [project, pictures, out, outside] =
        ["project", "project/pictures", "project/out", "outside"].map(|name| directory(&state, name));
    let code = "import os
for kind in ['png', 'svg']:
    os.symlink('OUTSIDE/f', f'/workspace/p/pictures/figure-1.{kind}')
os.rename('/workspace/p/out', '/workspace/p/moved')
os.symlink('OUTSIDE', '/workspace/p/out')
open('made', 'w').write('x')
class Drawing:
    def _repr_svg_(self):
        return '<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1\" height=\"1\"></svg>'
Drawing()"
        .replace("OUTSIDE", outside.to_str().unwrap());
    let run = |code: &str| {
        let mut run = program(&state, &["run", "--mount", &format!("{}:/workspace/p:rw", project.display())]);
        run.arg("--save").arg(&pictures).arg("--out").arg(&out).args(["-c", code]).stdin(Stdio::null());
        let output = run.output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (status, said) = run(&code);
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("pictures/figure-1."), "{said}");
    assert_eq!(std::fs::read_to_string(outside.join("f")).unwrap(), "of outside\n");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1, "{said}");
    assert_eq!(std::fs::read_to_string(project.join("moved/made")).unwrap(), "x");
    let (status, said) = run("open('made', 'w').write('x')");
    assert_eq!(status, Some(1), "{said}");
    assert!(said.ends_with("it is a symlink; name the directory that it leads to\n"), "{said}");
    assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
}

/// W63: the workspace is a directory of the user, which has a file of the same name.
#[test]
fn w63_files_of_run_replace_no_file_of_a_mounted_workspace() {
    let state = StateDir::new("run-replaces");
    let project = directory(&state, "project");
    let other = directory(&state, "other");
    let run = |file: &Path, stdin: &str| {
        let mut run = program(&state, &["run"]);
        run.arg("--workspace").arg(&project).arg("--file").arg(file).args(["-c", "print(open('f').read() + input())"]);
        let given = state.0.join("stdin");
        std::fs::write(&given, stdin).unwrap();
        let output = run.stdin(std::fs::File::open(given).unwrap()).output().unwrap();
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (status, said) = run(&other.join("f"), "in\n");
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("project/f` exists and would be replaced; rename one of them"), "{said}");
    assert_eq!(run(&project.join("f"), "in\n"), (Some(0), "of project\nin\n".into()));
    std::fs::write(project.join(".sandpool-stdin"), "mine").unwrap();
    let (status, said) = run(&project.join("f"), "in\n");
    assert_eq!(status, Some(1), "{said}");
    assert_eq!(std::fs::read_to_string(project.join(".sandpool-stdin")).unwrap(), "mine");
    assert_eq!(std::fs::read_to_string(project.join("f")).unwrap(), "of project\n");
}

#[test]
#[allow(clippy::disallowed_methods, reason = "the test starts the program it tests")]
fn a_server_of_an_ordinary_user_refuses_persist_and_names_the_remedy() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIP: only root can start a server as another user");
        return;
    }
    const NOBODY: u32 = 65_534;
    let state = StateDir::new("persist-user");
    std::fs::set_permissions(&state.0, Permissions::from_mode(0o755)).unwrap();
    let home = state.0.join("home");
    std::fs::create_dir(&home).unwrap();
    chown(&home, Some(NOBODY), Some(NOBODY)).unwrap();
    let config = state.0.join("sandpool.toml");
    std::fs::write(&config, "[dialect.sandpool]\npersist = true\n").unwrap();
    // Outside of the directories of the build, which may be closed to others.
    let binary = state.0.join("sandpool");
    for name in ["sandpool", "sandpool-guest", "libsandpool_zygote.so"] {
        let built = Path::new(env!("CARGO_BIN_EXE_sandpool")).with_file_name(name);
        if built.exists() {
            std::fs::copy(built, state.0.join(name)).unwrap();
        }
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&binary).arg("stdio").arg("--config");
    command.arg(&config).arg("--state-dir").arg(home.join("state")).env("HOME", &home).env_remove("XDG_DATA_HOME");
    let ended = command.stdin(std::process::Stdio::null()).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    let why = "`persist` needs a server of root: only root can have volumes on disk; use `--workspace DIR` instead";
    assert!(!ended.status.success() && said.contains(why), "{said}");
}
