"""What holds for a kernel that is a fork: it is like a cold one, and shares nothing with its siblings."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from host import Kernel, Warm

FORKS = 100
MEMORY = 6_000  # kB; the stand-in for the library dirties pages of its own

# Each gives the same in a cold kernel and in a fork.
TWINS = [
    "import sys\nsys.argv, sys.path, sys.flags, sys.orig_argv, sys.executable, sys.dont_write_bytecode",
    "__name__, sys.modules['__main__'].__dict__ is globals(), sorted(globals()), _, __, ___, _dh, In, Out",
    "import os\nsorted(os.environ.items()), os.getcwd()",
    "ip = get_ipython()\nip.starting_dir, ip.home_dir, ip.ipython_dir, ip.profile_dir.location, ip.execution_count, ip.last_execution_succeeded, ip.user_ns is globals()",
    "import locale\nlocale.setlocale(locale.LC_ALL), locale.getpreferredencoding(), sys.getfilesystemencoding()",
    "[(s.name, s.fileno(), s.mode, s.encoding, s.errors, s.line_buffering, s.isatty(), s.seekable(), s is o) for s, o in"
    " ((sys.stdin, sys.__stdin__), (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__))]",
    "import gc\ngc.isenabled(), gc.get_threshold(), sys.getrecursionlimit(), sys.getswitchinterval(), sys.gettrace(), sys.getprofile()",
    "import threading\nthreading.active_count(), threading.main_thread().native_id == os.getpid(), os.listdir('/proc/self/task') == [str(os.getpid())]",
    "import signal\n[(n, str(signal.getsignal(n)).split(' object')[0]) for n in sorted(signal.valid_signals())], signal.pthread_sigmask(signal.SIG_BLOCK, ())",
    "import builtins\nsorted(vars(builtins))",
    "import linecache, tempfile, logging, time, warnings\n[k for k in linecache.cache if k.startswith('<cell 0')], tempfile.tempdir, logging.root.handlers, time.tzname, '__warningregistry__' in globals()",
    "import asyncio\nasyncio.events._get_running_loop(), asyncio.run(asyncio.sleep(0, 1))",
    "import warnings\nwarnings.warn('once'); 5",
    "1 / 0",
    "%who_ls",
]
DATA_TWINS = [
    "import numpy, pandas, matplotlib, matplotlib.pyplot as plt",
    "matplotlib.get_backend(), matplotlib.get_configdir(), matplotlib.get_cachedir(), plt.isinteractive(), plt.get_fignums(), sorted(matplotlib.rcParams.items(), key=str)",
    "numpy.get_printoptions(), numpy.geterr(), [(name, pandas.get_option(name)) for name in ('display.width', 'display.max_rows', 'mode.copy_on_write')]",
    "numpy.random.get_state()[0], numpy.random.get_state()[2:], numpy.random.rand() != numpy.random.rand()",
    "plt.figure();",
    "sorted(getattr(f, '__name__', str(f)) for f in get_ipython().events.callbacks['post_execute']), sorted(matplotlib.rcParams.items(), key=str)",
    "plt.plot([1, 2]); plt.title('x'); plt.show()",
    "pandas.DataFrame({'a': [1, 2], 'b': ['x', None]})",
    "numpy.linalg.inv(numpy.array([[2.0, 0.0], [0.0, 4.0]]))",
]
RANDOM = """import json, random, secrets, ssl, tempfile, uuid, os
got = [random.random(), random.getrandbits(64), secrets.token_hex(), ssl.RAND_bytes(16).hex(), str(uuid.uuid1()), str(uuid.uuid4()),
       next(tempfile._get_candidate_names()), os.urandom(8).hex(), uuid.uuid1().clock_seq << 48 | random.getrandbits(30)]
import multiprocessing
got.append(bytes(multiprocessing.current_process().authkey).hex())
try:
    import numpy
    got += [numpy.random.rand(), int(numpy.random.randint(1 << 62)), numpy.random.default_rng().random(), numpy.random.randn()]
except ImportError:
    pass
print(json.dumps(got))"""

Start = Callable[..., Kernel]


def twins(cold: Start, warm: Start, can: set[str]) -> list[str]:
    directory = tempfile.mkdtemp(prefix="kernel-twins-")
    pair = [start({}, directory) for start in (cold, warm)]
    found = ["it is no fork"] if pair[1].run("print('pandas' in __import__('sys').modules)").stdout != f"{'pandas' in can}\n" else []
    pair[0].run("None")
    for cell in TWINS + (DATA_TWINS if {"numpy", "pandas", "matplotlib"} <= can else []):
        one, two = (shown(kernel, cell) for kernel in pair)
        if one != two:
            found.append(f"{cell[:60]!r}: {difference(one, two)}")
    for kernel in pair:
        kernel.close()
    os.rmdir(directory)
    return found


def shown(kernel: Kernel, cell: str) -> str:
    outcome = kernel.run(cell)
    events = [{**event, "ms": 0} for event in outcome.events]
    return re.sub("0x[0-9a-f]+", "0x", json.dumps([outcome.status, outcome.stdout, outcome.stderr, events]))


def difference(one: str, two: str) -> str:
    start = next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
    start = max(0, start - 60)
    return f"cold …{one[start:start + 200]} warm …{two[start:start + 200]}"


def everything_random_differs(warm: Start, directory: str) -> list[str]:
    """G41 of the hostile list."""
    kernels = [warm({}, directory) for _ in range(FORKS)]
    values = [json.loads(kernel.run(RANDOM).stdout) for kernel in kernels]
    for kernel in kernels:
        kernel.close()
    columns: list[tuple[Any, ...]] = list(zip(*values))
    return [f"value {i} is the same in two of {FORKS} forks" for i, column in enumerate(columns) if len(set(column)) < FORKS]


def state_is_its_own(warm: Start, directory: str) -> list[str]:
    """X15: nothing of one fork is seen in the next."""
    one = warm({}, directory)
    one.run("import sys, os, random, builtins; marker = builtins.marker = sys.marker = 1; os.environ['MARKER'] = '1'; sys.path.append('/marker'); random.seed(1)")
    two = warm({}, directory)
    seen = two.run("import sys, os\n'marker' in globals(), hasattr(__import__('builtins'), 'marker'), hasattr(sys, 'marker'), 'MARKER' in os.environ, '/marker' in sys.path").result
    # The streams, requests and events, copies of the streams; the last one is the listing's own.
    opened = two.run("' '.join(sorted(os.listdir('/proc/self/fd')))").result
    one.close()
    two.close()
    expected = "(False, False, False, False, False)", "'0 1 2 3 4 5 6 7'"
    return [] if (seen, opened) == expected else [f"seen: {seen} {opened}"]


def variables_that_are_read_at_start(warm: Start, directory: str, can: set[str]) -> list[str]:
    """They hold, too: by executing the interpreter anew where nothing else helps."""
    found = []
    for env, cell, expected in (
        ({"MPLBACKEND": "agg"}, "import os, sys\n'IPython' in sys.modules, 'pandas' in sys.modules, os.environ['MPLBACKEND'], 'KREQ' in os.environ", "(True, False, 'agg', False)"),
        ({"LD_BIND_NOW": "1"}, "open('/proc/self/environ').read().count('LD_BIND_NOW')", "1"),
        ({"TZ": "JST-9"}, "import time; time.tzname[0]", "'JST'"),
        ({"A": "é=\n", "PATH": "/bin"}, "import os; os.environ['A'], os.environ['PATH'], os.popen('echo $PATH').read()", "('é=\\n', '/bin', '/bin\\n')"),
        ({"OPENBLAS_NUM_THREADS": "2"}, "import os, numpy\nlen(os.listdir('/proc/self/task')) == min(2, len(os.sched_getaffinity(0)))", "True"),
    ):
        if 'numpy' in cell and 'numpy' not in can:
            continue
        kernel = warm(env, directory)
        outcome = kernel.run(cell)
        if outcome.result != expected:
            found.append(f"{env}: {outcome}")
        kernel.close()
    return found


def what_is_installed_is_not_hidden_by_what_is_imported(warm: Start, directory: str, can: set[str]) -> list[str]:
    """A fork has the runtime's version in memory; one that finds another installed is executed anew. None is, while there is nothing."""
    if "pandas" not in can:
        return []
    base = Path(tempfile.mkdtemp(dir=directory))
    env, cell = {"SANDPOOL_PACKAGES": str(base)}, "import sys\nforked = 'pandas' in sys.modules\nimport pandas\nforked, getattr(pandas, 'v', 0)"
    kernel = warm(env, directory)
    site = kernel.run("import sys; f'lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'").result.strip("'")
    found = [] if (before := kernel.run(cell).result) == "(True, 0)" else [f"before: {before}"]
    kernel.close()
    (base / site).mkdir(parents=True)
    (base / site / "pandas.py").write_text("v = 7")
    kernel = warm(env, directory)
    if (after := kernel.run(cell).result) != "(False, 7)":
        found.append(f"after: {after}")
    kernel.close()
    return found


def the_fonts_are_linked(warm: Start, directory: str, configuration: str) -> list[str]:
    """A fork finds the font list that was made with the runtime in its own, empty `/tmp`, as a cold kernel does."""
    shutil.rmtree(configuration)
    kernel = warm({}, directory)
    linked = kernel.run("import os, sys\n'_sandpool_site' not in sys.modules or [os.path.islink(f'{d}/{n}') for d in [os.environ['MPLCONFIGDIR']] for n in os.listdir(d)]").result
    kernel.close()
    os.makedirs(configuration, exist_ok=True)
    return [] if linked in ("True", "[True]") else [f"{linked}"]


def opens_the_added_packages_after_the_fork(cold: Start, warm: Start, directory: str) -> list[str]:
    """The warm interpreter does not know of them. A fork has them at the same place in its path as a cold kernel."""
    added = Path(tempfile.mkdtemp(dir=directory))
    (added / "started.pth").write_text("import sys, os; sys.started = os.getpid()\n")
    (added / "added_module.py").write_text("v = 7")
    cell = "import sys, os\nhas_site = '_sandpool_site' in sys.modules\n" \
        "not has_site or (sys.started == os.getpid(), __import__('added_module').v), sys.path"
    pair = [start({"SANDPOOL_ADDED": str(added)}, directory) for start in (cold, warm)]
    one, two = (kernel.run(cell).result for kernel in pair)
    for kernel in pair:
        kernel.close()
    return [] if one == two and one.startswith(("((True, 7),", "(True,")) else [f"cold {one}, forked {two}"]


def what_is_not_needed_goes(warm: Warm) -> list[str]:
    """The guest closes the channel without a word, or names a directory that is gone."""
    guest, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel = warm.fork_into(channel)
    guest.close()
    found = [] if kernel.wait() == 0 else [f"ended with {kernel.returncode}"]
    gone = Kernel(warm, {}, "/no/such/directory")
    ready = gone.ready()
    if ready.status != "died 70" or "working directory: No such file" not in ready.stderr:
        found.append(f"{ready}")
    gone.close()
    return found


def little_memory_is_its_own(warm: Start, directory: str) -> list[str]:
    kernel = warm({}, directory)
    assert kernel.run("import sys; 'IPython' in sys.modules, sys.argv").result == "(True, [''])"
    rollup = Path(f"/proc/{kernel.process.pid}/smaps_rollup").read_text()
    kernel.close()
    used = sum(int(size) for size in re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", rollup, re.M))
    return [] if used < MEMORY else [f"{used} kB"]


def tells_what_it_could_not_import(argv: list[str], env: dict[str, str]) -> list[str]:
    warm = Warm([*argv, "--warm", "json", "no_module_of_this_name", "string"], env)
    told = warm.reports()
    ended = warm.close()
    expected = {"no_module_of_this_name": "ModuleNotFoundError: No module named 'no_module_of_this_name'"}
    return [f"it told {told}"] * (told != expected) + [f"it ended with {ended}"] * (ended != 0)


def refuses_what_cannot_be_forked(argv: list[str], env: dict[str, str]) -> list[str]:
    """A module that starts a thread, or keeps a file open."""
    found = []
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "threaded.py").write_text("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n")
        Path(directory, "holding.py").write_text("files = [open('/dev/zero') for _ in range(9)]\n")
        for name, said in (("threaded", "it has 2 threads"), ("holding", "it has `/dev/zero` open")):
            # The launcher's socket is descriptor 3; here nobody listens.
            command = ["sh", "-c", 'exec "$@" 3>/dev/null', "sh", *argv, "--warm", name]
            ran = subprocess.run(command, env={**env, "KERNEL_TEST_PATH": directory}, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
            if ran.returncode != 1 or said not in ran.stderr:
                found.append(f"{name}: {ran}")
    return found
