"""Ranks that have fewer cores than they are.

Of k ranks that compute at the same time each has min(1, cores / k) of a core. A core is faster while the
others are idle: stages have two times, one measured alone and one with all cores busy.
"""

from __future__ import annotations

from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.simulate import ScheduleTimes, StageTimes
from fivefold.tune.predict import shared

__all__ = ["most_at_once", "on_cores"]


def on_cores(schedule: Schedule, alone: StageTimes, busy: StageTimes, cores: int) -> ScheduleTimes:
    """Carry out the rows of a schedule on so many cores. Messages take no time."""

    def speed(action: Action, computing: int) -> float:
        share = min(1.0, cores / computing)
        return share if computing > 1 else share * busy.of(action) / alone.of(action)

    return shared(schedule, busy, speed)


def most_at_once(timeline: ScheduleTimes) -> int:
    """Ranks that compute at the same time."""
    spans = [span for action, span in timeline.spans.items() if action.op is not Op.REDUCE]
    # What ends makes room for what begins at the same moment.
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
