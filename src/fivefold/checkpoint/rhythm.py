"""When to save: every n steps, or so often that saving and repeating lost work together cost least."""

from __future__ import annotations

import math
import time

__all__ = ["Rhythm"]

_FIRST_S = 1.0
"""a save is assumed to cost so much until one was measured"""


class Rhythm:
    """Decides on the first rank; steps alone decide where `every` is given, on each rank alike.

    Without `every`: the interval of Young (1974), sqrt(2 x cost x mean time between failures), for the cost
    that saves really had, and never so short that saving lengthens training by more than `max_overhead`.
    """

    def __init__(self, every: int, mtbf_s: float, max_overhead: float) -> None:
        self.every = every
        self._mtbf_s, self._max_overhead = mtbf_s, max_overhead
        self._cost_s = _FIRST_S
        self._last = time.monotonic()

    @property
    def interval_s(self) -> float:
        """From the beginning of one save to the next, where steps do not decide."""
        young = math.sqrt(2 * self._cost_s * self._mtbf_s)
        capped = self._cost_s / self._max_overhead if self._max_overhead else math.inf
        return max(young, capped)

    def by_step(self, step: int) -> bool:
        """Whether this step's number calls for a save."""
        return self.every > 0 and step % self.every == 0

    def by_time(self) -> bool:
        """Whether it is time for a save."""
        return not self.every and time.monotonic() - self._last >= self.interval_s

    def saved(self) -> None:
        """A save begins."""
        self._last = time.monotonic()

    def measured(self, cost_s: float) -> None:
        """A save lengthened training by so much."""
        # The middle between what was known and what was seen: one slow save does not change everything.
        self._cost_s = cost_s if self._cost_s == _FIRST_S else (self._cost_s + cost_s) / 2
