"""Run the drivers' cases: `run.py --python PATH --node PATH [--only WORD]`. One of the two is enough."""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import Case  # noqa: E402
from host import Kernel, Warm  # noqa: E402
import node_cases  # noqa: E402
import python_cases  # noqa: E402
import warm_cases  # noqa: E402

KERNELS = Path(__file__).resolve().parent.parent
# A warm interpreter reads these before it is forked.
CONFIGURATION = f"/tmp/kernel-test-matplotlib-{os.getpid()}"
ENVIRONMENT = {"MPLCONFIGDIR": CONFIGURATION, "IPYTHONDIR": os.path.join(tempfile.gettempdir(), ".ipython"), "OPENBLAS_NUM_THREADS": "1"}
PRELOADED = ["numpy", "pandas", "matplotlib.pyplot", "no_such_module"]


class Suite:
    """The cases of one driver, in as few kernels as they allow."""

    def __init__(self, name: str, argv: list[str] | Warm, cases: list[Case], interrupt_pipe: bool, can: set[str]) -> None:
        self.name, self.argv, self.cases, self.interrupt_pipe, self.can = name, argv, cases, interrupt_pipe, can
        self.shared: Kernel | None = None
        self.lines: list[str] = []
        self.directories: list[str] = []
        self.passed = self.failed = 0
        self.only = ""

    def start(self, case: Case) -> Kernel:
        directory = tempfile.mkdtemp(prefix="kernel-test-")
        self.directories.append(directory)
        for name, text in case.files.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        home = tempfile.mkdtemp(dir=directory, prefix="home")
        kernel = Kernel(self.argv, {**ENVIRONMENT, "HOME": home, **case.env}, directory, self.interrupt_pipe, case.merged)
        ready = kernel.ready()
        assert ready.status == "ready", f"{self.name} did not start: {ready.status} {ready.stderr}"
        time.sleep(case.waits)  # what a kernel does with it shows nowhere, so there is nothing to wait for
        return kernel

    def kernel_for(self, case: Case) -> Kernel:
        if case.fresh:
            return self.start(case)
        if self.shared is None or self.shared.process.poll() is not None:
            self.shared = self.start(case)
        return self.shared

    def run(self) -> None:
        for case in self.cases:
            if case.needs is not None and case.needs not in self.can:
                self.lines.append(f"SKIP {self.name}: {case.name} (no {case.needs})")
                continue
            self.record(case.name, functools.partial(self.failures, case))
        if self.shared is not None:
            self.shared.close()
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)

    def record(self, name: str, failures: Callable[[], list[str]]) -> None:
        started = time.perf_counter()
        try:
            found = failures()
        except Exception as e:  # a kernel that does not start, an event that is not JSON
            found = [f"{type(e).__name__}: {e}"]
        took = time.perf_counter() - started
        self.passed, self.failed = self.passed + (not found), self.failed + bool(found)
        self.lines.append(f"{'FAIL' if found else 'ok  '} {self.name}: {name} ({took:.2f} s)")
        self.lines.extend(f"       {line}" for line in found)

    def failures(self, case: Case) -> list[str]:
        kernel = self.kernel_for(case)
        found: list[str] = []
        for cell in case.cells:
            outcome = kernel.run(cell.code, interrupt=cell.interrupt, map=cell.map, stale=cell.stale, env=cell.env)
            numbers = {event["n"] for event in outcome.events}
            wrong = cell.failures(outcome)
            if numbers - {kernel.n}:
                wrong.append(f"events of another cell: {numbers}")
            found.extend(f"{cell.code[:80]!r}: {line}" for line in wrong)
            if outcome.status in ("silent", "killed"):
                kernel.stop()
                break
        if case.fresh:
            kernel.close()
        elif found:
            kernel.stop()  # the next case gets a clean one
        return found


class Forks(Suite):
    """The Python cases in forks of a warm interpreter, and what is to be said of forks alone."""

    def __init__(self, python: list[str], can: set[str]) -> None:
        self.cold = python
        self.warm_argv = [*python[:-1], str(KERNELS / "tests/warm.py"), python[-1]]
        super().__init__("forked python", Warm([*self.warm_argv, "--warm", *PRELOADED], ENVIRONMENT), python_cases.CASES, False, can)
        self.plain = [*python[:-1], "-W", "ignore", str(KERNELS / "tests/plain.py"), python[-1]]

    def run(self) -> None:
        super().run()
        assert isinstance(self.argv, Warm)
        warm, home = self.argv, tempfile.mkdtemp(prefix="kernel-test-")

        def start(argv: list[str] | Warm, env: dict[str, str], directory: str) -> Kernel:
            kernel = Kernel(argv, {**ENVIRONMENT, "HOME": home, **env}, directory)
            assert kernel.ready().status == "ready", kernel.log
            return kernel

        forked, cold = functools.partial(start, warm), functools.partial(start, self.cold)
        self.check("a fork is like a cold kernel", lambda: warm_cases.twins(cold, forked, self.can))
        for check in (warm_cases.everything_random_differs, warm_cases.state_is_its_own, warm_cases.little_memory_is_its_own):
            self.check(check.__name__.replace("_", " "), lambda: check(forked, home))
        self.check("what is installed is not hidden by what is imported",
                   lambda: warm_cases.what_is_installed_is_not_hidden_by_what_is_imported(forked, home, self.can))
        self.check("variables that are read at start", lambda: warm_cases.variables_that_are_read_at_start(forked, home, self.can))
        self.check("the fonts are linked", lambda: warm_cases.the_fonts_are_linked(forked, home, CONFIGURATION))
        self.check("opens the added packages after the fork (W65)", lambda: warm_cases.opens_the_added_packages_after_the_fork(cold, forked, home))
        self.check("what is not needed goes", lambda: warm_cases.what_is_not_needed_goes(warm))
        self.check("tells what it could not import (W42)",
                   lambda: warm_cases.tells_what_it_could_not_import(self.warm_argv, ENVIRONMENT))
        self.check("refuses what cannot be forked", lambda: warm_cases.refuses_what_cannot_be_forked(self.warm_argv, ENVIRONMENT))
        self.check("ends with the launcher", lambda: [f"ended with {code}" for code in [warm.close()] if code])
        self.check("plain cells are plain", lambda: [ran.stderr for ran in [subprocess.run(self.plain, capture_output=True, text=True)] if ran.returncode])
        shutil.rmtree(home, ignore_errors=True)

    def check(self, name: str, failures: Callable[[], list[str]]) -> None:
        if self.only in name:
            self.record(name, failures)


def modules(python: str) -> set[str]:
    names = ("matplotlib", "numpy", "pandas", "plotly", "seaborn", "vl_convert")
    code = f"import importlib.util as u; print(*[n for n in {names!r} if u.find_spec(n)])"
    return set(subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", help="an interpreter that has IPython")
    parser.add_argument("--node")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("-q", action="store_true", help="failures only")
    args = parser.parse_args()
    suites = []
    if args.python:
        argv = [args.python, "-I", "-X", "utf8", str(KERNELS / "driver.py")]
        can = modules(args.python)
        suites.append(Suite("python", argv, python_cases.CASES, False, can))
        suites.append(Forks(argv, can))
    if args.node:
        version = subprocess.run([args.node, "--version"], capture_output=True, text=True, check=True).stdout
        major = int(version.lstrip("v").split(".")[0])
        argv = [args.node, "--no-force-async-hooks-checks", str(KERNELS / "driver.cjs")]
        suites.append(Suite("node", argv, node_cases.CASES, True, {f"node {n}" for n in range(18, major + 1)}))
    if not suites:
        parser.error("--python or --node is needed")
    for suite in suites:
        suite.only = args.only
        suite.cases = [case for case in suite.cases if args.only in case.name]
    threads = [threading.Thread(target=suite.run) for suite in suites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for suite in suites:
        for line in suite.lines:
            if not args.q or not line.startswith("ok"):
                print(line)
    shutil.rmtree(CONFIGURATION, ignore_errors=True)
    passed, failed = sum(s.passed for s in suites), sum(s.failed for s in suites)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    sys.exit(main())
