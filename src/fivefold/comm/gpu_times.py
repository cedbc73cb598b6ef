"""Times of operations on a GPU, from events on its streams: nothing here waits for them.

    host     issue ... wait ── returns at once ─────────────────────
    stream            ●── stands still until the operation ends ──●──── what comes after it
                      └────────────── blocked ─────────────────────┘

Not run so far on several GPUs: what has been tested is said in docs/explanation/tracing.md.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from fivefold.trace.trace import Trace

__all__ = ["GpuTimes"]


class GpuTimes:
    """Of the operations of one trace on the current GPU."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._waiting: deque[tuple[Sequence[int], Any, Any]] = deque()
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_ns = time.monotonic_ns()
        trace.before_step.append(self.resolve)
        trace.closers.append(self.resolve)

    def mark(self) -> Any:
        """This point of the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def waited(self, events: Sequence[int], since: Any) -> None:
        """The current stream stood still for operations `since`, a mark, until here."""
        self._waiting.append((events, since, self.mark()))

    def resolve(self) -> None:
        """Tell the trace of those that have passed."""
        while self._waiting and self._waiting[0][2].query():
            events, since, until = self._waiting.popleft()
            blocked_ns = int(since.elapsed_time(until) * 1e6)
            end_ns = self._zero_ns + int(self._zero.elapsed_time(until) * 1e6)
            for event in events[:-1]:
                self._trace.ended(event, 0, end_ns=end_ns)
            self._trace.ended(events[-1], blocked_ns, end_ns=end_ns)
