"""A Jupyter Kernel Gateway with one kernel, over its websocket with TCP_NODELAY set on the client's side. Lines of JSON in and out."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid

import websocket

PATIENCE = 120


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Gateway:
    def __init__(self):
        self.port = free_port()
        program = os.path.join(os.path.dirname(sys.executable), "jupyter-kernelgateway")
        options = ["--KernelGatewayApp.ip=127.0.0.1", f"--KernelGatewayApp.port={self.port}"]
        self.process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def request(self, method, path):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request, b"{}" if method == "POST" else None, timeout=PATIENCE) as answer:
            return answer.read()

    def wait(self):
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return self.request("GET", "/api")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the gateway does not answer") from None
                time.sleep(0.02)

    def open(self):
        kernel = json.loads(self.request("POST", "/api/kernels"))["id"]
        address = f"ws://127.0.0.1:{self.port}/api/kernels/{kernel}/channels"
        options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)]
        return kernel, websocket.create_connection(address, timeout=PATIENCE, sockopt=options)

    def stop(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def run(connection, code):
    id = uuid.uuid4().hex
    header = {"msg_id": id, "msg_type": "execute_request", "username": "", "session": id, "version": "5.3"}
    content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "stop_on_error": False}
    message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
    connection.send(json.dumps(message))
    idle = replied = False
    while not (idle and replied):
        answer = json.loads(connection.recv())
        if answer["parent_header"].get("msg_id") != id:
            continue
        kind = answer["header"]["msg_type"]
        idle |= kind == "status" and answer["content"]["execution_state"] == "idle"
        if kind == "execute_reply":
            replied = True
            if answer["content"]["status"] != "ok":
                raise RuntimeError("the cell failed: " + json.dumps(answer["content"])[:300])


class Bench:
    def __init__(self, gateway):
        self.gateway, self.connection = gateway, None

    def start(self, code):
        """A new kernel of the running gateway, to the result of its first cell."""
        start = time.perf_counter()
        kernel, connection = self.gateway.open()
        run(connection, code)
        taken = time.perf_counter() - start
        connection.close()
        self.gateway.request("DELETE", f"/api/kernels/{kernel}")
        return {"values": [taken]}

    def call(self, times, code):
        if self.connection is None:
            _, self.connection = self.gateway.open()
            run(self.connection, code)
        taken = []
        for _ in range(times):
            start = time.perf_counter()
            run(self.connection, code)
            taken.append(time.perf_counter() - start)
        return {"values": taken}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    gateway = Gateway()
    try:
        gateway.wait()
        bench = Bench(gateway)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(bench, request.pop("do"))(**request)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    finally:
        gateway.stop()


main()
