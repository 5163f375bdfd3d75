"""This program is the Python kernel: it runs cells in IPython's shell, without its front end, and speaks the driver
protocol.

PROTOCOL.md is the contract with the guest. Cells share this process, so anything a cell does to it (replaced
builtins of `sys`, closed descriptors, signal handlers, forks) must at worst end the process; it must never make
the driver answer wrongly or twice. Two rules follow: everything the driver needs is imported and bound to a private
name before the first cell, and each request gets exactly one `done`, or the process exits.

A cold kernel calls `make_shell()` and `serve()`. The warm interpreter (`driver.py --warm MODULE...`) makes the shell,
imports the modules, runs throw-away cells and is then forked by the launcher's library. Each fork is a kernel: it
returns from the library into `adopt()`, which makes it equal to a cold kernel, and calls `serve()`. Nothing before the
fork leaves a descriptor, a thread, an event loop or a file behind, because the forks would share it.
"""

from __future__ import annotations

import sys

if __name__ == "__main__" and sys.version_info < (3, 11):
    sys.exit("sandpool: the Python kernel needs Python 3.11 or newer")

import _signal  # the functions without the conversion to enumerations
import _socket
import _thread
import ast
import base64
import bdb  # noqa: F401  (IPython imports it during a cell, when the working directory may contain another `bdb`)
import builtins
import contextlib
import contextvars
import ctypes
import fcntl
import gc
import importlib
import io
import json
import os
import re
import select
import shlex
import signal
import site
import subprocess
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from importlib import machinery
from json.encoder import encode_basestring as quote
from os import close, dup, dup2, fstat, get_inheritable, getpid, killpg, putenv, read, stat, unsetenv, waitid, write
from pathlib import Path
from time import perf_counter, tzset
from types import FrameType
from typing import Any, NoReturn

try:
    from IPython.core import async_helpers, interactiveshell
    from IPython.core.autocall import IPyAutocall
    from IPython.core.compilerop import CachingCompiler
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.formatters import DisplayFormatter
    from IPython.core.inputtransformer2 import leading_empty_lines
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.core.macro import Macro
    from IPython.core.magics.script import ScriptMagics
    from IPython.core.profiledir import ProfileDir
    from IPython.utils.path import get_home_dir
    from IPython.utils.text import LSString, SList
    from traitlets.config import Config
except ImportError as missing:
    sys.exit(f"sandpool: the Python kernel needs IPython, which `{sys.executable}` cannot import: {missing}")

SHOWN_FILE = "<stdin>"  # the name tracebacks show for every cell
TEXT_LIMIT = 1_000_000  # bytes of one text
PICTURE_LIMIT = 8_000_000  # base64 characters of one picture
LINE_LIMIT = 12_000_000  # bytes of one event
SOURCE_LIMIT = 16_000_000  # characters of old cells kept for `inspect.getsource`
STRAY_LIMIT = 64_000  # characters that threads of earlier cells may add to one cell
ARGUMENT_LIMIT = 100_000  # bytes of one argument; Linux allows 128 KiB
LOST = 70  # exit status when the control pipes are gone
INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
# What `picture.py` draws: the kind is the name of the group.
ILLUSTRATED = re.compile(r"application/vnd\.vega\.v\d+[.+](?P<vega>json)|application/vnd\.vegalite\.v\d+[.+](?P<vegalite>json)"
                         r"|application/vnd\.plotly\.v1\+(?P<plotly>json)|image/(?P<svg>svg)\+xml")
ILLUSTRATED_LIMIT = 16  # pictures of charts and drawings in one cell
PICTURES = frozenset(("image/png", "image/jpeg"))
SVG_PICTURE = "image/png;from=svg"  # apart from `image/png`, because not every dialect shows it
PAGE = "application/vnd.sandpool.page"  # the name of a file in the directory in which the kernel started
NO_INPUT = "input() is not available: this sandbox has no interactive stdin"

ALL_SIGNALS = signal.valid_signals()
BOOT_PATH = list(sys.path)
ENVIRON = os.environ
VARIABLES: dict[bytes, bytes] = ENVIRON._data  # without the methods of `ENVIRON`, which raise for an absent name
OWN_FILE = sys._getframe().f_code.co_filename
STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# Code to which IPython gives a special meaning, or may give one, and code that keeps state in the compiler or needs an event loop.
SPECIAL = re.compile(r"\A\s*(?:[ \t]|\Z)|^[ \t]*(?:[%!/,;]|>>>|\.\.\.|In \[|\[(?:nav|ins)\])|=\s*[!%]"
                     r"|[?\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]|a(?:wait|sync)|__future__"
                     r"|create_task|ensure_future|get_running_loop", re.MULTILINE)
# Functions that need a running event loop, and functions that must not find one.
NEED_LOOP = frozenset(("create_task", "ensure_future", "get_running_loop"))
START_LOOP = re.compile(r"(?:asyncio\.)?run|.*\brun_(?:until_complete|forever)", re.DOTALL)
SCALARS = frozenset((int, float, complex, bool, str, bytes))
FIRST_WORD = re.compile(r"[\w.*]*")
# Methods of the shell that run a cell. A cell that replaces one on the instance expects it to be called.
REPLACEABLE = frozenset(("run_cell", "_run_cell", "run_cell_async", "should_run_async", "run_ast_nodes", "run_code",
                         "transform_cell", "transform_ast"))
# File names that IPython gives to code that it compiles from a cell's text.
USER_NAMES = frozenset(("<string>", "<timed exec>", "<timed eval>", "<magic-timeit>", "<prun>"))

scan_json = json.JSONDecoder().scan_once  # written in C, so a changed `json` does not affect it
encode_json = json.JSONEncoder(allow_nan=False, ensure_ascii=False, separators=(",", ":"), default=repr).encode
flush_text = io.TextIOWrapper.flush
list_threads, get_ident = threading.enumerate, threading.get_ident
count_threads, live_threads = _thread._count, threading._active  # type: ignore[attr-defined]
set_trace, set_profile = sys.settrace, sys.setprofile
install, current_handler, set_alarm, set_mask = _signal.signal, _signal.getsignal, _signal.alarm, _signal.pthread_sigmask
original_input = builtins.input
set_async_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc

try:
    _libc = ctypes.CDLL(None)
    _c_flush = _libc.fflush
    # `fflush(NULL)` would wait for the lock of every open FILE.
    _c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
except (OSError, ValueError, AttributeError):
    _c_flush = None


# ---------------------------------------------------------------- values


def exact(text: str) -> str:
    """Return the characters of a `str` without calling the methods of a subclass."""
    return str.__str__(text)


def cut(text: str) -> str:
    """Return `text` without its middle if it is over the limit, and without lone surrogates."""
    text = exact(text)
    if len(text) * 4 > TEXT_LIMIT:
        half = TEXT_LIMIT // 2
        head = text[:half].encode("utf-8", "backslashreplace")
        tail = text[max(half, len(text) - half):].encode("utf-8", "backslashreplace")
        if len(text) > TEXT_LIMIT or len(head) + len(tail) > TEXT_LIMIT:
            left_out = len(text) - 2 * half if len(text) > TEXT_LIMIT else 0
            left_out += len(head[half:].decode("utf-8", "ignore")) + len(tail[:-half].decode("utf-8", "ignore"))
            head_text, tail_text = head[:half].decode("utf-8", "ignore"), tail[-half:].decode("utf-8", "ignore")
            return f"{head_text}\n[... {left_out} characters left out ...]\n{tail_text}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def bounded_bundle(data: dict[str, Any]) -> dict[str, str]:
    """Return a mime bundle as {mime: JSON text}, with each value and the whole within the limits."""
    out: dict[str, str] = {}
    notes: list[str] = []
    for mime, value in list(data.items()):
        mime = exact(mime) if isinstance(mime, str) else "text/plain"
        text = encode_value(mime, value)
        if text is None:
            notes.append(f"[{mime} left out: it is larger than {PICTURE_LIMIT // 1_000_000} MB]")
        else:
            out[mime] = text
    while sum(map(len, out.values())) * 2 > LINE_LIMIT:  # every character may take several bytes
        if sum(len(text.encode()) for text in out.values()) < LINE_LIMIT - 100_000:
            break
        largest = max(out, key=lambda mime: len(out[mime]))
        del out[largest]
        notes.append(f"[{largest} left out: the display is larger than {LINE_LIMIT // 1_000_000} MB]")
    if notes:
        plain = json_string(out["text/plain"]) + "\n" if "text/plain" in out else ""
        out["text/plain"] = quote(cut(plain + "\n".join(notes)))
    return out


def json_string(text: str) -> str:
    return scan_json(text, 0)[0]


def encode_value(mime: str, value: Any) -> str | None:
    """Return one value of a bundle as JSON, or None for a picture over the limit."""
    if mime.startswith("image/") and mime != "image/svg+xml":
        if isinstance(value, (bytes, bytearray, memoryview)):
            value = base64.b64encode(value).decode("ascii")
        if isinstance(value, str):
            value = "".join(exact(value).split())
            return quote(value) if len(value) <= PICTURE_LIMIT else None
    if isinstance(value, (bytes, bytearray)):
        value = bytes(value).decode("utf-8", "backslashreplace")
    if isinstance(value, str):
        return quote(cut(value))
    try:
        text = encode_json(value)
        if len(text) <= TEXT_LIMIT:
            return text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\\ud", "\\\\ud")
    except (ValueError, TypeError, RecursionError):
        pass
    return quote(cut(repr(value)))


# ---------------------------------------------------------------- charts


def vega_lite_of_altair(obj: Any) -> Any:
    """Make altair describe a chart as Vega-Lite, instead of a page that loads its library from the network. A renderer that
    the user chose stays."""
    altair = sys.modules.get("altair")
    if altair is None or type(obj).__module__.partition(".")[0] != "altair" or altair.renderers.active != "default":
        return contextlib.nullcontext()
    return altair.renderers.enable("mimetype")


def illustrated(data: dict[str, Any]) -> dict[str, Any]:
    """Return a bundle with a picture of the chart or the drawing that it describes. Both are also left as pages in the
    directory in which the kernel started; the description of a chart is then left out."""
    found = next((match for mime in data if isinstance(mime, str) and (match := ILLUSTRATED.fullmatch(mime))), None)
    if found is None or not PICTURES.isdisjoint(data):
        return data
    mime, kind = found.group(), found.lastgroup
    if kind == "svg" and machinery.PathFinder.find_spec("vl_convert", BOOT_PATH) is None:
        return data
    if KERNEL.illustrated >= ILLUSTRATED_LIMIT:
        made = {"why": f"one cell gets at most {ILLUSTRATED_LIMIT} pictures of charts and drawings"}
    else:
        KERNEL.illustrated += 1
        made = draw(kind or "", data[mime])
    out = dict(data)
    if "png" in made:
        out[SVG_PICTURE if kind == "svg" else "image/png"] = made["png"]
    page, why = made.get("page"), made.get("why")
    if page is not None:
        out[PAGE] = page
    if kind == "svg":
        return out
    if page is not None:
        del out[mime]
    parts = (f"chart in {KERNEL.directory}/{page}" if page else "", f"no picture: {why}" if why else "")
    out["text/plain"] = f"[{'; '.join(filter(None, parts))}]"
    return out


def draw(kind: str, value: Any) -> dict[str, str]:
    """Return what `picture.py` answers. It is a process of its own: an interrupt ends it and not the kernel."""
    try:
        text = value if isinstance(value, str) else encode_json(value)
        given = script_file(exact(text))
    except (ValueError, TypeError, RecursionError, OSError) as e:
        return {"why": f"{type_name(e)}: {e}"}
    parts: list[bytes] = []
    program = os.path.join(os.path.dirname(OWN_FILE), "picture.py")
    try:
        run_command([sys.executable, "-P", "-B", "-X", "utf8", program, kind, KERNEL.directory], stdin=given, out=parts.append,
                    err=lambda _: None)
        answer = scan_json(b"".join(parts).decode("utf-8"), 0)[0]
        return {name: answer[name] for name in ("png", "page", "why") if isinstance(answer.get(name), str)}
    except (OSError, ValueError, StopIteration, AttributeError):
        return {"why": "the program that draws it failed"}
    finally:
        close(given)


# ---------------------------------------------------------------- the shell's parts


class Sources(CachingCompiler):
    """Gives each cell a unique name, so that a function of an old cell still finds its source."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: deque[tuple[str, int]] = deque()
        self.total = 0

    def get_code_name(self, raw_code: str, transformed_code: str, number: int) -> str:
        KERNEL.compiled += 1
        nested = f".{KERNEL.compiled}" if KERNEL.compiled > 1 else ""
        return f"<cell {KERNEL.n}{nested}>"

    def cache(self, transformed_code: str, number: int = 0, raw_code: str | None = None) -> str:
        name = self.get_code_name(transformed_code, transformed_code, number)
        self._filename_map[name] = number
        size = len(transformed_code)
        traceback.linecache.cache[name] = size, None, [line + "\n" for line in transformed_code.splitlines()], name
        self.kept.append((name, size))
        self.total += size
        while self.total > SOURCE_LIMIT and len(self.kept) > 1:
            old, size = self.kept.popleft()
            self.total -= size
            traceback.linecache.cache.pop(old, None)
            self._filename_map.pop(old, None)
        return name

    def forget(self) -> None:
        """Remove all cells."""
        for name, _ in self.kept:
            self._filename_map.pop(name, None)
        self.kept.clear()
        self.total = 0


class Output(io.TextIOWrapper):
    """The stream behind `sys.stdout` and `sys.stderr`."""


class WatchedOutput(Output):
    """An output while threads or tasks of earlier cells exist: their text does not become output of the current cell."""

    def write(self, text: str) -> int:
        run = stray()
        return super().write(text) if run is None else KERNEL.keep_stray(run, text)


class MergedStderr(io.TextIOWrapper):
    """Standard error on the same pipe as standard output. Each write first flushes what was printed before."""

    def write(self, text: str) -> int:
        with contextlib.suppress(Exception):
            flush_text(KERNEL.streams["stdout"])
        written = super().write(text)
        super().flush()
        return written


class WatchedMergedStderr(MergedStderr):
    """A merged standard error while threads or tasks of earlier cells exist."""

    def write(self, text: str) -> int:
        run = stray()
        return super().write(text) if run is None else KERNEL.keep_stray(run, text)


WATCHED = {Output: WatchedOutput, MergedStderr: WatchedMergedStderr}
UNWATCHED = {watched: plain for plain, watched in WATCHED.items()}


# ---------------------------------------------------------------- which cell something belongs to

CELL: contextvars.ContextVar[int] = contextvars.ContextVar("sandpool_cell")  # a task keeps its creator's
borrowed_threads: dict[int, int] = {}  # by thread: the cell of the function that runs in an older thread


def cell_of_caller() -> int:
    """Return the cell that started the calling thread or task, or the current cell."""
    me = get_ident()
    cell = borrowed_threads.get(me)
    if cell is None:
        cell = CELL.get(None)
    if cell is None:
        cell = getattr(live_threads.get(me), "_sandpool_cell", None)
    return KERNEL.n if cell is None else cell


def stray() -> int | None:
    """Return the earlier cell to which the caller belongs, or None if it belongs to the current cell."""
    if getpid() != KERNEL.pid:
        return None  # a forked child belongs to one cell
    cell = cell_of_caller()
    return None if cell == KERNEL.n and (KERNEL.in_cell or get_ident() == KERNEL.main) else cell


def for_this_cell(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` so that it belongs to the current cell in every thread that calls it."""
    cell = cell_of_caller()

    def call(*args: Any, **kwargs: Any) -> Any:
        me = get_ident()
        before = borrowed_threads.get(me)
        borrowed_threads[me] = cell
        try:
            return function(*args, **kwargs)
        finally:
            if before is None:
                borrowed_threads.pop(me, None)
            else:
                borrowed_threads[me] = before

    return call


def follow_threads() -> None:
    """Record for each thread the cell that started it."""
    start_thread, start_raw = threading.Thread.start, _thread.start_new_thread

    def start(self: threading.Thread) -> None:
        self._sandpool_cell = cell_of_caller()  # type: ignore[attr-defined]
        start_thread(self)

    def start_new_thread(function: Callable[..., Any], args: Any, kwargs: Any = None) -> int:
        kwargs = {} if kwargs is None else kwargs
        return start_raw(for_this_cell(function) if callable(function) else function, args, kwargs)

    start.__doc__, start.__qualname__ = start_thread.__doc__, start_thread.__qualname__
    threading.Thread.start = start  # type: ignore[method-assign]
    start_new_thread.__doc__ = start_raw.__doc__
    _thread.start_new_thread = _thread.start_new = start_new_thread  # type: ignore[assignment]


def follow_pools() -> None:
    """Attribute the work of a thread pool to the cell that submits it."""
    module = sys.modules.get("concurrent.futures.thread")
    pool = getattr(module, "ThreadPoolExecutor", None)
    if pool is None or getattr(pool.submit, "_sandpool", False):
        return
    submit_plain = pool.submit

    def submit(self: Any, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return submit_plain(self, for_this_cell(fn), *args, **kwargs)

    submit.__doc__, submit.__qualname__ = submit_plain.__doc__, submit_plain.__qualname__
    submit._sandpool = True  # type: ignore[attr-defined]
    pool.submit = submit


def is_cell(filename: str) -> bool:
    return filename.startswith("<cell ")


class Hook(DisplayHook):
    """Sends the last value of a cell as a `result` event. It stores only `_`, `__` and `___`."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        KERNEL.event("result", data=bounded_bundle(illustrated(format_dict)))

    def log_output(self, format_dict: dict[str, Any]) -> None:
        pass  # IPython would keep every bundle for ever

    def update_user_ns(self, result: Any) -> None:
        if "_" in vars(builtins):  # gettext
            return
        ns = self.shell.user_ns
        ns["___"], ns["__"], ns["_"] = ns.get("__", ""), ns.get("_", ""), result

    def finish_displayhook(self) -> None:
        self._is_active = False

    def quiet(self) -> bool:
        code = KERNEL.code
        return ";" in code[-200:] and bool(self.semicolon_at_end_of_expression(code))


class Publisher(DisplayPublisher):
    """Sends the arguments of `display()` as a `display` event."""

    def publish(self, data: Any, metadata: Any = None, source: Any = None, *, transient: Any = None,
                update: bool = False, **_: Any) -> None:
        self._validate_data(data, metadata)
        run = stray() if count_threads() else None
        if run is not None:
            bundle = bounded_bundle(data)
            plain = bundle.get("text/plain")
            KERNEL.keep_stray(run, (json_string(plain) if plain else f"[{', '.join(bundle)}]") + "\n")
            return
        members: dict[str, Any] = {"data": bounded_bundle(illustrated(data))}
        identity = (transient or {}).get("display_id")
        if identity is not None:
            members["id"] = quote(cut(str(identity)))
        if update:
            members["update"] = "true"
        KERNEL.event("display", **members)

    def clear_output(self, wait: bool = False) -> None:
        KERNEL.event("clear", wait="true" if wait else "false")


class Formatter(DisplayFormatter):
    """Records which figures a cell has shown, so that none is shown again when the cell ends."""

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        if type(obj) in SCALARS and not include and not exclude and self.shows_as_repr(type(obj)):
            with contextlib.suppress(ValueError):  # an integer may be too long
                return {"text/plain": repr(obj)}, {}
        figure_module = sys.modules.get("matplotlib.figure")
        if figure_module is not None and isinstance(obj, figure_module.Figure):
            KERNEL.shown_figures.append(obj)
        with vega_lite_of_altair(obj):
            return super().format(obj, include, exclude)

    def shows_as_repr(self, kind: type) -> bool:
        """Return whether no formatter was registered for this plain type, so that `repr` gives the result."""
        if not vars(self).get("printers"):
            plain = self.formatters["text/plain"]
            others = (*self.formatters.values(), self.mimebundle_formatter, self.ipython_display_formatter)
            self.printers = [one.type_printers for one in others if one is not plain]
            self.text_printers, self.text_defaults = plain.type_printers, dict(plain.type_printers)
        if kind is float and self.formatters["text/plain"].float_format != "%r":
            return False
        return self.text_printers.get(kind) is self.text_defaults.get(kind) and all(map(SCALARS.isdisjoint, self.printers))


def close_shown_figures() -> None:
    """Close the figures that were shown already, before matplotlib_inline shows and closes the other open ones."""
    shown, KERNEL.shown_figures = KERNEL.shown_figures, []
    if not shown:
        return
    helpers = sys.modules.get("matplotlib._pylab_helpers")
    inline = sys.modules.get("matplotlib_inline.config")
    if helpers is None or inline is None or not inline.InlineBackend.instance().close_figures:
        return
    for figure in shown:
        helpers.Gcf.destroy_fig(figure)


class NoProfileDir(ProfileDir):
    """A profile directory that has a name but is not created, because the file system may be read-only."""

    def _mkdir(self, path: str, mode: int | None = None) -> bool:
        return False

    def _location_changed(self, change: Any) -> None:
        self._location_isset = True


class Scripts(ScriptMagics):
    """Runs `%%bash`, `%%sh` and `%%script` like `!`, without IPython's asyncio thread, which would never end."""

    def shebang(self, line: str, cell: str) -> None:
        from IPython.utils.process import arg_split

        args, argv = ScriptMagics.shebang.parser.parse_known_args(arg_split(line, posix=True))
        ns = self.shell.user_ns
        cell = cell if cell.endswith("\n") else cell + "\n"
        if takes_argument(argv) and len(cell.encode("utf-8", "surrogateescape")) < ARGUMENT_LIMIT:
            argv, script = [*argv, "-c", cell], os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        else:
            script = script_file(cell)
        if args.bg:
            self._background(args, argv, script)
            return
        captured: dict[str, list[bytes]] = {name: [] for name in (args.out, args.err) if name}
        try:
            status = run_command(argv, stdin=script, out=captured[args.out].append if args.out else None,
                                 err=captured[args.err].append if args.err else None)
        except FileNotFoundError as e:
            if e.filename != argv[0]:
                raise
            print(f"Couldn't find program: {argv[0]!r}")
            return
        finally:
            close(script)
            ns.update({name: b"".join(parts).decode("utf-8", "replace") for name, parts in captured.items()})
        if args.raise_error and status != 0:
            raise subprocess.CalledProcessError(status, argv[0])

    def _background(self, args: Any, argv: list[str], script: int) -> None:
        ns = self.shell.user_ns
        process = subprocess.Popen(argv, stdin=script, start_new_session=True, env=child_env(),
                                   stdout=subprocess.PIPE if args.out else subprocess.DEVNULL,
                                   stderr=subprocess.PIPE if args.err else subprocess.DEVNULL)
        close(script)
        for name, value in ((args.out, process.stdout), (args.err, process.stderr), (args.proc, process)):
            if name:
                ns[name] = value
        KERNEL.background.append(process)  # dropping it would raise a ResourceWarning

    shebang.__doc__ = ScriptMagics.shebang.__doc__
    shebang.parser = ScriptMagics.shebang.parser  # type: ignore[attr-defined]


class Exit:
    """Implements `exit` and `quit`, which end the cell and not the kernel."""

    def __repr__(self) -> str:
        return "Use exit() to end the cell"

    def __call__(self, code: Any = None) -> NoReturn:
        raise SystemExit(code)


class Shell(InteractiveShell):
    """IPython's shell without the terminal, the history and the pseudo-terminal."""

    def _tee(self, channel: str) -> Any:
        return contextlib.nullcontext()  # the original keeps all output in memory

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        return {}  # the original calls `str(exception)` and keeps the text for ever

    def init_virtualenv(self) -> None:
        pass

    def note_defaults(self) -> None:
        """Record the settings on which a plain cell relies."""
        self.builtin_trap.__enter__()  # entered once for all cells
        self.default_transforms = self.transforms()

    def transforms(self) -> tuple[list[Any], ...]:
        inputs, lines = self.input_transformer_manager, self.prefilter_manager
        return (inputs.cleanup_transforms + inputs.line_transforms + inputs.token_transformers, lines.transformers + lines.checkers,
                self.input_transformers_post + self.ast_transformers, self.events.callbacks["pre_run_cell"] + self.events.callbacks["post_run_cell"])

    def is_plain(self, code: str) -> bool:
        """Return whether a cell is plain Python and no hook or transformer has to see it. `run_plain` then does the same as
        `run_cell` in a fraction of the time."""
        if (SPECIAL.search(code) or self.ast_node_interactivity != "last_expr" or self.custom_exceptions
                or self.trio_runner or self.logger.log_active or not REPLACEABLE.isdisjoint(vars(self))
                or self.transforms() != self.default_transforms):
            return False
        if "\n" in code.rstrip("\n"):
            return True
        # A line alone may call a magic without `%`.
        word = FIRST_WORD.match(code).group()  # type: ignore[union-attr]
        magics = self.magics_manager.magics
        return not (self.autocall or word in magics["line"] or word in magics["cell"]
                    or isinstance(self.user_ns.get(word), (Macro, IPyAutocall)))

    def should_run_async(self, raw_cell: str, **options: Any) -> bool:
        """Also run a cell in the event loop that makes a task without an `await`, as it would run in a notebook."""
        return makes_task(options.get("transformed_cell") or raw_cell) or super().should_run_async(raw_cell, **options)

    def run_plain(self, code: str) -> BaseException | None:
        """Run a plain cell and return the error with which it ended."""
        self.events.trigger("pre_execute")
        error = None
        try:
            with self.display_trap:
                error = self.run_statements(code if code.endswith("\n") else code + "\n")
        finally:
            self.events.trigger("post_execute")
        if self.last_execution_succeeded is not (error is None):
            self.last_execution_succeeded = error is None
        return error

    def run_statements(self, source: str) -> BaseException | None:
        name, flags, user_ns = self.compile.cache(source), self.compile.flags, self.user_ns
        hook = sys.excepthook
        try:
            body = compile(source, name, "exec", flags | ast.PyCF_ONLY_AST, True).body
            sys.excepthook, self.sys_excepthook = self.excepthook, hook
            last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
            for node in body:  # one by one, as IPython does, so that statements before one that does not compile are run
                exec(compile(ast.Module([node], []), name, "exec", flags, True), user_ns, user_ns)
            if last is not None:
                exec(compile(ast.Interactive([last]), name, "single", flags, True), user_ns, user_ns)
        except BaseException as e:
            return e
        finally:
            sys.excepthook = hook
        return None

    def init_user_ns(self) -> None:
        super().init_user_ns()
        self.user_ns["exit"] = self.user_ns["quit"] = Exit()

    def init_display_formatter(self) -> None:
        self.display_formatter = Formatter(parent=self)
        self.display_formatter.active_types = self.display_formatter.format_types
        self.configurables.append(self.display_formatter)

    def showtraceback(self, exc_tuple: Any = None, *_: Any, **__: Any) -> None:
        # `%run`, a failing `__repr__` and event callbacks report an error only here.
        KERNEL.shown = (exc_tuple or sys.exc_info())[1]

    def showsyntaxerror(self, *_: Any, **__: Any) -> None:
        KERNEL.shown = sys.exc_info()[1]

    showindentationerror = showsyntaxerror

    def ask_exit(self) -> NoReturn:
        raise SystemExit(0)

    def enable_gui(self, gui: Any = None) -> None:
        pass

    def system(self, cmd: str) -> None:
        """Run `!cmd`."""
        cmd = self.var_expand(cmd, depth=1)
        status = run_command(shell_argv(cmd), out=sink("stdout"), err=sink("stderr"))
        self.user_ns["_exit_code"] = status
        if status != 0 and self.system_raise_on_error:
            raise subprocess.CalledProcessError(status, cmd)

    system_piped = system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """Run `a = !cmd` and return what the command writes to both streams."""
        cmd = self.var_expand(cmd, depth=depth + 1)
        parts: list[bytes] = []
        status = run_command(shell_argv(cmd), out=parts.append, merge=True)
        self.user_ns["_exit_code"] = status
        if status != 0 and self.system_raise_on_error:
            raise subprocess.CalledProcessError(status, cmd)
        text = b"".join(parts).decode("utf-8", "replace")
        return SList(text.splitlines()) if split else LSString(text)


def makes_task(code: str) -> bool:
    """Return whether a cell calls a function outside of its own functions that needs a running event loop. Functions of the
    cell do not count, and a cell that starts a loop of its own must not find one."""
    if not any(name in code for name in NEED_LOOP):
        return False
    try:
        nodes: list[ast.AST] = [ast.parse(code)]
    except (SyntaxError, ValueError):
        return False
    needs_loop = False
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if START_LOOP.fullmatch(name):
                return False
            needs_loop |= name.rpartition(".")[2] in NEED_LOOP
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            nodes.extend(ast.iter_child_nodes(node))
    return needs_loop


def pip(line: str) -> None:
    """Run pip in the interpreter of the kernel. A failure is an error of the cell."""
    shell = KERNEL.shell
    shell.system(f"{shlex.quote(sys.executable)} -m pip {line}")
    if (status := shell.user_ns["_exit_code"]) != 0:
        raise subprocess.CalledProcessError(status, f"pip {line}")


def blank_lines_before_magic(lines: list[str]) -> list[str]:
    """Drop the empty lines at the top of a cell only before a cell magic, which must come first. IPython always drops them,
    and its tracebacks then show wrong line numbers."""
    rest = leading_empty_lines(lines)
    return rest if rest and rest[0].startswith("%%") else lines


def print_page(shell: Any, data: Any, start: int = 0, screen_lines: int = 0, **_: Any) -> None:
    """Print what `obj?` and others would show in a pager."""
    text = data.get("text/plain", "") if isinstance(data, dict) else data
    print("\n".join(text.splitlines()[start:]))


# ---------------------------------------------------------------- child processes


def shell_argv(cmd: str) -> list[str]:
    return ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", cmd]


def child_env() -> dict[str, str]:
    """Return the environment without the inline backend, because a figure shown by a child would be lost."""
    env = dict(os.environ)
    if env.get("MPLBACKEND") == INLINE_BACKEND:
        del env["MPLBACKEND"]
    return env


def takes_argument(argv: list[str]) -> bool:
    """Return whether a shell takes the script by `-c`. From standard input, `read` would consume the rest of the script."""
    return bool(argv) and os.path.basename(argv[0]) in ("bash", "sh", "dash", "zsh") and all(
        arg.startswith("-") and arg not in ("-s", "-c", "-") for arg in argv[1:])


def script_file(text: str) -> int:
    """Return a descriptor at the start of an unnamed file that contains `text`. Unlike a pipe, it needs no writer."""
    try:
        fd = os.memfd_create("script", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as f:
            fd = dup(f.fileno())
    data = text.encode("utf-8", "surrogateescape")
    while data:
        data = data[write(fd, data):]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def sink(name: str) -> Callable[[bytes], Any] | None:
    """Return None if a child may write to the descriptor itself, or a writer to the replacement of `sys.<name>`
    (`%%capture`, `redirect_stdout`)."""
    stream = getattr(sys, name, None)
    if stream is None or stream is KERNEL.streams.get(name):
        return None
    return lambda data: stream.write(data.decode("utf-8", "replace"))


def run_command(argv: list[str], stdin: int | None = None, out: Callable[[bytes], Any] | None = None,
                err: Callable[[bytes], Any] | None = None, merge: bool = False) -> int:
    """Run a command to its end in a new session without a terminal. An interrupt kills the whole session.
    `out` and `err` receive its output; without them it writes to descriptors 1 and 2."""
    KERNEL.flush()
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL if stdin is None else stdin, start_new_session=True, env=child_env(),
        stdout=subprocess.PIPE if out else None,
        stderr=subprocess.STDOUT if merge else subprocess.PIPE if err else None)
    try:
        takers = {stream.fileno(): taker for stream, taker in ((process.stdout, out), (process.stderr, err))
                  if stream is not None and taker is not None}
        if takers:
            collect(process, takers)
        with contextlib.suppress(ChildProcessError):
            waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # an interrupt leaves this at once
        return process.wait()
    except BaseException:
        end_session(process)
        raise
    finally:
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def collect(process: subprocess.Popen[bytes], takers: dict[int, Callable[[bytes], Any]]) -> None:
    """Pass the child's output on until the child ends. Processes that it left behind may hold the pipes open for ever."""
    poll = select.poll()
    for fd in takers:
        poll.register(fd, select.POLLIN)
    waiting = set(takers)
    while waiting:
        ready = [fd for fd, _ in poll.poll(20)]
        if not ready and process.poll() is not None:
            return
        for fd in ready:
            data = read(fd, 65536)
            if data:
                takers[fd](data)
            else:
                poll.unregister(fd)
                waiting.discard(fd)


def end_session(process: subprocess.Popen[bytes]) -> None:
    for number, patience in ((signal.SIGINT, 0.3), (signal.SIGKILL, 1.0)):
        with contextlib.suppress(OSError):
            killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
            if number == signal.SIGKILL:
                return
    # The leader has ended or will end; the rest of its session got the second signal.


# ---------------------------------------------------------------- errors


def is_user_file(filename: str) -> bool:
    """Return whether a frame belongs to the user: a cell, or a file that is neither part of a library nor this file."""
    if filename.startswith("<"):
        return is_cell(filename) or filename in USER_NAMES
    return not (filename == OWN_FILE or filename.startswith(STDLIB)
                or "site-packages" in filename or "dist-packages" in filename)


def shown_frame(frame: traceback.FrameSummary) -> traceback.FrameSummary:
    if not is_cell(frame.filename):
        return frame
    # CPython has no source line for `<stdin>`.
    return traceback.FrameSummary(SHOWN_FILE, frame.lineno, frame.name, lookup_line=False, line="")


def keep_user_frames(error: traceback.TracebackException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    frames = [shown_frame(f) for f in error.stack or () if is_user_file(f.filename)]
    # Without frames there is no `Traceback` line, as in CPython.
    error.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
    if isinstance(getattr(error, "filename", None), str) and is_cell(error.filename):
        error.filename = SHOWN_FILE
    if isinstance(getattr(error, "_str", None), str):
        error._str = cut(error._str)  # type: ignore[attr-defined]
    for other in (error.__cause__, error.__context__, *(error.exceptions or ())):
        keep_user_frames(other, seen)


def type_name(e: BaseException) -> str:
    return exact(type.__dict__["__name__"].__get__(type(e)))


def error_text(e: BaseException) -> str:
    """Return CPython's plain traceback with the user's frames. This may run the user's `__str__`."""
    if isinstance(e, interactiveshell.UsageError):
        return f"UsageError: {e}\n"
    tb = BaseException.__traceback__.__get__(e)  # type: ignore[attr-defined]
    error = traceback.TracebackException(type(e), e, tb, lookup_lines=False, compact=True)
    keep_user_frames(error, set())
    return "".join(error.format())


def error_value(e: BaseException) -> str:
    value = str(e)
    filename = getattr(e, "filename", None)
    if isinstance(e, SyntaxError) and isinstance(filename, str) and is_cell(filename):
        value = value.replace(filename, SHOWN_FILE)
    return value


def safely(render: Callable[[BaseException], str], e: BaseException, fallback: str) -> str:
    try:
        return cut(render(e))
    except Exception:
        return fallback


def show_warning(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Replace `warnings.formatwarning`: a warning in a cell reads like CPython's for `<stdin>`."""
    if is_cell(filename):
        filename, line = SHOWN_FILE, ""
    return original_formatwarning(message, category, filename, lineno, line)


original_formatwarning = warnings.formatwarning


# ---------------------------------------------------------------- the kernel


class Kernel:
    """The state of this process and the two control pipes."""

    def __init__(self) -> None:
        self.req = self.evt = -1
        self.evt_identity: tuple[int, int] | None = None
        self.pid = getpid()
        self.n = 0
        self.code = ""
        self.compiled = 0  # code objects named in this cell
        self.shell: Shell = None  # type: ignore[assignment]
        self.streams: dict[str, io.TextIOWrapper] = {}
        self.merged = False  # 1 and 2 are the same pipe
        self.cell_variables: list[tuple[bytes, bytes, bytes | None]] = []  # of the current cell: name, value, previous value
        self.spare: dict[int, int] = {}  # copies of 1 and 2, in case a cell closes them
        self.stdin: Any = None
        self.shown: BaseException | None = None
        self.shown_figures: list[Any] = []
        self.illustrated = 0  # pictures of charts and drawings in this cell
        self.directory = "/"  # in which the kernel started
        self.background: list[subprocess.Popen[bytes]] = []
        self.packages: str | None = None  # where `pip` installs in this sandbox
        self.packages_seen = 0
        self.at_import: Callable[[], Any] | None = None  # work that a cold kernel would do at its first import
        self.loop: Any = None
        self.task: Any = None
        self.in_cell = False
        self.signalled = False  # an interrupt arrived during this cell
        self.cancelled = False  # the interrupt cancelled the cell's task
        self.quiet_signals = 0
        self.has_handlers = False  # the user installed signal handlers, which may raise anywhere
        self.pending: BaseException | None = None  # what a handler raised while an event was written
        self.lock = threading.Lock()
        self.writer: int | None = None
        self.queued: deque[bytes] = deque(maxlen=1000)
        self.between: deque[tuple[str, dict[str, Any]]] = deque(maxlen=32)
        self.main = get_ident()
        self.strays: deque[tuple[int, str]] = deque()  # output of earlier cells' threads: cell, text
        self.stray_size = 0

    # -- events

    def flush(self) -> None:
        """Flush the buffers of Python and C for 1 and 2. A stream of the user may block, so it is flushed only where an
        interrupt works."""
        for name, own in self.streams.items():
            try:
                flush_text(own)
            except Exception:
                pass
            current = getattr(sys, name, None)
            if current is not own and self.in_cell and current is not None:
                with contextlib.suppress(Exception):
                    current.flush()
        if _c_flush is not None:
            _c_flush(_c_stdout)

    def event(self, kind: str, **members: Any) -> None:
        """Send an event. The values of the members are JSON; a `data` member is {mime: JSON}."""
        if getpid() != self.pid:  # a forked child must never answer
            if kind == "done":
                end_child(None)
            return
        if not self.in_cell and kind in ("display", "clear"):
            self.between.append((kind, members))  # a thread sends this between cells; the next cell gets it
            return
        self.flush()
        if "data" in members:
            members["data"] = "{" + ",".join(f"{quote(k)}:{v}" for k, v in members["data"].items()) + "}"
        fields = "".join(f',"{name}":{value}' for name, value in members.items())
        self.send(f'{{"t":"{kind}","n":{self.n}{fields}}}\n'.encode("utf-8", "backslashreplace"))

    def send(self, line: bytes) -> None:
        """Write a whole line, even if signals arrive."""
        me = get_ident()
        if self.writer == me:
            self.queued.append(line)  # a signal handler sends this in the middle of another line
            return
        self.quiet_signals += 1
        old = set_mask(signal.SIG_BLOCK, ALL_SIGNALS) if self.has_handlers else None
        try:
            with self.lock:
                self.writer = me
                self.write_all(line)
                while self.queued:
                    self.write_all(self.queued.popleft())
                self.writer = None
        finally:
            if old is not None:
                set_mask(signal.SIG_SETMASK, old)
            self.quiet_signals -= 1
        if self.pending is not None and self.in_cell and threading.current_thread() is threading.main_thread():
            pending, self.pending = self.pending, None
            raise pending

    def write_all(self, line: bytes) -> None:
        if self.evt_identity is None:
            return  # the warm interpreter has no event pipe
        view = memoryview(line)
        try:
            if identity(self.evt) != self.evt_identity:
                lost("the kernel's control pipe was replaced")
            while view:
                try:
                    view = view[write(self.evt, view):]
                except BlockingIOError:
                    select.poll().poll(1)
        except OSError as e:
            lost(f"the kernel's control pipe is gone: {os.strerror(e.errno or 0)}")

    # -- what does not belong to the cell

    def watch(self) -> None:
        """Watch the streams only while threads or tasks of earlier cells could write to them."""
        tasks = self.loop is not None and not self.loop.is_closed() and (self.loop._ready or self.loop._scheduled)
        kinds = WATCHED if count_threads() or tasks else UNWATCHED
        for stream in self.streams.values():
            kind = type(stream)
            if kind in kinds:
                stream.__class__ = kinds[kind]

    def keep_stray(self, run: int, text: str) -> int:
        """Store output of an earlier cell until the next `done`. This takes no lock, because a signal handler may print too."""
        text = exact(text)
        room = STRAY_LIMIT - self.stray_size
        self.stray_size += len(text)
        if room > 0:
            self.strays.append((run, text[:room]))
        return len(text)

    def send_strays(self) -> None:
        """Send one `late` for each earlier cell whose threads have written something."""
        lost, self.stray_size = self.stray_size - STRAY_LIMIT, 0
        found: dict[int, list[str]] = {}
        for _ in range(len(self.strays)):
            run, text = self.strays.popleft()
            found.setdefault(run, []).append(text)
        for run, texts in found.items():
            self.event("late", run=run, text=quote(cut("".join(texts))))
        if found and lost > 0:
            self.event("late", run=run, text=quote(f"[... {lost} characters left out ...]\n"))

    # -- interrupts

    def on_sigint(self, _number: int, frame: FrameType | None) -> None:
        if not self.in_cell or getpid() != self.pid:
            if getpid() != self.pid:
                raise KeyboardInterrupt
            return
        self.signalled = True
        if self.quiet_signals:
            self.pending = KeyboardInterrupt()
            return
        if self.task is not None and not self.task.done() and idle_in_loop(frame):
            self.cancelled = True
            self.task.cancel()
            self.loop.call_soon_threadsafe(lambda: None)
            return
        raise KeyboardInterrupt

    def run_async(self, coroutine: Any) -> Any:
        """Run a coroutine for IPython. One loop serves all cells; it is made when first needed and never before a fork."""
        asyncio = import_plain("asyncio")
        if self.loop is None or self.loop.is_closed() or self.loop_pid != getpid():
            self.loop, self.loop_pid = asyncio.new_event_loop(), getpid()
        asyncio.set_event_loop(self.loop)
        async_helpers._asyncio_event_loop = self.loop
        self.task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(self.task)
        except asyncio.CancelledError:
            if self.cancelled:
                raise KeyboardInterrupt from None
            raise
        except BaseException:
            if not self.task.done():
                self.task.cancel()
                with contextlib.suppress(BaseException):
                    self.loop.run_until_complete(self.task)
            raise
        finally:
            self.task = None

    # -- a cell

    def run(self, n: int, code: str, variables: dict[str, str] | None = None) -> None:
        """Run one cell. It ends with exactly one `done`, or with the end of the process."""
        started = perf_counter()
        self.n, self.code, self.compiled = n, code, 0
        self.shown, self.shown_figures, self.illustrated = None, [], 0
        self.signalled = self.cancelled = False
        self.pending = None
        threads = set(list_threads())
        CELL.set(n)
        follow_pools()
        self.watch()
        status, exit_code = "ok", None
        try:
            try:
                self.in_cell = True
                self.set_variables(variables or {})
                while self.between:
                    kind, members = self.between.popleft()
                    self.event(kind, **members)
                if self.at_import is not None and "import" in code:
                    self.at_import, prepare = None, self.at_import
                    prepare()
                self.see_packages()
                error = self.execute(code)
                set_trace(None)
                if error is not None:
                    if getpid() != self.pid:
                        end_child(error)
                    status, exit_code = self.conclude(error)
                self.flush()
                self.repair_streams()
            finally:
                self.in_cell = False
        except BaseException as e:  # an interrupt or a handler of the user, raised outside the user's frames
            self.in_cell = False
            if getpid() != self.pid:
                end_child(e)
            status = "interrupted" if self.signalled and isinstance(e, KeyboardInterrupt) else "error"
            self.report(type_name(e), "", f"{type_name(e)}\n")
        unset_hooks()
        guard_signals(self)
        self.restore_variables()
        if status == "interrupted":
            stop_threads(set(list_threads()) - threads)
        error = None
        self.shown = None
        self.repair_descriptors()
        self.watch()
        if self.strays:
            self.send_strays()
        ms = round((perf_counter() - started) * 1000, 3)
        extra = {} if exit_code is None else {"code": exit_code}
        self.event("done", status=f'"{status}"', ms=ms, **extra)

    def open_packages(self) -> None:
        """Add the directory in which `pip` installs to the path, before the runtime's packages. It may not exist yet."""
        self.packages = packages_of(ENVIRON)
        if self.packages is None:
            return
        loaders = ((machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
                   (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
                   (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES))
        # Python's own finder would remember that the directory does not exist.
        sys.path_importer_cache[self.packages] = machinery.FileFinder(self.packages, *loaders)
        own = (n for n, path in enumerate(sys.path) if path.endswith("/site-packages"))
        sys.path.insert(next(own, len(sys.path)), self.packages)

    def see_packages(self) -> None:
        """Read the `.pth` files of packages that were installed since the last cell."""
        if self.packages is None:
            return
        try:
            seen = stat(self.packages).st_mtime_ns
        except OSError:
            return
        if seen != self.packages_seen:
            self.packages_seen = seen
            site.addsitedir(self.packages)

    def set_variables(self, variables: dict[str, str]) -> None:
        """Set the environment variables of the current cell."""
        for name, text in variables.items():
            key, value = name.encode(), text.encode("utf-8", "surrogateescape")
            self.cell_variables.append((key, value, VARIABLES.get(key)))
            putenv(key, value)
            VARIABLES[key] = value

    def restore_variables(self) -> None:
        """Restore the environment from before the cell, except for variables that the cell itself changed."""
        while self.cell_variables:
            key, value, before = self.cell_variables[-1]
            for _ in range(3):  # a signal handler of the user may raise here
                try:
                    if VARIABLES.get(key) == value:
                        if before is None:
                            unsetenv(key)
                            del VARIABLES[key]
                        else:
                            putenv(key, before)
                            VARIABLES[key] = before
                    break
                except BaseException:
                    continue
            self.cell_variables.pop()

    def execute(self, code: str) -> BaseException | None:
        try:
            if self.shell.is_plain(code):
                return self.shell.run_plain(code) or self.shown
            result = self.shell.run_cell(code, store_history=False)
        except BaseException as e:
            return e
        error = result.error_before_exec or result.error_in_exec or self.shown if result is not None else self.shown
        self.shell.last_execution_result = None  # it references the error's frames, and with them the user's objects
        self.shell.displayhook.exec_result = None
        return error

    def conclude(self, error: BaseException) -> tuple[str, int | None]:
        """Report how the cell ended. Return its status and exit code."""
        if isinstance(error, SystemExit):
            return "exit", exit_status(error)
        if self.cancelled and type_name(error) == "CancelledError":
            error = KeyboardInterrupt().with_traceback(error.__traceback__)
        interrupted = self.signalled and isinstance(error, KeyboardInterrupt)
        name = type_name(error)
        text = safely(error_text, error, f"{name}: <the error could not be shown>\n")
        value = safely(error_value, error, "<exception str() failed>")
        self.report(name, value, text)
        return ("interrupted" if interrupted else "error"), None

    def report(self, name: str, value: str, text: str) -> None:
        self.event("error", name=quote(cut(name)), value=quote(cut(value)), text=quote(cut(text)))

    # -- what a cell may have broken

    def open_streams(self) -> None:
        for fd, name in ((1, "stdout"), (2, "stderr")):
            self.open_stream(fd, name)
        self.stdin = open(0, encoding="utf-8", closefd=False)
        sys.stdin = sys.__stdin__ = self.stdin
        builtins.input = no_input

    def merge_streams(self) -> None:
        """Keep the order of both streams if 1 and 2 are the same pipe."""
        with contextlib.suppress(OSError):
            self.merged = identity(1) == identity(2)
        if self.merged:
            self.open_stream(2, "stderr")

    def open_stream(self, fd: int, name: str) -> None:
        kind = MergedStderr if self.merged and name == "stderr" else Output
        stream = kind(open(fd, "wb", closefd=False), encoding="utf-8", errors="backslashreplace", line_buffering=True)
        stream.mode = "w"
        self.streams[name] = stream
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)

    def repair_streams(self) -> None:
        """Restore streams that are None or closed, which would silently lose all later output."""
        for fd, name in ((1, "stdout"), (2, "stderr")):
            if is_usable(self.streams[name]):
                if is_usable(getattr(sys, name, None)):
                    continue
                setattr(sys, name, self.streams[name])
            else:
                with contextlib.suppress(OSError, ValueError):
                    replaced = getattr(sys, name, None)
                    keep = replaced is not self.streams[name] and is_usable(replaced)
                    self.open_stream(fd, name)
                    if keep:
                        setattr(sys, name, replaced)
            self.note(f"sys.{name} was lost and has been restored")

    def repair_descriptors(self) -> None:
        for fd, copy in self.spare.items():
            try:
                get_inheritable(fd)  # the cheapest check that it is open
            except OSError:
                with contextlib.suppress(OSError):
                    dup2(copy, fd)
                    self.note(f"descriptor {fd} was closed by the code and has been restored")

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):
            write(2, f"sandpool: {text}\n".encode())


KERNEL = Kernel()


def identity(fd: int) -> tuple[int, int]:
    stat = fstat(fd)
    return stat.st_dev, stat.st_ino


def lost(why: str) -> NoReturn:
    with contextlib.suppress(OSError):
        write(2, f"sandpool: {why}\n".encode())
    os._exit(LOST)


def is_usable(stream: Any) -> bool:
    try:
        return stream is not None and not getattr(stream, "closed", False)
    except ValueError:  # detached
        return False


def no_input(prompt: Any = "", /) -> str:
    if sys.stdin is not KERNEL.stdin:
        return original_input(prompt)
    sys.stdout.write(str(prompt))
    sys.stdout.flush()
    raise EOFError(NO_INPUT)


no_input.__name__ = no_input.__qualname__ = "input"
no_input.__doc__ = original_input.__doc__


def exit_status(e: SystemExit) -> int:
    """Return the exit status as CPython does: a number is the status, None is 0, anything else is printed and is 1."""
    code = e.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)
    return 1


def end_child(error: BaseException | None) -> NoReturn:
    """End a child that the cell forked and that has returned to the driver, as a script would end."""
    status = 0
    with contextlib.suppress(BaseException):
        if isinstance(error, SystemExit):
            status = exit_status(error)
        elif error is not None:
            status = 1
            print(error_text(error), end="", file=sys.stderr)
    with contextlib.suppress(BaseException):
        KERNEL.flush()
    os._exit(status)


def forget_pipes() -> None:
    """Close the control pipes in a forked child, so that the guest sees their end when the kernel dies."""
    if KERNEL.evt_identity is None:
        return
    KERNEL.evt_identity = None
    for fd in (KERNEL.req, KERNEL.evt):
        with contextlib.suppress(OSError):
            close(fd)


def unset_hooks() -> None:
    """Remove trace and profile functions, which must not see the driver or raise in it."""
    with contextlib.suppress(BaseException):
        set_trace(None)
    for _ in range(2):  # the call itself calls the function that it removes
        try:
            set_profile(None)
            break
        except BaseException:
            continue


def guard_signals(kernel: Kernel) -> None:
    """Take SIGINT back after a cell, and cancel an alarm that would kill the process."""
    try:
        install(signal.SIGINT, kernel.on_sigint)
        set_mask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        if current_handler(signal.SIGALRM) == signal.SIG_DFL:
            set_alarm(0)
    except BaseException:
        pass


class Handler:
    """A signal handler of the user. What it raises ends a cell, but never the driver."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.function(number, frame)
        except BaseException as e:
            if getpid() != KERNEL.pid or KERNEL.in_cell and KERNEL.writer != get_ident():
                raise
            if KERNEL.in_cell:
                KERNEL.pending = e


def users_handler(handler: Any) -> Any:
    return handler.function if type(handler) is Handler else handler


def set_handler(number: Any, handler: Any, /) -> Any:
    """Implement `signal.signal` for the user's code."""
    KERNEL.has_handlers = True
    return users_handler(install(number, Handler(handler) if callable(handler) else handler))


def get_handler(number: Any, /) -> Any:
    """Implement `signal.getsignal` for the user's code."""
    return users_handler(current_handler(number))


for own, original in ((set_handler, install), (get_handler, current_handler)):
    own.__name__ = own.__qualname__ = original.__name__
    own.__doc__ = original.__doc__


def stop_threads(threads: set[threading.Thread]) -> None:
    """End the threads that an interrupted cell started, at their next bytecode."""
    for thread in threads:
        if thread.ident is not None:
            set_async_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def idle_in_loop(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    filename = frame.f_code.co_filename
    return filename.endswith("selectors.py") or "/asyncio/" in filename


def import_plain(name: str) -> Any:
    """Import a module as at the start, never from the working directory."""
    module = sys.modules.get(name)
    if module is None:
        path, sys.path[:] = list(sys.path), BOOT_PATH
        try:
            module = __import__(name)
        finally:
            sys.path[:] = path
    return module


def packages_of(env: Mapping[str, str]) -> str | None:
    """Return the directory in which `pip` installs. It is on the sandbox's volume; the runtime is shared and read-only."""
    base = env.get("SANDPOOL_PACKAGES")
    return f"{base}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages" if base else None


def has_packages(env: Mapping[str, str]) -> bool:
    directory = packages_of(env)
    try:
        return directory is not None and bool(os.listdir(directory))
    except OSError:
        return False


# ---------------------------------------------------------------- start


def make_shell() -> Shell:
    """Build the shell without opening a descriptor, starting a thread or writing a file."""
    config = Config()
    config.HistoryManager.enabled = False  # no database, no thread
    config.HistoryManager.hist_file = ":memory:"
    config.HistoryAccessor.enabled = False
    config.InteractiveShell.colors = "nocolor"
    config.InteractiveShell.cache_size = 0  # `Out` would keep every result alive
    config.InteractiveShell.autoindent = False
    config.InteractiveShell.xmode = "Plain"
    os.environ.setdefault("MPLBACKEND", INLINE_BACKEND)
    directory = os.environ.get("IPYTHONDIR") or os.path.join(os.environ.get("HOME") or "/tmp", ".ipython")
    profile = NoProfileDir(location=os.path.join(directory, "profile_default"), config=config)
    shell = Shell.instance(config=config, ipython_dir=directory, profile_dir=profile, displayhook_class=Hook,
                           display_pub_class=Publisher, compiler_class=Sources)
    shell.loop_runner = KERNEL.run_async
    transforms = shell.input_transformer_manager.cleanup_transforms
    transforms[transforms.index(leading_empty_lines)] = blank_lines_before_magic
    shell.set_hook("show_in_pager", print_page, priority=0)
    shell.register_magics(Scripts)
    shell.register_magic_function(pip, "line", "pip")
    shell.events.register("post_execute", close_shown_figures)
    shell.note_defaults()
    interactiveshell.warn = quiet_about_exit(interactiveshell.warn)
    warnings.formatwarning = show_warning
    _signal.signal, _signal.getsignal = set_handler, get_handler
    follow_threads()
    sys.argv = [""]
    KERNEL.shell = shell
    return shell


def quiet_about_exit(warn: Callable[..., None]) -> Callable[..., None]:
    def wrapped(message: Any, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith("To exit:"):
            warn(message, *args, **kwargs)

    return wrapped


# ---------------------------------------------------------------- the warm interpreter

PACKET_LIMIT = 1 << 18  # bytes of a fork's first packet; the limit of Linux is lower
# Settings that keep imports from starting threads.
SINGLE = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")}
# Variables that the interpreter, the C library or a preloaded library reads once, when it starts. A fork that needs
# another value executes the interpreter again.
READ_AT_START = ("IPYTHON", "MPL", "MATPLOTLIB", "LANG", "LC_", "LD_", "MALLOC_", "GLIBC_", "PANDAS_", "NPY_")
# Cells that fill caches which every kernel would otherwise fill itself, by the module that they need.
WARM_CELLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("IPython", ("1 + 1", "print(end='')", "1 / 0", "x = = 1", "def f(a): return a\nf(1);", "import json, asyncio\n{'a': [json]}",
                 "%pwd", "%time None", "%%time\nNone", "!true", "a = !true", "class A: pass\ntry: A().b\nexcept AttributeError: pass")),
    ("numpy", ("import numpy as np", "np.arange(3) / 2", "np.random.rand(2, 2).sum()")),
    ("pandas", ("import pandas as pd", "pd.DataFrame({'a': [1, 2], 'b': ['x', 'y']})", "pd.DataFrame({'a': [1.5]}).describe()",
                "pd.Series([1])")),
    ("matplotlib.pyplot", ("import matplotlib.pyplot as plt\nplt.plot([1, 2]); plt.title('a')",
                           "import io\nplt.plot([1]); plt.savefig(io.BytesIO()); plt.close('all')")),
)


def warm(modules: list[str]) -> NoReturn:
    """Import all modules and serve forks until the launcher ends. Each fork becomes a kernel."""
    gc.disable()  # a collection would write to pages that the forks share
    make_shell()
    environment = dict(ENVIRON)
    ENVIRON.update(SINGLE)
    failed = {name: why for name in modules if (why := preload(name))}
    loaded = [name for name in modules if name not in failed]
    write(3, b"j" + json.dumps({"not_imported": failed}).encode())  # to the launcher: `jail::zygote::ZygoteMessage`
    with pipes_for_output():
        KERNEL.open_streams()
        warm_up(["IPython", *loaded])
    set_environment(environment)
    set_directory(environment.get("HOME", "/"))  # most forks start there
    surplus = [f"{threads} threads" for threads in [len(os.listdir("/proc/self/task"))] if threads != 1] + list(descriptors())
    if surplus:
        sys.exit(f"sandpool: no warm interpreter: after importing `{' '.join(loaded)}` it has {', '.join(surplus)}, which forks cannot share")
    blas, site = blas_setters(), site_code()
    library = ctypes.PyDLL("/proc/self/fd/4")  # a PyDLL call keeps the interpreter's lock
    hooks = [ctypes.cast(getattr(ctypes.pythonapi, f"PyOS_{name}"), ctypes.c_void_p)
             for name in ("BeforeFork", "AfterFork_Parent", "AfterFork_Child")]
    serve_forks = library.sandpool_zygote_serve
    gc.collect()
    use_large_pages()
    fill_holes()
    gc.freeze()
    channel = serve_forks(3, *hooks)
    if channel < 0:
        os._exit(0)
    adopt(channel, blas, site)
    serve()


def preload(name: str) -> str:
    """Import a module. Return why it cannot be imported, or an empty text."""
    try:
        importlib.import_module(name)
        return ""
    except BaseException as e:
        why = " ".join(f"{type_name(e)}: {e}".split())[:300]
        hint = "; added packages (`sandpool setup --add`) cannot be preloaded" if isinstance(e, ModuleNotFoundError) else ""
        print(f"sandpool: `{name}` is not preloaded: {why}{hint}", file=sys.stderr)
        return why


@contextlib.contextmanager
def pipes_for_output() -> Iterator[None]:
    """Make descriptors 1 and 2 pipes, as in a fork, because a stream remembers the kind of file it was opened on."""
    log, (reader, writer) = (dup(1), dup(2)), os.pipe()
    os.set_blocking(writer, False)  # output that does not fit is dropped
    for fd in (1, 2):
        dup2(writer, fd)
    yield
    KERNEL.flush()
    for fd, copy in zip((1, 2), log):
        dup2(copy, fd)
        close(copy)
    close(reader)
    close(writer)


@contextlib.contextmanager
def no_figures() -> Iterator[None]:
    """Restore matplotlib to its state before the first figure. Drawing loads a backend, which changes settings and the shell;
    that has to happen in the kernel that draws."""
    shell, modules = KERNEL.shell, sys.modules
    matplotlib, pyplot = modules["matplotlib"], modules["matplotlib.pyplot"]
    tables = [vars(pyplot), matplotlib.rcParams, matplotlib.rcParamsDefault,
              *(formatter.type_printers for formatter in shell.display_formatter.formatters.values())]
    lists = [shell.configurables, *shell.events.callbacks.values()]
    old_tables, old_lists = [dict(table) for table in tables], [items[:] for items in lists]
    yield
    pyplot.close("all")
    modules["matplotlib.font_manager"]._get_font.cache_clear()  # every cached font keeps its file open
    for table, old in zip(tables, old_tables):
        for name in set(table) - set(old):
            del table[name]
        dict.update(table, old)  # the method of `rcParams` would validate the settings
    for items, old_items in zip(lists, old_lists):
        items[:] = old_items
    modules.pop("matplotlib_inline.backend_inline", None)
    if "matplotlib_inline.config" in modules:
        modules["matplotlib_inline.config"].InlineBackend.clear_instance()


def set_directory(path: str) -> None:
    """Set the directory that the shell reports as its start."""
    KERNEL.shell.starting_dir = path
    KERNEL.shell.history_manager.dir_hist[:] = [Path(path)]


def warm_up(loaded: list[str]) -> None:
    """Run the throw-away cells and remove their traces."""
    ns = KERNEL.shell.user_ns
    before, lines = dict(ns), dict(traceback.linecache.cache)
    with no_figures() if "matplotlib.pyplot" in sys.modules else contextlib.nullcontext():
        for name, cells in WARM_CELLS:
            for cell in cells if name in loaded else ():
                KERNEL.run(0, cell)
    for name in set(ns) - set(before):
        del ns[name]
    ns.update(before)
    traceback.linecache.cache.clear()
    traceback.linecache.cache.update(lines)
    KERNEL.shell.compile.forget()
    KERNEL.code = ""
    if "ssl" in sys.modules:
        sys.modules["ssl"].RAND_status()  # initialises megabytes of OpenSSL's state; each fork reseeds


def use_large_pages() -> None:
    """Move the objects into pages of 2 MB. A fork then copies one page-table entry instead of 512, which is most of its time;
    it still copies only pieces of 4 kB when it writes. Linux before 6.1 refuses this, which does no harm."""
    large, small, collapse = 1 << 21, 1 << 12, 25
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", maps.read(), re.MULTILINE)
    with open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in found):
            for address in range(-(-start // large) * large, end // large * large, large):
                entries.seek(address // small * 8)
                present = sum(top >> 7 for top in entries.read(large // small * 8)[7::8])
                if present * 10 > large // small * 9:  # unused pages stay unused
                    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(large), collapse)


class MallocInfo(ctypes.Structure):
    """The C library's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                                                     "uordblks", "fordblks", "keepcost")]


def fill_holes() -> None:
    """Allocate the free blocks between objects permanently. A fork would put new objects there and thereby copy every page;
    instead its objects share new pages."""
    for size, count in free_blocks():
        if size == 16:
            HELD.extend(object() for _ in range(count))
        elif size == 32:
            HELD.extend(map(float, range(count)))
        else:
            HELD.extend(bytes(size - bytes.__basicsize__) for _ in range(count))
    if not hasattr(_libc, "mallinfo2"):
        return  # not glibc, or an old one
    malloc, free, sbrk, mallinfo = _libc.malloc, _libc.free, _libc.sbrk, _libc.mallinfo2
    malloc.restype = sbrk.restype = ctypes.c_void_p
    malloc.argtypes, free.argtypes, sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
    mallinfo.restype = MallocInfo
    top = sbrk(0) - mallinfo().keepcost  # no block above was ever allocated
    for size in (*range(120_000, 1 << 12, -2048), *range(1 << 12, 16, -16)):
        while (block := malloc(size)) is not None and block < top:
            pass
        free(block)


HELD: list[Any] = []


def free_blocks() -> list[tuple[int, int]]:
    """Return size and number of the free blocks of CPython's small-object allocator, which reports them only as text on 2."""
    kept, report = dup(2), os.memfd_create("report", os.MFD_CLOEXEC)
    dup2(report, 2)
    sys._debugmallocstats()  # type: ignore[attr-defined]
    dup2(kept, 2)
    close(kept)
    with open(report, encoding="utf-8") as text:
        text.seek(0)
        rows = re.findall(r"^ +\d+ +(\d+) +\d+ +\d+ +(\d+)$", text.read(), re.MULTILINE)
    return [(int(size), int(free)) for size, free in rows]


def descriptors() -> Iterator[str]:
    """Return descriptions of the open descriptors besides 0 to 4."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            if int(name) > 4:
                yield f"`{os.readlink(f'/proc/self/fd/{name}')}` open"


def set_environment(wanted: dict[str, str]) -> None:
    """Make the environment equal to `wanted`, changing only variables that differ."""
    for name in [name for name in ENVIRON if name not in wanted]:
        del ENVIRON[name]
    for name, value in wanted.items():
        if ENVIRON.get(name) != value:
            ENVIRON[name] = value


def blas_setters() -> list[Callable[[int], Any]]:
    """Return the functions of all loaded OpenBLAS libraries that set the number of threads."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "openblas" in line}
    libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    names = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]
    return [getattr(library, name) for library in libraries for name in names if hasattr(library, name)]


def blas_threads(env: dict[str, str]) -> int:
    """Return the number of threads that OpenBLAS itself would choose."""
    cores = len(os.sched_getaffinity(0))
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        if env.get(name, "").isdecimal() and int(env[name]) > 0:
            return min(int(env[name]), cores)
    return cores


def site_code() -> Any:
    """Return the code that the runtime executes at each start of Python."""
    module = sys.modules.get("_sandpool_site")
    return module.__loader__.get_code("_sandpool_site") if module is not None else None  # type: ignore[union-attr]


def adopt(channel: int, blas: list[Callable[[int], Any]], site: Any) -> None:
    """Turn a fork, which is already confined, into a kernel of its sandbox that equals an executed one."""
    KERNEL.pid = getpid()
    guest = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, channel)
    packet, ancillary, _, _ = guest.recvmsg(PACKET_LIMIT, _socket.CMSG_SPACE(16))
    guest.close()
    if not packet:
        os._exit(0)  # the guest does not need this fork
    place_descriptors([number for _, _, data in ancillary for number in memoryview(data).cast("i")])
    equipment, _ = scan_json(packet.decode("utf-8"), 0)
    try:
        os.chdir(equipment["cwd"])
    except OSError as e:
        lost(f"the kernel's working directory: {os.strerror(e.errno or 0)}")
    adopt_environment(equipment["env"], blas)
    reseed()
    if site is not None:
        exec(site, {})  # opens the packages that the operator added, which the warm interpreter must not see
        BOOT_PATH[:] = sys.path
    if (directory := os.getcwd()) != KERNEL.shell.starting_dir:
        set_directory(directory)
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]
    sys.orig_argv[sys.orig_argv.index("--warm"):] = []
    gc.enable()


def adopt_environment(env: dict[str, str], blas: list[Callable[[int], Any]]) -> None:
    for name in ("KREQ", "KEVT", "KINT"):
        env.pop(name, None)
    env.setdefault("MPLBACKEND", INLINE_BACKEND)
    before = dict(ENVIRON)
    if has_packages(env):
        execute_again(env)  # a package may be another version of a module that is imported here
    if env != before:
        if any(name.startswith(READ_AT_START) and before.get(name) != env.get(name) for name in before | env):
            execute_again(env)
        set_environment(env)
        if env.get("TZ") != before.get("TZ"):
            tzset()
        if env.get("HOME") != before.get("HOME"):
            KERNEL.shell.home_dir = get_home_dir()
    if env.get("OPENBLAS_NUM_THREADS") != "1":
        KERNEL.at_import = lambda: [set_threads(blas_threads(env)) for set_threads in blas]


def place_descriptors(numbers: list[int]) -> None:
    """Give the four received descriptors the numbers of the protocol, and open `/dev/null` as 0."""
    if len(numbers) != 4:
        lost("the kernel got no pipes")
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (os.open(os.devnull, os.O_RDONLY), *numbers)]
    os.closerange(0, 10)
    for number, fd in enumerate(high):
        dup2(fd, number)
        close(fd)


def execute_again(env: dict[str, str]) -> NoReturn:
    """Become a cold kernel in the same process."""
    argv = sys.orig_argv[:sys.orig_argv.index("--warm")]
    os.execve(sys.executable, argv, {**env, "KREQ": "3", "KEVT": "4"})


def reseed() -> None:
    """Reseed the random generators of this fork except `random`, which CPython reseeds. The seed of `hash()` cannot change."""
    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        # `seed()` would create another generator for this; setting the whole state is faster.
        key = sys.modules["numpy"].frombuffer(os.urandom(624 * 4), "uint32")
        sys.modules["numpy.random"].set_state(("MT19937", key, 623))
    if "ssl" in sys.modules:
        # OpenSSL detects a fork by its pid, which is the same in every sandbox.
        sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
    if "uuid" in sys.modules:
        sys.modules["uuid"]._node = sys.modules["uuid"]._last_timestamp = None
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


# ---------------------------------------------------------------- serving


def serve(req: int = 3, evt: int = 4) -> NoReturn:
    """Serve requests until the guest closes the pipe. This function never returns."""
    kernel = KERNEL
    kernel.req, kernel.evt, kernel.pid, kernel.main = req, evt, getpid(), get_ident()
    for fd in (req, evt):
        os.set_inheritable(fd, False)
    if not kernel.streams:
        kernel.open_streams()
    kernel.merge_streams()
    for fd in (1, 2):
        with contextlib.suppress(OSError):
            kernel.spare[fd] = dup(fd)
    kernel.evt_identity = identity(evt)
    os.register_at_fork(after_in_child=forget_pipes)
    kernel.open_packages()
    kernel.directory = kernel.shell.starting_dir
    sys.path.insert(0, "")
    guard_signals(kernel)
    kernel.event("ready", version=quote(".".join(map(str, sys.version_info[:3]))))
    try:
        for line in request_lines(req):
            request, _ = scan_json(line, 0)
            if request["t"] == "run":
                kernel.run(request["n"], request["code"], request.get("env"))
    except BaseException as e:  # the driver is broken, and no answer is better than a wrong one
        lost(f"the kernel failed: {type_name(e)}")
    os._exit(0)  # exit handlers of the cells may block, so none runs


def request_lines(fd: int) -> Iterator[str]:
    parts: list[bytes] = []
    while True:
        try:
            data = read(fd, 65536)  # the size of a pipe; a larger buffer would be mapped again for each read
        except OSError as e:
            lost(f"the kernel's request pipe is gone: {os.strerror(e.errno or 0)}")
        except BaseException:
            continue  # a signal handler of the user raised between cells
        if getpid() != KERNEL.pid:
            os._exit(0)
        if not data:
            return
        parts.append(data)
        if b"\n" in data:
            *lines, rest = b"".join(parts).split(b"\n")
            parts = [rest]
            for line in lines:
                yield line.decode("utf-8")


def main() -> NoReturn:
    if sys.argv[1:2] == ["--warm"]:
        warm(sys.argv[2:])
    req, evt = (int(os.environ.pop(name, default)) for name, default in (("KREQ", "3"), ("KEVT", "4")))
    os.environ.pop("KINT", None)
    make_shell()
    serve(req, evt)


if __name__ == "__main__":
    main()
