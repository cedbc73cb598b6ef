"""When to save: every n steps, or so often that saving and repeating lost work together cost least."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from fivefold.checkpoint.interval import Level, with_flushes

__all__ = ["Rhythm"]

_FIRST_S = 1.0
"""a save is assumed to cost so much until one was measured"""
_REMEMBERED = 9


class Rhythm:
    """Decides on the first rank; steps alone decide where `every` is given, on each rank alike.

    Without `every`: the interval with least waste for what saves and flushes have really cost, and for the
    mean time between failures that was stated; never so short that they lengthen training by more than
    `max_overhead`, unless that is 0.
    """

    def __init__(
        self,
        every: int,
        mtbf_s: float,
        max_overhead: float,
        flush_every: int = 0,
        *,
        agents_share: bool = True,
    ) -> None:
        self._every, self._flush_every = every, flush_every
        self._mtbf_s, self._max_overhead = mtbf_s, max_overhead
        self._agents_share = agents_share
        """whether agents run on the cores of training: their time is training's, then"""
        self._costs_s: list[float] = []
        self._flushes_s: list[float] = []
        self._last = time.monotonic()

    @property
    def known(self) -> bool:
        """Whether a save was measured."""
        return bool(self._costs_s)

    @property
    def cost_s(self) -> float:
        """By how much a save lengthens training: the middle of the last ones."""
        return _middle(self._costs_s, _FIRST_S)

    @property
    def flush_s(self) -> float:
        """By how much a flush lengthens training besides; 0 until one was measured."""
        return _middle(self._flushes_s, 0.0)

    @property
    def interval_s(self) -> float:
        """From the beginning of one save to the next, where steps do not decide."""
        found = with_flushes(
            Level(self.cost_s, self._mtbf_s),
            Level(self.flush_s),
            self._flush_every,
            self._max_overhead,
        )
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

    def measured(self, cost_s: float, agent_s: float = 0.0) -> None:
        """A save lengthened training by so much, and took so much processor time of the agent."""
        cost_s += agent_s if self._agents_share else 0.0
        self._costs_s = [*self._costs_s[1 - _REMEMBERED :], max(0.0, cost_s)]

    def flushed(self, agent_s: float) -> None:
        """A flush took so much processor time of the agent."""
        cost_s = agent_s if self._agents_share else 0.0
        self._flushes_s = [*self._flushes_s[1 - _REMEMBERED :], max(0.0, cost_s)]


def _middle(costs_s: Sequence[float], otherwise: float) -> float:
    costs = sorted(costs_s)
    return costs[len(costs) // 2] if costs else otherwise
