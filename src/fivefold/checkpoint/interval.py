r"""How often to save: often enough that little work is repeated, and rarely enough that saving costs little.

    waste
      |  \                    /     repeated work, T/2 for each failure
      |   \                /        + saving, C in every T
      |     \___      ___/
      |          ----
      +-----------|--------------> T      C: cost of a save, M: mean time between failures
             sqrt(2 C M)

Young, "A first order approximation to the optimum checkpoint interval", Comm. ACM 17(9), 1974.
Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
Two levels: Benoit, Cavelan, Le Fevre, Robert, Sun, "Towards optimal multi-level checkpointing", IEEE Trans.
Computers 66(7), 2017, to first order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.errors import UsageError

__all__ = ["Interval", "Level", "daly", "two_level", "with_flushes", "young"]

_LEAST_COST_S = 1e-6
_MOST_FLUSHES = 1_000_000


@dataclass(frozen=True)
class Level:
    """What saving to a level costs, and how often it is needed.

    Raises:
        UsageError: a cost is negative, or a time between failures not positive.
    """

    cost_s: float
    """by how much one save lengthens training, in seconds; not how long it takes beside training"""
    mtbf_s: float = math.inf
    """mean seconds between failures of the whole run that only this level survives"""

    def __post_init__(self) -> None:
        if not 0 <= self.cost_s < math.inf:
            raise UsageError(f"a save costs {self.cost_s} s: expected 0 or more")
        if not self.mtbf_s > 0:
            raise UsageError(f"{self.mtbf_s} s between failures: expected more than 0")


@dataclass(frozen=True)
class Interval:
    """When to save and when to flush, and what comes of it."""

    every_s: float
    """from one save to the next, in seconds of training"""
    flush_every: int
    """every how manyeth save is flushed; 0: none"""
    overhead: float
    """share of the time that saving and flushing add"""
    waste: float
    """that, and the share that is repeated after failures"""

    def every_steps(self, step_s: float) -> int:
        """The same in steps that take `step_s` seconds each; never more often. Raises `UsageError`."""
        if not step_s > 0:
            raise UsageError(f"a step of {step_s} s: expected more than 0")
        return max(1, math.ceil(min(self.every_s / step_s, 1e15) - 1e-9))


def young(cost_s: float, mtbf_s: float) -> float:
    """Young's interval in seconds: sqrt(2 C M). Good while the cost is far below the time between failures.

    >>> round(young(6.0, 3600.0))
    208
    """
    level = Level(cost_s, mtbf_s)
    return math.sqrt(2 * level.cost_s * level.mtbf_s) if level.cost_s else 0.0


def daly(cost_s: float, mtbf_s: float) -> float:
    """Daly's interval in seconds of training between two saves, good for any cost.

    >>> round(daly(6.0, 3600.0)), round(daly(3600.0, 600.0))
    (204, 600)
    """
    level = Level(cost_s, mtbf_s)
    if level.cost_s >= 2 * level.mtbf_s:
        return level.mtbf_s
    if math.isinf(level.mtbf_s):
        return young(cost_s, mtbf_s)
    small = level.cost_s / (2 * level.mtbf_s)
    whole = math.sqrt(2 * level.cost_s * level.mtbf_s)
    return whole * (1 + math.sqrt(small) / 3 + small / 9) - level.cost_s


def two_level(local: Level, flush: Level, max_overhead: float = 0.0) -> Interval:
    """The interval with least waste, where every n-th save is flushed too.

    Of failures per second l (survived by the nodes' own storage) and f (only by what was flushed), with costs
    c and g, and T from save to save:

        waste = (c + g/n) / T  +  T/2 (l + n f)      least at n = sqrt(g l / (c f)),
                                                     T = sqrt(2 (c + g/n) / (l + n f))

    Args:
        local: of every save.
        flush: of a flush, beyond the save; infinite `mtbf_s`: never needed.
        max_overhead: share of the time that saving may add at most, 0.035 for 3.5 %; saves are rarer then
            than least waste would have them. 0: no such bound.
    """
    near, far = 1 / local.mtbf_s, 1 / flush.mtbf_s
    if not far:
        return with_flushes(local, flush, 0, max_overhead)
    best = math.sqrt(flush.cost_s * near / (max(local.cost_s, _LEAST_COST_S) * far))
    candidates = {min(max(1, n), _MOST_FLUSHES) for n in (math.floor(best), math.ceil(best))}
    found = [with_flushes(local, flush, n, max_overhead) for n in sorted(candidates)]
    return min(found, key=lambda interval: interval.waste)


def with_flushes(
    local: Level, flush: Level, flush_every: int, max_overhead: float = 0.0
) -> Interval:
    """The interval with least waste where every `flush_every`-th save is flushed, 0: none; see `two_level`.

    >>> round(with_flushes(Level(0.5, 3600), Level(4.0), 0).every_s)
    60
    >>> round(with_flushes(Level(0.5, 3600), Level(4.0), 8).every_s)
    85
    """
    if not 0 <= max_overhead < 1:
        raise UsageError(f"an overhead of {max_overhead}: expected a share from 0 to below 1")
    saving = max(local.cost_s, _LEAST_COST_S) + (flush.cost_s / flush_every if flush_every else 0.0)
    failing = 1 / local.mtbf_s + flush_every / flush.mtbf_s
    every = math.sqrt(2 * saving / failing) if failing else math.inf
    if max_overhead:
        every = max(every, saving / max_overhead)
    if math.isinf(every):
        return Interval(every, flush_every, 0.0, 0.0)
    overhead = saving / every
    return Interval(every, flush_every, overhead, overhead + every * failing / 2)
