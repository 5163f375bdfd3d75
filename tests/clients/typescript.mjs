// The TypeScript packages @modelcontextprotocol/client and @modelcontextprotocol/sdk: typescript.mjs client|sdk|sdk-2024, where the
// last one is an older version of sdk. They are found from the directory in NODE_CLIENTS. What goes in and out is said in driver.py.

import { createRequire } from 'node:module';
import path from 'node:path';
import readline from 'node:readline';
import { pathToFileURL } from 'node:url';

const name = `@modelcontextprotocol/${process.argv[2]}`;
const sdk = process.argv[2] !== 'client';
const say = (line) => console.log(JSON.stringify(line));
const load = (module) => import(pathToFileURL(createRequire(path.join(process.env.NODE_CLIENTS, 'package.json')).resolve(module)));

const main = await load(sdk ? `${name}/client/index.js` : name);
const stdio = await load(sdk ? `${name}/client/stdio.js` : `${name}/stdio`);
const http = sdk ? await load(`${name}/client/streamableHttp.js`) : main;

let client;
const running = new Map();

function transport({ command, url, token }) {
  if (!url) return new stdio.StdioClientTransport({ command: command[0], args: command.slice(1), env: process.env });
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  return new http.StreamableHTTPClientTransport(new URL(url), { requestInit: { headers } });
}

// The older package does not tell the revision, so it is read from the server's answer.
function revisionTold(over) {
  let told;
  let handler;
  Object.defineProperty(over, 'onmessage', {
    get: () => handler,
    set: (wanted) => {
      handler = (message, extra) => {
        told ??= message.result?.protocolVersion;
        wanted(message, extra);
      };
    },
  });
  return () => told;
}

async function connect(where) {
  const mode = where.era === 'legacy' ? 'legacy' : 'auto';
  client = new main.Client({ name: 'story', version: '1' }, sdk ? {} : { versionNegotiation: { mode } });
  const over = transport(where);
  const told = sdk ? revisionTold(over) : client.getNegotiatedProtocolVersion.bind(client);
  try {
    await client.connect(over);
  } catch (error) {
    return say({ refused: String(error.message) });
  }
  // A message the client cannot read ends up here, and nowhere else.
  client.onerror = (error) => say({ complaint: String(error) });
  say({ connected: told() });
}

async function disconnect() {
  if (!client) return;
  // What it says about its own end is no matter of the server.
  client.onerror = undefined;
  await client.close();
}

function ask(request, options) {
  switch (request.op) {
    case 'list':
      return client.listTools();
    case 'read':
      return client.readResource({ uri: request.uri });
    case 'call': {
      const call = { name: request.tool, arguments: request.arguments };
      return sdk ? client.callTool(call, undefined, options) : client.callTool(call, options);
    }
  }
}

async function answer(request) {
  const { id } = request;
  const stop = new AbortController();
  running.set(id, stop);
  const onprogress = request.progress && ((note) => say({ id, progress: [note.progress, note.message] }));
  try {
    say({ id, result: await ask(request, { signal: stop.signal, onprogress, timeout: 300_000 }) });
  } catch (error) {
    say(stop.signal.aborted ? { id, cancelled: true } : { id, error: { code: error.code, message: error.message } });
  }
}

for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  if (request.op === 'connect') {
    await disconnect();
    await connect(request);
  } else if (request.op === 'cancel') running.get(request.id).abort('enough');
  else answer(request);
}
await disconnect();
