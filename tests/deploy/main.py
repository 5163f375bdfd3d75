"""Runs the files of deploy/ with the programs that use them, in front of a real server.

    main.py SANDPOOL ROOT    ROOT is a directory with nginx, Caddy, promtool and logrotate, unpacked

Each configuration runs as it is, except for its addresses, ports and certificates.
"""

import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time

import jsonschema
import yaml

DEPLOY = pathlib.Path(__file__).resolve().parents[2] / "deploy"
HOST = "sandbox.example.com"
TOKEN = "a-token-of-the-test-0123456789"
PATIENCE = 120
# nginx and many load balancers give up on an answer after 60 s unless they are told otherwise.
SILENCE = 62
failed = []


def check(name, act):
    """Prints whether `act` returns something true. A check that raises an error has failed."""
    try:
        well, got = (lambda got: (bool(got), got))(act())
    except Exception as error:
        well, got = False, repr(error)
    if not well:
        failed.append(name)
    print(f"{'ok  ' if well else 'FAIL'} {name}{'' if well else f'  {got}'}", flush=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(port, process, log):
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    sys.exit(f"FAIL {process.args[0]} does not listen:\n{log.read_text()}")


@contextlib.contextmanager
def running(command, port, log, **options):
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, **options)
    try:
        wait_for(port, process, log)
        yield
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Client:
    """A client of the server behind a proxy. It finds the proxy's address without a name server."""

    def __init__(self, port, certificate):
        self.port, self.tls = port, ssl.create_default_context(cafile=certificate)

    def request(self, method, path, body=None, headers={}, host=None):
        connection = http.client.HTTPSConnection(HOST, self.port, timeout=PATIENCE)
        plain = socket.create_connection(("127.0.0.1", self.port), PATIENCE)
        connection.sock = self.tls.wrap_socket(plain, server_hostname=HOST)
        # A server that refuses a request early answers before it has read all of it.
        with contextlib.suppress(ssl.SSLEOFError, BrokenPipeError, ConnectionResetError):
            connection.request(method, path, body, {"Host": host or f"{HOST}:{self.port}", **headers})
        return connection.getresponse()

    def post(self, message, accept="application/json", **others):
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json", "Accept": accept}
        return self.request("POST", "/mcp", json.dumps(message), headers, **others)

    def call(self, tool, **arguments):
        answer = json.load(self.post(message(tool, arguments)))
        parts = answer["result"]["content"]
        text = next(part["text"] for part in parts if "text" in part)
        with contextlib.suppress(ValueError):
            return json.loads(text)
        return text

    def context(self):
        return json.load(self.post(message("create_context", {})))["result"]["structuredContent"]["context"]


def message(tool, arguments, **meta):
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": tool, "arguments": arguments, **meta}}


def path_of(url):
    return re.fullmatch(r"https://[^/]+(/.*)", url)[1]


def streams(client):
    """Events arrive while the run waits for a file that the client writes after the first event. A proxy that holds events
    back lets the run wait until its time is over."""
    wait = "import pathlib, time\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\nprint('went')"
    context = client.context()
    arguments = {"context": context, "code": wait, "timeout": 60}
    answer = client.post(message("run_code", arguments, _meta={"progressToken": 1}), "application/json, text/event-stream")
    assert answer.headers["Content-Type"].startswith("text/event-stream"), answer.headers["Content-Type"]
    first = answer.readline()
    client.call("write_file", context=context, path="go", content="")
    rest = answer.read().decode()
    client.call("stop_context", context=context)
    return first and "went" in rest


def uploads(client):
    """A file larger than a request may be arrives whole, by a link that begins with the public address."""
    content = os.urandom(1 << 20) * 64
    context = client.context()
    link = client.call("upload_link", context=context, path="big.bin")
    url = re.search(r"https://\S+?(?=[\"\s]|$)", link if isinstance(link, str) else json.dumps(link))[0]
    assert url.startswith(f"https://{HOST}:{client.port}/upload/"), url
    pieces = (content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20))
    answer = client.request("PUT", path_of(url), pieces, {"Content-Length": str(len(content))})
    assert answer.status in (200, 201, 204), (answer.status, answer.read()[:500])
    found = client.call("run_command", context=context, command="sha256sum big.bin")
    client.call("stop_context", context=context)
    return hashlib.sha256(content).hexdigest() in json.dumps(found)


def downloads(client):
    """A link to a file works through the proxy without a token."""
    context = client.context()
    left = {"context": context, "path": "left.txt", "content": "x" * 300000}
    url = client.call("write_file", **left)["url"]
    assert url.startswith(f"https://{HOST}:{client.port}/files/"), url
    content = client.request("GET", path_of(url)).read()
    client.call("stop_context", context=context)
    return content == b"x" * 300000


def is_silent_for_long(client):
    """A client without streams waits for longer than a minute and gets its answer."""
    return "slept" in json.dumps(client.call("run_code", context=client.context(), code=f"import time; time.sleep({SILENCE}); print('slept')", timeout=300))


def in_front_of(name, client):
    """Checks what a proxy must not break."""
    silent = {}
    waiting = threading.Thread(target=lambda: silent.update(answer=is_silent_for_long(client)))
    waiting.start()
    check(f"{name}: a call is answered", lambda: "42" in json.dumps(client.call("run_code", code="6 * 7")))
    check(f"{name}: events are not held back", lambda: streams(client))
    check(f"{name}: a large upload arrives", lambda: uploads(client))
    check(f"{name}: a link works", lambda: downloads(client))
    check(f"{name}: without a token 401", lambda: client.request("POST", "/mcp", "{}").status == 401)
    check(f"{name}: /metrics is closed", lambda: client.request("GET", "/metrics", None, {"Authorization": f"Bearer {TOKEN}"}).status == 403)
    check(f"{name}: a foreign host is refused", lambda: b"result" not in client.post(message("list_contexts", {}), host="evil.example").read())
    too_large = {"code": "#" * (28 << 20)}
    check(f"{name}: the server refuses what is too large", lambda: json.load(client.post(message("run_code", too_large)))["error"])
    waiting.join()
    check(f"{name}: a silent call of {SILENCE} s is answered", lambda: silent["answer"])


def certificate(scratch):
    paths = [scratch / "fullchain.pem", scratch / "privkey.pem"]
    subject = ["-subj", f"/CN={HOST}", "-addext", f"subjectAltName=DNS:{HOST}"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, "-out", paths[0], "-keyout", paths[1]]
    subprocess.run(command, check=True, capture_output=True)
    return paths


def replaced(text, *pairs):
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, str(new))
    return text


def nginx(root, scratch, port, server, paths):
    site = replaced(
        (DEPLOY / "nginx/sandpool.conf").read_text(),
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("127.0.0.1:8775", f"127.0.0.1:{server}"),
        (f"/etc/ssl/{HOST}/fullchain.pem", paths[0]),
        (f"/etc/ssl/{HOST}/privkey.pem", paths[1]),
    )
    (scratch / "sandpool.conf").write_text(site)
    places = "".join(f"{kind}_temp_path {scratch}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    user = "user root;\n" if os.geteuid() == 0 else ""
    (scratch / "nginx.conf").write_text(
        f"{user}daemon off;\npid {scratch}/nginx.pid;\nerror_log stderr;\nevents {{}}\nhttp {{\naccess_log off;\n{places}include sandpool.conf;\n}}\n"
    )
    return [root / "usr/sbin/nginx", "-p", scratch, "-c", scratch / "nginx.conf"]


def caddy(root, scratch, port, server, paths):
    site = replaced(
        (DEPLOY / "caddy/Caddyfile").read_text(),
        (f"\n{HOST} {{\n", f"\nhttps://{HOST}:{port} {{\n\ttls {paths[0]} {paths[1]}\n"),
        ("127.0.0.1:8775", f"127.0.0.1:{server}"),
    )
    options = f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tdefault_bind 127.0.0.1\n\tstorage file_system {scratch}/caddy\n}}\n"
    (scratch / "Caddyfile").write_text(options + site)
    return [root / "usr/bin/caddy", "run", "--config", scratch / "Caddyfile", "--adapter", "caddyfile"]


def proxies(sandpool, root, scratch):
    paths = certificate(scratch)
    for name, command in (("nginx", nginx), ("caddy", caddy)):
        place, port, server = scratch / name, free_port(), free_port()
        place.mkdir()
        (place / "sandpool.toml").write_text(
            f'state_dir = "{place}/state"\n[serve]\nlisten = "127.0.0.1:{server}"\npublic_url = "https://{HOST}:{port}"\n'
        )
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SANDPOOL_")}
        environment |= {"SANDPOOL_API_TOKEN": TOKEN, "HOME": str(place)}
        with running([sandpool, "--config", place / "sandpool.toml", "serve"], server, place / "server.log", env=environment):
            with running(command(root, place, port, server, paths), port, place / "proxy.log", env=environment):
                before = len(failed)
                in_front_of(name, Client(port, paths[0]))
                for log in ("server.log", "proxy.log") if len(failed) > before else ():
                    print(f"---- {name}: {log}\n{(place / log).read_text()[-3000:]}")


def rules(root):
    promtool, place = root / "usr/bin/promtool", DEPLOY / "prometheus"
    run = lambda *words: subprocess.run([promtool, *words], cwd=place, capture_output=True, text=True)
    for words in (("check", "rules", "sandpool.rules.yml"), ("test", "rules", "sandpool.rules.test.yml")):
        result = run(*words)
        check(f"promtool {' '.join(words)}", lambda: result.returncode == 0 or print(result.stdout, result.stderr))


def logs(root, scratch):
    """logrotate moves away what a program wrote to a file that it holds open, and loses nothing after that."""
    directory = scratch / "log"
    directory.mkdir(mode=0o755)
    path, settings = directory / "sandpool.log", scratch / "logrotate.conf"
    settings.write_text(replaced((DEPLOY / "logrotate/sandpool").read_text(), ("/var/log/sandpool", directory)))
    settings.chmod(0o644)
    environment = os.environ | {"LD_LIBRARY_PATH": str(next((root / "usr/lib").glob("*-linux-gnu")))}
    rotate = [root / "usr/sbin/logrotate", "--force", "--state", scratch / "logrotate.state", settings]
    with path.open("a") as writer:
        writer.write("before\n")
        writer.flush()
        subprocess.run(rotate, check=True, env=environment)
        writer.write("after\n")
        writer.flush()
    check("logrotate keeps old lines", lambda: (directory / "sandpool.log.1").read_text() == "before\n")
    check("logrotate loses no later line", lambda: path.read_text() == "after\n")


def compose():
    import compose as package

    schema = json.loads((pathlib.Path(package.__file__).parent / "config/compose_spec.json").read_text())
    document = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    check("compose.yaml fits the schema", lambda: jsonschema.validate(document, schema) is None)
    wrong = {**document, "services": {"sandpool": {"imge": "sandpool"}}}
    check("the schema refuses a wrong member", lambda: list(jsonschema.Draft7Validator(schema).iter_errors(wrong)))


def main():
    sandpool, root = (pathlib.Path(word).absolute() for word in sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="sandpool-deploy-") as scratch:
        rules(root)
        logs(root, pathlib.Path(scratch))
        compose()
        proxies(sandpool, root, pathlib.Path(scratch))
    print(f"{'FAILED: ' + ', '.join(failed) if failed else 'deploy: everything works'}", flush=True)
    sys.exit(bool(failed))


main()
