"""Operations whose futures are waited for out of our sight, as DistributedDataParallel does in C++.

    bucket 0   ├────────────────┤                    wholly hidden: backward went on meanwhile
    bucket 1            ├─────────────────┤
    backward   ─────────────────┤ (last bucket is sent)
    bucket 2                    ├──────────────┤
                                └── blocked ───┘     of bucket 1 first, the rest of bucket 2
    span       ────────────────────────────────┤

From the moment when the last operation of a backward pass was asked for there is nothing left to compute:
what then goes on until the span's end, the caller waits for.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, field

from fivefold.trace.phases import Phase
from fivefold.trace.schema import PHASES
from fivefold.trace.trace import Trace

__all__ = ["Unwaited", "unwaited"]

_BACKWARD = PHASES.index(Phase.BACKWARD)
_LATE_NS = 20_000_000
"""a future's callback needs the interpreter, and may come so much later than the future"""
_END_S = 0.1
"""how long callbacks may take to come when a trace ends"""


@dataclass
class _Pass:
    """One backward pass: its operations, and once it is over, what has been counted as waiting."""

    begun: dict[int, int] = field(default_factory=dict[int, int])
    """when operations were asked for that have not ended"""
    ended: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """when others ended, which they are, and when all ranks had come to them (0: unknown)"""
    last_ns: int = 0
    """when the last operation was asked for; after the pass, until when waiting has been counted"""
    over_ns: int = 0


class Unwaited:
    """Of one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = weakref.ref(trace)
        self._lock = threading.Lock()
        self._pass = _Pass()
        self._of: dict[int, _Pass] = {}
        trace.after_phase.append(self._after_phase)
        trace.closers.append(self._give_up)

    def watch(self, event: int) -> None:
        """Somebody took the future of an operation of this backward pass."""
        trace = self._trace()
        if trace is None or trace.phase != _BACKWARD:
            return
        with self._lock:
            begun = self._pass.begun[event] = trace.begun_ns(event)
            self._pass.last_ns = max(self._pass.last_ns, begun)
            self._of[event] = self._pass

    def ended(self, event: int, end_ns: int, start_ns: int = 0) -> None:
        """The future of an operation is set. One that was not watched has blocked nobody."""
        trace = self._trace()
        if trace is None:
            return
        with self._lock:
            own = self._of.pop(event, None)
            if own is None:
                trace.ended(event, 0, start_ns, end_ns)
                return
            own.begun.pop(event, None)
            if not own.over_ns:
                own.ended.append((end_ns, event, start_ns))
            else:
                late = own.over_ns < end_ns < own.over_ns + _LATE_NS
                _settle(trace, own, event, own.over_ns if late else end_ns, start_ns)

    def _after_phase(self, phase: int, begin_ns: int, end_ns: int) -> None:  # noqa: ARG002
        if phase != _BACKWARD:
            return
        trace = self._trace()
        with self._lock:
            own, self._pass = self._pass, _Pass()
            own.over_ns = end_ns
            if trace is not None:
                for ended_ns, event, start_ns in sorted(own.ended):
                    _settle(trace, own, event, ended_ns, start_ns)
            own.ended.clear()

    def _give_up(self) -> None:
        """The trace ends, perhaps within a backward pass. Callbacks that are due get time to come."""
        until = time.monotonic() + _END_S
        while self._of and time.monotonic() < until:
            time.sleep(0.001)
        self._after_phase(_BACKWARD, 0, self._pass.last_ns)


def _settle(trace: Trace, own: _Pass, event: int, end_ns: int, start_ns: int) -> None:
    until = min(end_ns, own.over_ns)
    blocked = max(0, until - max(own.last_ns, trace.begun_ns(event)))
    own.last_ns = max(own.last_ns, until)
    trace.ended(event, blocked, start_ns, end_ns)


_lock = threading.Lock()
_known: weakref.WeakKeyDictionary[Trace, Unwaited] = weakref.WeakKeyDictionary()


def unwaited(trace: Trace) -> Unwaited:
    """The operations of `trace` that nobody is seen to wait for."""
    with _lock:
        found = _known.get(trace)
        if found is None:
            found = _known[trace] = Unwaited(trace)
        return found
