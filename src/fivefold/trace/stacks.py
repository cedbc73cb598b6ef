"""A thread that looks at the training thread, about 10 times a second: where it is, and that it lives.

It wakes twice as often, to find out whether its whole process stood still.

It counts where the thread is seen by phase, writes the counts and the heartbeat into the trace, and calls
whoever watches for something (`fivefold.comm.hang`). One such thread serves a process.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from fivefold.trace.counters import RunDelay
from fivefold.trace.frames import position, where
from fivefold.trace.schema import PHASES
from fivefold.trace.trace import Trace

__all__ = ["OUTSIDE", "Watcher"]

OUTSIDE = "outside"
"""what stacks call the time that no phase claims"""
_KEPT, _SEEN = 50, 500
"""places per phase that are written, and that are counted until the rarest are dropped"""
_LONGEST = 160
_OVERSLEPT_NS = 5_000_000
_log = logging.getLogger(__name__)


class _Sleep:
    """Finds out whether a thread overslept because its whole process stood still.

    It did if for longer than threads of the process computed it neither slept nor was ready without a core,
    nor was the thread that trains, which may hold the interpreter meanwhile. Of a stop only the part after
    the end of the sleep is seen.

    After a sleep of the right length, as nearly all are, the files are read only where it is asked for.
    """

    def __init__(self, trains: int) -> None:
        known = {thread.ident: thread.native_id for thread in threading.enumerate()}
        threads = {threading.get_native_id(), known.get(trains)}
        self._delays = [RunDelay(Path("/"), thread) for thread in threads if thread]
        self._ready, self._computed = self._delayed(), time.process_time_ns()
        self._now = time.monotonic_ns()

    def close(self) -> None:
        """Give the descriptors back."""
        for delay in self._delays:
            delay.close()

    def stopped_ns(self, meant_ns: int, *, read: bool) -> int:
        """How long the process stood still since the last call. `read`: the files in any case."""
        # What the next sleep is compared with is read before the clock, what this one is after it: a core
        # that is taken away in between must not look like a stop.
        before = (self._delayed() if read else self._ready), time.process_time_ns()
        now = time.monotonic_ns()
        over, ready, computed = now - self._now - meant_ns, self._ready, self._computed
        self._now, (self._ready, self._computed) = now, before
        if over <= _OVERSLEPT_NS:
            return 0
        # All waiting for a core is taken off, that during the sleep too: rather too little is called a stop.
        over -= self._delayed() - ready
        used = time.process_time_ns() - computed
        # Another thread may have held the interpreter for as long as it computed.
        if over <= max(_OVERSLEPT_NS, used):
            return 0
        over -= max(0, used - meant_ns)  # more than was used while the thread was to sleep anyway
        return over if over > _OVERSLEPT_NS else 0

    def _delayed(self) -> int:
        """How long both threads were ready without a core, since they began."""
        return sum(delay.read() or 0 for delay in self._delays)


class Watcher:
    """Watches the thread that made `trace`, until `close`, which the trace calls as it is closed."""

    def __init__(self, trace: Trace, *, every_s: float = 0.05, write_s: float = 2.0) -> None:
        self.since = time.monotonic()
        """when the watched thread was first seen where it is now, in s of the monotonic clock"""
        self.watchers: list[Callable[[], None]] = []
        """called at every look, in the thread of the watcher; one that raises is called no more"""
        self._trace, self._every_s, self._write_s = trace, every_s, write_s
        self._seen: dict[str, Counter[str]] = {}
        self._position = (0, 0)
        self._closed = False
        # Held until the end: to wait for a lock takes less than to wait for an event.
        self._open = threading.Lock()
        self._open.acquire()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="fivefold-watch", daemon=True)
        trace.closers.append(self.close)
        self._thread.start()

    @property
    def frame(self) -> FrameType | None:
        """What the watched thread executes now."""
        return sys._current_frames().get(self._trace.thread)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def close(self) -> None:
        """End the thread, and write what it counted. A process that was forked has no such thread."""
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        self._open.release()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * self._every_s + 2.0)

    def _run(self) -> None:
        written = time.monotonic()
        sleep, meant_ns = _Sleep(self._trace.thread), int(self._every_s * 1e9)
        for number in itertools.count():
            if self._open.acquire(timeout=self._every_s):
                break
            looks = number % 2 == 0  # to have slept costs little, to look and understand more
            if stopped_ns := sleep.stopped_ns(meant_ns, read=looks):
                self._trace.live["stopped_ns"] += stopped_ns
            if not looks:
                continue
            self._look()
            for watcher in tuple(self.watchers):
                self._call(watcher)
            now = time.monotonic()
            if now - written >= self._write_s:
                written = now
                self._write()
        sleep.close()
        self._write()

    def _look(self) -> None:
        self._trace.beat()
        frame = self.frame
        if frame is None:
            return
        found = position(frame)
        if found != self._position:
            self._position, self.since = found, time.monotonic()
        phase = self._trace.phase
        counts = self._seen.setdefault(
            PHASES[phase] if phase < len(PHASES) else OUTSIDE, Counter[str]()
        )
        counts[where(frame)[:_LONGEST]] += 1
        if len(counts) > _SEEN:
            for rare, _ in counts.most_common()[_SEEN // 2 :]:
                del counts[rare]

    def _write(self) -> None:
        kept, room = _KEPT, int(self._trace.file.sections["stacks"]["bytes"])
        while kept:
            text = json.dumps({phase: c.most_common(kept) for phase, c in self._seen.items()})
            if len(text) <= room:
                self._trace.write("stacks", text)
                return
            kept //= 2

    def _call(self, watcher: Callable[[], None]) -> None:
        try:
            watcher()
        except Exception:  # noqa: BLE001 - whatever it was, training goes on
            self.watchers.remove(watcher)
            _log.exception("%r has failed, and watches no more", watcher)
