"""How long a schedule takes when its ranks have fewer cores than they are.

Of k ranks that compute at the same time each has min(1, cores / k) of a core. A core is faster while the
others are idle: stages have two times, one measured alone and one with all cores busy. With as many cores as
ranks and equal times this is what `fivefold.parallel.pipeline.simulate` computes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, needs
from fivefold.parallel.pipeline.simulate import StageTimes

__all__ = ["Shared", "shared"]


@dataclass(frozen=True)
class Shared:
    """What comes of it."""

    makespan_s: float
    """with the sums of gradients at the end"""
    most_at_once: int
    """ranks that compute at the same time"""


def shared(schedule: Schedule, alone: StageTimes, busy: StageTimes, cores: int) -> Shared:
    """Carry out the rows of a schedule on so many cores. Messages take no time."""
    rows = [[a for a in reversed(row) if a.op is not Op.REDUCE] for row in schedule.rows]
    left: dict[Action, float] = {}  # part that is still to be computed
    done: set[Action] = set()
    ends: dict[Action, float] = {}
    now, most = 0.0, 0
    while any(rows) or left:
        for row in rows:
            if (
                row
                and row[-1] not in left
                and all(n in done for n in needs(row[-1], schedule.stages))
            ):
                left[row[-1]] = 1.0  # fmt: skip
        assert left, "check has proven that schedules come to no standstill"
        most = max(most, len(left))
        times = alone if len(left) == 1 else busy
        share = min(1.0, cores / len(left))
        speed = {action: share / times.of(action) for action in left}
        lasts = {action: part / speed[action] for action, part in left.items()}
        first = min(lasts, key=lasts.__getitem__)
        passed = lasts[first]
        now += passed
        left = {action: part - passed * speed[action] for action, part in left.items()}
        for action in [a for a, part in left.items() if a == first or part < 1e-12]:
            del left[action]
            done.add(action.result)
            ends[action] = now
            rank = schedule.rank_of(action.chain, action.stage)
            rows[rank].pop()
    return Shared(_with_sums(schedule, ends, busy), most)


def _with_sums(schedule: Schedule, ends: dict[Action, float], times: StageTimes) -> float:
    """The end of the last sum: on the same ranks one after the other, from the last stage to the first."""
    if schedule.chains == 1:
        return max(ends.values())
    asked: defaultdict[int, float] = defaultdict(float)
    for row in schedule.rows:
        at = 0.0
        for action in row:
            if action.op is Op.REDUCE:
                asked[action.stage] = max(asked[action.stage], at)
            else:
                at = ends[action]
    free: defaultdict[frozenset[int], float] = defaultdict(float)
    for stage in sorted(asked, reverse=True):
        ranks = schedule.ranks_of(stage)
        free[ranks] = max(asked[stage], free[ranks]) + times.reduce_s[stage]
    return max(*ends.values(), *free.values())
