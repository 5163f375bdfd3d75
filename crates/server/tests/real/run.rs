//! `sandpool run`: what a program gets from the command line, and what it leaves.

use std::io::Write;
use std::process::{Output, Stdio};

use crate::support::{StateDir, program};

/// Runs the command with this standard input.
fn run(state: &StateDir, stdin: &str, arguments: &[&str]) -> Output {
    let mut command = program();
    command.arg("run").arg("--state-dir").arg(state.0.join("state")).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn printed(output: &Output) -> (String, String, Option<i32>) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr), output.status.code())
}

#[test]
fn a_program_gets_arguments_and_standard_input_in_every_language() {
    let state = StateDir::new("run-input");
    let code = "import sys, subprocess\nprint(sys.argv[1:], input())\nprint(sys.stdin.read())";
    let (out, err, status) = printed(&run(&state, "one\ntwo", &["-c", code, "--", "a", "-b 'c'"]));
    assert_eq!((out.as_str(), status), ("['a', \"-b 'c'\"] one\ntwo\n", Some(0)), "{err}");
    assert_eq!(err, "", "nothing but the program writes");
    let code =
        "import { readFileSync } from 'node:fs'\nconsole.log(process.argv.slice(2).join('|'), readFileSync(0, 'utf8'))";
    let (out, err, status) = printed(&run(&state, "one\ntwo", &["-l", "javascript", "-c", code, "--", "a", "-b 'c'"]));
    assert_eq!((out.as_str(), status), ("a|-b 'c' one\ntwo\n", Some(0)), "{err}");
    let code = "let all = ''; for await (const part of process.stdin) all += part; console.log(all.length as number)";
    let (out, err, _) = printed(&run(&state, &"x".repeat(300_000), &["-l", "ts", "-c", code]));
    assert_eq!(out, "300000\n", "{err}");
    let (out, err, status) = printed(&run(
        &state,
        "one\ntwo",
        &["-l", "bash", "-c", "echo \"$# $2\"; cat; ls -A; exit 5", "--", "a", "-b 'c'"],
    ));
    assert_eq!((out.as_str(), status), ("2 -b 'c'\none\ntwo", Some(5)), "{err}");
    assert_eq!(err, "");
    // Code that comes from standard input has none.
    let (out, err, _) =
        printed(&run(&state, "import sys; print(sys.argv[1:], repr(sys.stdin.read()))", &["-", "--", "a"]));
    assert_eq!(out, "['a'] ''\n", "{err}");
}

#[test]
fn files_go_in_under_their_names_and_what_the_code_left_comes_out() {
    let state = StateDir::new("run-files");
    let path = |name: &str| state.0.join(name).to_str().unwrap().to_owned();
    for (name, content) in [("same.csv", "1,2\n"), ("changed.csv", "3,4\n")] {
        std::fs::write(path(name), content).unwrap();
    }
    let code = "import os\nassert open('same.csv').read() == '1,2\\n'\nopen('changed.csv', 'a').write('5,6\\n')\n\
                os.makedirs('a/b')\nopen('a/b/large.bin', 'wb').write(bytes(3 << 20))\nos.symlink('/etc/passwd', 'link')";
    let (same, changed, out) = (path("same.csv"), path("changed.csv"), path("out"));
    let arguments = ["--file", &same, "--file", &changed, "--out", &out, "-c", code];
    let (_, err, status) = printed(&run(&state, "", &arguments));
    assert_eq!(status, Some(0), "{err}");
    assert_eq!(std::fs::read_to_string(path("out/changed.csv")).unwrap(), "3,4\n5,6\n");
    assert_eq!(std::fs::metadata(path("out/a/b/large.bin")).unwrap().len(), 3 << 20);
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 2, "neither the unchanged file nor the link: {err}");
    // What a program left before it failed comes out, too.
    let (_, err, status) = printed(&run(&state, "", &["--out", &out, "-c", "open('x', 'w').write('y')\n1 / 0"]));
    assert_eq!((status, std::fs::read_to_string(path("out/x")).unwrap().as_str()), (Some(1), "y"), "{err}");
    let (_, err, status) = printed(&run(&state, "", &["--file", &path("none"), "-c", "1"]));
    assert_eq!(status, Some(1));
    assert!(err.starts_with(&format!("error: `--file {}`: ", path("none"))), "{err}");
}

#[test]
fn a_file_with_holes_is_left_out_where_it_is_larger_than_the_sandboxs_disk() {
    let state = StateDir::new("run-holes");
    let out = state.0.join("out");
    let code =
        "open('huge', 'wb').truncate(1 << 40)\nopen('holes', 'wb').truncate(3 << 20)\nopen('z', 'w').write('last')";
    let (_, err, status) = printed(&run(&state, "", &["--out", out.to_str().unwrap(), "-c", code]));
    assert_eq!(status, Some(0), "{err}");
    let huge = out.join("huge");
    let said =
        format!("sandpool: {} was left out: it has 1048576 MB, and all files together more than", huge.display());
    assert!(err.contains(&said), "{err}");
    assert!(!huge.exists());
    assert_eq!(std::fs::metadata(out.join("holes")).unwrap().len(), 3 << 20, "{err}");
    assert_eq!(std::fs::read_to_string(out.join("z")).unwrap(), "last");
}
