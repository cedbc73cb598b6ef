"""Time and memory of a candidate, predicted.

stages' costs ──► schedule simulated ──► + update of the weights          seconds of a step
parameters, gradients, buckets, optimiser ──► + activations alive at once     bytes of a rank
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from fivefold.cluster.description import Cluster, LinkCost
from fivefold.parallel.buckets import OTHER_BYTES
from fivefold.parallel.gathering import PARTS as UNITS
from fivefold.parallel.gathering import check_divisible
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, needs
from fivefold.parallel.pipeline.simulate import (
    ScheduleTimes,
    Span,
    StageTimes,
    place_sums,
    simulate,
)
from fivefold.parallel.sharded import CHUNK_BYTES
from fivefold.plan import Layout
from fivefold.sections import bytes_of
from fivefold.tune.candidates import Candidate
from fivefold.tune.need import OPTIMIZERS, Need
from fivefold.tune.subject import Staged, Subject
from fivefold.tune.work import Links, StageCost

__all__ = ["Case", "Prediction", "StepTime", "shared"]


@dataclass(frozen=True)
class StepTime:
    """Where the time of a step goes, on the rank that is busy longest. The sum is the step."""

    compute_s: float
    exchange_s: float
    """waiting for pixels of neighbouring tiles"""
    statistics_s: float
    """sums of batch norm and the like"""
    idle_s: float
    """waiting for other stages"""
    gradients_s: float
    """summing gradients, as far as nothing hides it"""
    update_s: float
    again_s: float = 0.0
    """computing again what a budget has no room for"""
    gather_s: float = 0.0
    """gathering parameters that replicas divide, as far as nothing hides it"""

    @property
    def step_s(self) -> float:
        """All of it."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class Prediction:
    """What is expected of a candidate."""

    candidate: Candidate
    parts: StepTime
    memory_bytes: int
    """of the rank that needs most"""

    @property
    def step_s(self) -> float:
        """Seconds of a training step."""
        return self.parts.step_s


_SLACK = 0.7
"""Part of the measured time of one sample that a sample of several, or a tile's share of one, may take"""


class Case:
    """A candidate for a net, which is divided into tiles once somebody wants more than a bound."""

    def __init__(
        self,
        subject: Subject,
        candidate: Candidate,
        batch: int,
        optimizer: str,
        make: Callable[[Candidate], Schedule] = Candidate.make,
    ) -> None:
        """`batch` is global; `make` may remember schedules that were made before."""
        layout = candidate.layout
        self.candidate = candidate
        self._subject, self._cluster = subject, subject.cluster
        self._copies, self._make = OPTIMIZERS[optimizer], make
        self._samples = -(-batch // layout.data)  # of the largest replica
        self._rows = -(-self._samples // candidate.micro_batches)
        self._fewest = max(batch // layout.data // candidate.micro_batches, 1)
        self._links = Links(
            self._cluster.link(layout.tiles),
            self._cluster.link(layout.size if layout.data > 1 else layout.tiles),
            layout.tiles,
            layout.data,
            self._cluster.device.overlaps,
        )

    @functools.cached_property
    def _staged(self) -> Staged:
        rows = self._fewest if self._subject.measured is None else self._rows
        return self._subject.staged(self.candidate.layout, self.candidate.stages, rows)

    @functools.cached_property
    def need(self) -> Need:
        """Its memory. Raises `UsageError` where the net cannot be divided so."""
        units = (0, 0)
        if self.candidate.parts > 1:
            check_divisible(self._subject.net)
            units = self._subject.units_bytes if self._layered else units
        return Need(self.candidate, self._staged, self._samples, self._rows, self._copies, units)

    def memory_bytes(self) -> int:
        """Of the rank that needs most: all of a budget that is enough, else the least that would be."""
        return self._within[0]

    @functools.cached_property
    def _within(self) -> tuple[int, Sequence[float]]:
        """Memory, and seconds of computing again for a budget, by stage."""
        schedule, budget = self._make(self.candidate), self.candidate.budget
        if not budget:
            return self.need.most_bytes(schedule), [0.0] * schedule.stages
        return self.need.within(schedule, bytes_of(budget))

    @property
    def _layered(self) -> bool:
        """Whether parameters are gathered layer by layer, while others compute."""
        return self.candidate.shard == "parameters"

    def bound_s(self) -> float:
        """No step is faster, told without dividing the net into tiles: as if they had no borders.

        Raises `UsageError` for a net that cannot be cut into so many stages.
        """
        whole = self._subject.staged(Layout(), self.candidate.stages, 1)
        bound = self._least_s(self._costs(whole, self._rows / self.candidate.layout.tiles))
        return bound if self._subject.measured is None else _SLACK * bound

    def least_s(self) -> float:
        """The same with borders. Raises `UsageError` where the net cannot be divided so."""
        return self._least_s(self._costs(self._staged, self._rows))

    def _least_s(self, costs: Sequence[StageCost]) -> float:
        """The busiest rank, and the way to it and back, on a device that is as fast as it ever is."""
        return self._busiest_s(costs) / self._cluster.speed(self._on_a_node(1))

    def _busiest_s(self, costs: Sequence[StageCost]) -> float:
        ranks, micro = self.candidate.layout.pipe, self.candidate.micro_batches
        if self.candidate.chains > 1:
            pairs = zip(costs, reversed(costs), strict=True)
            return max(micro / 2 * (_both(one) + _both(other)) for one, other in pairs)
        busy = [micro * sum(map(_both, costs[rank::ranks])) for rank in range(ranks)]
        later = self.candidate.schedule == "zero-bubble"  # which fills the way back with weights
        ways = [c.forward_s + (0.0 if later else c.backward_s) for c in costs]
        waits = [sum(ways[:rank]) for rank in range(ranks)]
        return max(b + wait for b, wait in zip(busy, waits, strict=True))

    def predict(self) -> Prediction:
        """Simulate a step."""
        schedule = self._make(self.candidate)
        memory_bytes, again_s = self._within
        costs = self._costs(self._staged, self._rows)
        costs = [_later(cost, more) for cost, more in zip(costs, again_s, strict=True)]
        divides = self.candidate.parts > 1
        sums = [0.0 if divides else self._sum_s(schedule, n) for n in self._staged.trained_bytes]
        times = StageTimes(
            tuple(c.forward_s for c in costs),
            tuple(c.backward_s for c in costs),
            tuple(c.backward_s - c.weight_s for c in costs),
            tuple(c.weight_s for c in costs),
            tuple(sums),
        )
        timeline = self._timeline(schedule, times)
        computed = max(end for a, (_, end) in timeline.spans.items() if a.op is not Op.REDUCE)
        gather_s, gradients_s = (
            self._divided_s(schedule, costs)
            if divides
            else (0.0, self._exposed_s(timeline, computed, sums, costs))
        )
        busiest = max(range(schedule.ranks), key=lambda rank: timeline.busy_s[rank])
        counts = [(len(schedule.micros_of(chain)), s) for chain, s in schedule.held(busiest)]
        exchange = sum(n * costs[s].exchange_s for n, s in counts)
        statistics = sum(n * costs[s].statistics_s for n, s in counts)
        again = sum(n * again_s[s] for n, s in counts)
        parts = StepTime(
            timeline.busy_s[busiest] - exchange - statistics - again,
            exchange,
            statistics,
            computed - timeline.busy_s[busiest],
            gradients_s,
            max(self._update_s(schedule, rank) for rank in range(schedule.ranks))
            / self._cluster.speed(self._on_a_node(schedule.ranks)),
            again,
            gather_s,
        )
        return Prediction(self.candidate, parts, memory_bytes)

    def _timeline(self, schedule: Schedule, times: StageTimes) -> ScheduleTimes:
        """When everything happens, on devices that may share cores."""
        travel, blocks = self._travel_s(schedule), not self._cluster.device.overlaps
        if not self._cluster.cores_per_node:
            return simulate(schedule, times, travel, sends_block=blocks)
        # Tiles and replicas do the same at the same time.

        def speed(_action: Action, computing: int) -> float:
            return self._cluster.speed(self._on_a_node(computing))

        return shared(schedule, times, speed, travel)

    def _on_a_node(self, computing: int) -> int:
        """How many ranks of a node compute while so many places of the pipe axis do."""
        layout = self.candidate.layout
        return min(computing * layout.data * layout.tiles, self._cluster.devices_per_node)

    def _costs(self, staged: Staged, rows: float) -> list[StageCost]:
        costs = [staged.work.cost(span, rows, self._links) for span in staged.spans]
        if self.candidate.recompute:
            costs = [_later(cost, cost.again_s) for cost in costs]
        measured = self._subject.measured
        if self.candidate.schedule and measured is not None:
            costs = [_with_actions(cost, measured.action_s) for cost in costs]
        return costs

    def _exposed_s(
        self,
        timeline: ScheduleTimes,
        computed: float,
        sums: Sequence[float],
        costs: Sequence[StageCost],
    ) -> float:
        """Seconds of sums of gradients that come behind everything else."""
        if self.candidate.layout.pipe > 1:
            late = timeline.makespan_s - computed
            return late if self._cluster.device.overlaps else max(late, *sums)
        if not self._cluster.device.overlaps:
            return sums[0]
        # Buckets leave while backward goes on; the last one cannot.
        last = self._sum_s(timeline.schedule, min(self._staged.trained_bytes[0], OTHER_BYTES) / 25)
        return max(sums[0] - costs[0].backward_s, last)

    def _divided_s(self, schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, float]:
        """Seconds of gathering parameters that replicas divide, and of summing gradients, each its part.

        For a whole step at once nothing hides them; layer by layer, what layers compute does, but for the
        first ones and the last.
        """
        sizes = [
            sum(self._staged.trained_bytes[stage] for stage in schedule.stages_of(rank))
            for rank in range(schedule.ranks)
        ]
        parts, tiles = self.candidate.parts, self.candidate.layout.tiles
        link = self._cluster.link(parts, self.candidate.layout.pipe * tiles)
        messages = max(sizes) // CHUNK_BYTES + (UNITS if self._layered else 1)
        each = link.all_gather_s(max(sizes) / parts, parts) + (messages - 1) * link.latency_s
        if self._layered:
            hidden = sum(map(_both, costs)) if self._cluster.device.overlaps else 0.0
            exposed = max(3 * each - hidden, 2 * each / UNITS)
            return exposed * 2 / 3, exposed / 3
        among = self._links.tiles.all_reduce_s(max(sizes) / parts, tiles) if tiles > 1 else 0.0
        return each, each + among

    def _sum_s(self, schedule: Schedule, size_bytes: float) -> float:
        """To sum the gradients of a stage, in buckets."""
        if self.candidate.reducers == 1:
            return 0.0
        paired = schedule.chains > 1
        link = self._links.everyone
        if paired:
            link = self._cluster.link(self.candidate.layout.size)
        buckets = 1 + int(size_bytes // OTHER_BYTES)
        return (
            link.all_reduce_s(size_bytes, self.candidate.reducers) + (buckets - 1) * link.latency_s
        )

    def _update_s(self, schedule: Schedule, rank: int) -> float:
        """Read and write parameters and the optimiser's numbers; and pack and unpack gradients."""
        every = self._staged.trained_bytes
        trained = sum(every[stage] for stage in schedule.stages_of(rank))
        packed = 4 * trained * (self.candidate.reducers > 1)
        own = trained / self.candidate.parts
        if self._subject.measured is not None and trained:
            packed_s = packed / self._cluster.device.bytes_per_s
            return packed_s + self._subject.measured.update_s * own / sum(every)
        return ((3 + 2 * self._copies) * own + packed) / self._cluster.device.bytes_per_s

    def _travel_s(self, schedule: Schedule) -> Callable[[int, int], float]:
        layout = self.candidate.layout

        def seconds(source: int, target: int) -> float:
            places = schedule.rank_of(0, source), schedule.rank_of(0, target)
            link = _link_of(self._cluster, layout, places)
            return link.message_s(self._rows * self._staged.takes_bytes[target])

        return seconds


def _link_of(cluster: Cluster, layout: Layout, places: tuple[int, int]) -> LinkCost:
    """The slowest link between two places on the pipe axis, of any replica and tile."""
    node = cluster.devices_per_node
    for replica in range(min(layout.data, node)):
        first = replica * layout.pipe * layout.tiles
        for tile in range(layout.tiles):
            one, other = (first + place * layout.tiles + tile for place in places)
            if one // node != other // node:
                return cluster.between
    return cluster.within


def _later(cost: StageCost, more_s: float) -> StageCost:
    """With a backward that takes longer."""
    return replace(cost, backward_s=cost.backward_s + more_s)


def _with_actions(cost: StageCost, action_s: float) -> StageCost:
    return replace(cost, forward_s=cost.forward_s + action_s, backward_s=cost.backward_s + action_s)


def _both(cost: StageCost) -> float:
    return cost.forward_s + cost.backward_s


# ---- How long a schedule takes when its ranks share cores
#
#     rank 0  |FFFF----BBBBBB|        alone it is as fast as a core can be
#     rank 1  |--ffffbbbb----|        two at once on two cores slow each other down a little, four by half
#
# What is under way is done at a speed that depends on how many compute; whenever an action ends, or begins,
# the speeds of all change. With speeds of 1 this is what `simulate` computes.


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
