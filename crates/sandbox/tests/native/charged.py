"""Takes objects of the kernel inside a sandbox and holds them for a second, while somebody outside looks at the sandbox's cgroup.
Prints how many it has, how many it may have, the least memory in kB that the kernel needs for them, and the error that ended it;
`-` stands for none. Argument: the kind; without one it prints all kinds. The tests of this directory and the lab
(scripts/vm/job/attacks.py) run it."""

import ctypes
import errno
import fcntl
import mmap
import os
import select
import socket
import struct
import sys
import time

libc = ctypes.CDLL(None, use_errno=True)
held = []


def call(function, *arguments):
    result = function(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), function.__name__)
    return result


def fill(write, piece):
    """Writes until nobody takes any more."""
    written = 0
    try:
        while True:
            written += write(piece)
    except BlockingIOError:
        return written


def nothing():
    """What this program itself needs."""
    yield 0


def pipes():
    for _ in range(32):
        ends = os.pipe()
        held.append(ends)
        fcntl.fcntl(ends[1], 1031, 1 << 20)  # F_SETPIPE_SZ
        os.set_blocking(ends[1], False)
        yield fill(lambda piece: os.write(ends[1], piece), bytes(1 << 16))


def unix_sockets():
    for _ in range(200):
        pair = socket.socketpair()
        held.append(pair)
        pair[0].setblocking(False)
        yield fill(pair[0].send, bytes(1 << 15))


def descriptors_in_flight():
    """Descriptors that were sent and not received."""
    file = os.open("/dev/null", os.O_RDONLY)
    for _ in range(100):
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        held.append(pair)
        pair[0].setblocking(False)
        pair[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("100i", *[file] * 100))])
        yield from [0] * 100


def epoll_items():
    files = [os.eventfd(0) for _ in range(3000)]
    for _ in range(40):
        poll = select.epoll()
        held.append(poll)
        for file in files:
            poll.register(file, 0)
            yield 160


def descriptors():
    while True:
        held.append(os.eventfd(0))
        yield 0


def timers():
    for _ in range(20_000):
        held.append(ctypes.c_void_p())
        call(libc.timer_create, 1, None, ctypes.byref(held[-1]))
        yield 0


def mappings():
    libc.mmap.restype = ctypes.c_ssize_t
    for number in range(100_000):
        # Neighbours with other rights do not become one.
        call(libc.mmap, None, ctypes.c_size_t(4096), number % 2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        yield 150


def page_tables():
    """One page in every two megabytes, all of them the page of zeros."""
    room = mmap.mmap(-1, 16 << 30, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)  # MAP_NORESERVE
    room.madvise(mmap.MADV_NOHUGEPAGE)
    held.append(room)
    for place in range(0, len(room), 2 << 20):
        room[place]
        yield 4096


def absent_names():
    for number in range(100_000):
        try:
            os.stat(f"/usr/lib/absent-{number}")
        except FileNotFoundError:
            yield 190


def semaphores():
    for _ in range(2000):
        held.append(Semaphores(call(libc.semget, 0, 250, 0o600)))
        yield 250 * 64


class Semaphores:
    """Outlive their process."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        libc.semctl(self.number, 0, 0)  # IPC_RMID


def memory_files():
    file = os.memfd_create("held")
    for _ in range(40):
        yield os.write(file, bytes(1 << 20))


def landlock_rules():
    """Ports, of which a set of rules can name all. Kernels before 6.7 know none."""
    for _ in range(3):
        try:
            rules = call(libc.syscall, 444, struct.pack("QQ", 0, 1), 16, 0)
        except OSError:
            return
        for port in range(60_000):
            call(libc.syscall, 445, rules, 2, struct.pack("QQ", 1, port), 0)
            yield 48


def closed_connections():
    server = socket.create_server(("127.0.0.1", 0), backlog=100)
    for _ in range(6000):
        client = socket.create_connection(server.getsockname())
        peer = server.accept()[0]
        client.close()
        peer.close()
    with open("/proc/net/sockstat") as file:
        words = next(line for line in file if line.startswith("TCP:")).split()
    yield from [0] * int(words[words.index("tw") + 1])


def addresses():
    """Datagrams to many addresses. Tables of neighbours are the host's."""
    for family, address in ((socket.AF_INET, "127.{}.{}.1"), (socket.AF_INET6, "fd00::{:x}:{:x}")):
        sender = socket.socket(family, socket.SOCK_DGRAM)
        for number in range(4000):
            try:
                sender.sendto(b"x", (address.format(number >> 8, number & 255), 9))
            except OSError:
                pass
            yield 0


def time_stamps():
    """Copies of what was sent, which wait in a queue that no cgroup counts until somebody asks for the time of sending."""
    target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    target.bind(("127.0.0.1", 0))
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(20):
        stamp = (socket.SOL_SOCKET, 37, struct.pack("I", 2))  # SO_TIMESTAMPING, SOF_TIMESTAMPING_TX_SOFTWARE
        sender.sendmsg([bytes(1000)], [stamp], 0, target.getsockname())
    try:
        while True:
            sender.recvmsg(2000, 1000, 0x2000 | socket.MSG_DONTWAIT)  # MSG_ERRQUEUE
            yield 0
    except BlockingIOError:
        pass


# How many there may be at most; what has no such number is charged.
KINDS = {
    nothing: None,
    pipes: None,
    unix_sockets: None,
    descriptors_in_flight: 4096 + 100,
    epoll_items: None,
    descriptors: 4096,
    timers: 4096,
    mappings: 65_530,
    page_tables: None,
    absent_names: None,
    semaphores: None,
    memory_files: None,
    landlock_rules: None,
    closed_connections: 4096,
    addresses: None,
    time_stamps: 0,
}


def main(name):
    kind, most = next((kind, most) for kind, most in KINDS.items() if kind.__name__ == name)
    count, least, ended = 0, 0, "-"
    try:
        for size in kind():
            count, least = count + 1, least + size
    except OSError as error:
        ended = errno.errorcode[error.errno]
    time.sleep(1)
    held.clear()
    print(count, "-" if most is None else most, least // 1024, ended)


if len(sys.argv) > 1:
    main(sys.argv[1])
else:
    print(*(kind.__name__ for kind in KINDS))
