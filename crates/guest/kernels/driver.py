"""The Python kernel: runs cells in IPython's shell, without its front end, and speaks the driver protocol.

PROTOCOL.md is the contract with the guest. Cells share this process, so whatever a cell does to it (replaced
builtins of `sys`, closed descriptors, signal handlers, forks) must at worst end the process; it must never make
the driver answer wrongly or twice. Two rules follow: everything the driver needs is imported and bound to a private
name before the first cell, and each request gets exactly one `done`, or the process exits.

Life: a cold kernel is `make_shell()`, `serve()`. The warm interpreter (`driver.py --warm MODULE...`) makes the shell, imports
the modules, runs throw-away cells and is then forked by the launcher's library; each fork is a kernel that comes back
from there into `adopt()`, which makes it what a cold one would be, and `serve()`. Nothing before the fork leaves a
descriptor, a thread, an event loop or a file behind, for the forks would share it.
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
import bdb  # noqa: F401  (IPython imports it in the middle of a cell, when the working directory may hold another)
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
from os import close, dup, dup2, fstat, get_inheritable, getpid, killpg, read, stat, waitid, write
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
STRAY_LIMIT = 64_000  # characters that threads of earlier cells may add to one
ARGUMENT_LIMIT = 100_000  # the kernel allows 128 KiB
LOST = 70  # exit status when the control pipes are gone
INLINE_BACKEND = "module://matplotlib_inline.backend_inline"
NO_INPUT = "input() is not available: this sandbox has no interactive stdin"

ALL_SIGNALS = signal.valid_signals()
BOOT_PATH = list(sys.path)
ENVIRON = os.environ
OWN_FILE = sys._getframe().f_code.co_filename
STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
# What IPython gives a meaning of its own, or may; and what keeps state of its own in the compiler or needs an event loop.
SPECIAL = re.compile(r"\A\s*(?:[ \t]|\Z)|^[ \t]*(?:[%!/,;]|>>>|\.\.\.|In \[|\[(?:nav|ins)\])|=\s*[!%]"
                     r"|[?\r\x0b\x0c\x1c-\x1e\x85\u2028\u2029]|a(?:wait|sync)|__future__", re.MULTILINE)
SCALARS = frozenset((int, float, complex, bool, str, bytes))
FIRST_WORD = re.compile(r"[\w.*]*")
# Methods of the shell that take part in running a cell: replaced on the instance, they are called.
REPLACEABLE = frozenset(("run_cell", "_run_cell", "run_cell_async", "should_run_async", "run_ast_nodes", "run_code",
                         "transform_cell", "transform_ast"))
# Code that IPython compiles from a cell's text under a name of its own.
USER_NAMES = frozenset(("<string>", "<timed exec>", "<timed eval>", "<magic-timeit>", "<prun>"))

scan_json = json.JSONDecoder().scan_once  # C, and so out of reach of a changed `json`
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
    # Not `fflush(NULL)`: that waits for the lock of every open FILE.
    _c_stdout = ctypes.c_void_p.in_dll(_libc, "stdout")
except (OSError, ValueError, AttributeError):
    _c_flush = None


# ---------------------------------------------------------------- values


def exact(text: str) -> str:
    """The characters of a `str`, free of a subclass's methods."""
    return str.__str__(text)


def cut(text: str) -> str:
    """`text` with its middle left out when it is over the limit, and without lone surrogates."""
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
    """A mime bundle as {mime: JSON text}, each value and the whole within the limits."""
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
    """One value of a bundle as JSON; None when it is a picture over the limit."""
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


# ---------------------------------------------------------------- the shell's parts


class Sources(CachingCompiler):
    """Names each cell uniquely, so that a function of an old cell still finds its own source."""

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
        """The cells so far."""
        for name, _ in self.kept:
            self._filename_map.pop(name, None)
        self.kept.clear()
        self.total = 0


class Output(io.TextIOWrapper):
    """`sys.stdout` and `sys.stderr`."""


class WatchedOutput(Output):
    """The same while threads or tasks of earlier cells are there: what those write is not the output of this cell."""

    def write(self, text: str) -> int:
        run = stray()
        return super().write(text) if run is None else KERNEL.keep_stray(run, text)


class MergedStderr(io.TextIOWrapper):
    """Standard error where it is the same pipe as standard output: what was printed before comes before, to the letter."""

    def write(self, text: str) -> int:
        with contextlib.suppress(Exception):
            flush_text(KERNEL.streams["stdout"])
        written = super().write(text)
        super().flush()
        return written


class WatchedMergedStderr(MergedStderr):
    def write(self, text: str) -> int:
        run = stray()
        return super().write(text) if run is None else KERNEL.keep_stray(run, text)


WATCHED = {Output: WatchedOutput, MergedStderr: WatchedMergedStderr}
UNWATCHED = {watched: plain for plain, watched in WATCHED.items()}


# ---------------------------------------------------------------- which cell something belongs to

CELL: contextvars.ContextVar[int] = contextvars.ContextVar("sandpool_cell")  # of a task, which has the context it was made in
borrowed_threads: dict[int, int] = {}  # cells of what runs in threads that were there before


def cell_of_caller() -> int:
    """The cell that started what calls this: a thread, a task, or the cell itself."""
    me = get_ident()
    cell = borrowed_threads.get(me)
    if cell is None:
        cell = CELL.get(None)
    if cell is None:
        cell = getattr(live_threads.get(me), "_sandpool_cell", None)
    return KERNEL.n if cell is None else cell


def stray() -> int | None:
    """The earlier cell that the caller belongs to, if it does not belong to the one that runs."""
    if getpid() != KERNEL.pid:
        return None  # a child has one cell
    cell = cell_of_caller()
    return None if cell == KERNEL.n and (KERNEL.in_cell or get_ident() == KERNEL.main) else cell


def for_this_cell(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as what belongs to the cell that runs now, in whatever thread it is called."""
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
    """Remember of each thread the cell that started it."""
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
    """The threads of a pool work for whoever submits; those of the cell that imports it are its own anyway."""
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
    """The last value of a cell becomes a `result` event. Keeps `_`, `__`, `___`, and nothing else."""

    def write_output_prompt(self) -> None:
        pass

    def write_format_data(self, format_dict: dict[str, Any], md_dict: Any = None) -> None:
        KERNEL.event("result", data=bounded_bundle(format_dict))

    def log_output(self, format_dict: dict[str, Any]) -> None:
        pass  # IPython keeps every bundle for ever

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
    """`display()` becomes a `display` event."""

    def publish(self, data: Any, metadata: Any = None, source: Any = None, *, transient: Any = None,
                update: bool = False, **_: Any) -> None:
        self._validate_data(data, metadata)
        members: dict[str, Any] = {"data": bounded_bundle(data)}
        run = stray() if count_threads() else None
        if run is not None:
            plain = members["data"].get("text/plain")
            KERNEL.keep_stray(run, (json_string(plain) if plain else f"[{', '.join(members['data'])}]") + "\n")
            return
        identity = (transient or {}).get("display_id")
        if identity is not None:
            members["id"] = quote(cut(str(identity)))
        if update:
            members["update"] = "true"
        KERNEL.event("display", **members)

    def clear_output(self, wait: bool = False) -> None:
        KERNEL.event("clear", wait="true" if wait else "false")


class Formatter(DisplayFormatter):
    """Remembers which figures a cell has shown, so that none is shown a second time when the cell ends."""

    def format(self, obj: Any, include: Any = None, exclude: Any = None) -> Any:
        if type(obj) in SCALARS and not include and not exclude and self.shows_as_repr(type(obj)):
            with contextlib.suppress(ValueError):  # an integer may be too long
                return {"text/plain": repr(obj)}, {}
        figure_module = sys.modules.get("matplotlib.figure")
        if figure_module is not None and isinstance(obj, figure_module.Figure):
            KERNEL.shown_figures.append(obj)
        return super().format(obj, include, exclude)

    def shows_as_repr(self, kind: type) -> bool:
        """Whether nobody has said how a plain number or text is to be shown: then no formatter has to be asked."""
        if not vars(self).get("printers"):
            plain = self.formatters["text/plain"]
            others = (*self.formatters.values(), self.mimebundle_formatter, self.ipython_display_formatter)
            self.printers = [one.type_printers for one in others if one is not plain]
            self.text_printers, self.text_defaults = plain.type_printers, dict(plain.type_printers)
        if kind is float and self.formatters["text/plain"].float_format != "%r":
            return False
        return self.text_printers.get(kind) is self.text_defaults.get(kind) and all(map(SCALARS.isdisjoint, self.printers))


def close_shown_figures() -> None:
    """Before matplotlib_inline flushes the open figures: those shown already are closed, as it closes the others."""
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
    """A profile directory that is named but not made: the file system may be read-only."""

    def _mkdir(self, path: str, mode: int | None = None) -> bool:
        return False

    def _location_changed(self, change: Any) -> None:
        self._location_isset = True


class Scripts(ScriptMagics):
    """`%%bash`, `%%sh`, `%%script`: like `!`, not over IPython's asyncio thread, which would never end."""

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
        KERNEL.background.append(process)  # or its end would be a ResourceWarning

    shebang.__doc__ = ScriptMagics.shebang.__doc__
    shebang.parser = ScriptMagics.shebang.parser  # type: ignore[attr-defined]


class Exit:
    """`exit` and `quit`: end the cell, not the kernel."""

    def __repr__(self) -> str:
        return "Use exit() to end the cell"

    def __call__(self, code: Any = None) -> NoReturn:
        raise SystemExit(code)


class Shell(InteractiveShell):
    """IPython's shell with the terminal, the history and the pseudo-terminal taken out."""

    def _tee(self, channel: str) -> Any:
        return contextlib.nullcontext()  # the original keeps all output in memory

    def _format_exception_for_storage(self, exception: BaseException, *_: Any, **__: Any) -> Any:
        return {}  # the original calls `str(exception)` and keeps the text for ever

    def init_virtualenv(self) -> None:
        pass

    def note_defaults(self) -> None:
        """What a plain cell relies on being as it is now."""
        self.builtin_trap.__enter__()  # for good, rather than for each cell anew
        self.default_transforms = self.transforms()

    def transforms(self) -> tuple[list[Any], ...]:
        inputs, lines = self.input_transformer_manager, self.prefilter_manager
        return (inputs.cleanup_transforms + inputs.line_transforms + inputs.token_transformers, lines.transformers + lines.checkers,
                self.input_transformers_post + self.ast_transformers, self.events.callbacks["pre_run_cell"] + self.events.callbacks["post_run_cell"])

    def is_plain(self, code: str) -> bool:
        """Whether a cell is Python and nothing else, and nobody has asked to see it on its way: then `run_plain` does what
        `run_cell` would do, in a fraction of the time."""
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

    def run_plain(self, code: str) -> BaseException | None:
        """Run a plain cell: the error it ended with."""
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
            for node in body:  # one by one, as IPython does: those before one that cannot be compiled are run
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
        """`!cmd`."""
        cmd = self.var_expand(cmd, depth=1)
        status = run_command(shell_argv(cmd), out=sink("stdout"), err=sink("stderr"))
        self.user_ns["_exit_code"] = status
        if status != 0 and self.system_raise_on_error:
            raise subprocess.CalledProcessError(status, cmd)

    system_piped = system_raw = system

    def getoutput(self, cmd: str, split: bool = True, depth: int = 0) -> Any:
        """`a = !cmd`: what it writes to both streams."""
        cmd = self.var_expand(cmd, depth=depth + 1)
        parts: list[bytes] = []
        status = run_command(shell_argv(cmd), out=parts.append, merge=True)
        self.user_ns["_exit_code"] = status
        if status != 0 and self.system_raise_on_error:
            raise subprocess.CalledProcessError(status, cmd)
        text = b"".join(parts).decode("utf-8", "replace")
        return SList(text.splitlines()) if split else LSString(text)


def blank_lines_before_magic(lines: list[str]) -> list[str]:
    """IPython drops the empty lines at the top of every cell, and tracebacks then count wrongly. They only need to go
    where a cell magic must come first."""
    rest = leading_empty_lines(lines)
    return rest if rest and rest[0].startswith("%%") else lines


def print_page(shell: Any, data: Any, start: int = 0, screen_lines: int = 0, **_: Any) -> None:
    """`obj?` and the other users of a pager print."""
    text = data.get("text/plain", "") if isinstance(data, dict) else data
    print("\n".join(text.splitlines()[start:]))


# ---------------------------------------------------------------- child processes


def shell_argv(cmd: str) -> list[str]:
    return ["/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh", "-c", cmd]


def child_env() -> dict[str, str]:
    """The environment without the inline backend: a figure shown by a child would go nowhere."""
    env = dict(os.environ)
    if env.get("MPLBACKEND") == INLINE_BACKEND:
        del env["MPLBACKEND"]
    return env


def takes_argument(argv: list[str]) -> bool:
    """Whether a shell takes the script by `-c`. On its standard input, `read` would eat the rest of it."""
    return bool(argv) and os.path.basename(argv[0]) in ("bash", "sh", "dash", "zsh") and all(
        arg.startswith("-") and arg not in ("-s", "-c", "-") for arg in argv[1:])


def script_file(text: str) -> int:
    """A descriptor at the start of a nameless file that holds `text`: needs no writer, unlike a pipe."""
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
    """None when a child may write to the descriptor itself, else a writer to what stands for `sys.<name>`
    (`%%capture`, `redirect_stdout`)."""
    stream = getattr(sys, name, None)
    if stream is None or stream is KERNEL.streams.get(name):
        return None
    return lambda data: stream.write(data.decode("utf-8", "replace"))


def run_command(argv: list[str], stdin: int | None = None, out: Callable[[bytes], Any] | None = None,
                err: Callable[[bytes], Any] | None = None, merge: bool = False) -> int:
    """Run to the end, in a session of its own and without a terminal; an interrupt kills the whole session.
    `out` and `err` take what it writes; without them it writes to descriptors 1 and 2."""
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
    """Hand on what the child writes until it ends; what it left running may hold the pipes open for ever."""
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
    # The leader is gone or will be; the rest of its session got the second signal.


# ---------------------------------------------------------------- errors


def is_user_file(filename: str) -> bool:
    """Whether a frame is the user's own: a cell, or a file that is neither a library's nor ours."""
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
    """CPython's plain traceback with the user's frames. May run the user's `__str__`."""
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
    """`warnings.formatwarning` for cells: CPython's text for `<stdin>`."""
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
        self.borrowed: list[tuple[str, str, str | None]] = []  # the cell's own variables: name, value, what was there
        self.spare: dict[int, int] = {}  # copies of 1 and 2 for a cell that closes them
        self.stdin: Any = None
        self.shown: BaseException | None = None
        self.shown_figures: list[Any] = []
        self.background: list[subprocess.Popen[bytes]] = []
        self.packages: str | None = None  # where `pip` installs in this sandbox
        self.packages_seen = 0
        self.at_import: Callable[[], Any] | None = None  # what the first import of a cold kernel would have done
        self.loop: Any = None
        self.task: Any = None
        self.in_cell = False
        self.signalled = False  # an interrupt came in this cell
        self.cancelled = False  # and took the form of a cancelled task
        self.quiet_signals = 0
        self.has_handlers = False  # of the user's; they may raise anywhere
        self.pending_interrupt = False
        self.lock = threading.Lock()
        self.writer: int | None = None
        self.queued: deque[bytes] = deque(maxlen=1000)
        self.between: deque[tuple[str, dict[str, Any]]] = deque(maxlen=32)
        self.main = get_ident()
        self.strays: deque[tuple[int, str]] = deque()  # what earlier cells' threads wrote: cell, text
        self.stray_size = 0

    # -- events

    def flush(self) -> None:
        """What Python and C hold for 1 and 2. A stream of the user's may block, so only where an interrupt works."""
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
        """Send an event. The members' values are JSON already, a `data` member is {mime: JSON}."""
        if getpid() != self.pid:  # a forked child must never answer
            if kind == "done":
                end_child(None)
            return
        if not self.in_cell and kind in ("display", "clear"):
            self.between.append((kind, members))  # from a thread; it belongs to the next cell
            return
        self.flush()
        if "data" in members:
            members["data"] = "{" + ",".join(f"{quote(k)}:{v}" for k, v in members["data"].items()) + "}"
        fields = "".join(f',"{name}":{value}' for name, value in members.items())
        self.send(f'{{"t":"{kind}","n":{self.n}{fields}}}\n'.encode("utf-8", "backslashreplace"))

    def send(self, line: bytes) -> None:
        """Write a whole line, whatever signals come."""
        me = get_ident()
        if self.writer == me:
            self.queued.append(line)  # from a signal handler, in the middle of another line
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
        if self.pending_interrupt and self.in_cell and threading.current_thread() is threading.main_thread():
            self.pending_interrupt = False
            raise KeyboardInterrupt

    def write_all(self, line: bytes) -> None:
        if self.evt_identity is None:
            return  # in the zygote
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
        """Look at who writes only while somebody else could."""
        tasks = self.loop is not None and not self.loop.is_closed() and (self.loop._ready or self.loop._scheduled)
        kinds = WATCHED if count_threads() or tasks else UNWATCHED
        for stream in self.streams.values():
            kind = type(stream)
            if kind in kinds:
                stream.__class__ = kinds[kind]

    def keep_stray(self, run: int, text: str) -> int:
        """For the next `done`. Takes no lock: a signal handler may print too."""
        text = exact(text)
        room = STRAY_LIMIT - self.stray_size
        self.stray_size += len(text)
        if room > 0:
            self.strays.append((run, text[:room]))
        return len(text)

    def send_strays(self) -> None:
        """One `late` for each earlier cell whose threads have written something."""
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
            self.pending_interrupt = True
            return
        if self.task is not None and not self.task.done() and idle_in_loop(frame):
            self.cancelled = True
            self.task.cancel()
            self.loop.call_soon_threadsafe(lambda: None)
            return
        raise KeyboardInterrupt

    def run_async(self, coroutine: Any) -> Any:
        """IPython's loop runner: one loop for all cells, made when first needed and never before a fork."""
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
        """Run one cell; ends with exactly one `done`, or with the process."""
        started = perf_counter()
        self.n, self.code, self.compiled = n, code, 0
        self.shown, self.shown_figures = None, []
        self.signalled = self.cancelled = self.pending_interrupt = False
        threads = set(list_threads())
        CELL.set(n)
        follow_pools()
        self.watch()
        status, exit_code = "ok", None
        try:
            try:
                self.in_cell = True
                self.borrow(variables or {})
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
        except BaseException as e:  # an interrupt (or a handler of the user's) outside the user's own frames
            self.in_cell = False
            if getpid() != self.pid:
                end_child(e)
            status = "interrupted" if self.signalled and isinstance(e, KeyboardInterrupt) else "error"
            self.report(type_name(e), "", f"{type_name(e)}\n")
        unset_hooks()
        guard_signals(self)
        self.give_back()
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
        """Import from where `pip` installs, before the runtime's own packages: the directory need not be there yet."""
        self.packages = packages_of(ENVIRON)
        if self.packages is None:
            return
        loaders = ((machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
                   (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
                   (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES))
        # Python's own would remember that there is none.
        sys.path_importer_cache[self.packages] = machinery.FileFinder(self.packages, *loaders)
        own = (n for n, path in enumerate(sys.path) if path.endswith("/site-packages"))
        sys.path.insert(next(own, len(sys.path)), self.packages)

    def see_packages(self) -> None:
        """What was installed since the last cell may have said in `.pth` files where more of it is."""
        if self.packages is None:
            return
        try:
            seen = stat(self.packages).st_mtime_ns
        except OSError:
            return
        if seen != self.packages_seen:
            self.packages_seen = seen
            site.addsitedir(self.packages)

    def borrow(self, variables: dict[str, str]) -> None:
        """Set the environment variables of this one cell."""
        for name, value in variables.items():
            self.borrowed.append((name, value, ENVIRON.get(name)))
            ENVIRON[name] = value

    def give_back(self) -> None:
        """The environment as it was before the cell, but for the variables that the cell itself changed."""
        while self.borrowed:
            name, value, before = self.borrowed[-1]
            for _ in range(3):  # a signal handler of the user's may raise in here
                try:
                    if ENVIRON.get(name) == value:
                        if before is None:
                            del ENVIRON[name]
                        else:
                            ENVIRON[name] = before
                    break
                except BaseException:
                    continue
            self.borrowed.pop()

    def execute(self, code: str) -> BaseException | None:
        try:
            if self.shell.is_plain(code):
                return self.shell.run_plain(code) or self.shown
            result = self.shell.run_cell(code, store_history=False)
        except BaseException as e:
            return e
        error = result.error_before_exec or result.error_in_exec or self.shown if result is not None else self.shown
        self.shell.last_execution_result = None  # holds the error's frames, and with them the user's objects
        self.shell.displayhook.exec_result = None
        return error

    def conclude(self, error: BaseException) -> tuple[str, int | None]:
        """Report how the cell ended: (status, exit code)."""
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
        """Where 1 and 2 are the same pipe, their order is kept."""
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
        """A stream that is None or closed would lose all later output in silence."""
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
                get_inheritable(fd)  # the cheapest question
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
    """As CPython does: a number is the status, nothing is 0, anything else is printed and is 1."""
    code = e.code
    if code is None:
        return 0
    if isinstance(code, int):
        return int(code) & 0xFF
    with contextlib.suppress(Exception):
        print(code, file=sys.stderr)
    return 1


def end_child(error: BaseException | None) -> NoReturn:
    """A child the cell forked has come back to the driver: it ends like a script."""
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
    """In a forked child: let go of the control pipes, so that their end is seen when the kernel dies."""
    if KERNEL.evt_identity is None:
        return
    KERNEL.evt_identity = None
    for fd in (KERNEL.req, KERNEL.evt):
        with contextlib.suppress(OSError):
            close(fd)


def unset_hooks() -> None:
    """A trace or profile function must not see, or raise in, the driver."""
    with contextlib.suppress(BaseException):
        set_trace(None)
    for _ in range(2):  # the call itself is an event for the function that it removes
        try:
            set_profile(None)
            break
        except BaseException:
            continue


def guard_signals(kernel: Kernel) -> None:
    """After each cell: SIGINT is ours in the next one, whatever this one did; an alarm left behind must not kill."""
    try:
        install(signal.SIGINT, kernel.on_sigint)
        set_mask(signal.SIG_UNBLOCK, (signal.SIGINT,))
        if current_handler(signal.SIGALRM) == signal.SIG_DFL:
            set_alarm(0)
    except BaseException:
        pass


def note_handler(number: Any, handler: Any) -> Any:
    """`signal.signal` for the user's code."""
    KERNEL.has_handlers = True
    return install(number, handler)


note_handler.__name__ = note_handler.__qualname__ = "signal"
note_handler.__doc__ = install.__doc__


def stop_threads(threads: set[threading.Thread]) -> None:
    """End the threads an interrupted cell started, at their next bytecode."""
    for thread in threads:
        if thread.ident is not None:
            set_async_exception(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def idle_in_loop(frame: FrameType | None) -> bool:
    if frame is None:
        return False
    filename = frame.f_code.co_filename
    return filename.endswith("selectors.py") or "/asyncio/" in filename


def import_plain(name: str) -> Any:
    """Import as at start: never from the working directory."""
    module = sys.modules.get(name)
    if module is None:
        path, sys.path[:] = list(sys.path), BOOT_PATH
        try:
            module = __import__(name)
        finally:
            sys.path[:] = path
    return module


def packages_of(env: Mapping[str, str]) -> str | None:
    """Where `pip` installs: on the sandbox's own volume, over the runtime, which is shared and read-only."""
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
    """Build the shell: no descriptor, no thread, no file."""
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
    shell.events.register("post_execute", close_shown_figures)
    shell.note_defaults()
    interactiveshell.warn = quiet_about_exit(interactiveshell.warn)
    warnings.formatwarning = show_warning
    _signal.signal = note_handler
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

PACKET_LIMIT = 1 << 18  # bytes of what a fork is told; the kernel's own limit for a packet is lower
# Its imports must start no thread.
SINGLE = {name: "1" for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")}
# Variables that the interpreter, the C library or a preloaded library reads once, when it starts. A fork that is to have
# another value executes the interpreter anew.
READ_AT_START = ("IPYTHON", "MPL", "MATPLOTLIB", "LANG", "LC_", "LD_", "MALLOC_", "GLIBC_", "PANDAS_", "NPY_")
# Cells that fill the caches which every kernel would fill for itself, by the module they need.
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
    """Import everything, be forked for as long as the launcher lives, and be a kernel in each fork."""
    gc.disable()  # it would only move objects about in pages that are to be shared
    make_shell()
    environment = dict(ENVIRON)
    ENVIRON.update(SINGLE)
    failed = {name: why for name in modules if (why := preload(name))}
    loaded = [name for name in modules if name not in failed]
    write(3, b"j" + json.dumps({"not_imported": failed}).encode())  # to the launcher, as `jail::warm::Said`
    with pipes_for_output():
        KERNEL.open_streams()
        warm_up(["IPython", *loaded])
    set_environment(environment)
    set_directory(environment.get("HOME", "/"))  # likely that of the forks
    held = [f"{threads} threads" for threads in [len(os.listdir("/proc/self/task"))] if threads != 1] + list(descriptors())
    if held:
        sys.exit(f"sandpool: no warm interpreter: after importing `{' '.join(loaded)}` it has {', '.join(held)}, which forks cannot share")
    blas, site = blas_setters(), site_code()
    library = ctypes.PyDLL("/proc/self/fd/4")  # keeps the lock of the interpreter
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
    """Why it cannot be imported; empty when it is."""
    try:
        importlib.import_module(name)
        return ""
    except BaseException as e:
        why = " ".join(f"{type_name(e)}: {e}".split())[:300]
        print(f"sandpool: `{name}` is not preloaded: {why}", file=sys.stderr)
        return why


@contextlib.contextmanager
def pipes_for_output() -> Iterator[None]:
    """Descriptors 1 and 2 are pipes, as they will be in a fork: a stream remembers what kind of file it was opened on."""
    log, (reader, writer) = (dup(1), dup(2)), os.pipe()
    os.set_blocking(writer, False)  # a cell that writes much loses it
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
    """matplotlib is afterwards as before its first figure. That loads a backend, which changes settings and the shell; it is to
    do so in the kernel that draws."""
    shell, modules = KERNEL.shell, sys.modules
    matplotlib, pyplot = modules["matplotlib"], modules["matplotlib.pyplot"]
    tables = [vars(pyplot), matplotlib.rcParams, matplotlib.rcParamsDefault,
              *(formatter.type_printers for formatter in shell.display_formatter.formatters.values())]
    lists = [shell.configurables, *shell.events.callbacks.values()]
    old_tables, old_lists = [dict(table) for table in tables], [items[:] for items in lists]
    yield
    pyplot.close("all")
    modules["matplotlib.font_manager"]._get_font.cache_clear()  # each has its file open
    for table, old in zip(tables, old_tables):
        for name in set(table) - set(old):
            del table[name]
        dict.update(table, old)  # not the settings' own method, which would check them
    for items, old_items in zip(lists, old_lists):
        items[:] = old_items
    modules.pop("matplotlib_inline.backend_inline", None)
    if "matplotlib_inline.config" in modules:
        modules["matplotlib_inline.config"].InlineBackend.clear_instance()


def set_directory(path: str) -> None:
    """Where the shell says that it was started."""
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
        sys.modules["ssl"].RAND_status()  # OpenSSL makes itself ready, megabytes of it; each fork reseeds


def use_large_pages() -> None:
    """Have the objects in pages of 2 MB: a fork copies one entry for each, not 512, and that is most of its time. What a fork
    changes is still its own in pieces of 4 kB. A kernel that cannot do it (before Linux 6.1) says so and nothing is lost."""
    large, small, collapse = 1 << 21, 1 << 12, 25
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        found = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(?:\[heap\])?$", maps.read(), re.MULTILINE)
    with open("/proc/self/pagemap", "rb", buffering=0) as entries:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in found):
            for place in range(-(-start // large) * large, end // large * large, large):
                entries.seek(place // small * 8)
                present = sum(top >> 7 for top in entries.read(large // small * 8)[7::8])
                if present * 10 > large // small * 9:  # what was never used is to stay so
                    _libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(large), collapse)


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                                                     "uordblks", "fordblks", "keepcost")]


def fill_holes() -> None:
    """Take, for good, the free places between objects. A fork would put its own objects there, one to a page, and each page
    is then its own; it gets places in pages where nothing else is."""
    held: list[Any] = HELD
    for size, free in free_blocks():
        if size == 16:
            held.extend(object() for _ in range(free))
        elif size == 32:
            held.extend(map(float, range(free)))
        else:
            held.extend(bytes(size - bytes.__basicsize__) for _ in range(free))
    if not hasattr(_libc, "mallinfo2"):
        return  # not glibc, or an old one
    malloc, release, end, told = _libc.malloc, _libc.free, _libc.sbrk, _libc.mallinfo2
    malloc.restype = end.restype = ctypes.c_void_p
    malloc.argtypes, release.argtypes, end.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_ssize_t]
    told.restype = MallocInfo
    top = end(0) - told().keepcost  # what lies above was never given out
    for size in (*range(120_000, 1 << 12, -2048), *range(1 << 12, 16, -16)):
        while (block := malloc(size)) is not None and block < top:
            pass
        release(block)


HELD: list[Any] = []


def free_blocks() -> list[tuple[int, int]]:
    """Of CPython's allocator of small objects, which tells them only as text, on descriptor 2: (size, how many)."""
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
    """What is open beside 0 to 4."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            if int(name) > 4:
                yield f"`{os.readlink(f'/proc/self/fd/{name}')}` open"


def set_environment(wanted: dict[str, str]) -> None:
    """Only what differs is touched."""
    for name in [name for name in ENVIRON if name not in wanted]:
        del ENVIRON[name]
    for name, value in wanted.items():
        if ENVIRON.get(name) != value:
            ENVIRON[name] = value


def blas_setters() -> list[Callable[[int], Any]]:
    """The functions that set the number of threads, of each OpenBLAS that was loaded."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if "openblas" in line}
    libraries = [ctypes.CDLL(path) for path in sorted(paths)]
    names = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]
    return [getattr(library, name) for library in libraries for name in names if hasattr(library, name)]


def blas_threads(env: dict[str, str]) -> int:
    """As OpenBLAS itself would choose."""
    cores = len(os.sched_getaffinity(0))
    for name in ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS"):
        if env.get(name, "").isdecimal() and int(env[name]) > 0:
            return min(int(env[name]), cores)
    return cores


def site_code() -> Any:
    """What the runtime does at each start of Python."""
    module = sys.modules.get("_sandpool_site")
    return module.__loader__.get_code("_sandpool_site") if module is not None else None  # type: ignore[union-attr]


def adopt(channel: int, blas: list[Callable[[int], Any]], site: Any) -> None:
    """In a fork, all restrictions in force: take what makes it a kernel of its sandbox, and be like one that was executed."""
    KERNEL.pid = getpid()
    guest = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, channel)
    packet, ancillary, _, _ = guest.recvmsg(PACKET_LIMIT, _socket.CMSG_SPACE(16))
    guest.close()
    if not packet:
        os._exit(0)  # never needed
    place([number for _, _, data in ancillary for number in memoryview(data).cast("i")])
    told, _ = scan_json(packet.decode("utf-8"), 0)
    try:
        os.chdir(told["cwd"])
    except OSError as e:
        lost(f"the kernel's working directory: {os.strerror(e.errno or 0)}")
    adopt_environment(told["env"], blas)
    reseed()
    if site is not None:
        exec(site, {})
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
        execute_anew(env)  # one of them may be another version of what is imported here
    if env != before:
        if any(name.startswith(READ_AT_START) and before.get(name) != env.get(name) for name in before | env):
            execute_anew(env)
        set_environment(env)
        if env.get("TZ") != before.get("TZ"):
            tzset()
        if env.get("HOME") != before.get("HOME"):
            KERNEL.shell.home_dir = get_home_dir()
    if env.get("OPENBLAS_NUM_THREADS") != "1":
        KERNEL.at_import = lambda: [set_threads(blas_threads(env)) for set_threads in blas]


def place(numbers: list[int]) -> None:
    """The four descriptors that came, where the protocol has them, and nothing to read at 0."""
    if len(numbers) != 4:
        lost("the kernel got no pipes")
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (os.open(os.devnull, os.O_RDONLY), *numbers)]
    os.closerange(0, 10)
    for number, fd in enumerate(high):
        dup2(fd, number)
        close(fd)


def execute_anew(env: dict[str, str]) -> NoReturn:
    """A cold kernel after all, in the same process."""
    argv = sys.orig_argv[:sys.orig_argv.index("--warm")]
    os.execve(sys.executable, argv, {**env, "KREQ": "3", "KEVT": "4"})


def reseed() -> None:
    """Make the generators of this fork its own, beside `random`, which CPython reseeds; the seed of `hash()` cannot be."""
    tempfile.tempdir = None
    tempfile._name_sequence = None  # type: ignore[attr-defined]
    if "numpy.random" in sys.modules:
        # Its `seed()` makes a generator to seed the generator; this is the whole state.
        key = sys.modules["numpy"].frombuffer(os.urandom(624 * 4), "uint32")
        sys.modules["numpy.random"].set_state(("MT19937", key, 623))
    if "ssl" in sys.modules:
        # OpenSSL knows a fork by its pid, which is the same in every sandbox.
        sys.modules["ssl"].RAND_add(os.urandom(32), 32.0)
    if "uuid" in sys.modules:
        sys.modules["uuid"]._node = sys.modules["uuid"]._last_timestamp = None
    if "multiprocessing.process" in sys.modules:
        process = sys.modules["multiprocessing.process"].current_process()
        process.authkey = os.urandom(32)


# ---------------------------------------------------------------- serving


def serve(req: int = 3, evt: int = 4) -> NoReturn:
    """Take requests until the guest closes the pipe. Never returns."""
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
    sys.path.insert(0, "")
    guard_signals(kernel)
    kernel.event("ready", version=quote(".".join(map(str, sys.version_info[:3]))))
    try:
        for line in request_lines(req):
            request, _ = scan_json(line, 0)
            if request["t"] == "run":
                kernel.run(request["n"], request["code"], request.get("env"))
    except BaseException as e:  # the driver itself is broken: no answer is better than a wrong one
        lost(f"the kernel failed: {type_name(e)}")
    os._exit(0)  # no exit handlers: the cell's own may block


def request_lines(fd: int) -> Iterator[str]:
    parts: list[bytes] = []
    while True:
        try:
            data = read(fd, 65536)  # what a pipe holds; more would be mapped anew for each read
        except OSError as e:
            lost(f"the kernel's request pipe is gone: {os.strerror(e.errno or 0)}")
        except BaseException:
            continue  # a signal handler of the user's raised between cells
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
