"""Kernels of ipykernel, started by jupyter_client, spoken to over its sockets with as little between as can be: the client signs and
sends, polls, and reads frames; it verifies nothing. Lines of JSON in and out."""

import json
import os
import signal
import subprocess
import sys
import time

import zmq
from jupyter_client import KernelManager
from jupyter_client.manager import start_new_kernel

PATIENCE = 120


class Kernel:
    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.client = self.manager.blocking_client()
        self.client.start_channels(hb=False, stdin=False, control=False)
        self.shell = self.client.shell_channel.socket
        self.iopub = self.client.iopub_channel.socket
        self.poller = zmq.Poller()
        self.poller.register(self.shell, zmq.POLLIN)
        self.poller.register(self.iopub, zmq.POLLIN)

    def begin(self, code):
        """Sends a cell. It is done when its reply, its output and its idle status were read."""
        content = {"code": code, "silent": False, "store_history": False, "allow_stdin": False, "stop_on_error": False}
        message = self.client.session.msg("execute_request", content)
        self.id, self.printed, self.idle, self.replied = message["header"]["msg_id"], "", False, False
        self.client.session.send(self.shell, message)

    def read(self, socket):
        """Takes what there is; true once the cell is done."""
        while socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            frames = socket.recv_multipart()
            header, parent, _, content = frames[frames.index(b"<IDS|MSG>") + 2 :][:4]
            if self.id.encode() not in parent:
                continue
            kind = json.loads(header)["msg_type"]
            if kind == "status":
                self.idle |= json.loads(content)["execution_state"] == "idle"
            elif kind == "stream":
                self.printed += json.loads(content)["text"]
            elif kind == "execute_reply":
                self.replied = True
                if json.loads(content)["status"] != "ok":
                    raise RuntimeError("the cell failed: " + content.decode()[:300])
        return self.idle and self.replied

    def run(self, code):
        self.begin(code)
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for socket, _ in self.poller.poll(1000):
                if self.read(socket):
                    return self.printed
            if not self.manager.is_alive():
                raise RuntimeError("the kernel ended")
        raise TimeoutError(f"no answer within {PATIENCE} s")

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Bench:
    def __init__(self):
        self.kernels = []

    def start(self, code):
        """From nothing to the result of a first cell."""
        start = time.perf_counter()
        kernel = Kernel()
        self.kernels.append(kernel)
        kernel.run(code)
        taken = time.perf_counter() - start
        self.kernels.pop().stop()
        return {"values": [taken]}

    def open(self, count, code):
        """Kernels that stay, each after a first cell; as many as fit."""
        for _ in range(count):
            try:
                self.kernels.append(Kernel())
                # A cell sent before the output socket is subscribed can lose its idle status, for which `run` would wait in vain.
                self.kernels[-1].client.wait_for_ready(timeout=PATIENCE)
                self.kernels[-1].run(code)
            except Exception as error:
                self.kernels.pop().stop()
                return {"kernels": len(self.kernels), "why": str(error)}
        return {"kernels": len(self.kernels), "why": None}

    def call(self, times, code):
        return {"values": [timed(lambda: self.kernels[0].run(code)) for _ in range(times)]}

    def start_ordinary(self, code):
        """The same as most programs do it: jupyter_client waits until the kernel is ready, and reads what comes."""
        start = time.perf_counter()
        manager, client = start_new_kernel(kernel_name="python3", stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            client.execute_interactive(code, store_history=False, output_hook=lambda _: None, timeout=PATIENCE)
            return {"values": [time.perf_counter() - start]}
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)

    def call_ordinary(self, times, code):
        def run():
            client = self.kernels[0].client
            client.execute_interactive(code, store_history=False, output_hook=lambda _: None, timeout=PATIENCE)

        return {"values": [timed(run) for _ in range(times)]}

    def pids(self):
        return {"pids": [kernel.manager.provisioner.pid for kernel in self.kernels]}

    def load(self, seconds, code):
        """Each kernel always has one cell to run; how many were done a second."""
        poller, owner = zmq.Poller(), {}
        for kernel in self.kernels:
            for socket in (kernel.shell, kernel.iopub):
                poller.register(socket, zmq.POLLIN)
                owner[socket] = kernel
        start, done = time.monotonic(), 0
        for kernel in self.kernels:
            kernel.begin(code)
        while time.monotonic() - start < seconds:
            for socket, _ in poller.poll(1000):
                if owner[socket].read(socket):
                    done += 1
                    owner[socket].begin(code)
        rate = done / (time.monotonic() - start)
        for kernel in self.kernels:
            while not (kernel.idle and kernel.replied):
                for socket, _ in kernel.poller.poll(1000):
                    kernel.read(socket)
        return {"values": [rate]}

    def close(self):
        while self.kernels:
            self.kernels.pop().stop()
        return {}


def main():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    bench = Bench()
    try:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer = getattr(bench, request.pop("do"))(**request)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers)
    finally:
        bench.close()


main()
