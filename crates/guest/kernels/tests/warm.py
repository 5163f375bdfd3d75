"""A stand-in for the launcher's library: `warm.py DRIVER --warm MODULE...` is the warm interpreter, forked by plain `os.fork`.

Each packet on descriptor 3 brings a channel; a fork gets it, and its pid is the answer. A process in between ends at once,
so that the fork belongs to the nearest subreaper, as it belongs to the guest in a sandbox.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys


class Library:
    def __init__(self, path: str) -> None:
        assert path == "/proc/self/fd/4", path

    def sandpool_zygote_serve(self, launcher_fd: int, *hooks: ctypes.c_void_p) -> int:
        assert len(hooks) == 3 and all(hook.value for hook in hooks), hooks
        opened = sorted(os.listdir("/proc/self/fd"))
        assert opened == ["0", "1", "2", "3", "4", "5"], f"the warm interpreter holds {opened}"  # 5 lists the directory
        launcher = socket.socket(fileno=launcher_fd)
        while True:
            packet, channels, _, _ = socket.recv_fds(launcher, 1, 1)
            if not packet:
                return -1
            reader, writer = os.pipe()
            between = os.fork()
            if between == 0:
                pid = os.fork()
                if pid == 0:
                    channel = os.dup2(channels[0], 9)
                    os.closerange(0, 9)
                    os.closerange(10, 64)
                    return channel
                os.write(writer, pid.to_bytes(4, "little"))
                os._exit(0)
            os.waitpid(between, 0)
            launcher.send(os.read(reader, 4))
            for fd in (reader, writer, channels[0]):
                os.close(fd)


ctypes.PyDLL = Library  # type: ignore[assignment, misc]
sys.path += filter(None, [os.environ.get("KERNEL_TEST_PATH")])
sys.argv = sys.argv[1:]
sys.orig_argv.remove(__file__)
with open(sys.argv[0], encoding="utf-8") as driver:
    source = compile(driver.read(), sys.argv[0], "exec", dont_inherit=True)
exec(source, globals())
