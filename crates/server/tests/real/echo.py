"""A host with TLS that repeats what it is sent, vouched for by an authority made in the directory given. Prints its port."""

import http.server
import ssl
import subprocess
import sys

directory = sys.argv[1]


def openssl(*arguments):
    subprocess.run(["openssl", *arguments], check=True, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
openssl("req", "-x509", *KEY, "-keyout", "root.key", "-out", "root.pem", "-subj", "/CN=a root of the test's own", "-days", "30")
openssl("req", *KEY, "-keyout", "host.key", "-out", "host.csr", "-subj", "/CN=api.test")
with open(f"{directory}/names", "w") as names:
    names.write("subjectAltName=DNS:api.test")
openssl("x509", "-req", "-in", "host.csr", "-CA", "root.pem", "-CAkey", "root.key", "-CAcreateserial", "-out", "host.pem",
        "-days", "20", "-extfile", "names")


class Echo(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        with open(f"{directory}/heard", "a") as heard:
            heard.write(f"{self.path} {self.headers['Authorization']}\n")
        content = f"<h1>echo</h1><p>{self.headers['Authorization']}</p>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("X-Echo", self.headers["Authorization"] or "nothing")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(f"{directory}/host.pem", f"{directory}/host.key")
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
print(server.server_port, flush=True)
server.serve_forever()
