"""Two registries on loopback, for `pip` at `/simple` and for `npm` at `/npm`: tiny packages made here. Prints its port."""

import base64
import hashlib
import http.server
import io
import json
import tarfile
import zipfile


def wheel(name, version, code, requires="", start=""):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{name}/__init__.py", code)
        if start:
            archive.writestr(f"{name}.pth", start)
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", f"[console_scripts]\n{name}-says = {name}:says\n")
        archive.writestr(f"{info}/RECORD", "")
    return f"{name}-{version}-py3-none-any.whl", file.getvalue()


def tarball(name, version, code):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        package = {"name": name, "version": version, "main": "index.js", "bin": {f"{name}-says": "says.js"}}
        for path, text in {"package.json": json.dumps(package), "index.js": code, "says.js": "#!/usr/bin/env node\nconsole.log('said')\n"}.items():
            entry = tarfile.TarInfo(f"package/{path}")
            entry.size, entry.mode = len(text), 0o755
            archive.addfile(entry, io.BytesIO(text.encode()))
    return file.getvalue()


WHEELS = dict([
    # The runtime has the one it needs, and another version of the other.
    wheel("tinypack", "1.0", "value = 'of the wheel'\ndef says(): print('said')\n", "Requires-Dist: numpy\n"),
    wheel("openpyxl", "99.0", "__version__ = '99.0'\n"),
    # It runs code at each start of Python.
    wheel("startpack", "1.0", "value = 'of the wheel'\n", start="import os, sys; sys.startpack = [*getattr(sys, 'startpack', []), (os.getuid(), os.getpid())]\n"),
])
TARBALL = tarball("tinynode", "1.2.3", "module.exports = 'of the tarball'")


class Registry(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        host, parts = self.headers["Host"], self.path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            names = [name for name in WHEELS if name.startswith(f"{parts[1]}-")]
            self.answer("text/html", "".join(f'<a href="/wheels/{name}">{name}</a>' for name in names).encode())
        elif parts[0] == "wheels" and parts[-1] in WHEELS:
            self.answer("application/octet-stream", WHEELS[parts[-1]])
        elif parts == ["npm", "tinynode"]:
            integrity = "sha512-" + base64.b64encode(hashlib.sha512(TARBALL).digest()).decode()
            dist = {"tarball": f"http://{host}/npm/tinynode.tgz", "integrity": integrity}
            version = {"name": "tinynode", "version": "1.2.3", "bin": {"tinynode-says": "says.js"}, "dist": dist}
            document = {"name": "tinynode", "dist-tags": {"latest": "1.2.3"}, "versions": {"1.2.3": version}}
            self.answer("application/json", json.dumps(document).encode())
        elif parts[-1] == "tinynode.tgz":
            self.answer("application/octet-stream", TARBALL)
        else:
            self.send_error(404)

    def answer(self, kind, content):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry)
print(server.server_port, flush=True)
server.serve_forever()
