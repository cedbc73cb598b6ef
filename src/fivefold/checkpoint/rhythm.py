"""When to save: every n steps, or so often that saving and repeating lost work together cost least."""

from __future__ import annotations

import math
import time

from fivefold.checkpoint.interval import Level, two_level

__all__ = ["Rhythm"]

_FIRST_S = 1.0
"""a save is assumed to cost so much until one was measured"""


class Rhythm:
    """Decides on the first rank; steps alone decide where `every` is given, on each rank alike.

    Without `every`: the interval with least waste for what saves have really cost, and for the mean time
    between failures that was stated; never so short that saving lengthens training by more than
    `max_overhead`, unless that is 0.
    """

    def __init__(self, every: int, mtbf_s: float, max_overhead: float) -> None:
        self._every = every
        self._mtbf_s, self._max_overhead = mtbf_s, max_overhead
        self._costs_s: list[float] = []
        self._last = time.monotonic()

    @property
    def cost_s(self) -> float:
        """By how much a save lengthens training: the middle of the last ones."""
        costs = sorted(self._costs_s)
        return costs[len(costs) // 2] if costs else _FIRST_S

    @property
    def interval_s(self) -> float:
        """From the beginning of one save to the next, where steps do not decide."""
        found = two_level(Level(self.cost_s, self._mtbf_s), Level(0.0), self._max_overhead)
        return found.every_s if math.isfinite(found.every_s) else self._mtbf_s

    def by_step(self, step: int) -> bool:
        """Whether this step's number calls for a save."""
        return self._every > 0 and step % self._every == 0

    def by_time(self) -> bool:
        """Whether it is time for a save."""
        return not self._every and time.monotonic() - self._last >= self.interval_s

    def saved(self) -> None:
        """A save begins."""
        self._last = time.monotonic()

    def measured(self, cost_s: float) -> None:
        """A save lengthened training by so much."""
        self._costs_s = [*self._costs_s[-8:], cost_s]
