"""The JavaScript driver's cases. Cells are given as the transpiler leaves them, and some as the user wrote them."""

from __future__ import annotations

import json

from cases import ANY, Case, Cell, has

STOPPED = "Interrupted: the cell was interrupted\n"
TURN = "await __hold(new Promise((r) => setTimeout(r, 40)));"


def vlq(value: int) -> str:
    digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = value << 1 if value >= 0 else (-value << 1) | 1
    out = ""
    while True:
        digit, value = value & 31, value >> 5
        out += digits[digit | (32 if value else 0)]
        if not value:
            return out


def source_map(source: str, content: str, *lines: tuple[int, int]) -> str:
    """A map in which column 0 of each generated line comes from (line, column) of the source, counted from 0."""
    mappings, last = [], (0, 0)
    for line, column in lines:
        mappings.append(vlq(0) + vlq(0) + vlq(line - last[0]) + vlq(column - last[1]))
        last = (line, column)
    return json.dumps({"version": 3, "sources": [source], "sourcesContent": [content], "names": [], "mappings": ";".join(mappings)})


def stopped(code: str, within: float = 1.0, late: object = ANY) -> Cell:
    return Cell(code, status="interrupted", error=STOPPED, interrupt=0.2, within=within, late=late)


VALUES = [
    Case("the last value is the result", [
        Cell("1 + 1", result="2"), Cell("let x = 42"), Cell("x", result="42"), Cell("'a'", result="'a'"), Cell("undefined"), Cell(""), Cell("null", result="null"),
        Cell("({ a: 1, b: [1, 2], c: { d: { e: {} } } })", result="{ a: 1, b: [ 1, 2 ], c: { d: { e: {} } } }"), Cell("10n ** 20n", result="100000000000000000000n"),
        Cell("-0", result="-0"), Cell("NaN", result="NaN"), Cell("Symbol('s')", result="Symbol(s)"), Cell("new Map([[1, { a: 2 }]])", result="Map(1) { 1 => { a: 2 } }"),
        Cell("function named() {}; named", result="[Function: named]"), Cell("const c = {}; c.self = c; c", result="<ref *1> { self: [Circular *1] }"),
        Cell("new Proxy({ p: 1 }, { get() { throw 1 } })", result="{ p: 1 }")]),
    Case("names live on and may be declared again", [
        Cell("let a = 1; const b = 2; class K {}"), Cell("let a = 3; const b = 4; class K { k = 1 }"), Cell("[a, b, new K()]", result="[ 3, 4, K { k: 1 } ]"),
        Cell("globalThis.later = 5", result="5"), Cell("later", result="5")]),
    Case("_ is the last value", [Cell("41", result="41"), Cell("_ + 1", result="42"), Cell("globalThis._ = 'mine'", result="'mine'"), Cell("7", result="7"), Cell("_", result="'mine'")], fresh=True),
    Case("await works at top level", [
        Cell("await __hold(new Promise((r) => setTimeout(() => r('slept'), 5)))", result="'slept'"), Cell("await 5", result="5"),
        Cell("let total = 0; for await (const v of [1, 2, 3]) total += v; total", result="6"),
        Cell("let seen = []; for await (const x of __holdEach([1, Promise.resolve(2), 'c'])) seen.push(x); seen", result="[ 1, 2, 'c' ]"),
        Cell("seen = []; async function* count() { try { for (let i = 0; ; i++) yield i } finally { seen.push('closed') } } for await (const x of __holdEach(count())) { if (x > 1) break; seen.push(x) } seen", result="[ 0, 1, 'closed' ]"),
        Cell("for await (const x of __holdEach(new Set([7]))) seen = x; seen", result="7"), Cell("for await (const x of __holdEach(5)) ;", status="error", error=has("not async iterable")),
        Cell("await __hold({ calls: 0, then(r) { r(++this.calls) } })", result="1"), Cell("await __hold(7)", result="7"),
        Cell("await __hold(Promise.reject(new RangeError('no')))", status="error", error=has("RangeError: no\n    at cell-"))]),
    Case("variables of one cell", [
        Cell("process.env.OLD = 'o'; 0", result="0"),
        Cell("[process.env.NEW, process.env.OLD, process.env['toString'], Object.hasOwn(process.env, '__proto__')]", env={"NEW": "n=\u00e9", "OLD": "x", "toString": "t", "__proto__": "p"}, result="[ 'n=\u00e9', 'x', 't', true ]"),
        Cell("[process.env.NEW, process.env.OLD, typeof process.env.toString, Object.hasOwn(process.env, '__proto__')]", result="[ undefined, 'o', 'function', false ]"),
        Cell("require('child_process').execSync('echo $NEW $OLD') + ''", env={"NEW": "child"}, result="'child o\\n'"),
        Cell("process.env.NEW = 'mine'; delete process.env.OLD; process.env.BESIDE = 'b'; 0", env={"NEW": "n", "OLD": "x"}, result="0"),
        Cell("[process.env.NEW, process.env.OLD, process.env.BESIDE]", result="[ 'mine', undefined, 'b' ]"), Cell("delete process.env.NEW", result="true"),
        Cell("null.x", env={"NEW": "n"}, status="error", error=ANY), Cell("process.exit(3)", env={"NEW": "n"}, status="exit", exit_code=3), Cell("let let", env={"NEW": "n"}, status="error", error=ANY),
        Cell("for (;;);", env={"NEW": "n"}, status="interrupted", error=STOPPED, interrupt=0.2, within=1), Cell("await __hold(new Promise(() => {}))", env={"NEW": "n"}, status="interrupted", error=STOPPED, interrupt=0.2, within=1),
        Cell("'NEW' in process.env", result="false"),
        Cell("await __hold(new Promise((r) => setTimeout(r, 20))); process.env.NEW", env={"NEW": "awaited"}, result="'awaited'"), Cell("process.env.NEW"),
        Cell("globalThis.real = process.env; process.env = {}; Object.prototype.env = { BAD: 1 }; 0", result="0"), Cell("real.NEW", env={"NEW": "n"}, result="'n'"), Cell("[real.NEW, real.BAD]", result="[ undefined, undefined ]")], fresh=True),
    Case("both streams in one pipe keep their order", [
        Cell("for (let i = 0; i < 3; i++) { process.stdout.write('o' + i + ' '); process.stderr.write('e' + i + ' ') }", out="o0 e0 o1 e1 o2 e2 ", result=ANY),
        Cell("console.log('a'); console.error('b'); console.log('c')", out="a\nb\nc\n")], fresh=True, merged=True),
    Case("an interrupt that comes late stops no other cell", [
        Cell("let kept = 1"), Cell(TURN * 10 + "kept", result="1", stale=True),
        Cell("{ const end = Date.now() + 400; while (Date.now() < end); } kept", result="1", stale=True), stopped("for (;;);"), Cell("kept", result="1")]),
    Case("a pending promise survives collection", [
        Cell("require('node:v8').setFlagsFromString('--expose-gc'); globalThis.gc = require('node:vm').runInNewContext('gc'); 0", result="0"),
        stopped("setTimeout(() => gc(), 20); await __hold(new Promise(() => {}))"), Cell("gc(); 1", result="1"),
        stopped("setTimeout(() => gc(), 20); for await (const x of __holdEach({ [Symbol.asyncIterator]: () => ({ next: () => new Promise(() => {}) }) })) {}"), Cell("gc(); 1", result="1"),
        stopped("setTimeout(() => gc(), 20); for await (const x of __holdEach([1, new Promise(() => {})])) {}"), Cell("gc(); 1", result="1"),
        Cell("setTimeout(() => gc(), 5); setTimeout(() => gc(), 15); await __hold(new Promise((r) => { setTimeout(r, 30, 'ok') }))", result="'ok'")], fresh=True),
    Case("invalid surrogates still give valid JSON", [Cell("'\\ud800'", result=lambda r: r.lower() == "'\\ud800'"), Cell("({ toString: 1, [Symbol.for('nodejs.util.inspect.custom')]() { return 'a\\udfff\\u0000\\u2028' } })", result="a\ufffd\0\u2028"),
                                                      Cell("display({ s: '\\ud800' }, 'application/json')", displays=[{"application/json": {"s": "\ufffd"}}])]),
    Case("a long text is cut in the middle", [
        Cell("({ [Symbol.for('nodejs.util.inspect.custom')]() { return 'x'.repeat(5e6) } })", result=lambda r: len(r) < 1_000_100 and "\n[... 4000000 characters left out ...]\n" in r),
        Cell("display('é'.repeat(900000))", displays=lambda d: len(d[0]["text/plain"].encode()) < 1_000_100),
        Cell("display('\\0'.repeat(2e6))", displays=ANY)]),
    Case("displays", [
        Cell("display('<b>', 'text/html'); display({ a: [1] }, 'application/json'); display({ a: 1 }); display('s')",
             displays=[{"text/html": "<b>"}, {"application/json": {"a": [1]}}, {"text/plain": "{ a: 1 }"}, {"text/plain": "s"}]),
        Cell("display(Buffer.from([0x89, 0x50, 0x4e, 0x47, 1]))", displays=[{"image/png": "iVBORwE="}]),
        Cell("display(new Uint8Array([0xff, 0xd8, 0xff, 1]))", displays=[{"image/jpeg": "/9j/AQ=="}]),
        Cell("display('data:image/png;base64,iVBO\\nRwE=', 'image/png')", displays=[{"image/png": "iVBORwE="}]),
        Cell("display(Buffer.alloc(7e6, 1), 'image/png')", displays=[{"text/plain": "[image/png left out: it is larger than 8 MB]"}]),
        Cell("Buffer.from([1, 2])", result="<Buffer 01 02>")]),
    Case("output is complete and in order", [
        Cell("console.log('a'); display(1); console.error('b'); process.stdout.write('c')", out="a\nc", err="b\n", displays=ANY, result="true"),
        Cell("process.stdout.write('x'.repeat(1e6) + 'end\\n'); 0", out=lambda t: len(t) == 1_000_004 and t.endswith("end\n"), result="0"),
        Cell("console.log(1); require('child_process').execSync('echo 2', { stdio: 'inherit' }); console.log(3)", out="1\n2\n3\n")]),
]

MODULES = [
    Case("require and import work from the working directory", [
        Cell("require('./c.cjs').z", result="1"), Cell("const { a, default: d } = await __hold(__import('./m.mjs')); [a, d]", result="[ 7, 8 ]"),
        Cell("(await __hold(__import('node:fs'))).default === require('fs')", result="true"), Cell("(await __hold(__import('pkg'))).kind", result="'esm'"), Cell("require('pkg').kind", result="'cjs'"),
        Cell("(await __hold(__import('./d.json', { with: { type: 'json' } }))).default.k", result="1"),
        Cell("const { z, default: all } = __named(await __hold(__import('./loop.cjs'))); [z(), all.y, all === require('./loop.cjs')]", result="[ 1, 2, true ]"),
        Cell("const { a: a2, b: b2, default: d2 } = __named(await __hold(__import('./m.mjs'))); [a2, b2, d2]", result="[ 7, undefined, 8 ]"),
        Cell("const { EOL } = __named(await __hold(__import('node:os'))); EOL", result="'\\n'"),
        Cell("await __hold(__import('no-such'))", status="error", error=has("ERR_MODULE_NOT_FOUND", "Cannot find package 'no-such'")),
        Cell("require.main === module", result="true"), Cell("[__dirname === process.cwd(), typeof exports]", result="[ true, 'object' ]"),
        Cell("require('fs').mkdirSync('sub'); require('fs').writeFileSync('sub/s.cjs', 'module.exports = 9'); process.chdir('sub')"), Cell("require('./s.cjs')", result="9"),
        Cell("process.chdir('..')"), Cell("Object.keys(globalThis).filter((k) => /__|babel|display|require|module/.test(k))", result="[]")], fresh=True,
         files={"m.mjs": "export const a = 7; export default 8", "c.cjs": "module.exports = { z: 1 }",
                "loop.cjs": "const all = {}; for (const k of ['z']) all[k] = function () { return this === undefined || this === globalThis ? 1 : 0 }; all.y = 2; module.exports = all",
                "d.json": '{"k":1}'}),
    Case("helpers of the transpiler cannot be replaced", [
        Cell("__hold = 1; typeof __hold", result="'function'"), Cell("'use strict'; try { __import = 1 } catch (e) { e.constructor.name }", result=ANY),
        Cell("const log = []; class D { m() { return 1 } }\n"
             "babelHelpers.decorate([(t, k, d) => ({ ...d, value: () => 2 }), babelHelpers.decorateParam(0, (t, k, i) => { log.push([k, i]) }), babelHelpers.decorateMetadata('design:type', Function)], D.prototype, 'm', null);\n"
             "let E = class E {}; E = babelHelpers.decorate([(c) => class extends c { x = 1 }], E);\n[new D().m(), log, new E().x]", result="[ 2, [ [ 'm', 0 ] ], 1 ]")]),
    Case("workers, children and inspectors of the user's work", [
        Cell("await __hold(new Promise((r) => new (require('worker_threads').Worker)('require(\"worker_threads\").parentPort.postMessage(6)', { eval: true }).on('message', r)))", result="6"),
        Cell("require('child_process').execFileSync('sh', ['-c', 'ls /proc/self/fd | tr \"\\\\n\" \" \"']).toString()", result="'0 1 2 3 '"),
        Cell("Object.keys(process.env).filter((k) => ['KREQ', 'KEVT', 'KINT'].includes(k))", result="[]"),
        Cell("const s = new (require('inspector').Session)(); s.connect(); let got; s.post('Runtime.evaluate', { expression: '1+2' }, (e, r) => { got = r.result.value }); s.disconnect(); got", result="3")]),
    Case("standard input is at its end", [
        Cell("process.stdin.resume(); await __hold(new Promise((r) => process.stdin.on('end', () => r('end'))))", result="'end'", within=2), Cell("require('fs').readFileSync(0, 'utf8')", result="''")]),
]

ERRORS = [
    Case("an error has the user's frames", [
        Cell("function thrower(v) {\n  throw new TypeError('bad ' + v);\n}"),
        Cell("\nthrower(3)", status="error", error=lambda t: t == "TypeError: bad 3\n    at thrower (cell-{}.js:2:9)\n    at cell-{}.js:2:1\n".format(*numbers(t)),
             check=lambda o: (o.of("error")[0]["name"], o.of("error")[0]["value"]) == ("TypeError", "bad 3")),
        Cell("JSON.parse('{')", status="error", error=has("SyntaxError: ", "at JSON.parse", "at cell-")),
        Cell("require('fs').readFileSync('/no')", status="error", error=lambda t: "code: 'ENOENT'" in t and "node:" not in t),
        Cell("nope", status="error", error=has("ReferenceError: nope is not defined\n    at cell-"))]),
    Case("causes and properties are shown", [
        Cell("const e = new Error('a', { cause: new TypeError('b') }); e.code = 'X'; throw e", status="error",
             error=lambda t: t == "Error: a\n    at cell-{0}.js:1:11 {{\n  code: 'X',\n  [cause]: TypeError: b\n      at cell-{0}.js:1:35\n}}\n".format(numbers(t)[0])),
        Cell("throw new AggregateError([new Error('p')], 'all')", status="error", error=has("AggregateError: all", "Error: p"))]),
    Case("anything may be thrown", [Cell("throw 5", status="error", error="Uncaught 5\n"), Cell("throw null", status="error", error="Uncaught null\n"), Cell("throw undefined", status="error", error="Uncaught undefined\n"),
                                    Cell("throw { a: 1 }", status="error", error="Uncaught { a: 1 }\n"), Cell("throw Symbol('s')", status="error", error="Uncaught Symbol(s)\n")]),
    Case("syntax errors show the line", [Cell("1;\nlet y = = 1", status="error", error=has(".js:2\nlet y = = 1\n        ^\n\nSyntaxError: Unexpected token '='\n"),
                                             check=lambda o: o.of("error")[0]["value"] == "Unexpected token '='"),
                                         Cell("eval('var = 1')", status="error", error=has("SyntaxError: ", "at cell-"))]),
    Case("an error that cannot be shown", [
        Cell("const h = new Error('h'); Object.defineProperty(h, 'stack', { get() { throw 1 } }); throw h", status="error", error=ANY),
        Cell("const i = new Error('i'); Object.defineProperty(i, 'message', { get() { throw 1 } }); throw i", status="error", error="Error: <the error could not be shown>\n"),
        Cell("Error.prepareStackTrace = () => { throw 2 }; throw new Error('j')", status="error", error=ANY), Cell("delete Error.prepareStackTrace", result="true"),
        Cell("const l = new Error('l'); l.stack; l.name = { toString() { for (;;); } }; throw l", status="interrupted", error=STOPPED, interrupt=0.2, within=1),
        Cell("throw new Error('m'.repeat(3e6))", status="error", error=lambda t: len(t) < 1_000_100), Cell("1", result="1")]),
    Case("positions go through the source map", [
        Cell("const one = 1;\nthrow new Error('mapped');\n", map=source_map("cell.ts", "type T = 1;\n\n\nconst one = 1;\n    throw new Error('mapped');", (3, 0), (4, 4)), status="error",
             error=lambda t: t == "Error: mapped\n    at cell-{}.ts:5:5\n".format(numbers(t)[0])),
        Cell("function old() {\nthrow new Error('old');\n}", map=source_map("cell.tsx", "", (9, 0), (10, 2), (11, 0))),
        Cell("old()", status="error", error=lambda t: "at old (cell-{}.ts:11:3)".format(numbers(t)[0]) in t and ".js:1:1" in t),
        Cell("throw new Error('plain')", map=source_map("cell.js", "", (6, 0)), status="error", error=has(".js:7:1\n")),
        Cell("throw new Error('bad map')", map="{", status="error", error=has(".js:1:7\n"))]),
    Case("process.exit ends the cell only", [
        Cell("let kept = 1; process.exit(3)", status="exit", exit_code=3), Cell("process.exit()", status="exit", exit_code=0), Cell("process.exitCode = 4; process.exit()", status="exit", exit_code=4),
        Cell("try { process.exit(5) } catch {} console.log('on')", status="exit", exit_code=5, out="on\n"), Cell("setTimeout(() => process.exit(6), 5); await __hold(new Promise(() => {}))", status="exit", exit_code=6),
        Cell("await __hold(1); process.exit(7)", status="exit", exit_code=7), Cell("process.abort()", status="exit", exit_code=134), Cell("kept", result="1")]),
    # W26: what timers and promises of an earlier cell write is told apart, with the number of its cell.
    Case("timers and promises left behind print late", [
        Cell("var ready = {}; ready.go = new Promise(r => ready.start = r); ready.over = (async () => { await ready.go; console.log('late'); process.stderr.write('err\\n');"
             " await new Promise(r => setTimeout(r, 5)); console.log('later'); display('shown') })(); 0", result="0"),
        Cell("console.log('mine'); ready.start(); await ready.over; console.log('still mine')", out="mine\nstill mine\n", result=ANY,
             late=["late\nerr\nlater\nshown\n"], check=lambda o: o.of("late")[0]["run"] == o.of("late")[0]["n"] - 1),
        Cell("await new Promise(r => setTimeout(() => { console.log('own'); r() }, 1))", out="own\n", result=ANY)]),
    Case("a flood of late output is bounded", [
        Cell("var f = {}; f.go = new Promise(r => f.start = r); f.over = f.go.then(() => { for (let i = 0; i < 20000; i++) console.log('x'.repeat(100)) }); 0", result="0"),
        Cell("f.start(); await f.over; 1", result="1", late=lambda x: 60_000 < sum(map(len, x)) < 70_000 and "characters left out" in x[-1])]),
    Case("late errors are told and kill nothing", [
        Cell("setTimeout(() => { throw new Error('timer') }, 5); " + TURN, late=lambda x: len(x) == 1 and x[0].startswith("Error: timer\n    at Timeout")),
        Cell("Promise.reject(new Error('nobody')); " + TURN, late=lambda x: len(x) == 1 and x[0].startswith("Error: nobody\n    at cell-")),
        Cell("setTimeout(() => { throw { get a() { return 1 } } }, 1); " + TURN, late=["Uncaught { a: [Getter] }\n"]),
        Cell("const storm = setInterval(() => { for (let i = 0; i < 200; i++) Promise.reject(i) }, 1); " + TURN + " clearInterval(storm)", late=lambda x: len(x) == 100 and x[-1] == "further errors are not shown\n"),
        Cell(TURN, late=ANY), Cell("new (require('events').EventEmitter)().emit('error', new Error('ee'))", status="error", error=has("Error: ee")),
        Cell("1", result="1")]),
]

INTERRUPTS = [
    Case("an interrupt ends the cell and keeps the state", [
        Cell("let state = 'kept'"), stopped("for (;;);"), stopped("await __hold(new Promise(() => {}))"), stopped("await __hold(1); for (;;);"),
        stopped("setTimeout(() => { for (;;); }, 1); await __hold(new Promise(() => {}))"), stopped("for (;;) { try { for (;;); } catch {} finally { continue } }"),
        stopped("(function g() { Promise.resolve().then(g) })(); await __hold(new Promise(() => {}))", 2), stopped("(function t() { process.nextTick(t) })(); await __hold(new Promise(() => {}))", 2),
        stopped("/(a+)+b/.test('a'.repeat(40))"), stopped("Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0)"), stopped("({ [Symbol.for('nodejs.util.inspect.custom')]() { for (;;); } })"),
        Cell("state", result="'kept'"), Cell(TURN + " 'later'", result="'later'", late=ANY)]),
    Case("a timer that hangs between cells is ended", [
        Cell("setTimeout(() => { for (;;); }, 1)", result=ANY), *[Cell("'through'", result=ANY, status=ANY, error=ANY, interrupt=0.3, within=2)] * 6, Cell("2", result="2")]),
    Case("a late byte does no harm", [Cell("1", result="1"), Cell("2", result="2", interrupt=0.0, status=ANY, error=ANY), Cell("for (let i = 0; i < 1e6; i++); 3", result="3")]),
]

FIRST_CELLS = [
    *[Case(f"the first cell after {waits} s", [
        Cell("[typeof _, Object.keys(globalThis).filter((k) => /^_|^[a-z]$/.test(k)), process.stdout.bytesWritten, Object.keys(process.stdout._handle), process.exitCode, process.listenerCount('SIGINT')]",
             result="[ 'undefined', [], 0, [], undefined, 1 ]"),
        Cell("console.count(); console.log(1); console.error(2)", out="default: 1\n1\n", err="2\n"), Cell("_[0]", result="'undefined'"),
        Cell("null.x", status="error", error="TypeError: Cannot read properties of null (reading 'x')\n    at cell-4.js:1:6\n")],
        fresh=True, waits=waits) for waits in (0, 0.02, 0.021, 0.022, 0.024, 0.026, 0.03, 0.5)],
    *[Case(f"the first cell is interrupted after {waits} s", [stopped("globalThis.kept = 1; for (;;);"), Cell("kept", result="1"), stopped("await __hold(new Promise(() => {}))")], fresh=True, waits=waits) for waits in (0, 0.5)],
    *[Case(f"probes are not counted, after {waits} s", [
        Cell(";"), Cell(";"), Cell("null.x", status="error", error="TypeError: Cannot read properties of null (reading 'x')\n    at cell-1.js:1:6\n"), Cell(";"),
        Cell("let f = () => { throw new Error('f') }\nlet let", status="error", error=has("cell-2.js:2\nlet let\n"), map=source_map("cell.js", "let f = () => { throw new Error('f') }\nlet let", (0, 0), (1, 0))),
        Cell(";", map=source_map("cell.ts", "interface A {};", (0, 0))), Cell("null.x", status="error", error=has("at cell-4.js:1:6\n")), Cell("typeof _", result="'undefined'")],
        fresh=True, waits=waits) for waits in (0, 0.025, 0.5)],
    Case("packages of NODE_PATH are imported like those of the working directory", [
        Cell("process.env.NODE_PATH = `/no/where:${process.cwd()}/shared/node_modules`; (await __hold(__import('far'))).kind", result="'esm'"),
        Cell("(await __hold(__import('far/more.mjs'))).more", result="2"),
        Cell("await __hold(__import('farther'))", status="error", error=has("Cannot find package 'farther' imported from", "/cell.js")),
        Cell("await __hold(__import('./far'))", status="error", error=has("ERR_MODULE_NOT_FOUND")),
        Cell("await __hold(__import('far/broken.mjs'))", status="error", error=has("is broken"))],
        files={"shared/node_modules/far/package.json": json.dumps({"name": "far", "exports": {".": {"import": "./e.mjs", "require": "./c.cjs"}, "./*": "./*"}}),
               "shared/node_modules/far/e.mjs": "export const kind = 'esm'", "shared/node_modules/far/more.mjs": "export const more = 2",
               "shared/node_modules/far/broken.mjs": "throw new Error('it is broken')"}, fresh=True),
    Case("files of shared packages have the names of NODE_PATH in tracebacks", [
        Cell("require('fs').symlinkSync('secret', 'shown')\nprocess.env.NODE_PATH = `${process.cwd()}/shown/node_modules`; require('module')._initPaths(); 0", result="0"),
        Cell("require('thrower')()", status="error", error=lambda e: "/shown/node_modules/thrower/index.js:1:" in e and "secret" not in e),
        Cell("require('thrower/none')", status="error", error=lambda e: "secret" not in e)],
        files={"secret/node_modules/thrower/index.js": "module.exports = () => { throw new Error('inside') }"}, fresh=True),
    Case("the first cell imports", [Cell("(await __hold(__import('node:os'))).EOL", result="'\\n'"), Cell("process.emitWarning('mine'); " + TURN, err=has("Warning: mine"))], fresh=True),
    Case("the first cell changes all", [Cell("process.stdout._handle.writeUtf8String = () => 0; Object.defineProperty(globalThis, '_', { value: 1 }); 0", result="0"), Cell("console.log('lost'); _", result="1")], fresh=True, waits=0.5),
    Case("the console keeps nothing", [
        Cell("require('node:v8').setFlagsFromString('--expose-gc'); globalThis.gc = require('node:vm').runInNewContext('gc'); 0", result="0"),
        Cell("globalThis.refs = ['log', 'error', 'info', 'warn', 'debug', 'dir', 'table'].map((m) => { const o = {}; console[m](o); return new WeakRef(o) }); 0", result="0", out=ANY, err=ANY),
        Cell(TURN + " gc(); refs.filter((r) => r.deref() !== undefined).length", result="0"),
        Cell("const { log } = console; log('free'); log.name", out="free\n", result="'log'")], fresh=True, waits=0.5),
]

HOSTILE = [
    Case("a closed stdout comes back", [
        Cell("process.stdout.end(); 0", result="0", err=ANY), Cell("console.log(1)", out="1\n", err=ANY), Cell("require('fs').closeSync(1)", err=ANY), Cell("console.log(2)", out="2\n", err=ANY),
        Cell("process.stdout.destroy(); 0", result="0", err=ANY), Cell("console.log(3)", out="3\n", err=ANY), Cell("Object.defineProperty(process, 'stdout', { value: null, configurable: true }); 0", result="0", err=ANY), Cell("process.stdout.write('4'); 0", out="4", result="0"),
        Cell("process.stdout.write = () => { throw new Error('w') }; 0", result="0"), Cell("5", result="5")], fresh=True),
    Case("the process's listeners come back", [Cell("process.removeAllListeners(); 0", result="0"), stopped("await __hold(new Promise(() => {}))"), Cell("setTimeout(() => { throw 1 }, 1); " + TURN, late=["Uncaught 1\n"]),
                                               Cell("process.on = process.addListener = process.emitWarning = () => { throw 2 }; 0", result="0"), stopped("for (;;);"), stopped("await __hold(new Promise(() => {}))"), Cell("3", result="3")], fresh=True),
    Case("changed builtins do not reach the driver", [
        Cell("const no = () => { throw new Error('patched') };\n"
             "JSON.stringify = JSON.parse = no; Array.prototype.push = Array.prototype.map = Array.prototype.join = no; Array.prototype[Symbol.iterator] = no; Buffer.from = Buffer.alloc = no; globalThis.setImmediate = globalThis.setTimeout = no;\n"
             "Promise.prototype.then = Promise.resolve = no; globalThis.Promise = no; String.prototype.split = String.prototype.replace = String.prototype.slice = String.prototype.indexOf = no; RegExp.prototype.exec = no; Map.prototype.get = Set.prototype.add = no;\n"
             "Object.defineProperty = no; Number = String = Error = no; require('util').inspect = no; require('fs').writeSync = no; require('events').prototype.on = no; Reflect.apply = no; 0", result="0"),
        Cell("1 + 1", result="2"), Cell("[1, 'a']", result=ANY, status=ANY, error=ANY), Cell("console.log('out')", out="out\n"), Cell("null.x", status="error", error=has("TypeError: Cannot read properties of null")), Cell("2", result="2")], fresh=True),
    Case("a polluted Object.prototype does not reach the driver", [
        Cell("Object.prototype.toJSON = () => 1; 0", result="0"), Cell("({ a: 1 }).a", result="1"), Cell("delete Object.prototype.toJSON; 0", result="0"),
        Cell("for (const k of ['params', 'exit', 'interrupted', 'failure', 'objectId', 'map', 'n', 'code']) Object.defineProperty(Object.prototype, k, { configurable: true, get() { return undefined }, set(v) { throw new Error('setter ' + k) } }); 0", result=ANY, status=ANY, error=ANY),
        Cell("1 + 1", result="2"), Cell("[1, { b: 2 }]", result="[ 1, { b: 2 } ]"), Cell("null.x", status="error", error=has("TypeError"))], fresh=True),
    Case("inherited values on Object.prototype", [Cell("Object.prototype.exit = 1; Object.prototype.interrupted = 1; Object.prototype.failure = 1; Object.prototype.exceptionDetails = {}; Object.prototype.polluted = 1; 0", result="0"), Cell("3", result="3")], fresh=True),
    Case("closing the control pipe is noticed", [Cell("require('fs').closeSync(4)", status="died -9", err=has("control pipe"), within=2)], fresh=True),
    Case("closing the request pipe ends the kernel", [Cell("require('fs').closeSync(3); 0", result="0", status="died -9", err="sandpool: the kernel's request pipe is gone\n")], fresh=True),
    Case("death by signal is seen", [Cell("process.kill(process.pid, 'SIGKILL'); for (;;);", status="died -9")], fresh=True),
    Case("fake events on stdout are output", [Cell("console.log('{\"t\":\"done\",\"n\":1,\"status\":\"ok\"}')", out='{"t":"done","n":1,"status":"ok"}\n')]),
    Case("a stack overflow is an error", [Cell("(function f() { f() })()", status="error", error=has("RangeError: Maximum call stack size exceeded"))]),
    Case("a strict cell", [Cell("'use strict'; undeclared = 1", status="error", error=has("ReferenceError: undeclared is not defined"))]),
]


def numbers(text: str) -> list[str]:
    import re
    return re.findall(r"cell-(\d+)\.", text) or ["?", "?"]


CASES = [*VALUES, *MODULES, *ERRORS, *INTERRUPTS, *FIRST_CELLS, *HOSTILE]
for _case in CASES:
    if "pkg" in str(_case.cells):
        _case.files |= {"node_modules/pkg/package.json": json.dumps({"name": "pkg", "exports": {"import": "./e.mjs", "require": "./c.cjs"}}),
                        "node_modules/pkg/e.mjs": "export const kind = 'esm'", "node_modules/pkg/c.cjs": "exports.kind = 'cjs'"}
