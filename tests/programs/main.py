"""Starts Vite and Next in a sandbox and asks each for a page (W01): both list the network's interfaces before they say where they listen,
and a sandbox has no netlink. `main.py SANDPOOL DIR`: the built program, and a directory with the installed packages."""

import json
import os
import subprocess
import sys
import tempfile

# Each program, an address below it, and what has to be in the answer: what the program itself made of its source.
PROGRAMS = {
    "vite": ("vite --host 0.0.0.0 --port 5001", "http://127.0.0.1:5001/main.ts", "const answer = 42;"),
    "next": ("next dev --port 5002", "http://127.0.0.1:5002/", "made by next"),
}
# Asks until the program answers, for as long as it lives.
SHELL = """
cd /programs
export NEXT_TELEMETRY_DISABLED=1
node_modules/.bin/{start} >/tmp/said 2>&1 </dev/null &
until curl -sf --max-time 100 {address}; do kill -0 $! || break; sleep 0.2; done
kill $!
cat /tmp/said >&2
"""


class Server:
    def __init__(self, program, directory, state):
        config = os.path.join(state, "sandpool.toml")
        with open(config, "w") as file:
            file.write(f'state_dir = "{state}"\nruntimes.warm = false\nmicrosandbox.volumes = ["{directory}:/programs"]\n')
        command = [program, "--config", config, "stdio", "--dialect", "microsandbox"]
        self.log = open(os.path.join(state, "log"), "w+")
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "programs", "version": "1"}}
        self.ask("initialize", hello)

    def ask(self, method, params):
        self.process.stdin.write(json.dumps({"jsonrpc": "2.0", "id": 1, "method": method, "params": params}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            message = json.loads(line)
            if "id" in message:
                return message
        self.log.seek(0)
        sys.exit("the server ended:\n" + self.log.read()[-3000:])

    def run(self, command):
        arguments = {"command": command, "template": "node", "flavor": "large", "timeout": 180}
        return self.ask("tools/call", {"name": "execute_command", "arguments": arguments})

    def end(self):
        self.process.stdin.close()
        self.process.wait(60)


def main(program, directory):
    failed = 0
    with tempfile.TemporaryDirectory() as state:
        server = Server(program, directory, state)
        for name, (start, address, expected) in PROGRAMS.items():
            answer = server.run(SHELL.format(start=start, address=address))
            well = expected in answer.get("result", {}).get("structuredContent", {}).get("stdout", "")
            failed += not well
            print(f"ok    {name} starts and serves in a sandbox" if well else f"FAIL  {name}: {json.dumps(answer)[:3000]}")
        server.end()
    sys.exit(failed != 0)


main(*sys.argv[1:])
