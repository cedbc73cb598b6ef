"""A report that is made again while its run goes on, in parts that have changed.

    trace files --stamps differ--> document --> {part: JSON} --> those whose text differs get a new version

Nothing is read while nobody asks. What takes long is done seldom: making reports takes a fifth of one core
at most.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.introspect.document import document
from fivefold.introspect.exports import prometheus
from fivefold.introspect.run import TracedRun, trace_files
from fivefold.trace.file import TraceFile

__all__ = ["LiveReport", "stamp"]

EVERY_S = 1.0
"""a fresh report at most so often"""
_REST = 4.0
"""times as long as a report took, until the next begins"""


def stamp(path: Path) -> tuple[Any, ...]:
    """What changes when a run does: what every rank says that it is doing."""
    found: list[Any] = []
    for file in trace_files(path):
        try:
            trace = TraceFile.open(file)
            found.append((file.name, trace.live[0].tobytes()))
        except FivefoldError as problem:
            found.append((file.name, str(problem)))
    return tuple(found)


class LiveReport:
    """The latest report of the run at `path`, by parts. Any thread may ask; one at a time works.

    Raises `UsageError` if there is nothing to read at first; later that is a `problem`.
    """

    def __init__(
        self,
        path: Path,
        every_s: float = EVERY_S,
        make: Callable[[TracedRun], Mapping[str, Any]] = document,
    ) -> None:
        self.path = path
        self.every_s = every_s
        self.version = 0
        self.problem = ""
        """why the latest attempt failed, in a line; empty if it did not"""
        self.document: Mapping[str, Any] = {}
        self._make = make
        self._parts: dict[str, tuple[int, str]] = {}
        self._metrics = ""
        self._stamp: tuple[Any, ...] = ()
        self._next_s = 0.0
        self._lock = threading.Lock()
        self._renew()

    def refresh(self) -> None:
        """Make the report again if its time has come and its run has gone on."""
        with self._lock:
            if time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + self.every_s
            try:
                self._renew()
                self.problem = ""
            except FivefoldError as problem:  # files were moved away, or are written anew
                self.problem = str(problem)

    def metrics(self) -> str:
        """For Prometheus, of the same moment."""
        self.refresh()
        return self._metrics

    def since(self, version: int) -> tuple[int, str]:
        """The version now, and a JSON object of the parts that have changed after `version`; "" if none."""
        with self._lock:
            changed = [
                f"{json.dumps(part)}:{told}"
                for part, (changed_at, told) in self._parts.items()
                if changed_at > version
            ]
            return self.version, "{" + ",".join(changed) + "}" if changed else ""

    def _renew(self) -> None:
        begin = time.monotonic()
        now = stamp(self.path)
        if now == self._stamp:
            return
        run = TracedRun.load(self.path)
        self.document = made = self._make(run)
        self._metrics = prometheus.text(run.ranks)
        self._stamp = now
        version = self.version + 1
        for part, value in made.items():
            told = json.dumps(value, allow_nan=False, separators=(",", ":"))
            if self._parts.get(part, (0, ""))[1] != told:
                self._parts[part] = (version, told)
        self.version = version
        took = time.monotonic() - begin
        self._next_s = time.monotonic() + max(self.every_s, _REST * took)
