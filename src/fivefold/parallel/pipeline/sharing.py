"""How long a schedule takes when its ranks share cores.

    rank 0  |FFFF----BBBBBB|        alone it is as fast as a core can be
    rank 1  |--ffffbbbb----|        two at once on two cores slow each other down a little, four by half

What is under way is done at a speed that depends on how many compute; whenever an action ends, or begins, the
speeds of all change. With speeds of 1 this is what `simulate` computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, needs
from fivefold.parallel.pipeline.simulate import ScheduleTimes, Span, StageTimes, place_sums

__all__ = ["shared"]


def shared(
    schedule: Schedule,
    times: StageTimes,
    speed: Callable[[Action, int], float],
    sends_s: Callable[[int, int], float] = lambda _source, _target: 0.0,
) -> ScheduleTimes:
    """When everything happens, where an action goes on at `speed(action, n)` while n ranks compute.

    A rank is busy with what it sends to another one, see `sends_s(source, target)` in stages, after the
    action that made it. `schedule` is one that `check` finds right.
    """
    going = _Going(schedule, times, sends_s)
    while going.begin():
        going.pass_time(speed)
    place_sums(schedule, times, going.spans)
    return ScheduleTimes(schedule, going.spans)


class _Going:
    """Rows under way."""

    def __init__(
        self, schedule: Schedule, times: StageTimes, sends_s: Callable[[int, int], float]
    ) -> None:
        self._schedule, self._times, self._sends_s = schedule, times, sends_s
        self._rows = [list(reversed(row)) for row in schedule.rows]
        self._done: set[Action] = set()
        self._begun: dict[Action, float] = {}
        self._now = 0.0
        self._ends: defaultdict[int, float] = defaultdict(float)
        self.left_s: dict[Action, float] = {}
        """what is under way, and its seconds at a speed of 1"""
        self.spans: dict[Action, Span] = {}

    def begin(self) -> bool:
        """Begin what can be; whether there is anything under way."""
        for rank, row in enumerate(self._rows):
            while row and row[-1].op is Op.REDUCE:
                self.spans[row.pop()] = (self._ends[rank], self._ends[rank])
            if row and row[-1] not in self.left_s and self._ready(row[-1]):
                self.left_s[row[-1]] = self._lasts_s(row[-1])
                self._begun[row[-1]] = self._now
        return bool(self.left_s)

    def _ready(self, action: Action) -> bool:
        return all(need in self._done for need in needs(action, self._schedule.stages))

    def _lasts_s(self, action: Action) -> float:
        chain, stage = action.chain, action.stage
        other = {Op.FORWARD: stage + 1, Op.WEIGHT: -1}.get(action.op, stage - 1)
        seconds = self._times.of(action)
        if 0 <= other < self._schedule.stages:
            places = (self._schedule.rank_of(chain, stage), self._schedule.rank_of(chain, other))
            if places[0] != places[1]:
                seconds += self._sends_s(min(stage, other), max(stage, other))
        return seconds

    def pass_time(self, speed: Callable[[Action, int], float]) -> None:
        """Until the first of what is under way ends."""
        speeds = {action: speed(action, len(self.left_s)) for action in self.left_s}
        lasts_s = {action: left / speeds[action] for action, left in self.left_s.items()}
        first = min(lasts_s, key=lasts_s.__getitem__)
        passed_s = lasts_s[first]
        self._now += passed_s
        for action, lasting_s in lasts_s.items():
            self.left_s[action] -= passed_s * speeds[action]
            if action == first or lasting_s - passed_s <= 1e-12 * self._now:
                self._end(action)

    def _end(self, action: Action) -> None:
        del self.left_s[action]
        self._done.add(action.result)
        self.spans[action] = (self._begun[action], self._now)
        rank = self._schedule.rank_of(action.chain, action.stage)
        self._ends[rank] = self._now
        self._rows[rank].pop()
