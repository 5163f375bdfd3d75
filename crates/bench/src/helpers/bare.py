"""IPython's shell and nothing around it: how long a cell takes. Lines of JSON in and out."""

import json
import os
import sys
import time

from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

answers = os.fdopen(os.dup(1), "w", buffering=1)
sys.stdout = open(os.devnull, "w")
shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
for line in sys.stdin:
    taken = []
    for _ in range(json.loads(line)["times"]):
        start = time.perf_counter()
        shell.run_cell("print(1)")
        taken.append(time.perf_counter() - start)
    print(json.dumps({"values": taken}), file=answers)
