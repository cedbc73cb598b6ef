"""Spans, added up in place.

`span` costs two clock reads and an addition while a recorder is active, and two attribute tests while
none is. A recorder belongs to the thread that opened it (thread ranks of the tests stay apart). Where the
process writes a trace, spans of phases go there too.

Reading the figures: the total of a phase divided by the wall time of the run is the share of the run
spent in it. `load` near zero means the loader keeps up; a `load` that grows with faster processors
means it starves them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from fivefold.trace.current import current
from fivefold.trace.phases import Phase

if TYPE_CHECKING:
    from fivefold.trace.trace import Trace

__all__ = ["Recorder", "Stats", "recording", "span"]


@dataclass
class Stats:
    """Durations of one kind of span. All times in seconds; `min_s` is infinite before the first span."""

    count: int = 0
    total_s: float = 0.0
    min_s: float = float("inf")
    max_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """Mean duration in seconds, 0.0 before the first span."""
        return self.total_s / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        """Count one span of `seconds`."""
        self.count += 1
        self.total_s += seconds
        self.min_s = min(self.min_s, seconds)
        self.max_s = max(self.max_s, seconds)


@dataclass
class Recorder:
    """Adds up spans by name; names are `Phase` and `Tag` values."""

    stats: dict[str, Stats] = field(default_factory=dict[str, Stats])

    def add(self, name: str, seconds: float) -> None:
        """Count one span of `seconds` under `name`."""
        found = self.stats.get(name)
        if found is None:
            found = self.stats[name] = Stats()
        found.add(seconds)

    def total_s(self, name: str) -> float:
        """Seconds spent in spans called `name`."""
        found = self.stats.get(name)
        return found.total_s if found else 0.0


_NUMBERS = {str(phase): number for number, phase in enumerate(Phase)}


class _Active(threading.local):
    recorder: Recorder | None = None


_active = _Active()


@contextmanager
def recording(recorder: Recorder | None = None) -> Generator[Recorder]:
    """Collect every span of this thread until the block ends; the previous recorder then continues."""
    before = _active.recorder
    _active.recorder = current = recorder or Recorder()
    try:
        yield current
    finally:
        _active.recorder = before


class span:  # noqa: N801 - reads as a verb at every call site: `with span(Phase.FORWARD):`
    """Time the body of a `with` under a `Phase` or `Tag`."""

    __slots__ = ("_name", "_recorder", "_start", "_traced")

    def __init__(self, name: str) -> None:
        self._name = name
        self._recorder = _active.recorder
        self._start = 0.0
        self._traced: Trace | None = None

    def __enter__(self) -> Self:
        trace = current.trace
        if trace is not None:
            number = _NUMBERS.get(self._name)
            if number is not None and trace.push(number):
                self._traced = trace
        if self._recorder is not None:
            self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._recorder is not None:
            self._recorder.add(self._name, time.perf_counter() - self._start)
        if self._traced is not None:
            self._traced.pop()
            self._traced = None
