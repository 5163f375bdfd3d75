"""What a case is: cells run one after another in one kernel, each with the whole output it must give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from host import Outcome


class Anything:
    def __repr__(self) -> str:
        return "ANY"


ANY: Any = Anything()
Expected = Any  # a value to equal, ANY, or a predicate


# Times are watchdogs: a busy machine may take several times as long.
PATIENCE = 8


@dataclass
class Cell:
    code: str
    out: Expected = ""
    err: Expected = ""
    result: Expected = None  # the `text/plain` of the result event
    error: Expected = None  # the text of the error event
    status: Expected = "ok"
    exit_code: int | None = None
    displays: Expected = field(default_factory=list)  # the bundles of the display events
    late: Expected = field(default_factory=list)
    interrupt: float | None = None
    within: float = 20.0  # seconds on a quiet machine; after the interrupt, when there is one
    map: str | None = None
    env: dict[str, str] | None = None  # for this cell
    stale: bool = False  # an interrupt of the cell before arrives in this one
    check: Callable[[Outcome], Any] | None = None

    def failures(self, got: Outcome) -> list[str]:
        done = got.of("done")
        code = done[-1].get("code") if done else None
        pairs = [
            ("status", self.status, got.status), ("stdout", self.out, got.stdout), ("stderr", self.err, got.stderr),
            ("result", self.result, got.result), ("error", self.error, got.error),
            ("exit code", self.exit_code, code), ("displays", self.displays, [e["data"] for e in got.of("display")]),
            ("late", self.late, [e["text"] for e in got.of("late")]),
        ]
        found = [f"{name}: expected {want!r}, got {have!r}"[:3000] for name, want, have in pairs if not agrees(want, have)]
        took = got.after_interrupt if self.interrupt is not None else got.ms / 1000
        if took > PATIENCE * self.within:
            found.append(f"took {took:.2f} s, more than {PATIENCE} times {self.within}")
        if done and got.events[-1]["t"] != "done":
            found.append("an event after `done`")
        if self.check is not None and not self.check(got):
            found.append(f"the check failed on {str(got)[:2000]}")
        return found


def agrees(want: Expected, have: Any) -> bool:
    if want is ANY:
        return True
    if callable(want):
        return bool(want(have))
    return want == have


@dataclass
class Case:
    name: str
    cells: list[Cell]
    fresh: bool = False  # needs a kernel of its own
    env: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # in the kernel's working directory, before it starts
    merged: bool = False  # standard output and error are one pipe; needs a kernel of its own
    waits: float = 0  # seconds, after `ready` and before the first cell; needs a kernel of its own
    needs: str | None = None  # a module without which the case is skipped


def has(*parts: str) -> Callable[[Any], bool]:
    return lambda text: isinstance(text, str) and all(part in text for part in parts)


def trace(*lines: str) -> str:
    return "Traceback (most recent call last):\n" + "".join(f"{line}\n" for line in lines)
