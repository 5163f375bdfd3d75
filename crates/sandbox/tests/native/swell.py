"""Uses memory in one of several ways, as a program in a sandbox without a cgroup. The limit is 256 MB."""

import ctypes, mmap, os, sys, time

MB = 1 << 20


def fill(size):
    return b"x" * size


def fast():
    fill(3072 * MB)


def slow():
    held = []
    for _ in range(600):
        held.append(fill(2 * MB))
        time.sleep(0.002)


def forks():
    for _ in range(30):
        if os.fork() == 0:
            held = fill(48 * MB)
            time.sleep(60)
            sys.exit(len(held))
    time.sleep(60)


def copied():
    """Pages that forks share first, and then write."""
    held = bytearray(fill(100 * MB))
    for _ in range(8):
        if os.fork() == 0:
            time.sleep(1)
            for at in range(0, len(held), 4096):
                held[at] = 1
            time.sleep(60)
            os._exit(0)
    time.sleep(60)


def files():
    """The volume has 64 MB and /dev/shm half of the memory, so that the rest is a process's."""
    for directory in ["/workspace", "/dev/shm"]:
        try:
            with open(directory + "/big", "wb", buffering=0) as file:
                while True:
                    file.write(fill(MB))
        except OSError:
            pass
    held = fill(100 * MB)
    time.sleep(60)
    sys.exit(len(held))


def shared():
    area = mmap.mmap(-1, 1024 * MB)
    for at in range(0, 1024 * MB, MB):
        area[at : at + MB] = fill(MB)
    time.sleep(60)


def memfd():
    """No process maps it."""
    file = os.memfd_create("x")
    for _ in range(1024):
        os.write(file, fill(MB))
    time.sleep(60)


def segments():
    """System V segments that nobody is attached to."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.shmat.restype = ctypes.c_void_p
    for _ in range(64):
        number = libc.shmget(0, 16 * MB, 0o1600)
        assert number >= 0, os.strerror(ctypes.get_errno())
        at = libc.shmat(number, None, 0)
        ctypes.memset(at, 1, 16 * MB)
        libc.shmdt(ctypes.c_void_p(at))
    time.sleep(60)


def modest():
    """Less than the limit, however it looks: forks share their pages, and programs are started all the time."""
    held = fill(140 * MB)
    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            time.sleep(3)
            os._exit(0)
        children.append(child)
    until = time.monotonic() + 3
    while time.monotonic() < until:
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    for child in children:
        os.waitpid(child, 0)
    print("modest", len(held) // MB)


globals()[sys.argv[1]]()
