"""Does what programs do with calls that a sandbox refuses, and says whether they found another way."""

import asyncio
import os
import shutil
import socket

CONTENT = b"x" * 300_000
with open("/tmp/from", "wb") as file:
    file.write(CONTENT)


def same(path):
    with open(path, "rb") as file:
        return file.read() == CONTENT


def copied():
    shutil.copyfile("/tmp/from", "/tmp/copied")
    return same("/tmp/copied")


def copied_in_the_kernel():
    with open("/tmp/from", "rb") as source, open("/tmp/ranged", "wb") as target:
        while os.copy_file_range(source.fileno(), target.fileno(), len(CONTENT)):
            pass
    return same("/tmp/ranged")


def sent():
    """Through a socket whose other end reads along."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        with open("/tmp/sent", "wb") as target:
            while piece := theirs.recv(65536):
                target.write(piece)
        os._exit(0)
    theirs.close()
    with open("/tmp/from", "rb") as source, ours:
        ours.sendfile(source)
    os.wait()
    return same("/tmp/sent")


async def served():
    async def serve(reader, writer):
        with open("/tmp/from", "rb") as source:
            await asyncio.get_running_loop().sendfile(writer.transport, source)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    content = await reader.read(-1)
    writer.close()
    server.close()
    return content == CONTENT


print("interfaces", socket.if_nameindex())
print("names", sorted({entry[4][0] for entry in socket.getaddrinfo("localhost", 80, flags=socket.AI_ADDRCONFIG)}))
print("copied", copied())
print("copied in the kernel", copied_in_the_kernel())
print("sent", sent())
print("served", asyncio.run(served()))
