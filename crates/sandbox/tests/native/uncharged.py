"""Takes kernel memory by way of sockets, as much as it gets, and says how much that was, in kB."""

import errno
import socket
import struct
import sys

SOL_SOCKET, SO_RCVBUF, SO_SNDBUF, SO_TIMESTAMPING = 1, 8, 7, 37
MSG_MORE, MSG_ERRQUEUE = 0x8000, 0x2000
PIECE = b"x" * 32000


def fill(sock, piece, most):
    """Sends until nobody takes any more."""
    sock.setblocking(False)
    sent = 0
    try:
        while sent < most:
            sent += sock.send(piece)
    except (BlockingIOError, OSError):
        pass
    return sent


def listener():
    server = socket.socket()
    server.setsockopt(SOL_SOCKET, SO_RCVBUF, 4 << 20)
    server.bind(("127.0.0.1", 0))
    server.listen(4096)
    return server


def netlink():
    """Answers that nobody reads."""
    held, kept = 0, []
    for _ in range(100):
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
        sock.bind((0, 0))
        kept.append(sock)
        request = struct.pack("=IHHII", 16 + 1300, 99, 1, 1, 0) + b"x" * 1300
        held += fill(sock, request, 1 << 20)
    return held


def tcp(total):
    """What was sent and not read."""
    server, held, kept = listener(), 0, []
    while held < total and len(kept) < 1800:
        client = socket.create_connection(server.getsockname())
        kept += [client, server.accept()[0]]
        held += fill(client, PIECE, total - held)
    return held


def udp(total):
    """What arrived and was not read."""
    sender, kept = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), []
    for _ in range(min(total // (6 * len(PIECE)), 3500)):
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        kept.append(sock)
        for _ in range(6):
            sender.sendto(PIECE, sock.getsockname())
    held = 0
    for sock in kept:
        sock.setblocking(False)
        try:
            while True:
                held += len(sock.recv(len(PIECE)))
        except BlockingIOError:
            pass
    return held


def unaccepted(connections):
    """What arrived on connections that nobody accepts; with room for 4 MB each, if one could ask for it."""
    server, held, kept = listener(), 0, []
    for _ in range(connections):
        client = socket.socket()
        client.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
        client.connect(server.getsockname())
        kept.append(client)
    # What a sender has in its own buffer is sent on when there is room: several times.
    for _ in range(20):
        held += sum(fill(client, PIECE, 8 << 20) for client in kept)
    return held


def corked():
    """Datagrams in parts that are never sent."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.connect(("127.0.0.1", 9))
    return sock.send(PIECE, MSG_MORE)


def queued(sock):
    """Bytes in the queue of errors."""
    held = 0
    try:
        while True:
            data, ancillary, _, _ = sock.recvmsg(65536, 4096, MSG_ERRQUEUE | socket.MSG_DONTWAIT)
            held += len(data) + sum(len(value) for _, _, value in ancillary)
    except BlockingIOError:
        return held


def errors():
    """Refusals of datagrams, which carry the datagram."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(socket.IPPROTO_IP, 11, 1)
    for _ in range(50):
        try:
            sock.sendto(b"x" * 500, ("127.0.0.1", 9))
        except OSError:
            pass
    return queued(sock)


def stamped():
    """Copies of what was sent, with a time stamp that was asked for along with the datagram."""
    target = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    target.bind(("127.0.0.1", 0))
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for _ in range(5):
        sock.sendmsg([PIECE], [(SOL_SOCKET, SO_TIMESTAMPING, struct.pack("I", 2))], 0, target.getsockname())
    return queued(sock)


def option(level, name, value=1):
    sock = socket.socket(socket.AF_INET6 if level == 41 else socket.AF_INET, socket.SOCK_DGRAM)
    sock.setsockopt(level, name, value)
    return 0


ATTEMPTS = {
    "netlink": netlink,
    "tcp": lambda: tcp(int(sys.argv[1])),
    "udp": lambda: udp(int(sys.argv[1])),
    "unaccepted": lambda: unaccepted(100),
    "corked": corked,
    "errors": errors,
    "stamped": stamped,
    "stamps": lambda: option(SOL_SOCKET, SO_TIMESTAMPING, 2 | 16),
    "cork": lambda: option(17, 1),
    "zerocopy": lambda: option(SOL_SOCKET, 60),
    "membership": lambda: option(41, 20, socket.inet_pton(10, "ff05::1") + struct.pack("i", 1)),
    "flow label": lambda: option(41, 32, socket.inet_pton(10, "::1") + struct.pack("!IBBHHHI", 7, 0, 255, 256, 0, 0, 0)),
}

for name, attempt in ATTEMPTS.items():
    try:
        print(f"{name}: {attempt() // 1024}")
    except OSError as error:
        print(f"{name}: {errno.errorcode[error.errno]}")
