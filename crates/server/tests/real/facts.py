"""What a kernel has from where it comes, by name; without what differs from one process to the next."""

import ctypes, fcntl, json, os, resource, signal, stat, sys, threading  # noqa: E401

FACTS = {}
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option, *arguments):
    got = _libc.prctl(option, *arguments, *[0] * (4 - len(arguments)))
    return got if got >= 0 else -ctypes.get_errno()


def _through_pointer(option):
    number = ctypes.c_int(-1)
    _libc.prctl(option, ctypes.byref(number))
    return number.value


def _disposition(number):
    action = (ctypes.c_ulong * 20)()
    _libc.sigaction(number, None, ctypes.byref(action))
    return {0: "default", 1: "ignored"}.get(action[0], "handled")


def _tried(attempt, *arguments):
    try:
        attempt(*arguments)
        return "worked"
    except OSError as e:
        return e.errno


def _described(fd):
    mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
    kind = "pipe" if stat.S_ISFIFO(mode) else os.readlink(f"/proc/self/fd/{fd}")
    return [fd, kind, flags & os.O_ACCMODE, os.get_inheritable(fd)]


def _open_descriptors():
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            yield _described(int(name))
        except OSError:
            pass  # that of the listing


def _adjust(path, value):
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, value)
    finally:
        os.close(fd)


def _reopened(path):
    fd = os.open(path, os.O_PATH)
    try:
        os.close(os.open(f"/proc/self/fd/{fd}", os.O_RDWR))
    finally:
        os.close(fd)


def _find():
    with open("/proc/self/status") as lines:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in lines if ":\t" in line)
    for name in ("Umask", "TracerPid", "Uid", "Gid", "Groups", "Threads", "SigBlk", "SigIgn", "SigCgt", "SigQ", "CapInh", "CapPrm",
                 "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Speculation_Store_Bypass",
                 "SpeculationIndirectBranch", "Cpus_allowed", "Mems_allowed", "CoreDumping", "THP_enabled", "VmLck", "VmPin"):
        yield name, status.get(name)
    yield "descriptors", list(_open_descriptors())
    with open("/proc/self/maps") as maps:
        modes = [(line.split()[1], line.rstrip()) for line in maps]
    yield "writable shared mappings", [line for mode, line in modes if "w" in mode and mode.endswith("s")]
    yield "writable and executable mappings", [line for mode, line in modes if "w" in mode and "x" in mode]
    for name in ("cgroup", "limits", "oom_score_adj", "timerslack_ns", "loginuid", "sessionid", "coredump_filter", "timens_offsets",
                 "setgroups", "uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as text:
            # What the host's uid is differs from sandbox to sandbox.
            yield name, [word for word in text.read().split() if name not in ("uid_map", "gid_map") or len(word) < 5]
    for name in ("exe", "cwd", "root"):
        yield name, os.readlink(f"/proc/self/{name}")
    yield "namespaces", sorted(os.listdir("/proc/self/ns"))
    yield "environment", dict(sorted(os.environ.items()))
    with open("/proc/self/environ", "rb") as raw:
        told = {entry.split(b"=")[0].decode() for entry in raw.read().split(b"\0") if entry}
    yield "environment at the start", sorted(told - {"KREQ", "KEVT"})
    yield "arguments", [sys.argv, sys.orig_argv, sys.path, sys.executable, list(sys.flags)]
    yield "ids", [os.getresuid(), os.getresgid(), os.getgroups(), os.getppid(), os.getpgid(0) == os.getpid()]
    yield "scheduling", [os.nice(0), os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, sorted(os.sched_getaffinity(0))]
    yield "rlimits", {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    yield "prctl", {"dumpable": _prctl(3), "keep capabilities": _prctl(7), "seccomp": _prctl(21), "secure bits": _prctl(27),
                    "slack": _prctl(30), "no new privileges": _prctl(39), "no large pages": _prctl(42), "store bypass": _prctl(52, 0),
                    "death signal": _through_pointer(2), "subreaper": _through_pointer(37)}
    controller, terminal = os.openpty()
    os.close(os.open(os.ttyname(terminal), os.O_RDWR))
    with open("/proc/self/stat") as fields:
        yield "terminal", [int(fields.read().split()[6]), os.getsid(0) == os.getpid()]
    os.close(controller)
    os.close(terminal)
    yield "personality", _libc.personality(0xFFFFFFFF)
    yield "signals", {number: _disposition(number) for number in range(1, 65) if number not in (32, 33)}
    yield "timers", [signal.getitimer(which) for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)]
    yield "threads", [len(os.listdir("/proc/self/task")), threading.active_count(), threading.get_native_id() == os.getpid()]
    for name in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{name}") as table:
            yield f"System V {name}", len(table.readlines())
    keys = _libc.syscall(250, 0, -3, 0)  # x86-64's keyctl, which is refused
    yield "session keyring", keys if keys < 0 else "a number"
    program = f"/proc/self/map_files/{sorted(os.listdir('/proc/self/map_files'))[0]}"
    yield "attempts", {
        "program to write": _tried(os.open, "/proc/self/exe", os.O_RDWR),
        "program by its path": _tried(_reopened, "/proc/self/exe"),
        "program's mode": _tried(os.chmod, "/proc/self/exe", 0o777),
        "program's times": _tried(os.utime, "/proc/self/exe"),
        "program's attributes": _tried(os.setxattr, "/proc/self/exe", "user.x", b"1"),
        "program linked": _tried(lambda: os.link("/proc/self/exe", "/tmp/linked", follow_symlinks=True)),
        "mapped file": _tried(os.open, program, os.O_RDONLY),
        "library to write": _tried(os.open, os.__file__, os.O_RDWR),
        "above the root": sorted(os.listdir("/proc/self/root/../..")),
        "shelter from the memory killer": _tried(_adjust, "/proc/self/oom_score_adj", b"-1"),
        "priority": _tried(os.nice, -1),
        "guest's memory": _tried(os.open, "/proc/1/mem", os.O_RDWR),
        "guest's descriptors": _tried(os.listdir, "/proc/1/fd"),
        "guest's way to the launcher": _tried(os.open, "/proc/1/fd/4", os.O_RDWR),
        "guest's environment": _tried(os.open, "/proc/1/environ", os.O_RDONLY),
        "guest traced": _libc.ptrace(0x4206, 1, 0, 0),
        "files limit": _tried(lambda: resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (8192, 8192))),
    }


for _name, _value in _find():
    FACTS[_name] = _value
