// Walks through the agentrun dialect with the real TypeScript clients:
//   ts_client.mjs [--client sdk|client] [--mode legacy|auto|2026-07-28] COMMAND [ARG...]
// `sdk` is @modelcontextprotocol/sdk 1.32.2 (legacy only), `client` is @modelcontextprotocol/client 2.4.0. Both are looked up from
// the directory in NODE_CLIENTS, or from here. Prints `ok <step>` for every step and exits non-zero at the first that fails.

import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import path from 'node:path';
import { pathToFileURL } from 'node:url';

const TOOLS = ['run_code', 'create_context', 'stop_context', 'list_contexts', 'upload_file', 'download_file', 'list_files'];
const FIGURE = "import matplotlib.pyplot as plt\nplt.plot([1, 2, 3])\nprint('drawn')";
const TICKS = "import time\nfor i in range(4):\n    print('tick', i, flush=True)\n    time.sleep(0.4)";
const SLEEP = 'import time\ntime.sleep(25)';

const options = { client: 'sdk', mode: 'legacy' };
const command = process.argv.slice(2);
while (command[0]?.startsWith('--')) {
  options[command[0].slice(2)] = command[1];
  command.splice(0, 2);
}
if (command.length === 0) {
  console.error('usage: ts_client.mjs [--client sdk|client] [--mode legacy|auto|2026-07-28] COMMAND [ARG...]');
  process.exit(2);
}

const ok = (step) => console.log(`ok ${step}`);

async function load(name) {
  const home = process.env.NODE_CLIENTS ?? path.dirname(new URL(import.meta.url).pathname);
  return import(pathToFileURL(createRequire(path.join(home, 'package.json')).resolve(name)));
}

async function connect() {
  const [main, stdio] =
    options.client === 'sdk'
      ? ['@modelcontextprotocol/sdk/client/index.js', '@modelcontextprotocol/sdk/client/stdio.js']
      : ['@modelcontextprotocol/client', '@modelcontextprotocol/client/stdio'];
  const { Client } = await load(main);
  const { StdioClientTransport } = await load(stdio);
  const mode = ['legacy', 'auto'].includes(options.mode) ? options.mode : { pin: options.mode };
  const client = new Client({ name: 'walk', version: '1' }, options.client === 'sdk' ? {} : { versionNegotiation: { mode } });
  // A message the client cannot read ends up here, and nowhere else.
  client.onerror = (error) => {
    console.error('client error:', error);
    process.exitCode = 1;
  };
  await client.connect(new StdioClientTransport({ command: command[0], args: command.slice(1), env: process.env }));
  return client;
}

const client = await connect();
const request = (name, args, more) =>
  options.client === 'sdk'
    ? client.callTool({ name, arguments: args }, undefined, more)
    : client.callTool({ name, arguments: args }, more);

/** The result and the object in its first block, which must be the structured content unless it is an error. */
async function call(name, args = {}) {
  const result = await request(name, args);
  const object = JSON.parse(result.content[0].text);
  assert.equal(Boolean(result.isError), 'code' in object, `${name}: isError is ${result.isError} for ${result.content[0].text}`);
  assert.deepEqual(result.structuredContent, result.isError ? undefined : object, `${name}: structured content differs from the text`);
  return [result, object];
}
const get = async (name, args) => (await call(name, args))[1];
const run = (context_id, code) => get('run_code', { code, context_id });

async function fails(code, name, args) {
  const answer = await get(name, args);
  assert.equal(answer.code, code, JSON.stringify(answer));
  return answer.error;
}

async function create(args) {
  const made = await get('create_context', args);
  const title = args.language === 'javascript' ? 'JavaScript' : 'Python';
  assert.equal(made.message, `${title} context created successfully`);
  assert.match(made.created_at, /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$/);
  return made.context_id;
}

async function order(expected) {
  const listed = await get('list_contexts');
  assert.deepEqual(listed.contexts.map((c) => c.context_id), expected, 'not newest first');
  assert.equal(listed.total, expected.length);
}

ok(`connected to ${client.getServerVersion()?.name}`);

const { tools } = await client.listTools();
assert.deepEqual(tools.map((t) => t.name), TOOLS);
assert.deepEqual(tools[0].inputSchema.required, ['code', 'context_id']);
assert.deepEqual(tools[3].inputSchema, { type: 'object', properties: {}, required: [] });
ok('tools');

const a = await create({ name: 'py-a', description: 'first' });
const b = await create({ name: 'py-b', language: 'python' });
const js = await create({ name: 'js-c', language: 'javascript' });
ok('create');

assert.equal((await run(a, 'x = 42')).stdout, '');
assert.equal((await run(a, 'print(x)')).stdout, '42\n');
assert.equal((await run(a, 'x + 1')).stdout, '43\n');
assert.equal((await run('py-a', 'print(x)')).stdout, '42\n');
ok('state');

assert.match((await run(b, 'print(x)')).stderr, /NameError/);
ok('isolation');

await run(js, 'let y = 20; const z = 22;');
assert.equal((await run(js, 'console.log(y + z)')).stdout, '42\n');
ok('javascript');

{
  const [result, ran] = await call('run_code', { code: FIGURE, context_id: a });
  assert.ok(ran.success, ran.stderr);
  const pictures = result.content.filter((block) => block.type === 'image');
  assert.equal(pictures.length, 1);
  assert.equal(pictures[0].mimeType, 'image/png');
  assert.equal(Buffer.from(pictures[0].data, 'base64').subarray(1, 4).toString(), 'PNG');
}
ok('picture');

assert.equal(await fails('INVALID_PARAMS', 'run_code', { code: '1' }), 'Invalid arguments: code and context_id are required');
await fails('INVALID_PARAMS', 'run_code', { code: 5, context_id: a });
assert.equal(await fails('CONTEXT_NOT_FOUND', 'run_code', { code: '1', context_id: 'ctx-nobody' }), 'Context not found: ctx-nobody');
await fails('INVALID_CONTEXT_NAME', 'create_context', { name: 'a b' });
assert.equal(
  await fails('INVALID_LANGUAGE', 'create_context', { name: 'r', language: 'ruby' }),
  "Unsupported language: ruby. Must be 'python' or 'javascript'",
);
assert.match((await run(a, '1 / 0')).stderr, /File "<stdin>", line 1[^]*ZeroDivisionError: division by zero\n$/);
await assert.rejects(request('no_such_tool', {}), (error) => error.code === -32602 && error.message.includes('no_such_tool'));
ok('errors');

await order([js, b, a]);
ok('order');

{
  const blob = Buffer.from(Array.from({ length: 256 }, (_, i) => i));
  await get('upload_file', { context_id: a, path: 'data/in.csv', content: 'a,b\n1,2\n' });
  const written = await get('upload_file', { context_id: a, path: 'raw.bin', content: blob.toString('base64'), encoding: 'base64' });
  assert.deepEqual(written, { path: 'raw.bin', size: 256 });
  assert.equal((await run(a, "print(open('data/in.csv').read(), end='')")).stdout, 'a,b\n1,2\n');
  const text = await get('download_file', { context_id: a, path: 'data/in.csv' });
  assert.deepEqual([text.encoding, text.content], ['utf-8', 'a,b\n1,2\n']);
  const raw = await get('download_file', { context_id: a, path: 'raw.bin' });
  assert.equal(raw.encoding, 'base64');
  assert.deepEqual(Buffer.from(raw.content, 'base64'), blob);
  const paths = (await get('list_files', { context_id: a })).files.map((file) => file.path);
  assert.ok(paths.includes('data/in.csv') && paths.includes('raw.bin'), String(paths));
  await fails('FILE_NOT_FOUND', 'download_file', { context_id: a, path: 'nowhere.txt' });
  await fails('INVALID_PATH', 'download_file', { context_id: a, path: '../../etc/passwd' });
}
ok('files');

{
  const seen = [];
  await request('run_code', { code: TICKS, context_id: a }, { onprogress: (note) => seen.push(note) });
  const lines = seen.map((note) => note.message).join('\n');
  for (let i = 0; i < 4; i++) assert.ok(lines.includes(`tick ${i}`), lines);
  assert.ok(seen.every((note, i) => i === 0 || note.progress > seen[i - 1].progress), 'progress goes back');
}
ok('progress');

{
  const stop = new AbortController();
  const sleeping = request('run_code', { code: SLEEP, context_id: a }, { signal: stop.signal });
  setTimeout(() => stop.abort('enough'), 1000);
  await assert.rejects(sleeping);
  const begun = Date.now();
  assert.equal((await run(a, 'print(x)')).stdout, '42\n', 'a cancelled cell keeps its variables');
  assert.ok(Date.now() - begun < 15_000, 'the cell went on');
}
ok('cancel');

assert.equal((await get('stop_context', { context_id: a })).status, 'stopped');
await fails('CONTEXT_NOT_FOUND', 'run_code', { code: '1', context_id: a });
await fails('CONTEXT_NOT_FOUND', 'stop_context', { context_id: a });
await order([js, b]);
ok('stop');

await client.close();
