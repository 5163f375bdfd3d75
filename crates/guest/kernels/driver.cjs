'use strict';

// This program is the JavaScript kernel: it runs cells in V8's REPL mode, through an inspector session to itself, and
// speaks the driver protocol. PROTOCOL.md is the contract with the guest.
//
// Cells share this process, and may have changed every builtin by the time the driver runs again. So:
//  - the functions that the driver calls are bound below, before the first cell; its objects have no prototype; its
//    loops are plain;
//  - the driver uses no promise: terminating a cell inside a microtask drops the whole microtask queue;
//  - an interrupt unwinds every frame, also the driver's, up to the event loop, which resumes unfinished work
//    (`onSigint`, `recover`). Nothing here relies on `finally`. (`breakOnSigint` of the vm module would stop a
//    synchronous cell more gently, but leaves moments before and after the cell in which SIGINT kills the process.)
// Node has to be started with `--no-force-async-hooks-checks`; otherwise a termination inside a timer aborts the process.
// This is not an ES module, because loading one takes longer than all modules that are required here.

const { AsyncLocalStorage } = require('node:async_hooks');
const { Session } = require('node:inspector');
const { EventEmitter } = require('node:events');
const { SourceMap, createRequire } = require('node:module');
const { Socket } = require('node:net');
const { Writable } = require('node:stream');
const { TextEncoder: Encoder, inspect, types } = require('node:util');
const { Worker } = require('node:worker_threads');
const { setImmediate: soon } = require('node:timers');
const fs = require('node:fs');
const vm = require('node:vm');

const { fstatSync, openSync, closeSync, realpathSync, writeSync } = fs;
const { apply, bind, call } = Function.prototype;
const uncurry = bind.bind(call);
const invoke = uncurry(call);
const { asyncIterator, iterator } = Symbol;
const { parse, stringify } = JSON;
const { defineProperty, getOwnPropertyDescriptor, hasOwn, freeze, keys } = Object;
const ObjectPrototype = Object.prototype;
const BigIntFrom = BigInt, NumberFrom = Number, ProxyOf = Proxy;
const PromiseResolve = Promise.resolve.bind(Promise);
const then = uncurry(Promise.prototype.then);
const slice = uncurry(String.prototype.slice), indexOf = uncurry(String.prototype.indexOf);
const startsWith = uncurry(String.prototype.startsWith), endsWith = uncurry(String.prototype.endsWith);
const wellFormed = uncurry(String.prototype.toWellFormed), repeat = uncurry(String.prototype.repeat);
const split = uncurry(String.prototype.split), trim = uncurry(String.prototype.trim);
const match = uncurry(RegExp.prototype.exec);
const encodeUtf8 = uncurry(Encoder.prototype.encode), encoder = new Encoder();
const toBase64 = uncurry(Buffer.prototype.toString), bufferFrom = Buffer.from;
const setAdd = uncurry(Set.prototype.add), setDelete = uncurry(Set.prototype.delete), setClear = uncurry(Set.prototype.clear);
const mapGet = uncurry(Map.prototype.get), mapSet = uncurry(Map.prototype.set), mapDelete = uncurry(Map.prototype.delete);
const { isNativeError, isPromise, isUint8Array } = types;
const { store: atomicStore, add: atomicAdd, notify: atomicNotify, wait: atomicWait } = Atomics;
const on = uncurry(EventEmitter.prototype.on), listeners = uncurry(EventEmitter.prototype.rawListeners);
const sessionConnect = uncurry(Session.prototype.connect), sessionDisconnect = uncurry(Session.prototype.disconnect);
const sessionPost = uncurry(Session.prototype.post);
const runInThisContext = uncurry(vm.Script.prototype.runInThisContext);
const Script = vm.Script, mainLoader = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
const findEntry = uncurry(SourceMap.prototype.findEntry);
const { pid, kill, cwd, env: environment } = process;
const now = performance.now.bind(performance);
const round = Math.round;

const TEXT_LIMIT = 1_000_000;       // bytes of one text
const PICTURE_LIMIT = 8_000_000;    // base64 characters of one picture
const MAPS_LIMIT = 16_000_000;      // characters of old cells' source maps
const STRAY_LIMIT = 64_000;         // characters that timers and promises of earlier cells may add to one cell
const LATE_LIMIT = 100;             // late errors that are reported between two cells

const [REQ, EVT, KINT] = ['KREQ', 'KEVT', 'KINT'].map((name, i) => {
  const value = process.env[name];
  delete process.env[name];
  return value === undefined ? (name === 'KINT' ? -1 : 3 + i) : +value;
});

// ---------------------------------------------------------------- events

const reqInode = fstatSync(REQ).ino, evtInode = fstatSync(EVT).ino;
let n = 0;

// An orderly exit would wait for the watchdog thread, which blocks in a read.
const die = () => kill.call(process, pid, 'SIGKILL');

function lost(why) {
  try { writeSync(2, `sandpool: ${why}\n`); } catch {}
  die();
}

function isOurs(fd, inode) {
  try { return fstatSync(fd).ino === inode; } catch { return false; }
}

function send(line) {
  const bytes = encodeUtf8(encoder, line);
  try {
    if (!isOurs(EVT, evtInode)) lost("the kernel's control pipe was closed or replaced");
    if (!rehearsing) writeAll(EVT, bytes);
  } catch (e) {
    lost(`the kernel's control pipe is gone: ${e.code}`);
  }
}

function writeAll(fd, bytes) {
  for (let done = 0; done < bytes.length;) {
    try {
      done += writeSync(fd, bytes, done, bytes.length - done);
    } catch (e) {
      if (e.code !== 'EAGAIN') throw e;
      atomicWait(sleeper, 0, 0, 1);
    }
  }
}
const sleeper = new Int32Array(new SharedArrayBuffer(4));

// The values of the members are JSON. `stringify` gets only strings, which have no `toJSON`.
const event = (kind, members) => send(`{"t":"${kind}","n":${n}${members}}\n`);
const quote = (text) => stringify(wellFormed(text));

function utf8Length(text) {
  return text.length * 3 < TEXT_LIMIT ? text.length : encodeUtf8(encoder, text).length;
}

// Returns `text` without its middle if it is over the limit.
function cut(text) {
  if (utf8Length(text) <= TEXT_LIMIT) return text;
  let half = TEXT_LIMIT / 2;
  while (utf8Length(slice(text, 0, half)) + utf8Length(slice(text, -half)) > TEXT_LIMIT) half = (half * 0.7) | 0;
  return `${slice(text, 0, half)}\n[... ${text.length - 2 * half} characters left out ...]\n${slice(text, -half)}`;
}

const dataMember = (mime, json) => `,"data":{${quote(mime)}:${json}}`;

// ---------------------------------------------------------------- the inspector session

let session, takerId;
let taken;
let handlesHeld = false;            // the session keeps values alive for the cell

function connect() {
  session = new Session();
  sessionConnect(session);
  // The session keeps a handle to this function, so that no name for it stays in the user's global scope.
  defineProperty(globalThis, '__sandpoolTake', { __proto__: null, configurable: true, value: (v) => { taken = v; } });
  post('Runtime.evaluate', { __proto__: null, expression: '__sandpoolTake' }, (e, r) => { takerId = r.result.objectId; });
  delete globalThis.__sandpoolTake;
}

// Replaces the session. An evaluation that is abandoned while its await is pending must not stay with the session: when
// V8 collects the promise, it calls JavaScript in the middle of the collection, and the process dies.
function renew() {
  sessionDisconnect(session);
  handlesHeld = false;
  setClear(held);
  connect();
}

// The session makes an ordinary object, assigns `params` to it and serialises it. A setter or a `toJSON` on its
// prototype would interfere, so the user's are hidden for the one access before user code runs.
function post(method, params, callback) {
  hide('params', (restore) => ({ __proto__: null, configurable: true, get() {}, set(value) {
    restore();
    defineProperty(this, 'params', { __proto__: null, value, enumerable: true, writable: true, configurable: true });
  } }));
  hide('toJSON', (restore) => ({ __proto__: null, configurable: true, get: restore }));
  sessionPost(session, method, params, callback);
}

function hide(name, replacement) {
  const theirs = getOwnPropertyDescriptor(ObjectPrototype, name);
  if (theirs === undefined || !theirs.configurable) return;
  defineProperty(ObjectPrototype, name, replacement(() => { defineProperty(ObjectPrototype, name, theirs); }));
}

// Returns the value itself that a remote object stands for, not a copy.
function live(remote) {
  if (hasOwn(remote, 'objectId')) {
    handlesHeld = true;
    taken = undefined;
    post('Runtime.callFunctionOn', {
      __proto__: null, objectId: takerId, functionDeclaration: 'function (v) { this(v); }',
      arguments: [{ __proto__: null, objectId: remote.objectId }],
    }, () => {});
    const value = taken;
    taken = undefined;
    return value;
  }
  if (hasOwn(remote, 'unserializableValue')) {
    const text = remote.unserializableValue;
    return remote.type === 'bigint' ? BigIntFrom(slice(text, 0, -1)) : NumberFrom(text);
  }
  return remote.type === 'undefined' ? undefined : remote.value;
}

function releaseHandles() {
  if (!handlesHeld) return;
  handlesHeld = false;
  post('Runtime.releaseObjectGroup', { __proto__: null, objectGroup: 'cell' }, () => {});
}

// ---------------------------------------------------------------- errors

const maps = new Map();             // cell number -> source map, as text or parsed
const mapOrder = [];
let mapsSize = 0;

function keepMap(number, text) {
  mapSet(maps, number, text);
  mapOrder[mapOrder.length] = { __proto__: null, number, size: text.length };
  mapsSize += text.length;
  while (mapsSize > MAPS_LIMIT && mapOrder.length > 1) {
    mapsSize -= mapOrder[0].size;
    mapDelete(maps, mapOrder[0].number);
    for (let i = 1; i < mapOrder.length; i++) mapOrder[i - 1] = mapOrder[i];
    mapOrder.length -= 1;
  }
}

function mapOf(number) {
  let map = mapGet(maps, number);
  if (typeof map === 'string') {
    try {
      const payload = parse(map);
      map = { __proto__: null, ts: /\.[mc]?tsx?$/.test(payload.sources?.[0] ?? ''), map: new SourceMap(payload),
        source: payload.sourcesContent?.[0] };
    } catch {
      map = null;
    }
    mapSet(maps, number, map);
  }
  return map ?? null;
}

// Returns the position in the user's cell of V8's `cell-<number>.js:line:column` (all counted from 1).
function original(number, line, column) {
  const map = mapOf(number);
  if (map === null) return { __proto__: null, file: `cell-${number}.js`, line, column };
  const found = findEntry(map.map, line - 1, column - 1);
  const known = found !== undefined && typeof found.originalLine === 'number';
  return { __proto__: null, file: `cell-${number}.${map.ts ? 'ts' : 'js'}`,
    line: known ? found.originalLine + 1 : line, column: known ? found.originalColumn + 1 : column };
}

const OWN_FILE = slice(__filename, __filename.lastIndexOf('/') + 1);
const FRAME = /^\s+at /;
const POSITION = /cell-(\d+)\.js:(\d+):(\d+)/;
const INTERNAL = /[( ]node:|new Promise \(<anonymous>\)/;
const ELIDED = /^\s+\.\.\. \d+ lines matching cause stack trace \.\.\./;      // frames like those of the cause, which follows

// Returns a stack (or an inspected error, which contains stacks) with only the user's frames, at their original positions.
function shownStack(text) {
  const lines = split(text, '\n');
  let out = '';
  let first = true;
  for (let i = 0; i < lines.length; i++) {
    let line = lines[i];
    let tail = '';
    const foreign = match(FRAME, line) !== null && (match(INTERNAL, line) !== null || indexOf(line, OWN_FILE) >= 0);
    if (foreign || match(ELIDED, line) !== null) {
      if (endsWith(line, ' {')) out += ' {';     // `inspect` writes the properties of an error behind its last frame
      continue;
    }
    for (let m; (m = match(POSITION, line)) !== null;) {
      const p = original(+m[1], +m[2], +m[3]);
      tail += slice(line, 0, m.index) + `${p.file}:${p.line}:${p.column}`;
      line = slice(line, m.index + m[0].length);
    }
    out += (first ? '' : '\n') + tail + line;
    first = false;
  }
  return out;
}

// Returns a text in which the files of shared packages have the names by which `NODE_PATH` leads to them. Node resolves links,
// and the directories of the host may contain the name of its user.
function withoutHostPaths(text) {
  const directories = split(environment.NODE_PATH ?? '', ':');
  for (let i = 0; i < directories.length; i++) {
    let real = '';
    try {
      real = realpathSync(directories[i]);
    } catch {}
    if (real === '' || real === directories[i] || indexOf(text, real) < 0) continue;
    const parts = split(text, real);
    text = parts[0];
    for (let k = 1; k < parts.length; k++) text += directories[i] + parts[k];
  }
  return text;
}

const plain = freeze({ __proto__: null, colors: false });

// Returns {name, value, text} of any thrown value. This runs user code (getters, `inspect.custom`).
function describe(thrown) {
  if (!isNativeError(thrown)) return { __proto__: null, name: typeof thrown, value: inspect(thrown, plain), text: `Uncaught ${inspect(thrown, plain)}` };
  const name = `${thrown.name}`, value = withoutHostPaths(`${thrown.message}`);
  return { __proto__: null, name, value, text: withoutHostPaths(shownStack(inspect(thrown, plain))) };
}

const UNSHOWN = freeze({ __proto__: null, name: 'Error', value: '', text: 'Error: <the error could not be shown>' });

function safeDescribe(thrown) {
  try {
    return describe(thrown);
  } catch {
    return UNSHOWN;
  }
}

const withNewline = (text) => (endsWith(text, '\n') ? text : text + '\n');

function report(d) {
  event('error', `,"name":${quote(cut(d.name))},"value":${quote(cut(d.value))},"text":${quote(withNewline(cut(d.text)))}`);
}

// Describes the error of a cell that does not compile. It has no frame; V8 reports the position.
function syntaxError(thrown, details, code) {
  const p = original(number, details.lineNumber + 1, details.columnNumber + 1);
  const source = mapOf(number)?.source ?? code;
  const line = split(source, '\n')[p.line - 1] ?? '';
  const value = `${thrown.message}`;
  return { __proto__: null, name: 'SyntaxError', value,
    text: `${p.file}:${p.line}\n${line}\n${repeat(' ', p.column > 1 ? p.column - 1 : 0)}^\n\nSyntaxError: ${value}` };
}

const isSyntaxError = (thrown, details) =>
  isNativeError(thrown) && !hasOwn(details, 'stackTrace') && details.text === 'Uncaught'
  && thrown instanceof SyntaxErrorClass && match(POSITION, `${thrown.stack}`) === null;
const SyntaxErrorClass = SyntaxError;

// ---------------------------------------------------------------- output of earlier cells

// Timers, promises and handles remember the cell that created them. Before Node 24 this slows every promise down, and an
// interrupt may end the process, so the driver does not know there which cell writes.
const cells = NumberFrom(split(process.versions.node, '.')[0]) >= 24 ? new AsyncLocalStorage() : null;
const inCell = uncurry(AsyncLocalStorage.prototype.run), cellOf = uncurry(AsyncLocalStorage.prototype.getStore);
let strays = null;                                        // output of earlier cells, newest first
let straySize = 0;

// Returns the earlier cell to which the caller belongs, or 0 if it belongs to the current cell.
function stray() {
  const cell = cells === null ? undefined : cellOf(cells);
  return cell === undefined || (cell === n && current !== null) ? 0 : cell;
}

function keepStray(cell, text) {
  const room = STRAY_LIMIT - straySize;
  straySize += text.length;
  if (room > 0) strays = { __proto__: null, cell, text: slice(text, 0, room), next: strays };
}

// Sends one `late` for each earlier cell that has written something.
function sendStrays() {
  const lost = straySize - STRAY_LIMIT;
  let last = 0;
  while (strays !== null) {
    const { cell } = strays;
    let text = '', others = null;
    for (; strays !== null; strays = strays.next) {
      if (strays.cell === cell) text = strays.text + text;
      else others = { __proto__: null, cell: strays.cell, text: strays.text, next: others };
    }
    // The loop above reversed the order; this restores it.
    for (; others !== null; others = others.next) strays = { __proto__: null, cell: others.cell, text: others.text, next: strays };
    event('late', `,"run":${cell},"text":${quote(cut(text))}`);
    last = cell;
  }
  straySize = 0;
  if (last > 0 && lost > 0) event('late', `,"run":${last},"text":${quote(`[... ${lost} characters left out ...]\n`)}`);
}

// ---------------------------------------------------------------- one cell

const EXIT = Symbol('process.exit');
const state = new Int32Array(new SharedArrayBuffer(12));  // [a cell is running, beats of the main thread, its number]
let current = null;                                       // the cell that has no `done` yet
let finish = null;                                        // ends the running cell; the first caller wins
let lateCount = 0;
let begun = false;                                        // a cell of the user has arrived
let number = 0;                                           // number in the cell's name, which does not count probes
let probes = 0;

// The cell `;` checks whether the kernel still responds. The transpiler does not change it and produces it from nothing else.
const isProbe = (request) => request.code === ';' && typeof request.map !== 'string';

function run(request) {
  const cell = { __proto__: null, code: request.code, started: now(), outcome: null, settling: false, variables: null };
  current = cell;
  n = request.n;
  atomicStore(state, 2, n | 0);
  lateCount = 0;
  if (isProbe(request)) probes += 1;
  else if (!rehearsing) begun = true;
  number = n - probes;
  if (typeof request.map === 'string') keepMap(number, request.map);
  if (begun) startWatchdog();
  guardProcess();
  repairStreams();
  renewRequire();
  const mine = (outcome) => {
    if (finish !== mine) return;
    finish = null;
    atomicStore(state, 0, 0);
    cell.outcome = outcome;
    soon(() => conclude(cell));             // outside of the user's stack and of the microtask queue
  };
  finish = mine;
  atomicStore(state, 0, 1);
  try {
    if (hasOwn(request, 'env')) setVariables(cell, request.env);
    const evaluate = () => post('Runtime.evaluate', {
      __proto__: null, expression: `${cell.code}\n//# sourceURL=cell-${number}.js`, objectGroup: 'cell',
      replMode: true, awaitPromise: true,
    }, (failure, response) => mine(failure ? { __proto__: null, failure } : { __proto__: null, response }));
    if (cells === null) evaluate();
    else inCell(cells, n, evaluate);
  } catch (e) {
    mine({ __proto__: null, failure: e });
  }
  guardProcess();
}

// Ends a cell with exactly one `done`, even if showing its value fails.
function conclude(cell) {
  if (cell !== current) return;
  cell.settling = true;
  atomicStore(state, 0, 1);             // showing a value or an error is user code
  let end;
  try {
    end = settle(cell.code, cell.outcome);
  } catch {
    report(UNSHOWN);
    end = { __proto__: null, status: 'error', extra: '' };
  }
  settled(cell, end.status, end.extra);
}

// Sets the environment variables of a cell.
function setVariables(cell, variables) {
  const names = keys(variables);
  for (let i = 0; i < names.length; i++) {
    const name = names[i], value = variables[name];
    const before = hasOwn(environment, name) ? environment[name] : undefined;
    cell.variables = { __proto__: null, name, value, before, next: cell.variables };
    environment[name] = value;
  }
}

// Restores the environment from before the cell, except for variables that the cell itself changed.
function restoreVariables(cell) {
  for (; cell.variables !== null; cell.variables = cell.variables.next) {
    const { name, value, before } = cell.variables;
    if (!hasOwn(environment, name) || environment[name] !== value) continue;
    if (before === undefined) delete environment[name];
    else environment[name] = before;
  }
}

function settled(cell, status, extra) {
  restoreVariables(cell);
  current = null;
  atomicStore(state, 0, 0);
  if (!isOurs(REQ, reqInode)) lost("the kernel's request pipe is gone");
  if (strays !== null) sendStrays();
  event('done', `,"status":"${status}","ms":${round((now() - cell.started) * 1000) / 1000}${extra}`);
  releaseHandles();
  if (rehearsing) endRehearsal();
  takeRequest();
}

// Resumes after the watchdog was asked to stop a cell. It may have terminated that cell, or the driver at any point. If
// another cell runs by now, that one continues.
function recover(number) {
  const cell = current;
  if (cell === null || (n | 0) !== number) return takeRequest();
  if (finish !== null) return finish({ __proto__: null, interrupted: true });
  if (!cell.settling && cell.outcome !== null) { soon(() => conclude(cell)); return; }
  atomicStore(state, 0, 0);
  renew();
  report(STOPPED);
  settled(cell, 'interrupted', '');
}
const STOPPED = freeze({ __proto__: null, name: 'Interrupted', value: 'the cell was interrupted', text: 'Interrupted: the cell was interrupted' });

function settle(code, outcome) {
  let status = 'ok', extra = '';
  if (hasOwn(outcome, 'exit')) {
    status = 'exit';
    extra = `,"code":${outcome.exit}`;
    renew();
  } else if (hasOwn(outcome, 'interrupted')) {
    status = 'interrupted';
    renew();
  } else if (hasOwn(outcome, 'failure')) {
    status = settleFailure(outcome.failure);
  } else if (hasOwn(outcome.response, 'exceptionDetails')) {
    status = settleException(outcome.response.exceptionDetails, code);
  } else {
    status = settleValue(live(outcome.response.result));
  }
  if (status === 'interrupted') report(STOPPED);
  process.exitCode = undefined;
  guardProcess();
  repairStreams();
  return { __proto__: null, status, extra };
}

function settleFailure(failure) {
  const message = `${failure?.message ?? failure}`;
  renew();
  if (match(/Internal error|terminated/i, message) !== null) return 'interrupted';
  report({ __proto__: null, name: 'KernelError', value: message, text: `KernelError: ${message}` });
  return 'error';
}

function settleException(details, code) {
  const thrown = live(details.exception);
  let d;
  try {
    d = isSyntaxError(thrown, details) ? syntaxError(thrown, details, code) : describe(thrown);
  } catch {
    d = UNSHOWN;
  }
  report(d);
  return 'error';
}

let lastValue;
function settleValue(value) {
  if (value === undefined) return 'ok';
  let text;
  try {
    text = inspect(value, plain);
  } catch (e) {
    report(safeDescribe(e));
    return 'error';
  }
  keepLastValue(value);
  event('result', dataMember('text/plain', quote(cut(text))));
  return 'ok';
}

// Sets `_` as Node's REPL does, unless the user has defined `_`.
function keepLastValue(value) {
  const d = getOwnPropertyDescriptor(globalThis, '_');
  if (d !== undefined && (d.value !== lastValue || !d.configurable)) return;
  lastValue = value;
  defineProperty(globalThis, '_', { __proto__: null, value, writable: true, configurable: true, enumerable: false });
}

// ---------------------------------------------------------------- what cells find in their global scope

function define(name, value) {
  defineProperty(globalThis, name, { __proto__: null, value, enumerable: false, writable: false, configurable: false });
}

const held = new Set();
const drop = (p) => { setDelete(held, p); };

// Keeps a promise alive. The transpiler writes `await X` at top level as `await __hold(X)`: if only the suspended cell
// refers to the promise, V8 may collect both, and the cell never ends (or the process dies, see `renew`).
const hold = (value) => {
  if (value === null || (typeof value !== 'object' && typeof value !== 'function')) return value;
  if (!isPromise(value)) {
    if (typeof value.then !== 'function') return value;
    value = PromiseResolve(value);        // a thenable's `then` is called once, as by `await`
  }
  setAdd(held, value);
  then(value, () => drop(value), () => drop(value));
  return value;
};
define('__hold', hold);

// Keeps the promises alive for which a `for await (… of X)` waits, written as `for await (… of __holdEach(X))`.
define('__holdEach', (iterable) => {
  if (iterable === null || iterable === undefined) return iterable;
  const ofPromises = iterable[asyncIterator] ?? null;
  const each = ofPromises ?? iterable[iterator];
  if (typeof each !== 'function') return iterable;      // the loop throws the error
  const inner = invoke(each, iterable);
  const held = ofPromises !== null ? hold : (step) => ({ done: step.done, value: hold(step.value) });
  return {
    __proto__: null,
    [ofPromises !== null ? asyncIterator : iterator]() { return this; },
    next: () => held(inner.next()),
    get return() { return typeof inner.return === 'function' ? () => held(inner.return()) : undefined; },
  };
});

// Implements `import()` relative to the working directory, because scripts of the inspector cannot import.
let importer = null, importerBase = null, importedOnce = false;
const importerAt = (base) => runInThisContext(new Script('(s, o) => import(s, o)',
  { __proto__: null, filename: `${base}/cell.js`, importModuleDynamically: mainLoader }));
const importBy = (here, specifier, options) => (options === undefined ? here(specifier) : here(specifier, options));
function importHere(specifier, options) {
  const base = cwd();
  if (base !== importerBase) {
    importer = importerAt(base);
    importerBase = base;
  }
  const found = importBy(importer, specifier, options);
  return isPackage(specifier) ? then(found, undefined, (e) => importShared(specifier, options, e)) : found;
}

// Imports a package from the directories of `NODE_PATH`, as `require` does. Modules of Node look only above the importing file.
const MODULES = '/node_modules';
const isPackage = (specifier) => typeof specifier === 'string' && match(/^(?:@[\w.-]+\/)?[A-Za-z0-9][\w.-]*(?:\/.*)?$/, specifier) !== null;
async function importShared(specifier, options, error) {
  const directories = error?.code === 'ERR_MODULE_NOT_FOUND' ? split(environment.NODE_PATH ?? '', ':') : [];
  for (let i = 0; i < directories.length; i++) {
    if (!endsWith(directories[i], MODULES)) continue;
    const here = importerAt(slice(directories[i], 0, -MODULES.length));
    try {
      return await importBy(here, specifier, options);
    } catch (e) {
      if (e?.code !== 'ERR_MODULE_NOT_FOUND') throw e;
    }
  }
  throw error;
}
define('__import', (specifier, options) => {
  if (importedOnce) return importHere(specifier, options);
  importedOnce = true;
  const theirs = process.emitWarning;
  process.emitWarning = () => {};     // this loader is experimental and warns the first time
  try {
    return importHere(specifier, options);
  } finally {
    process.emitWarning = theirs;
  }
});

// Finds named imports. Node looks for the names of a CommonJS package without running it, and misses those that are
// assigned in a loop, such as lodash's; they are members of the default export.
define('__named', (namespace) => {
  const exported = namespace.default;
  if (exported === null || (typeof exported !== 'object' && typeof exported !== 'function')) return namespace;
  return new ProxyOf({ __proto__: null }, {
    __proto__: null,
    get: (_, name) => name in namespace ? namespace[name] : exported[name],
  });
});

// Implements TypeScript's legacy decorators under the name that the transpiler uses.
define('babelHelpers', freeze({
  decorate(decorators, target, key, desc) {
    const count = arguments.length;
    let r = count < 3 ? target : desc === null ? (desc = getOwnPropertyDescriptor(target, key)) : desc;
    for (let i = decorators.length - 1; i >= 0; i--) {
      const d = decorators[i];
      if (d) r = (count < 3 ? d(r) : count > 3 ? d(target, key, r) : d(target, key)) || r;
    }
    if (count > 3 && r) defineProperty(target, key, r);
    return r;
  },
  decorateParam: (index, decorator) => (target, key) => decorator(target, key, index),
  decorateMetadata(key, value) {
    if (typeof Reflect === 'object' && typeof Reflect.metadata === 'function') return Reflect.metadata(key, value);
  },
}));

function pictureType(bytes) {
  if (bytes[0] === 0x89 && bytes[1] === 0x50 && bytes[2] === 0x4e && bytes[3] === 0x47) return 'image/png';
  if (bytes[0] === 0xff && bytes[1] === 0xd8 && bytes[2] === 0xff) return 'image/jpeg';
  return null;
}

const isPicture = (mime) => startsWith(mime, 'image/') && mime !== 'image/svg+xml';

function display(value, mime) {
  if (mime === undefined && isUint8Array(value)) mime = pictureType(value) ?? undefined;
  mime = mime === undefined ? 'text/plain' : `${mime}`;
  const cell = stray();
  if (cell !== 0) return keepStray(cell, typeof value === 'string' && !isPicture(mime) ? `${value}\n` : `[${mime}]\n`);
  event('display', displayData(value, mime));
}

function displayData(value, mime) {
  if (isPicture(mime)) {
    let base64 = isUint8Array(value)
      ? toBase64(bufferFrom(value.buffer, value.byteOffset, value.byteLength), 'base64')
      : `${value}`;
    if (startsWith(base64, 'data:')) base64 = slice(base64, indexOf(base64, ',') + 1);
    if (base64.length > PICTURE_LIMIT) {
      return dataMember('text/plain', quote(`[${mime} left out: it is larger than ${PICTURE_LIMIT / 1e6} MB]`));
    }
    return dataMember(mime, quote(unbroken(base64)));
  }
  if (typeof value === 'string') return dataMember(mime, quote(cut(value)));
  if (startsWith(mime, 'application/') && endsWith(mime, 'json')) {
    const json = stringify(value);        // throws to the caller if the value cannot be JSON
    if (typeof json === 'string' && utf8Length(json) <= TEXT_LIMIT) return dataMember(mime, wellFormedJson(json));
  }
  return dataMember(mime, quote(cut(inspect(value, plain))));
}

// Returns JSON text without lone surrogates, which appear as escapes that strict readers refuse.
const wellFormedJson = (json) => (indexOf(json, '\\ud') < 0 ? json : stringify(deepWellFormed(parse(json))));
function deepWellFormed(v) {
  if (typeof v === 'string') return wellFormed(v);
  if (typeof v === 'object' && v !== null) for (const key in v) v[key] = deepWellFormed(v[key]);
  return v;
}

function unbroken(base64) {
  const parts = split(base64, '\n');
  let out = '';
  for (let i = 0; i < parts.length; i++) out += trim(parts[i]);
  return out;
}

defineProperty(globalThis, 'display', { __proto__: null, value: display, writable: true, configurable: true, enumerable: false });

// Provides `require`, `module` and `exports` as Node's REPL does and `__dirname` as in a script. All follow the working
// directory.
let base = null;
const cellModule = { exports: {}, id: '.', loaded: false, children: [], paths: [] };
const own = { __proto__: null };
function renewRequire() {
  let dir;
  try { dir = cwd(); } catch { return; }       // the directory was removed
  if (dir === base) return;
  base = dir;
  const require = createRequire(`${dir}/cell.js`);
  require.main = cellModule;                   // `require.main === module`, as in a script
  offer('require', require);
  offer('module', cellModule);
  offer('exports', cellModule.exports);
  offer('__dirname', dir);
  offer('__filename', `${dir}/cell.js`);
}

function offer(name, value) {
  const d = getOwnPropertyDescriptor(globalThis, name);
  if (d !== undefined && (!d.configurable || d.value !== own[name])) return;     // redefined by the user
  own[name] = value;
  defineProperty(globalThis, name, { __proto__: null, value, writable: true, configurable: true, enumerable: false });
}

// ---------------------------------------------------------------- the process

// Implements `process.exit`, which ends the cell and not the kernel.
function exit(code) {
  const wanted = code ?? process.exitCode ?? 0;
  const number = typeof wanted === 'number' || typeof wanted === 'string' ? NumberFrom(wanted) & 0xff : 1;
  if (finish !== null) finish({ __proto__: null, exit: number });
  throw EXIT;
}
process.exit = process.reallyExit = exit;
process.abort = () => exit(134);

function onSigint() {
  if (finish !== null) finish({ __proto__: null, interrupted: true });
}

// Reports errors that belong to no cell. They are never fatal, and their number is limited.
function onLate(error) {
  if (error === EXIT || (lateCount += 1) > LATE_LIMIT) return;
  const text = lateCount === LATE_LIMIT ? 'further errors are not shown' : safeDescribe(error).text;
  event('late', `,"text":${quote(withNewline(cut(text)))}`);
}

const bootHandlers = ['newListener', 'removeListener'].map((name) => ({ __proto__: null, name, handlers: process.listeners(name) }));
const ownHandlers = [
  { __proto__: null, name: 'SIGINT', handler: sturdy(onSigint) },
  { __proto__: null, name: 'uncaughtException', handler: sturdy((e) => onLate(e)) },
  { __proto__: null, name: 'unhandledRejection', handler: sturdy((e) => onLate(e)) },
];

function ensure(name, handler) {
  const present = listeners(process, name);
  for (let i = 0; i < present.length; i++) if (present[i] === handler) return;
  on(process, name, handler);
}

// Protects a handler: emitters call `handler.apply`, which cells may have replaced on the prototype.
function sturdy(handler) {
  return defineProperty(handler, 'apply', { __proto__: null, value: apply });
}

// Restores the listeners that keep the process alive, which a cell may have removed. The boot handlers come first, because
// a listener for a signal has no effect without them.
function guardProcess() {
  for (let i = 0; i < bootHandlers.length; i++) {
    const { name, handlers } = bootHandlers[i];
    for (let j = 0; j < handlers.length; j++) ensure(name, handlers[j]);
  }
  for (let i = 0; i < ownHandlers.length; i++) ensure(ownHandlers[i].name, ownHandlers[i].handler);
}

// Makes writes block. Pipes are written in the background by default, and `done` would overtake the output. An ended
// stream looks usable a moment later, but its handle is closed, so its end is recorded.
const ended = [false, false];
function prepareStream(stream, i) {
  stream._handle?.setBlocking?.(true);
  const write = stream.write;
  if (cells !== null) defineProperty(stream, 'write', { __proto__: null, value: writeOf, configurable: true, writable: true });
  function writeOf(chunk, encoding, done) {
    const cell = stray();
    if (cell === 0) return invoke(write, stream, chunk, encoding, done);
    keepStray(cell, isUint8Array(chunk) ? toBase64(bufferFrom(chunk.buffer, chunk.byteOffset, chunk.byteLength), 'utf8') : `${chunk}`);
    const callback = typeof encoding === 'function' ? encoding : done;
    if (typeof callback === 'function') soon(callback);
    return true;
  }
  on(stream, 'finish', () => { ended[i] = true; });
}

// Replaces the methods of `console` by those below the inspector's. While a session is connected, the inspector keeps the
// arguments of the last thousand calls alive.
function freeConsole() {
  for (const name of keys(console)) {
    const method = console.Console.prototype[name];
    if (typeof method !== 'function') continue;
    console[name] = defineProperty(method.bind(console), 'name', { __proto__: null, value: name, configurable: true });
  }
}

// Copies of 1 and 2, in case a cell closes them. Node cannot duplicate a descriptor, but can open it again.
const spare = [1, 2].map((fd) => {
  try { return openSync(`/proc/self/fd/${fd}`, 'w'); } catch { return -1; }
});

function repairStreams() {
  for (let i = 0; i < 2; i++) {
    const fd = i + 1, name = i === 0 ? 'stdout' : 'stderr';
    try {
      if (reopen(fd, spare[i]) || ended[i] || !usable(process[name])) replaceStream(fd, name);
    } catch {}
  }
}

function reopen(fd, copy) {
  try {
    fstatSync(fd);
    return false;
  } catch {}
  const fresh = openSync(`/proc/self/fd/${copy}`, 'w');      // the lowest free number
  if (fresh !== fd) { closeSync(fresh); return false; }
  return true;
}

const usable = (stream) => typeof stream === 'object' && stream !== null && !stream.destroyed && !stream.writableEnded;

function replaceStream(fd, name) {
  const stream = new Writable({ decodeStrings: true, write(chunk, _encoding, done) { writeAll(fd, chunk); done(); } });
  stream.fd = fd;
  ended[fd - 1] = false;
  prepareStream(stream, fd - 1);
  defineProperty(process, name, { __proto__: null, value: stream, configurable: true, enumerable: true, writable: true });
  console[`_${name}`] = stream;
  writeSync(2, `sandpool: process.${name} was closed by the code and has been restored\n`);
}

// ---------------------------------------------------------------- the watchdog

// A thread that waits for the number of a cell on KINT. It sends a message to the main thread. If the main thread does not
// react, the watchdog terminates what it runs, repeatedly, because a flood of `nextTick`s continues with the next one. A
// main thread that reacts is never terminated: that would hit the next code it runs, which may be the driver. The number
// of a cell that is over is ignored. The number of a cell that has not begun is meant for a timer of an old cell that
// blocks the main thread; while no cell runs, the watchdog waits longer, because a cell may be about to begin or to end.
// V8 13 compiles some loops that allocate (`a.push(new Array(100))`) without the check for a termination; the guest kills
// such a cell.
const WATCHDOG = `
const { workerData: { fd, state }, parentPort } = require('node:worker_threads');
const { readSync } = require('node:fs');
const { Session } = require('node:inspector');
const session = new Session();
session.connectToMainThread();
const bytes = Buffer.alloc(4);
for (;;) {
  try { if (readSync(fd, bytes) === 0) break; } catch (e) { if (e.code === 'EAGAIN') { Atomics.wait(state, 0, -1, 5); continue; } break; }
  const number = bytes.readInt32LE();
  const isOver = () => ((number - Atomics.load(state, 2)) | 0) < 0;
  let patience = Atomics.load(state, 0) === 0 ? 400 : 20;
  for (let tries = 0; tries < 40 && !isOver(); tries++) {
    const beat = Atomics.load(state, 1);
    parentPort.postMessage(number);
    if (Atomics.wait(state, 1, beat, patience) !== 'timed-out' || isOver()) break;
    session.post('Runtime.terminateExecution', () => {});
    if (Atomics.wait(state, 1, beat, 50) !== 'timed-out') break;
    patience = 20;
  }
}`;

let watchdog = null;

// Starts the watchdog with the first cell. It doubles the memory of a kernel, and a waiting kernel does not need it.
function startWatchdog() {
  if (watchdog !== null || KINT < 0) return;
  watchdog = 0;
  try {
    watchdog = worker({ fd: KINT, state });
    watchdog.on('message', sturdy((number) => { atomicAdd(state, 1, 1); atomicNotify(state, 1); recover(number); }));
    watchdog.on('error', () => {});
    watchdog.unref();
  } catch {}
}

const worker = (workerData) => new Worker(WATCHDOG, {
  eval: true, env: {}, execArgv: [], workerData, stdout: false, stderr: false,
  resourceLimits: { maxOldGenerationSizeMb: 8, maxYoungGenerationSizeMb: 1, stackSizeMb: 1, codeRangeSizeMb: 0 },
});

// ---------------------------------------------------------------- before the first cell

// A kernel that waits for its first cell rehearses: V8 compiles a function when it is first called, so the first cell would
// take ten times as long as the next. A rehearsal leaves no trace: no event, no output and no name, and the first cell
// gets the number it would have had. A cell that arrives at once is not delayed; one that arrives during the rehearsal
// waits for one step, a few milliseconds at most.
const REHEARSE_AFTER = 20;          // milliseconds without a cell
let rehearsing = false;
let rehearsed = 0;

const REHEARSALS = [
  () => rehearse("console.log(1, 'a', { a: [1] }); console.error(''); [1, { a: 'b' }]"),
  () => rehearse('null.x'),
  // A function cannot be handed to a thread, so this fails just before it would start one.
  () => { try { worker(() => {}); } catch {} },
  // The start leaves nearly a megabyte of garbage, which would stay while the kernel waits.
  () => { post('HeapProfiler.collectGarbage', undefined, () => {}); },
];

function rehearseNext() {
  if (begun || rehearsed === REHEARSALS.length) return;
  if (current === null) {
    rehearsed += 1;
    REHEARSALS[rehearsed - 1]();
  }
  if (!rehearsing) soon(rehearseNext);
}

function rehearse(code) {
  if (!hush(process.stdout, true) || !hush(process.stderr, true)) return;
  rehearsing = true;
  run({ __proto__: null, n, code });
}

function endRehearsal() {
  rehearsing = false;
  hush(process.stdout, false);
  hush(process.stderr, false);
  delete globalThis._;
  lastValue = undefined;
  soon(rehearseNext);
}

// Makes the stream write nothing (`on`) or everything again. Returns whether that is possible.
function hush(stream, on) {
  const handle = stream._handle;
  if (typeof handle?.writeUtf8String !== 'function') return false;
  if (!on) return delete handle.writeUtf8String;
  const write = handle.writeUtf8String;
  handle.writeUtf8String = (request) => invoke(write, handle, request, '');
  return true;
}

// ---------------------------------------------------------------- start

prepareStream(process.stdout, 0);
prepareStream(process.stderr, 1);
connect();
guardProcess();
renewRequire();
freeConsole();
delete process.mainModule;          // it is this file, which is not the user's
delete require.cache[__filename];

const requests = new Socket({ fd: REQ, readable: true, writable: false });
// These become own properties, so that a changed prototype does not affect this socket.
for (const name of ['emit', 'push', 'read', 'on', 'once', '_read', 'destroy', 'listenerCount']) {
  defineProperty(requests, name, { __proto__: null, value: requests[name] });
}
requests.setEncoding('utf8');
requests.on('end', sturdy(() => die()));
requests.on('error', sturdy(() => die()));
let pending = '';
requests.on('data', sturdy((chunk) => { pending += chunk; takeRequest(); }));

function takeRequest() {
  if (current !== null) return;
  const end = indexOf(pending, '\n');
  if (end < 0) return;
  const request = parse(slice(pending, 0, end));
  pending = slice(pending, end + 1);
  if (request.t === 'run') run(request);
  else if (request.t === 'begin') begin();
}

function begin() {
  event('ready', `,"version":${quote(slice(process.version, 1))}`);
  setTimeout(rehearseNext, REHEARSE_AFTER);
}

// The first request comes from the driver itself, so that V8 compiles that code too. Node has no `dup`, but can open a
// pipe by its descriptor.
try {
  const own = openSync(`/proc/self/fd/${REQ}`, 'w');
  writeSync(own, '{"t":"begin"}\n');
  closeSync(own);
} catch {
  begin();
}
