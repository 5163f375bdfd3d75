"""Tries to get out in every way there is, and says how each attempt ended."""

import errno
import socket
import sys

PUBLIC, PUBLIC6 = "192.0.2.1", "2001:db8::1"


def tcp(address, family=socket.AF_INET):
    with socket.socket(family, socket.SOCK_STREAM) as out:
        out.settimeout(5)
        out.connect(address)


def send(family, kind, protocol, address):
    with socket.socket(family, kind, protocol) as out:
        out.sendto(b"x", address)


ATTEMPTS = {
    "proxy": lambda: tcp(("127.0.0.1", 3128)),
    "loopback": lambda: tcp(("127.0.0.1", 3129)),
    "tcp": lambda: tcp((PUBLIC, 80)),
    "tcp6": lambda: tcp((PUBLIC6, 80), socket.AF_INET6),
    "metadata": lambda: tcp(("169.254.169.254", 80)),
    "private": lambda: tcp(("10.0.0.1", 80)),
    "udp": lambda: send(socket.AF_INET, socket.SOCK_DGRAM, 0, (PUBLIC, 53)),
    "udp6": lambda: send(socket.AF_INET6, socket.SOCK_DGRAM, 0, (PUBLIC6, 443)),
    "multicast": lambda: send(socket.AF_INET, socket.SOCK_DGRAM, 0, ("224.0.0.251", 5353)),
    "ping": lambda: send(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, (PUBLIC, 0)),
    "raw": lambda: send(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP, (PUBLIC, 0)),
    "packet": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0x0300).close(),
    "sctp": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).close(),
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close(),
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM).close(),
}

for name in sys.argv[1:] or ATTEMPTS:
    try:
        ATTEMPTS[name]()
        print(name, "DONE")
    except OSError as error:
        print(name, errno.errorcode.get(error.errno, error))
