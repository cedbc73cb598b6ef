"""Named places where a test lets a process or a whole node die."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from fivefold.errors import UsageError, suggest

__all__ = ["CRASH_POINTS", "crash_at"]

CRASH_POINTS = (
    "staged",
    "writing",
    "before-fsync",
    "before-rename",
    "after-rename",
    "encoding",
    "flushing",
    "rebuilding",
    "restarting",
)
"""In the order in which a save and a recovery pass them."""

_VARIABLE = "FIVEFOLD_CRASH_AT"
_NODE_GOES_S = 30.0

_passed: dict[str, int] = {}


def crash_at(point: str) -> None:
    """Die here if FIVEFOLD_CRASH_AT says so; else nothing happens.

    The variable is `POINT`, `POINT:N` for the N-th time that this process passes the point, and with
    `@pid1` behind it the whole node dies: process 1 of the namespace gets a SIGTERM, on which it has to
    exit at once (the kernel protects it from a SIGKILL that comes from inside). With `@parent` the process
    that started this one dies too, as when the ranks of a node and their agent go together.

    Raises:
        UsageError: the variable names no point.
    """
    assert point in CRASH_POINTS, point
    if told := os.environ.get(_VARIABLE):
        wanted, times, whose = _parsed(told)
        if wanted == point:
            _passed[point] = _passed.get(point, 0) + 1
            if _passed[point] == times:
                _die(whose)


def _parsed(told: str) -> tuple[str, int, str]:
    rest, _, whose = told.partition("@")
    point, _, times = rest.partition(":")
    if point not in CRASH_POINTS:
        raise UsageError(f"{_VARIABLE}={told}: no such point{suggest(point, CRASH_POINTS)}")
    if whose not in ("", "pid1", "parent") or (times and not times.isdecimal()):
        raise UsageError(f"{_VARIABLE}={told}: expected POINT[:N][@pid1 or @parent]")
    return point, int(times or 1), whose


def _die(whose: str) -> None:
    if whose == "pid1" and _in_a_namespace():
        os.kill(1, signal.SIGTERM)
        time.sleep(_NODE_GOES_S)  # the end of process 1 takes this one with it
    elif whose == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_namespace() -> bool:
    """Whether process 1 may be one of a test: user ids are mapped. A machine's own init is left alone."""
    inside, outside, count = Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3]
    return (inside, outside) != ("0", "0") or int(count) < 65536
