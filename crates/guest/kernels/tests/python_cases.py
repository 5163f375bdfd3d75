"""The Python driver's cases."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Callable

from host import Outcome
from cases import ANY, Case, Cell, has, trace

AT = '  File "<stdin>", line {}, in {}'.format
MODULE_FRAME = AT(1, "<module>")
INTERRUPTED = has("Traceback", "KeyboardInterrupt\n")
PNG = base64.b64encode(b"\x89PNG").decode()[:5]
PAGE, SVG_PICTURE = "application/vnd.sandpool.page", "image/png;from=svg"


def is_chart(page: str) -> Callable[[Outcome], bool]:
    def check(outcome: Outcome) -> bool:
        data = outcome.of("result")[0]["data"]
        return data["image/png"].startswith(PNG) and data[PAGE] == page and not any("vega" in mime for mime in data)

    return check


def one_png(displays: list[dict[str, str]]) -> bool:
    return len(displays) == 1 and displays[0].get("image/png", "").startswith(PNG)


def output_precedes_displays(outcome: Outcome) -> bool:
    """What was printed before a display has come before it. (What was printed after it may have, too.)"""
    seen, shown = "", 0
    for kind, text in outcome.order:
        if kind == "stdout":
            seen += text
        elif text == "display":
            if f"a {shown}" not in seen:
                return False
            shown += 1
    return shown == 3


SHADOWED = sorted(name for name in sys.stdlib_module_names if name.isidentifier() and name not in (
    "antigravity", "this", "__main__", "encodings", "_frozen_importlib", "_frozen_importlib_external", "zipimport"))

VALUES = [
    Case("the last value is the result", [Cell("1 + 1", result="2"), Cell("x = 42"), Cell("x", result="42"), Cell("'a'", result="'a'"),
                                          Cell("None"), Cell("1;"), Cell("x; # no value\n3  # three", result="3"), Cell("")]),
    Case("underscores keep the last three values", [Cell("10", result="10"), Cell("20", result="20"), Cell("30", result="30"),
                                                   Cell("(_, __, ___)", result="(30, 20, 10)"), Cell("len(Out)", result="0")]),
    Case("names live on", [Cell("def double(v):\n    return v * 2"), Cell("double(21)", result="42"), Cell("__name__", result="'__main__'")]),
    Case("how a value is shown can be changed", [
        Cell("1.5", result="1.5"), Cell("%precision 3", result=ANY), Cell("1.23456", result="1.235"), Cell("%precision", result=ANY), Cell("1.23456", result="1.23456"),
        Cell("f = get_ipython().display_formatter.formatters\nf['text/html'].for_type(int, lambda v: f'<b>{v}</b>')\n5", result="5",
             check=lambda o: o.of("result")[0]["data"].get("text/html") == "<b>5</b>"),
        Cell("f['text/html'].pop(int); f['text/plain'].for_type(str, lambda s, p, cycle: p.text('!' + s))\n'a'", result="!a"),
        Cell("10 ** 5000", status="error", error=has("ValueError: Exceeds the limit"), result=None), Cell("True", result="True"),
        Cell("3 + 2j, b'x'", result="((3+2j), b'x')")], fresh=True),
    Case("a semicolon silences", [Cell("'quiet';"), Cell("'a;'", result="'a;'"), Cell("'x' # ;", result="'x'")]),
    Case("an invalid surrogate still gives valid JSON", [Cell("'\\ud800'", result="'\\ud800'"), Cell("print('\\ud800')", out="\\ud800\n"),
                                                        Cell("class S:\n    def __repr__(self): return 'a\\udfff\\0\\u2028b'\nS()", result="a\\udfff\0\nb")]),
    Case("output bytes pass as they are", [Cell("import sys; n = sys.stdout.buffer.write(b'\\xff\\x00\\x1b[1m')", out="\udcff\0\x1b[1m")]),
    Case("a long text is cut in the middle", [Cell("'x' * 5_000_000", check=lambda o: 1_000_000 <= len(o.result) <= 1_000_100
                                                   and has("\n[... 4000002 characters left out ...]\n")(o.result), result=ANY),
                                              Cell("'é' * 900_000", result=lambda r: len(r.encode()) < 1_000_100 and "left out" in r)]),
    Case("a picture over the limit is replaced", [Cell("display({'image/png': 'A' * 9_000_000, 'text/plain': 'p'}, raw=True)",
                                                       displays=[{"text/plain": "p\n[image/png left out: it is larger than 8 MB]"}])]),
    Case("a line stays below its limit", [Cell("display({f'text/x{i}': '\\0' * 1_000_000 for i in range(20)}, raw=True)",
                                               displays=lambda d: "left out" in d[0]["text/plain"])]),
    Case("rich displays", [
        Cell("from IPython.display import HTML, JSON, SVG, Image, clear_output\ndisplay(HTML('<b>x</b>'))",
             displays=[{"text/plain": "<IPython.core.display.HTML object>", "text/html": "<b>x</b>"}]),
        Cell("display(Image(b'\\x89PNG\\r\\n\\x1a\\n' + b'0' * 60))", displays=one_png),
        Cell("display({'image/png': b'\\x89PNG'}, raw=True)", displays=[{"image/png": "iVBORw=="}]),
        Cell("JSON({'a': [1, float('nan')]})", result="<IPython.core.display.JSON object>"),
        Cell("h = display('a', display_id='k'); h.update('b')", displays=ANY,
             check=lambda o: [(e.get("id"), e.get("update")) for e in o.of("display")] == [("k", None), ("k", True)]),
        Cell("clear_output(wait=True)", check=lambda o: [e["wait"] for e in o.of("clear")] == [True]),
        Cell("class H:\n    def _repr_html_(self): return '<i>'\n    def __repr__(self): return 'H'\nH()", result="H",
             check=lambda o: o.of("result")[0]["data"]["text/html"] == "<i>")]),
    Case("displays and output stay in order", [
        Cell("for i in range(3):\n    print('a', i, end='')\n    display(i)\nimport os; _ = os.write(1, b'end')",
             out="a 0a 1a 2end", displays=ANY,
             check=output_precedes_displays)]),
    Case("variables of one cell", [
        Cell("import os; os.environ['OLD'] = 'o'"),
        Cell("os.environ['NEW'], os.environ['OLD'], os.environ['__proto__']", env={"NEW": "n=\u00e9\n", "OLD": "x", "__proto__": ""}, result="('n=\u00e9\\n', 'x', '')"),
        Cell("os.environ.get('NEW'), os.environ['OLD'], '__proto__' in os.environ", result="(None, 'o', False)"),
        Cell("!echo $NEW $OLD", env={"NEW": "child"}, out="child o\n"), Cell("!echo [$NEW]", out="[]\n"),
        Cell("os.environ['NEW'] = 'mine'; del os.environ['OLD']; os.environ['BESIDE'] = 'b'", env={"NEW": "n", "OLD": "x"}),
        Cell("os.environ.pop('NEW'), os.environ.get('OLD'), os.environ.pop('BESIDE')", result="('mine', None, 'b')"),
        Cell("1 / 0", env={"NEW": "n"}, status="error", error=ANY), Cell("exit(3)", env={"NEW": "n"}, status="exit", exit_code=3), Cell("x = = 1", env={"NEW": "n"}, status="error", error=ANY),
        Cell("while True: pass", env={"NEW": "n"}, status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1), Cell("'NEW' in os.environ", result="False"),
        Cell("T = type(os.environ); get = T.__getitem__\ndef once(*_):\n    T.__getitem__ = get\n    raise TimeoutError\nT.__getitem__ = once", env={"NEW": "n"}),
        Cell("[k for k in os.environ if k.startswith('NEW')]", result="[]")], fresh=True),
    Case("an environment that was replaced", [
        Cell("import os; real = os.environ; os.environ = {}"), Cell("!echo $NEW", env={"NEW": "n"}, out="\n"), Cell("real.get('NEW')", env={"NEW": "n"}, result="'n'"),
        Cell("del type(real).__delitem__", env={"NEW": "n"}), Cell("1", result="1")], fresh=True),
    Case("both streams in one pipe keep their order", [
        Cell("import sys\nfor i in range(3):\n    print('o', i, end=' '); sys.stderr.write(f'e {i} '); sys.stdout.write('. ')", out="o 0 e 0 . o 1 e 1 . o 2 e 2 . "),
        Cell("print('a', end=''); print('b', file=sys.stderr, end=''); print('c', end='')", out="abc"),
        Cell("print('a', end='')\n!echo b; echo c >&2\nprint('d')\nimport warnings; warnings.warn('w')", out=lambda o: o.startswith("ab\nc\nd\n<stdin>") and "UserWarning: w" in o),
        Cell("sys.stderr.writelines(['x', 'y']); sys.stdout.close(); sys.stderr.write('z')", out=has("xyz"), result=ANY), Cell("print('again')", out="again\n"),
        Cell("sys.stderr.close()", out=ANY), Cell("print('o', end=''); print('e', file=sys.stderr, end='')", out="oe")], fresh=True, merged=True),
    Case("what C wrote is flushed", [Cell("import ctypes; ctypes.CDLL(None).printf(b'from C\\n');", out="from C\n")]),
]

MAGICS = [
    Case("! runs without a terminal", [Cell("!echo out; echo err >&2; tty; read x || echo eof", out="out\nnot a tty\neof\n", err="err\n"),
                                       Cell("!exit 4"), Cell("_exit_code", result="4"), Cell("v = 'w'"), Cell("!echo $v {v}", out="w w\n")]),
    Case("a = ! gives the lines", [Cell("a = !printf 'x\\ny\\n'; echo z >&2"), Cell("list(a)", result="['x', 'y', 'z']"),
                                   Cell("b = !sleep 30 & echo now\nlist(b)", result="['now']", within=3)]),
    Case("a failed %pip is an error", [
        Cell("%pip install --no-index no-such-package-xyz", status="error", out="", err=ANY,
             error=has("CalledProcessError: Command 'pip install --no-index no-such-package-xyz' returned non-zero exit status 1.")),
        Cell("%pip --version", out=has("pip "), err=ANY)]),
    Case("%%bash is ours", [Cell("%%bash\necho a\nread x\necho [$x]\necho err >&2", out="a\n[]\n", err="err\n"),
                            Cell("%%bash\nexit 3", status="error", error=trace(MODULE_FRAME, "subprocess.CalledProcessError: Command 'bash' returned non-zero exit status 3.")),
                            Cell("\n\n%%bash\necho b", out="b\n"), Cell("%%bash --no-raise-error\nexit 3"), Cell("%%sh --out o --err e\necho 1; echo 2 >&2"), Cell("o, e", result="('1\\n', '2\\n')"),
                            Cell("%%script python3 -\nprint(6 * 7)", out="42\n"), Cell("%%script cat\nxyz", out="xyz\n"),
                            Cell("%%script no-such-program\nx", out="Couldn't find program: 'no-such-program'\n"),
                            Cell("%%bash --bg --out pipe\necho late"), Cell("pipe.read()", result="b'late\\n'"),
                            Cell("import threading; threading.active_count()", result="1")]),
    Case("%%capture takes children's output too", [Cell("%%capture c\n!echo child\nprint('own')"), Cell("c.stdout", result="'child\\nown\\n'")]),
    Case("magics", [Cell("%%writefile w.py\nprint('from w')\nw = 5", out="Writing w.py\n"), Cell("%run w.py", out="from w\n"), Cell("w", result="5"),
                    Cell("%time 5", out=has("Wall time"), result="5"), Cell("%who", out=ANY), Cell("%timeit -n1 -r1 pass", out=has("per loop")),
                    Cell("%pwd", result=ANY), Cell("%env NOPE=1", out="env: NOPE=1\n"), Cell("%no_such", status="error", error="UsageError: Line magic function `%no_such` not found.\n"),
                    Cell("len?", out=has("Docstring"))]),
    Case("%reset leaves a working kernel", [Cell("z = 1"), Cell("%reset -f"), Cell("'z' in globals()", result="False"), Cell("exit(2)", status="exit", exit_code=2)]),
]

ERRORS = [
    Case("an error is CPython's plain traceback", [
        Cell("x = 1 / 0", status="error", error="Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\nZeroDivisionError: division by zero\n",
             check=lambda o: (o.of("error")[0]["name"], o.of("error")[0]["value"]) == ("ZeroDivisionError", "division by zero"))]),
    Case("frames of older cells have their own lines", [
        Cell("def outer(v):\n    return inner(v)\n\ndef inner(v):\n    raise KeyError(v)"),
        Cell("\n\nouter('k')", status="error", error=trace(AT(3, "<module>"), AT(2, "outer"), AT(5, "inner"), "KeyError: 'k'"))]),
    Case("the sources of older cells are kept", [Cell("def kept():\n    return 'of cell one'"), Cell("y = 2"),
                                                 Cell("import inspect; inspect.getsource(kept)", result='"def kept():\\n    return \'of cell one\'\\n"')]),
    Case("a user's file keeps its source line, a library's frames go", [
        Cell("import usermod; usermod.fail()", status="error", error=lambda t: t.startswith(trace(MODULE_FRAME)) and "usermod.py\", line 3, in fail\n    json.loads('{')\n" in t
             and "json/" not in t and t.endswith("\njson.decoder.JSONDecodeError: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)\n"))],
         files={"usermod.py": "import json\ndef fail():\n    json.loads('{')\n"}, fresh=True),
    Case("syntax errors say <stdin>", [
        Cell("x = = 1", status="error", error='  File "<stdin>", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax\n',
             check=lambda o: o.of("error")[0]["value"] == "invalid syntax (<stdin>, line 1)"),
        Cell("def f():\nreturn 1", status="error", error=has('File "<stdin>", line 2', "IndentationError: expected an indented block")),
        Cell("a = 1\nreturn 5", status="error", error=has('File "<stdin>", line 2', "SyntaxError: 'return' outside function"))]),
    Case("causes and contexts are kept", [
        Cell("try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ValueError('v') from e", status="error",
             error=trace(AT(2, "<module>"), "ZeroDivisionError: division by zero") + "\nThe above exception was the direct cause of the following exception:\n\n"
             + trace(AT(4, "<module>"), "ValueError: v")),
        Cell("try:\n    1 / 0\nexcept ZeroDivisionError:\n    undefined_name", status="error", error=has("During handling of the above exception", "NameError"))]),
    Case("exception groups are kept", [Cell("raise ExceptionGroup('g', [ValueError(1), TypeError(2)])", status="error",
                                            error=has('Exception Group Traceback', 'File "<stdin>", line 1, in <module>', "ValueError: 1", "TypeError: 2"))]),
    Case("notes are kept", [Cell("e = ValueError('v'); e.add_note('a note'); raise e", status="error", error=trace(MODULE_FRAME, "ValueError: v", "a note"))]),
    Case("recursion is folded", [Cell("def r(): return r()\nr()", status="error", error=has("[Previous line repeated", "RecursionError"))]),
    Case("warnings say <stdin>", [Cell("import warnings; warnings.warn('hm')", err="<stdin>:1: UserWarning: hm\n")]),
    Case("an exception that cannot be shown", [
        Cell("class A(Exception):\n    def __str__(self): raise ValueError\nraise A()", status="error", error=trace(AT(3, "<module>"), "A: <exception str() failed>")),
        Cell("class B(Exception):\n    def __str__(self): return 5\nraise B()", status="error", error=trace(AT(3, "<module>"), "B: <exception str() failed>")),
        Cell("class C(Exception):\n    def __str__(self): return 'x' * 50_000_000\nraise C()", status="error", error=lambda t: "left out" in t and len(t) < 1_100_000),
        Cell("class D(Exception):\n    __cause__ = property(lambda s: 1 / 0)\nraise D('d')", status="error", error=has("D: ")),
        Cell("class E(Exception):\n    __traceback__ = property(lambda s: 1 / 0)\nraise E('e')", status="error", error=trace(AT(3, "<module>"), "E: e")),
        Cell("class M(type):\n    __name__ = property(lambda s: 1 / 0)\nclass F(Exception, metaclass=M): pass\nraise F('f')", status="error", error=has("F: ")),
        Cell("class G(Exception):\n    def __str__(self):\n        while True: pass\nraise G()", status=ANY, error=ANY, interrupt=0.2, within=1)]),
    Case("a value that cannot be shown", [
        Cell("class R:\n    def __repr__(self): raise ValueError('r')\nR()", status="error", error=trace(AT(2, "__repr__"), "ValueError: r")),
        Cell("class N:\n    def __repr__(self): return 5\nN()", status="error", error=has("TypeError: __repr__ returned non-string")),
        Cell("class L:\n    def __repr__(self):\n        while True: pass\nL()", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("class Big:\n    def __repr__(self): return 'y' * 300_000_000\nBig()", result=lambda r: len(r) < 1_000_100),
        Cell("l = []; l.append(l); l", result="[[...]]"),
        Cell("class T(str):\n    def __len__(self): return 1 / 0\n    def encode(self, *a): return None\nclass U:\n    def __repr__(self): return T('t')\nU()", result="t")]),
    Case("exit ends the cell only", [
        Cell("kept = 1; exit()", status="exit", exit_code=0), Cell("quit(7)", status="exit", exit_code=7), Cell("import sys; sys.exit('bye')", status="exit", exit_code=1, err="bye\n"),
        Cell("raise SystemExit", status="exit", exit_code=0), Cell("sys.exit(-1)", status="exit", exit_code=255), Cell("kept", result="1")]),
    Case("a user's own KeyboardInterrupt is an error", [Cell("raise KeyboardInterrupt", status="error", error=trace(MODULE_FRAME, "KeyboardInterrupt"))]),
    Case("the cell after an error runs", [Cell("1 / 0", status="error", error=ANY), Cell("2", result="2")]),
    Case("errors keep nothing alive", [Cell("import weakref\nclass W: pass\ndef g():\n    w = W(); global ref; ref = weakref.ref(w); 1 / 0\ng()", status="error", error=ANY),
                                       Cell("import gc; n = gc.collect()\nref() is None", result="True")]),
]

INPUT = [
    Case("input() says why not", [
        Cell("input('Name: ')", out="Name: ", status="error", error=trace(MODULE_FRAME, "EOFError: input() is not available: this sandbox has no interactive stdin")),
        Cell("import sys; sys.stdin.read()", result="''"), Cell("sys.stdin.readline()", result="''"), Cell("list(sys.stdin)", result="[]"),
        Cell("import io; old, sys.stdin = sys.stdin, io.StringIO('typed\\n')\ninput()", result="'typed'"), Cell("sys.stdin = old"),
        Cell("import os; os.read(0, 1)", result="b''"), Cell("breakpoint()", out=ANY, status="error", error=has("BdbQuit"), within=3)]),
]

ASYNC = [
    Case("await works at top level", [
        Cell("import asyncio\nawait asyncio.sleep(0.01, 'slept')", result="'slept'"),
        Cell("async def co():\n    await asyncio.sleep(0)\n    raise ValueError('in co')\nawait co()", status="error", error=trace(AT(4, "<module>"), AT(3, "co"), "ValueError: in co")),
        Cell("asyncio.run(asyncio.sleep(0, 'ran'))", result="'ran'"),
        Cell("t = asyncio.create_task(asyncio.sleep(0, 'a task'))\ntype(t).__name__", result="'Task'"),
        Cell("await t", result="'a task'"),
        Cell("from asyncio import create_task", result=None),
        Cell("u = create_task(asyncio.sleep(0, 'imported'))\ntype(u).__name__", result="'Task'"),
        Cell("!true\nv = create_task(asyncio.sleep(0))\ntype(v).__name__", result="'Task'"),
        Cell("loop = asyncio.new_event_loop(); w = loop.create_task(asyncio.sleep(0, 'own')); loop.run_until_complete(w)",
             result="'own'"),
        Cell("from asyncio import run\nasync def main(): return await asyncio.create_task(asyncio.sleep(0, 'inner'))\nrun(main())", result="'inner'"),
        Cell("await asyncio.gather(*[asyncio.sleep(0, i) for i in range(3)])", result="[0, 1, 2]"),
        Cell("await asyncio.sleep(60)", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("await asyncio.sleep(0, 'again')", result="'again'"),
        Cell("import sys\nawait asyncio.sleep(0)\nsys.exit(3)", status="exit", exit_code=3)]),
]

INTERRUPTS = [
    Case("an interrupt ends the cell and keeps the state", [
        Cell("state = 'kept'"),
        Cell("while True: pass", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("import time; time.sleep(60)", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("import threading; threading.Lock().acquire() and threading.Event().wait()", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("import re; re.match('(a+)+b', 'a' * 40)", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=2),
        Cell("!sleep 60 & sleep 61", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("%%bash\ntrap '' INT\nsleep 60", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=2),
        Cell("x = !sleep 60", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("import subprocess; subprocess.run(['sleep', '60'])", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("def spin():\n    while True: pass\nt = threading.Thread(target=spin); t.start(); t.join()", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
        Cell("for _ in range(100):\n    if threading.active_count() == 1: break\n    time.sleep(0.02)\nthreading.active_count()", result="1"),
        Cell("try:\n    time.sleep(60)\nexcept BaseException:\n    print('swallowed')", out="swallowed\n", interrupt=0.2, within=1),
        Cell("for i in range(10**6): display(i)", displays=ANY, status="interrupted", error=INTERRUPTED, interrupt=0.1, within=2),
        Cell("state", result="'kept'")]),
    Case("a signal between cells does nothing", [Cell("import os, signal, threading\nthreading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()"),
                                                 Cell("import time; time.sleep(0.0); 'fine'", result="'fine'", status=ANY, error=ANY), Cell("3", result="3", status=ANY, error=ANY)]),
    Case("a replaced handler is put back", [Cell("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT});"),
                                            Cell("while True: pass", status="interrupted", error=INTERRUPTED, interrupt=0.2, within=1),
                                            Cell("signal.alarm(1);"), Cell("import time; time.sleep(1.1)"),
                                            Cell("def ring(*_): raise TimeoutError\nsignal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, 0.05)\ntime.sleep(0.03)", status=ANY, error=ANY, out=ANY, err=ANY),
                                            Cell("time.sleep(0.1)", status=ANY, error=ANY, out=ANY, err=ANY), Cell("4", result="4")]),
    # Where the handler raises decides what is printed: IPython reports an error of one of its callbacks itself.
    Case("a handler that raises in the driver costs no variables", [
        Cell("import signal\nkept = 1\ndef ring(number, frame):\n    if frame is not None and frame.f_code.co_filename.endswith('driver.py'): raise TimeoutError\n"
             "signal.signal(signal.SIGALRM, ring)\nsignal.getsignal(signal.SIGALRM) is ring", result="True"),
        Cell("signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005);", status=ANY, error=ANY, out=ANY, err=ANY),
        *[Cell("kept += 1", status=ANY, error=ANY, out=ANY, err=ANY)] * 100,
        *[Cell("signal.setitimer(signal.ITIMER_REAL, 0);", status=ANY, error=ANY, out=ANY, err=ANY)] * 10,
        Cell("kept > 1, signal.signal(signal.SIGALRM, signal.SIG_DFL) is ring", result="(True, True)")], fresh=True),
]

HOSTILE = [
    Case("a lost stdout comes back", [
        Cell("import sys, os; sys.stdout = None", err="sandpool: sys.stdout was lost and has been restored\n"), Cell("print(1)", out="1\n"),
        Cell("sys.stdout.close()", err="sandpool: sys.stdout was lost and has been restored\n"), Cell("print(2)", out="2\n"),
        Cell("sys.stdout.detach();", err="sandpool: sys.stdout was lost and has been restored\n"), Cell("print(3)", out="3\n"),
        Cell("os.close(1)", err="sandpool: descriptor 1 was closed by the code and has been restored\n"), Cell("print(4)", out="4\n"),
        Cell("del sys.stderr", err="sandpool: sys.stderr was lost and has been restored\n"), Cell("print(5, file=sys.stderr)", err="5\n"),
        Cell("class Bad:\n    def write(self, *a): raise OSError('bad')\n    flush = write\nold, sys.stdout = sys.stdout, Bad()", status=ANY, error=ANY),
        Cell("print(6)", status="error", error=has("OSError: bad")), Cell("sys.stdout = old; print(7)", out="7\n"),
        Cell("class Slow(Bad):\n    def write(self, *a): pass\n    def flush(self):\n        while True: pass\nsys.stdout = Slow()", status=ANY, error=ANY, interrupt=0.2, within=2),
        Cell("sys.stdout = old\n8", result=ANY, status=ANY, error=ANY, interrupt=0.2, within=2), Cell("9", result="9"),
        Cell("os.closerange(0, 3)", err=ANY), Cell("print(10)", out="10\n")]),
    Case("a forked child never answers", [
        Cell("import os\npid = os.fork()\nif pid: os.waitpid(pid, 0)\nprint('parent' if pid else 'child')\ndisplay(1)\npid > 0",
             out="child\nparent\n", result="True", displays=ANY, check=lambda o: len(o.events) == 3),
        Cell("pid = os.fork()\nif not pid: 1 / 0\nos.waitpid(pid, 0)[1] >> 8", err=trace(AT(2, "<module>"), "ZeroDivisionError: division by zero"), result="1"),
        Cell("pid = os.fork()\nif not pid: exit(9)\nos.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])", result="9"),
        Cell("import ctypes\npid = ctypes.CDLL(None).fork()\nif pid: os.waitpid(pid, 0)\n'once'", result="'once'", check=lambda o: len(o.of("result")) == 1)]),
    Case("multiprocessing by fork works", [
        Cell("import multiprocessing as mp\ndef square(v): return v * v\nclass P:\n    def __init__(self, v): self.v = v\nctx = mp.get_context('fork')"),
        Cell("with ctx.Pool(2) as pool: got = pool.map(square, range(4))\ngot", result="[0, 1, 4, 9]"),
        Cell("import pickle; pickle.loads(pickle.dumps(P(3))).v", result="3")]),
    Case("closing the control pipe is noticed", [Cell("import os; os.close(4)", status="died 70", err=has("control pipe"), within=2)], fresh=True),
    Case("a file over the control pipe is noticed", [Cell("import os; f = os.open('/dev/null', os.O_WRONLY); os.dup2(f, 4);", status="died 70", err=has("control pipe"), within=2)], fresh=True),
    Case("closing the request pipe ends the kernel", [Cell("import os; os.close(3)", err=ANY), Cell("1", status="died 70", err=ANY, within=2)], fresh=True),
    Case("all descriptors closed", [Cell("import os; os.closerange(3, 1000)", status="died 70", err=ANY, within=2)], fresh=True),
    Case("death by signal is seen", [Cell("import os; os.kill(os.getpid(), 9)", status="died -9")], fresh=True),
    Case("lowered limits", [Cell("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (0, 0)); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"),
                            Cell("print('still'); 1 / 0", out="still\n", status="error", error=trace(MODULE_FRAME, "ZeroDivisionError: division by zero"))], fresh=True),
    Case("memory refused", [Cell("import resource\nresource.setrlimit(resource.RLIMIT_AS, (300 << 20, 300 << 20))"),
                            Cell("x = bytearray(1 << 30)", status="error", error=trace(MODULE_FRAME, "MemoryError")), Cell("'alive'", result="'alive'")], fresh=True),
    Case("trace and profile functions do not see the driver", [
        Cell("import sys\ndef tracer(*a): raise RuntimeError('traced')\nsys.settrace(tracer)", status=ANY, error=ANY), Cell("1", result="1"),
        Cell("sys.setprofile(tracer)", status=ANY, error=ANY), Cell("2", result="2")]),
    Case("patched modules do not reach the driver", [
        Cell("import json, os, time, io, sys, signal, threading, base64, traceback, contextlib\nboom = lambda *a, **k: 1 / 0\n"
             "json.dumps = json.loads = json.JSONEncoder.encode = json.JSONDecoder.decode = boom\nos.write = os.read = os.getpid = os.fstat = boom\n"
             "time.perf_counter = time.time = boom\nsignal.signal = boom\nthreading.enumerate = boom\nbase64.b64encode = boom\n"),
        Cell("print('x'); 3", out="x\n", result="3"), Cell("1 / 0", status="error", error=trace(MODULE_FRAME, "ZeroDivisionError: division by zero"))], fresh=True),
    Case("shadow modules in the working directory", [
        Cell("1 + 1", result="2"), Cell("1 / 0", status="error", error=ANY), Cell("!echo ok", out="ok\n"), Cell("%%bash\necho ok", out="ok\n"),
        Cell("import mine; mine.v", result="11"), Cell("a = !echo b\nlist(a)", result="['b']"), Cell("x = = 1", status="error", error=ANY),
        Cell("import sys; sys.path[0]", result="''"),
        Cell("async def f(): return 5\nawait f()", result="5"), Cell("import warnings; warnings.warn('w')", err=has("UserWarning: w"))],
         files={"mine.py": "v = 11", **{f"{name}.py": "raise RuntimeError('shadow: ' + __name__)" for name in SHADOWED}}, fresh=True),
    Case("what is installed while the kernel runs is there at once, over the runtime's own", [
        Cell("import importlib.util, os, sys\nimportlib.util.find_spec('tiny_installed')"),
        # As `pip` does it: the directory was not there.
        Cell("site = f'{os.environ[\"SANDPOOL_PACKAGES\"]}/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages'\n"
             "os.makedirs(f'{site}/elsewhere'); os.makedirs(f'{site}/colorsys')\n"
             "open(f'{site}/tiny_installed.py', 'w').write('v = 1'); open(f'{site}/openpyxl.py', 'w').write('v = 2')\n"
             "open(f'{site}/elsewhere/further.py', 'w').write('v = 3'); open(f'{site}/some.pth', 'w').write('elsewhere\\n')\n"
             "import tiny_installed, openpyxl; tiny_installed.v, openpyxl.v", result="(1, 2)"),
        Cell("import further, colorsys, shutil; shutil.rmtree(os.environ['SANDPOOL_PACKAGES']); further.v, colorsys.__file__.startswith('/tmp/')", result="(3, False)")],
         env={"SANDPOOL_PACKAGES": f"/tmp/kernel-test-packages-{os.getpid()}"}, fresh=True),
    # W26: what a thread or a task of an earlier cell writes is told apart, with the number of its cell.
    Case("threads left behind print and display late", [
        Cell("import threading, time\ngo = threading.Event()\ndef late():\n    go.wait(); print('late'); display('late')\nt = threading.Thread(target=late); t.start()"),
        Cell("print('mine'); go.set(); t.join(); print('still mine')", out="mine\nstill mine\n", late=["late\n'late'\n"],
             check=lambda o: o.of("late")[0]["run"] == o.of("late")[0]["n"] - 1),
        Cell("print('alone')", out="alone\n")]),
    Case("a thread of this cell, and what a pool does for it, are its own", [
        Cell("import threading\nfrom concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(1); pool.submit(print, 'one').result()", out="one\n"),
        Cell("pool.submit(print, 'two').result()\nt = threading.Thread(target=print, args=('three',)); t.start(); t.join()", out="two\nthree\n"),
        Cell("import sys; pool.submit(sys.stderr.write, 'four').result()", result="4", err="four")]),
    Case("threads of threads, raw threads and errors of threads are late too", [
        Cell("import _thread, sys, threading\ngo, done = threading.Event(), threading.Semaphore(0)\ndef raw(): go.wait(); sys.stderr.write('raw\\n'); done.release()\n"
             "def outer():\n    go.wait(); inner = threading.Thread(target=print, args=('inner',)); inner.start(); inner.join(); done.release()\n"
             "def fails():\n    go.wait()\n    try: 1 / 0\n    finally: done.release()\n"
             "_thread.start_new_thread(raw, ()); threads = [threading.Thread(target=f) for f in (outer, fails)]; [t.start() for t in threads];"),
        Cell("go.set(); [done.acquire() for _ in range(3)]; [t.join() for t in threads]; None",
             late=lambda x: len(x) == 1 and all(part in x[0] for part in ("raw\n", "inner\n", "ZeroDivisionError")))]),
    Case("a task of an earlier cell is late", [
        Cell("import asyncio\nasync def tick():\n    await asyncio.sleep(0.01); print('tick')\nasync def begin(): return asyncio.create_task(tick())\nt = await begin()"),
        Cell("await t; print('tock')", out="tock\n", late=["tick\n"])]),
    Case("a flood of late output is bounded", [
        Cell("import threading\ngo, over = threading.Event(), threading.Event()\ndef flood():\n    go.wait()\n    for n in range(20_000): print('x' * 100)\n    over.set()\n"
             "threading.Thread(target=flood).start()"),
        Cell("go.set(); over.wait()", result="True", late=lambda x: 60_000 < sum(map(len, x)) < 70_000 and "characters left out" in x[-1])]),
    Case("children inherit no control pipe", [Cell("!ls /proc/self/fd | tr '\\n' ' '", out="0 1 2 3 "),
                                              Cell("import os; [k for k in os.environ if k in ('KREQ', 'KEVT', 'KINT')]", result="[]")]),
    Case("deleted builtins", [Cell("import builtins; del builtins.print, builtins.display"), Cell("5", result="5")], fresh=True),
    Case("a broken `len` ends at worst the kernel", [Cell("import builtins; builtins.len = None", status=ANY, error=ANY, err=ANY), Cell("5", status=ANY, result=ANY, error=ANY, err=ANY, within=3)], fresh=True),
    Case("exit handlers do not hold the kernel", [Cell("import atexit, time; atexit.register(time.sleep, 60);")], fresh=True),
]

FIGURES = [
    Case("figures are shown once", [
        Cell("import matplotlib.pyplot as plt\nplt.plot([1, 2]);", displays=one_png),
        Cell("plt.plot([1, 2]); plt.show()", displays=one_png),
        Cell("fig, ax = plt.subplots(); ax.plot([1]); fig", result="<Figure size 640x480 with 1 Axes>", displays=[],
             check=lambda o: o.of("result")[0]["data"]["image/png"].startswith(PNG)),
        Cell("fig, ax = plt.subplots(); display(fig)", displays=one_png),
        Cell("%matplotlib inline\nplt.plot([2]);", displays=one_png),
        Cell("plt.plot([2]); 1 / 0", status="error", error=ANY, displays=one_png),
        Cell("a, b = plt.figure(), plt.figure()", displays=lambda d: len(d) == 2),
        Cell("'nothing'", result="'nothing'"), Cell("!echo [$MPLBACKEND]", out="[]\n")], needs="matplotlib"),
    Case("a style of seaborn keeps the font for Chinese, Japanese and Korean", [
        Cell("import matplotlib.pyplot as plt, seaborn\nseaborn.set_theme()\nplt.title('中文 日本語 한국어');", displays=one_png)], needs="seaborn"),
    Case("charts have pictures and pages", [
        Cell("import altair as alt, os\nchart = alt.Chart(alt.Data(values=[{'a': 1}])).mark_point().encode(x='a:Q')\nchart", result=ANY, check=is_chart("chart-1.html")),
        Cell("os.chdir('/')\nchart.show()", displays=lambda d: len(d) == 1 and d[0]["image/png"].startswith(PNG) and d[0][PAGE] == "chart-2.html"),
        Cell("with alt.renderers.enable('html'): display(chart)", displays=lambda d: "<div" in d[0]["text/html"] and "image/png" not in d[0]),
        Cell("display({'application/vnd.vega.v5+json': {'width': 9, 'height': 9, 'marks': []}, 'text/plain': 'x'}, raw=True)",
             displays=lambda d: d[0][PAGE] == "chart-3.html" and "image/png" in d[0]),
        Cell("display({'application/vnd.vegalite.v5+json': {'mark': 3}}, raw=True)", displays=lambda d: "no picture: " in d[0]["text/plain"]),
        Cell("display({'application/vnd.vegalite.v5+json': {'a': object()}}, raw=True)", displays=lambda d: "no picture: " in d[0]["text/plain"])],
        needs="vl_convert", fresh=True),
    Case("an SVG drawing has a picture", [
        Cell("from IPython.display import SVG\nsvg = SVG('<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"9\" height=\"9\"/>')\nsvg", result=ANY,
             check=lambda o: o.of("result")[0]["data"][SVG_PICTURE].startswith(PNG) and "<svg" in o.of("result")[0]["data"]["image/svg+xml"]
             and o.of("result")[0]["data"][PAGE] == "chart-1.html"),
        Cell("'<svg' in open('chart-1.html').read()", result="True"),
        Cell("display(SVG('<svg>'), SVG('<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1e9\" height=\"1e9\"/>'))", status=ANY, error=ANY,
             displays=lambda d: not any(SVG_PICTURE in one or PAGE in one for one in d)),
        Cell("for _ in range(20): display(svg)", displays=lambda d: len(d) == 20 and [SVG_PICTURE in one for one in d].count(True) == 16)], needs="vl_convert", fresh=True),
    Case("a plotly chart without a browser is a page and a sentence", [
        Cell("import plotly.graph_objects as go\ngo.Figure(go.Bar(y=[1]))", displays=lambda d: d[0][PAGE] == "chart-1.html" and "image/png" not in d[0]
             and d[0]["text/plain"].endswith("needs Chromium, which this sandbox does not have]")),
        Cell("'plotly' in open('chart-1.html').read()", result="True")], needs="plotly", env={"PLOTLY_RENDERER": "plotly_mimetype"}, fresh=True),
    Case("a table has text and html", [Cell("import pandas as pd\npd.DataFrame({'a': [1, 2]})", result="   a\n0  1\n1  2",
                                            check=lambda o: "<table" in o.of("result")[0]["data"]["text/html"])], needs="pandas"),
    Case("an interrupted numpy loop", [Cell("import numpy as np\nwhile True: np.ones(1000).sum()", status="interrupted", error=INTERRUPTED, interrupt=0.3, within=1)], needs="numpy"),
]

CASES = [*VALUES, *MAGICS, *ERRORS, *INPUT, *ASYNC, *INTERRUPTS, *HOSTILE, *FIGURES]
