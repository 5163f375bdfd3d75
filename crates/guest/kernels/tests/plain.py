"""What the driver takes for plain Python is what IPython would leave as it is: `plain.py DRIVER`, in an interpreter with IPython.

Read are pieces of the standard library, and lines made to be mistaken.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import textwrap
from pathlib import Path

spec = importlib.util.spec_from_file_location("driver", sys.argv[1])
assert spec is not None and spec.loader is not None
driver = importlib.util.module_from_spec(spec)
sys.modules["driver"] = driver
spec.loader.exec_module(driver)
shell = driver.make_shell()

NASTY = [
    "ls", "ls -l", "pwd", "cd /tmp", "who", "time 1", "exit", "quit()", "%time 1", "%%time\n1", "\n%%time\n1", "!ls", "!!ls", "x = !ls", "x =!ls", "x = %pwd",
    "x = (\n%pwd)", "x = \\\n  !ls", "a=b=!ls", "len?", "?len", "len??", "  x = 1", "\tx = 1", ">>> 1", "1\n>>> 2", "...", "... 1", "x\n... y", "In [1]: 1",
    "1\n   ...: 2", "[ins] In [1]: x", "/len x", ",f a b", ";f a b", "if 1:\n    %pwd", "if 1:\n    !ls", "def f():\n    x = !ls\n    return x",
    "await f()", "async def f(): pass", "[x async for x in y]", "from __future__ import annotations", "x = 1\r\ny = 2", "x\x0c= 1", "'''\n%pwd\n'''", "f'{x!r}'", "f'{x=!r}'",
    "x %= 2", "x = y % 2", "x = '%d' % 1", "x != 1", "x\n/2", "print(1)", "print(1);", "", " ", "\n", "\n\n1", "# ?", "'?'", "x = 1 # !ls", "ls = 1", "ls, b = 1, 2", "(1,\n2)", "(1\n,2)",
    "x;y", "x\n;y", "\\\n%pwd", "\\\nls", "if x: %pwd", "x = 5 if y else !ls", "macro", "auto", "autocall 1", "a.b", "a*b", "*a, b = c", "\u2028%pwd", "x\u2028%pwd", "\u0085!ls", "\ufeffprint(1)", "1 if x else\\\n?",
    "get_ipython", "get_ipython().run_line_magic('pwd', '')", "\uff41wait f()", "match x:\n    case _: pass", "@f\ndef g(): pass", "lambda: (yield)", "x = [\n  1,\n  2\n]", "\x00", "x\x1c%pwd", "ls\n", "ls\n\n", "history", "timeit",
]


def pieces() -> list[str]:
    library = Path(driver.STDLIB)
    chosen = random.Random(4)
    found = list(NASTY)
    for path in sorted(library.glob("*.py"))[:120]:
        lines = path.read_text("utf-8", "replace").splitlines(keepends=True)
        for _ in range(12):
            start = chosen.randrange(len(lines) + 1)
            piece = "".join(lines[start:start + chosen.choice((1, 1, 3, 12))])
            found += [piece, textwrap.dedent(piece).lstrip("\n")]
    return found


def same(code: str) -> bool:
    ended = code if code.endswith("\n") else code + "\n"
    try:
        return shell.transform_cell(code) == ended and not shell.should_run_async(code, transformed_cell=ended)
    except SyntaxError:  # IPython's tokens end in a bad indentation; so does the cell
        return not compiles(ended)


def compiles(code: str) -> bool:
    try:
        return bool(compile(code, "<cell>", "exec", dont_inherit=True))
    except SyntaxError:
        return False


shell.user_ns["macro"] = driver.Macro("print(1)\n")
shell.user_ns["auto"] = driver.IPyAutocall()
everything = pieces()
plain = [code for code in everything if shell.is_plain(code)]
wrong = [code for code in plain if not same(code)]
assert not wrong, f"taken for plain: {wrong}"
assert len(plain) * 3 > len(everything), f"only {len(plain)} of {len(everything)} pieces are plain"
for change in (lambda: shell.ast_transformers.append(object()), lambda: shell.input_transformers_post.append(len),
               lambda: shell.events.register("post_run_cell", print), lambda: setattr(shell, "run_code", shell.run_code),
               lambda: setattr(type(shell), "ast_node_interactivity", "all")):
    assert shell.is_plain("print(1)")
    before = {name: list(value) for name, value in shell.events.callbacks.items()}, shell.ast_transformers[:], shell.input_transformers_post[:]
    change()
    assert not shell.is_plain("print(1)"), "somebody wants to see the cell"
    shell.events.callbacks, shell.ast_transformers, shell.input_transformers_post = before
    vars(shell).pop("run_code", None)
print(f"{len(plain)} of {len(everything)} pieces are plain")
