use std::fmt::Write;

use proto::Language::{Javascript, Typescript};

use super::*;

fn shown(language: Language, cells: &[&str]) -> String {
    let mut out = String::new();
    for code in cells {
        let _ = match transpile(SourceCell { language, number: 1, code }) {
            Ok(output) => writeln!(out, "{code}\n  =>\n{}\n----", output.code.trim_end()),
            Err(refusal) => writeln!(out, "{code}\n  refused\n{}----", refusal.text),
        };
    }
    out
}

#[test]
fn imports_become_calls_at_the_head() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "import fs from 'node:fs'",
            "use(a);\nimport a, {\n  b,\n  c as d,\n  'x-y' as e,\n} from \"m\";\nafter",
            "import * as all from 'm'",
            "import first, * as all from 'm'",
            "import 'effect'",
            "import data from './d.json' with { type: 'json' }",
            "const m = await import('m'); function f() { return import('n') }",
            "import defer * as x from 'm'",
        ]
    ));
}

#[test]
fn exports_vanish() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "export const a = 1, b = 2",
            "export function f() {}",
            "export class A {}",
            "const a = 1\nexport { a, a as b }",
            "export { a } from 'm'; export * from 'n'",
            "a\nexport default { a: 1 }",
            "export default function () {}",
            "export default async function named() {}",
            "export default class {}",
        ]
    ));
}

#[test]
fn what_is_waited_for_at_the_top_is_held() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "await x",
            "const a = await await f(await g), b = (await h).i",
            "async function f() { await x }\nconst g = async () => await y",
            "for await (const x of await y) { await z }",
            "await import('m')",
            "export default await x",
            "for await (const x of y) {}\nasync () => { for await (const x of y) {} }",
        ]
    ));
}

#[test]
fn var_becomes_redeclarable() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "var x = 1",
            "var x = 1; x + 1",
            "var app = app || {}",
            "early; var early = 1",
            "for (var i = 0, n = 3; i < n; i++) {} i",
            "for (var i, j = 0;;) {}",
            "for (var k of [1]) {} for (var { a, b: [c] } of []) {} for (var p in {}) var q = p",
            "if (a) var b = 1; else var c",
            "var y\n(foo)",
            "{ var { a, ...rest } = o, b }",
            "var a = 1; var a = await 2",
            "function f() { var inner = 1 }\nconst g = () => { var i }\nclass A { static { var s } }",
            "var s = 1; function t() { return s }",
        ]
    ));
}

/// Checks that a removed statement still separates its neighbours.
#[test]
fn what_is_taken_away_does_not_join_its_neighbours() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "const x = f()\nfunction f() {}\n[1, 2].forEach(f)",
            "let y = x\nimport z from 'm'\n(z)",
            "let y = x\nexport { y }\n`text`",
            "let y = x\nexport * from 'm'\n(y)",
        ]
    ));
}

#[test]
fn const_becomes_redeclarable_unless_it_is_assigned_to() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "const a = 1, { b } = c",
            "const a = 1; a = 2",
            "{ const a = 1 } for (const b of c) {}",
            "export const e = 1"
        ]
    ));
}

#[test]
fn functions_become_redeclarable_and_stay_hoisted() {
    insta::assert_snapshot!(shown(
        Javascript,
        &[
            "function f(a) { return f(a - 1) }\nf(1)",
            "f()\nfunction f() {\n  return g()\n}\nasync function* g() { await import('x') }",
            "function f() { return 1 }\nfunction f() { return 2 }",
            "var f\nfunction f() {}",
            "'use strict'\ng(); function g() {}",
            "#!/usr/bin/env node\nfunction f() {}",
            "{ function inner() {} }",
            "function f(){}function g(){}",
        ]
    ));
}

#[test]
fn code_that_needs_no_change_is_not_touched() {
    let code = "let a = 1;\n// comment\nlet b = `x${a}`, c = class { #p };\n{ a: 1 }\n({ b })\nfor (const x of []) { }\nwith (b) {}\n010";
    let output = transpile(SourceCell { language: Javascript, number: 1, code }).unwrap();
    assert_eq!(output, Output { code: code.to_owned(), map: None });
    for language in [Javascript, Typescript] {
        let output = transpile(SourceCell { language, number: 1, code: PROBE }).unwrap();
        assert_eq!(output, Output { code: PROBE.to_owned(), map: None });
    }
}

#[test]
fn typescript_becomes_javascript() {
    insta::assert_snapshot!(shown(
        Typescript,
        &[
            "const a: number = 1\ntype T = string\ninterface I { x: T }",
            "enum Color { Red, Green = 'g' }\nColor.Red",
            "const enum C { A = 1 << 2 }\nC.A",
            "enum A { X }\nenum A { Y = 1 }",
            "namespace N { export const x = 1; export function f() { return x } }\nN.f()",
            "namespace N { export let x = 1 }",
            "class P { constructor(private readonly x: number, public y = 2) {} }",
            "@dec class A { @m() f(@p x: number) {} }",
            "import type { T } from 't'; import { type U, v } from 'v'; export type { T }",
            "function over(a: string): void; function over(a: any) {}\nover('x')",
            "let x = <any>y as unknown as string; x!.length; x satisfies string",
            "abstract class B<T> { declare a: T; abstract f(): void; g?(): T }",
            "declare const d: number; declare global { interface Window { x: 1 } }",
            "using r = open(); await using s = open()",
            "import x = require('y')",
            "export = 1",
        ]
    ));
}

#[test]
fn faults_are_shown_with_their_place() {
    insta::assert_snapshot!(shown(
        Typescript,
        &[
            "let a = 1\n\tlet b = = 2",
            "let a = 1; let a = 2",
            "const é = 'x', b: = 1",
            "const j = <div>x</div>",
            "",
            "// nothing"
        ]
    ));
    insta::assert_snapshot!(shown(
        Javascript,
        &["function (", "const j = <div/>", "let a; let a", "return 1", "const x: number = 1", "'unclosed", "break"]
    ));
}

/// Returns all words of the output that the map contains, with their origins.
fn mapped(language: Language, code: &str) -> String {
    let output = transpile(SourceCell { language, number: 7, code }).unwrap();
    let map = output.map.unwrap();
    let map = oxc_sourcemap::SourceMap::from_json_string(&map).unwrap();
    assert_eq!(map.get_source_content(0), Some(code));
    let lines = |text: &str| text.lines().map(|line| line.encode_utf16().collect::<Vec<_>>()).collect::<Vec<_>>();
    let (from, to) = (lines(code), lines(&output.code));
    let word = |lines: &[Vec<u16>], line: u32, column: u32| {
        let rest = String::from_utf16_lossy(&lines[line as usize][column as usize..]);
        rest.chars().take_while(|c| c.is_alphanumeric()).collect::<String>()
    };
    let mut out = format!("{} {}\n", map.get_source(0).unwrap(), output.code);
    for token in map.get_tokens() {
        let new = word(&to, token.get_dst_line(), token.get_dst_col());
        let old = word(&from, token.get_src_line(), token.get_src_col());
        if !new.is_empty() {
            let _ = writeln!(out, "{new} <- {old} {}:{}", token.get_src_line() + 1, token.get_src_col() + 1);
        }
    }
    out
}

#[test]
fn the_map_leads_back() {
    insta::assert_snapshot!(mapped(
        Javascript,
        "import a from 'm'\nconst é𝒳 = await boom(); last()\nmoved()\nfunction moved() {\n  inner()\n}"
    ));
    insta::assert_snapshot!(mapped(
        Typescript,
        "interface X {\n  a: 1\n}\nenum E { A }\nvar v: X = await boom(E.A);\nafter(v)"
    ));
}

#[test]
fn random_text_never_panics_and_what_comes_out_can_be_read_again() {
    // This is a small generator, which combines fragments that the rewriter handles in any order.
    let fragments = [
        "var a = 1",
        "var a",
        "function f() {}",
        "f()",
        "await a",
        "import b from 'b'",
        "export default a",
        "{",
        "}",
        "\n",
        ";",
        "(",
        ")",
        "for (var i of a)",
        "if (a) ",
        "export ",
        "async ",
        "class C {}",
        "enum E { A }",
        ": number",
        "`${a}`",
        "/x/",
        "é",
        "//c\n",
    ];
    let mut seed = 0x2545_F491_4F6C_DD1Du64;
    let mut accepted = 0;
    for _ in 0..3000 {
        let mut code = String::new();
        for _ in 0..(seed % 9) {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            code.push_str(fragments[(seed % fragments.len() as u64) as usize]);
            code.push(' ');
        }
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        for language in [Javascript, Typescript] {
            if let Ok(output) = transpile(SourceCell { language, number: 1, code: &code }) {
                accepted += 1;
                let again = transpile(SourceCell { language: Javascript, number: 1, code: &output.code });
                assert!(again.is_ok(), "{code}\n=>\n{}\n{again:?}", output.code);
            }
        }
    }
    assert!(accepted > 500, "{accepted}");
}
