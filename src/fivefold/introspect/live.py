"""A report that is made again while its run goes on, in parts that have changed.

    trace files --stamps differ--> document --> {part: JSON} --> those whose text differs get a new version

Nothing is read while nobody asks. What takes long is done seldom: making reports takes a fifth of one core
at most while the run goes on. An end that its ranks tell is shown at once; that of a run killed with all its
ranks, which tells nothing, with the next report.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.introspect.document import document
from fivefold.introspect.exports import prometheus
from fivefold.introspect.run import TracedRun, trace_files
from fivefold.trace.file import TraceFile
from fivefold.trace.schema import ProcessState

__all__ = ["LiveReport", "stamp"]

EVERY_S = 1.0
"""a fresh report at most so often"""
_LOOK_S = 5.0
"""whether silent ranks live is looked at so often"""
_REST = 4.0
"""times as long as a report took, until the next begins"""


def stamp(path: Path) -> tuple[Any, ...]:
    """What changes when a run does: what every rank says that it is doing.

    A rank that was killed says nothing: while one claims to run, the stamp changes every few seconds too.
    """
    found = list(_said(path))
    running = any(state == ProcessState.RUNNING for _, state, _ in found)
    return (*found, int(time.monotonic() / _LOOK_S) if running else 0)


def _said(path: Path) -> Iterator[tuple[str, int, bytes | str]]:
    """Of every rank: its file, its state and all that it says; -1 and why, where that cannot be read."""
    for file in trace_files(path):
        try:
            live = TraceFile.open(file).live[0]
            yield file.name, int(live["state"]), live.tobytes()
        except FivefoldError as problem:
            yield file.name, -1, str(problem)


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
        self._next_s = self._look_s = 0.0
        self._running = False
        self._lock = threading.Lock()
        self._renew()

    def refresh(self) -> None:
        """Make the report again if its time has come and its run has gone on."""
        with self._lock:
            if time.monotonic() < self._next_s and not self._over():
                return
            begin = time.monotonic()
            try:
                self._renew()
                self.problem = ""
            except FivefoldError as problem:  # files were moved away, or are written anew
                self.problem = str(problem)
            took = time.monotonic() - begin
            self._next_s = time.monotonic() + max(self.every_s, _REST * took)

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

    def _over(self) -> bool:
        """Whether the run has ended since the latest report: nobody is disturbed by making another."""
        begin = time.monotonic()
        if not self._running or begin < self._look_s:
            return False
        try:
            over = all(state != ProcessState.RUNNING for _, state, _ in _said(self.path))
        except FivefoldError:  # files were moved away; the next attempt tells
            over = False
        self._look_s = time.monotonic() + max(self.every_s, _REST * (time.monotonic() - begin))
        return over

    def _renew(self) -> None:
        now = stamp(self.path)
        if now == self._stamp:
            return
        run = TracedRun.load(self.path)
        self._running = run.state == "running"
        self.document = made = self._make(run)
        self._metrics = prometheus.text(run.ranks)
        self._stamp = now
        version = self.version + 1
        for part, value in made.items():
            told = json.dumps(value, allow_nan=False, separators=(",", ":"))
            if self._parts.get(part, (0, ""))[1] != told:
                self._parts[part] = (version, told)
        self.version = version
