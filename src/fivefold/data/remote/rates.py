"""How fast helpers and the trainer are, and what follows: how far ahead to work, and when to worry.

A *service time* is the time between two answers of a helper that has work all the time; the *latency* of a
lease runs from its grant to its answer and holds the wait in the helper's queue as well.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

__all__ = ["HelperRate", "Mean", "Median", "Rates", "depth_for"]

_RECENT = 64
_LEAST_OVERDUE_S = 0.25
_LEAST_ANSWERS, _MOST_HARM_S = 8, 1.0


class Mean:
    """An exponential mean that follows the last ten values or so."""

    def __init__(self) -> None:
        self._value = 0.0
        self._count = 0

    def add(self, value: float) -> None:
        """Add a value; the first ones count alike."""
        self._count += 1
        self._value += (value - self._value) / min(self._count, 10)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return self._value if self._count else None


class Median:
    """The median of the last nine values: a step that also saved a checkpoint does not count."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=9)

    def add(self, value: float) -> None:
        """Add a value."""
        self._recent.append(value)

    @property
    def value(self) -> float | None:
        """None before the first value."""
        return statistics.median(self._recent) if self._recent else None


class HelperRate:
    """What one helper has shown so far, and whether it is of use."""

    def __init__(self) -> None:
        self.service_s = Mean()
        self.answers = 0
        self.saved_s = 0.0
        """what the trainer would have needed itself for the batches of this helper that it used"""
        self.delayed_s = 0.0
        """what the trainer stood still for batches that this helper held"""
        self._last_s = -math.inf

    def answered(self, since_s: float, now_s: float) -> None:
        """A lease granted at `since_s` was answered."""
        self.answers += 1
        self.service_s.add(now_s - max(since_s, self._last_s))
        self._last_s = now_s

    def delays(self) -> bool:
        """Whether it has cost a second more than it has saved, over 8 answers or more."""
        return self.answers >= _LEAST_ANSWERS and self.delayed_s - self.saved_s > _MOST_HARM_S


class Rates:
    """Of one stream: latencies of all helpers, the trainer's own cost, and how fast it consumes."""

    def __init__(self) -> None:
        self.own_s = Mean()
        """the trainer makes a batch itself"""
        self.step_s = Median()
        """from handing out a batch to being asked for the next: what the trainer does besides loading"""
        self.helpers: dict[int, HelperRate] = {}
        self._latencies: deque[float] = deque(maxlen=_RECENT)
        self._worst: float | None = None

    def of(self, helper: int) -> HelperRate:
        """The rate of one helper."""
        return self.helpers.setdefault(helper, HelperRate())

    def answered(self, helper: int, since_s: float, now_s: float) -> None:
        """A helper answered a lease."""
        self.of(helper).answered(since_s, now_s)
        self._latencies.append(now_s - since_s)
        self._worst = None

    @property
    def latency_s(self) -> float:
        """99th percentile of recent latencies, that is the worst; before any, twice the own cost."""
        if not self._latencies:
            return 2 * (self.own_s.value or 0.0)
        if self._worst is None:
            self._worst = max(self._latencies)
        return self._worst

    @property
    def overdue_s(self) -> float:
        """Age from which on a lease is given to another as well."""
        return max(_LEAST_OVERDUE_S, 3 * self.latency_s)

    @property
    def patience_s(self) -> float:
        """How long to stand still for one batch before making it: at most twice what that takes."""
        return max(_LEAST_OVERDUE_S, 2 * (self.own_s.value or 0.0))

    def supply(self, helpers: list[int]) -> float | None:
        """Batches per second that these helpers make together; None if none has shown yet."""
        times = [self.of(helper).service_s.value for helper in helpers]
        known = [1 / max(time, 1e-9) for time in times if time is not None]
        return sum(known) if known else None

    def suffices(self, helpers: list[int]) -> bool:
        """Whether helpers are faster than the trainer consumes, so that it had better wait for them."""
        supply, step_s = self.supply(helpers), self.step_s.value
        return supply is not None and step_s is not None and supply * step_s >= 1

    def depth(self, helpers: list[int], most: int) -> int:
        """How many batches from the consumer's on may be under way or wait, at most `most`."""
        supply = (self.supply(helpers) or 0.0) + 1 / max(self.own_s.value or 1e-3, 1e-6)
        demand = min(1 / max(self.step_s.value or 0.0, 1e-6), supply)
        return depth_for(self.latency_s, demand, len(helpers), most)


def depth_for(latency_s: float, rate: float, helpers: int, most: int) -> int:
    """Little's law: what is under way is rate times latency; two more, and two for each helper at least.

    >>> depth_for(0.5, 10.0, 1, 64), depth_for(0.001, 10.0, 4, 64), depth_for(60.0, 10.0, 4, 16)
    (7, 8, 16)
    """
    return max(1, min(max(math.ceil(latency_s * rate) + 2, 2 * helpers), most))
