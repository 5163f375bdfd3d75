//! The guest with the real drivers.

mod harness;

use harness::*;
use proto::{Deadline, Ended, KernelSpec, Language, RunStatus};

const SHORT: Deadline = Deadline { after_ms: 500, grace_ms: 3000 };

fn started(spec: Option<KernelSpec>) -> Option<Client> {
    let mut client = Client::new();
    client.started(1, &spec?);
    Some(client)
}

#[test]
fn python_keeps_state_shows_values_and_errors() {
    let Some(mut client) = started(python()) else { return };
    assert_eq!(client.run("x = 20").result(), None);
    assert_eq!(client.run("x + 1").result(), Some("21"));
    let ran = client.run("print('a'); 1/0");
    assert_eq!((ran.status(), ran.out().as_str()), (&RunStatus::Error, "a\n"));
    assert_eq!(ran.error().unwrap().0, "ZeroDivisionError");
    assert_eq!(client.run("exit(4)").status(), &RunStatus::Exit { code: 4 });
    let ran = client.run("import subprocess; print('1'); subprocess.run(['echo', '2']); display('d'); print('3')");
    assert_eq!(ran.out(), "1\n2\n3\n");
    let shown = ran.order.iter().position(|line| line == "display").unwrap();
    let before: String = ran.order[..shown].iter().map(|line| line.trim_start_matches("out ")).collect();
    assert!(before.replace('\n', "").starts_with("12"), "{:?}", ran.order);
    assert_eq!(client.run("x").result(), Some("20"));
    client.nothing_left();
    client.bye();
}

#[test]
fn python_is_interrupted_or_killed() {
    let Some(mut client) = started(python()) else { return };
    client.run("x = 1");
    let call = client.begin("while True: pass", SHORT, 1000);
    assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: true });
    assert_eq!(client.run("x").result(), Some("1"));
    let call = client.begin(
        "import signal; signal.signal(2, signal.SIG_IGN)\nwhile True: pass",
        Deadline { after_ms: 300, grace_ms: 300 },
        0,
    );
    assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: false });
    client.started(1, &python().unwrap());
    assert_eq!(client.run("import os; os._exit(7)").status(), &RunStatus::Ended { how: Ended::Exited { code: 7 } });
    client.nothing_left();
}

#[test]
fn an_interrupt_that_a_destructor_swallows_comes_again() {
    let Some(mut client) = started(python()) else { return };
    let code = "kept = 1\nimport time\nclass D:\n    def __del__(self): time.sleep(0.4)\n\
                for _ in range(6): D()\nwhile True: pass";
    let call = client.begin(code, Deadline { after_ms: 300, grace_ms: 6000 }, 10_000);
    let ran = client.finish(call);
    assert_eq!(ran.status(), &RunStatus::TimedOut { state_kept: true });
    assert!(ran.err().contains("KeyboardInterrupt"), "the first was swallowed: {}", ran.err());
    assert_eq!(client.run("kept").result(), Some("1"));
    client.nothing_left();
}

#[test]
fn python_has_a_cells_environment_in_that_cell_only() {
    let Some(mut client) = started(python()) else { return };
    client.run("import os; os.environ['OLD'] = 'o'");
    let look = "os.environ.get('NEW'), os.environ['OLD']";
    assert_eq!(client.run_with(look, &[("NEW", "n"), ("OLD", "x")]).result(), Some("('n', 'x')"));
    assert_eq!(client.run(look).result(), Some("(None, 'o')"));
    client.nothing_left();
}

#[test]
fn javascript_and_typescript_have_a_cells_environment_in_that_cell_only() {
    for language in [Language::Javascript, Language::Typescript] {
        let Some(mut client) = started(node(language)) else { return };
        client.run("process.env.OLD = 'o'");
        let look = "await new Promise(r => setTimeout(r, 5)); [process.env.NEW, process.env.OLD]";
        assert_eq!(client.run_with(look, &[("NEW", "n"), ("OLD", "x")]).result(), Some("[ 'n', 'x' ]"));
        assert_eq!(client.run(look).result(), Some("[ undefined, 'o' ]"));
        client.nothing_left();
    }
}

#[test]
fn merged_output_of_a_cell_is_in_order() {
    let cells = [
        (
            python(),
            "import sys, subprocess\nfor i in range(3): print('o', end=''); print('e', end='', file=sys.stderr)\n\
                    subprocess.run('printf O; printf E >&2', shell=True)\nprint('.')",
        ),
        (
            node(Language::Javascript),
            "for (let i = 0; i < 3; i++) { process.stdout.write('o'); process.stderr.write('e') }\n\
                    require('child_process').execSync('printf O; printf E >&2', { stdio: 'inherit' }); console.log('.')",
        ),
    ];
    for (spec, code) in cells {
        let Some(spec) = spec else { continue };
        let mut client = started(Some(KernelSpec { merge_output: true, ..spec })).unwrap();
        let ran = client.run(code);
        assert_eq!((ran.out().as_str(), ran.err().as_str()), ("oeoeoeOE.\n", ""), "{:?}", ran.error());
        client.nothing_left();
    }
}

#[test]
fn python_cancelled_at_random_points_is_clean_in_the_next_cell() {
    // G29
    let Some(mut client) = started(python()) else { return };
    let mut seed = 99u64;
    for round in 0..100 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let call = client.begin("import time; time.sleep(0.004)", LONG, 1000);
        std::thread::sleep(std::time::Duration::from_micros((seed >> 33) % 8000));
        client.interrupt(call);
        let ran = client.finish(call);
        let status = ran.status();
        assert!(matches!(status, RunStatus::Ok | RunStatus::Cancelled { state_kept: true }), "{round}: {status:?}");
        let next = client.run(&format!("{round}"));
        assert_eq!((next.status(), next.result()), (&RunStatus::Ok, Some(round.to_string().as_str())));
    }
    client.nothing_left();
}

#[test]
fn a_cancel_right_after_the_run_is_not_lost() {
    for spec in [python(), node(Language::Javascript)].into_iter().flatten() {
        let language = spec.language;
        let mut client = started(Some(spec)).unwrap();
        for _ in 0..20 {
            let code = if language == Language::Python { "while True: pass" } else { "while (true);" };
            let call = client.begin(code, LONG, 1000);
            client.interrupt(call);
            assert_eq!(client.finish(call).status(), &RunStatus::Cancelled { state_kept: true }, "{language:?}");
        }
        client.nothing_left();
    }
}

#[test]
fn javascript_declarations_live_on_and_can_be_made_again() {
    let Some(mut client) = started(node(Language::Javascript)) else { return };
    let cells = [
        ("var a = 1; function f() { return a } class C {}; const k = 1; f()", Some("1")),
        ("let a = 2; const f = () => a * 10; let C = 3; var k = 4; f() + C + k", Some("27")),
        ("function a() { return 'fn' } a()", Some("'fn'")),
        ("var a = a || 'fresh'; a", Some("'fresh'")),
        ("for (var i = 0; i < 3; i++) {} i", Some("3")),
        ("const i = 'again'; i", Some("'again'")),
        ("early(); function early() { return later() } function later() { return 'hoisted' }", Some("'hoisted'")),
        ("const early = 5, later = 6; early + later", Some("11")),
        (
            "import { basename } from 'node:path'; import os, * as all from 'node:os'; basename('/x/y') + (os.EOL === all.EOL)",
            Some("'ytrue'"),
        ),
        ("(await import('node:path')).basename('/p/q')", Some("'q'")),
        ("require('node:path').sep", Some("'/'")),
        ("await new Promise(r => setTimeout(() => r(42), 5))", Some("42")),
        ("export const e = 9; export default e", Some("9")),
        ("var silent = 1", None),
        ("import 'node:fs'", None),
        ("undeclared = 8; undeclared", Some("8")),
        ("with ({ w: 7 }) { w }", Some("7")),
    ];
    for (code, expected) in cells {
        let ran = client.run(code);
        assert_eq!(ran.status(), &RunStatus::Ok, "{code}: {:?}", ran.error());
        assert_eq!(ran.result(), expected, "{code}");
    }
    client.nothing_left();
    client.bye();
}

#[test]
fn typescript_runs() {
    let Some(mut client) = started(node(Language::Typescript)) else { return };
    let cells = [
        ("enum E { A, B = 'b' }", None),
        ("`${E.A} ${E.B} ${Object.keys(E)}`", Some("'0 b 0,A,B'")),
        ("enum E { X = 5 }\nObject.keys(E).join()", Some("'5,X'")),
        ("let E: string = 'free'; E", Some("'free'")),
        ("const enum K { One = 1 }; K.One", Some("1")),
        ("K.One + 1", Some("2")),
        (
            "namespace N { export const x = 1; export namespace M { export const y: number = 2 } }\nN.x + N.M.y",
            Some("3"),
        ),
        ("namespace N { export const z = 1 }\nObject.keys(N).join()", Some("'z'")),
        (
            "class P { constructor(private readonly a: number, public b = 2) {} sum(): number { return this.a + this.b } }\nnew P(1).sum()",
            Some("3"),
        ),
        (
            "function tag(v: string) { return (t: any) => { t.tag = v } }\n@tag('t') class D { static tag: string }",
            None,
        ),
        ("D.tag", Some("'t'")),
        (
            "function log(t: any, k: string, d: PropertyDescriptor) { const f = d.value; d.value = (...a: any[]) => 'logged ' + f(...a) }\nclass L { @log m(x: number) { return x } }\nnew L().m(3)",
            Some("'logged 3'"),
        ),
        (
            "import { join, type ParsedPath } from 'node:path'\nconst p: ParsedPath | null = null; join('a', 'b')",
            Some("'a/b'"),
        ),
        ("const id = <T,>(x: T): T => x; id<number>(5) satisfies number", Some("5")),
        ("interface Shape { area(): number }\nconst s: Shape = { area: () => 2 }; s.area()", Some("2")),
    ];
    for (code, expected) in cells {
        let ran = client.run(code);
        assert_eq!(ran.status(), &RunStatus::Ok, "{code}: {:?}", ran.error());
        assert_eq!(ran.result(), expected, "{code}");
    }
    let ran =
        client.run("interface Gone {\n  a: 1\n}\n\nfunction boom(): never {\n  throw new TypeError('no')\n}\nboom()");
    let (name, value, text) = ran.error().unwrap();
    assert_eq!((name, value), ("TypeError", "no"));
    assert!(text.contains("cell-16.ts:6:9") && text.contains("cell-16.ts:8:1"), "{text}");
    client.nothing_left();
    client.bye();
}

#[test]
fn a_probe_is_not_counted_in_the_names_of_cells() {
    for (language, name) in [(Language::Javascript, "js"), (Language::Typescript, "ts")] {
        let Some(mut client) = started(node(language)) else { return };
        assert_eq!(client.run(";").status(), &RunStatus::Ok);
        assert!(
            client.run("1 1").error().unwrap().2.starts_with(&format!("cell-1.{name}:1:")),
            "refused by the transpiler"
        );
        assert_eq!(client.run(";").status(), &RunStatus::Ok);
        assert!(
            client.run("\nnope()").error().unwrap().2.contains(&format!("at cell-2.{name}:2:1")),
            "thrown in the kernel"
        );
        client.nothing_left();
    }
}

#[test]
fn javascript_is_interrupted_step_by_step_and_killed_last() {
    let Some(mut client) = started(node(Language::Javascript)) else { return };
    client.run("var x = 1");
    for code in [
        "while (true);",
        "await new Promise(() => {})",
        "await 0; while (true);",
        "setTimeout(() => { for (;;); }, 0); await new Promise(() => {})",
    ] {
        let call = client.begin(code, SHORT, 1000);
        assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: true }, "{code}");
        assert_eq!(client.run("x").result(), Some("1"), "{code}");
    }
    let call =
        client.begin("require('child_process').execSync('sleep 30')", Deadline { after_ms: 300, grace_ms: 600 }, 0);
    assert_eq!(client.finish(call).status(), &RunStatus::TimedOut { state_kept: false });
    client.nothing_left();
}

#[test]
fn a_megabyte_of_javascript_output_is_whole() {
    let Some(mut client) = started(node(Language::Javascript)) else { return };
    for _ in 0..5 {
        let ran = client.run("for (let i = 0; i < 1000; i++) console.log('x'.repeat(999)); 'end'");
        assert_eq!((ran.stdout.len(), ran.result()), (1_000_000, Some("'end'")));
    }
    client.bye();
}
