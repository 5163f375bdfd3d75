"""A stand-in for the zygote: `zygote.py DRIVER` makes the shell, warms it up, forks, and serves in the child."""

from __future__ import annotations

import importlib.util
import os
import random
import sys

spec = importlib.util.spec_from_file_location("sandpool_driver", sys.argv[1])
assert spec is not None and spec.loader is not None
driver = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = driver
before = os.listdir("/proc/self/fd")
spec.loader.exec_module(driver)
driver.make_shell()
driver.warm_up()
assert os.listdir("/proc/self/fd") == before, "the zygote must open nothing"
assert len(os.listdir("/proc/self/task")) == 1, "the zygote must have one thread"
random.seed(1)  # every child would draw 0.13436424411240122 first
child = os.fork()
if child == 0:
    for name in ("KREQ", "KEVT", "KINT"):
        os.environ.pop(name, None)
    driver.after_fork()
    driver.serve(3, 4)
for fd in range(6):
    os.close(fd)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
