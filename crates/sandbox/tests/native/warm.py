"""A warm interpreter as small as it can be: what it reads on 3 is run, what is printed goes to 1."""

import array
import ctypes
import fcntl
import json
import os
import socket

library = ctypes.PyDLL("/proc/self/fd/4")
names = ("BeforeFork", "AfterFork_Parent", "AfterFork_Child")
hooks = [ctypes.cast(getattr(ctypes.pythonapi, "PyOS_" + name), ctypes.c_void_p) for name in names]
channel = library.sandpool_zygote_serve(3, *hooks)
if channel < 0:
    os._exit(0)
with socket.socket(fileno=channel) as guest:
    packet, control, _, _ = guest.recvmsg(1 << 16, socket.CMSG_SPACE(16))
if not packet:
    os._exit(0)
equipment = json.loads(packet)
received = array.array("i")
received.frombytes(control[0][2])
high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in received]
os.closerange(3, 64)
for number, fd in enumerate(high, 1):
    os.dup2(fd, number)
os.closerange(64, 80)
os.environ.clear()
os.environ.update(equipment["env"])
os.chdir(equipment["cwd"])
os.write(1, b"ready\n")
for line in os.fdopen(3, closefd=False):
    exec(line)
