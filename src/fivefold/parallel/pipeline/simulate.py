"""How long a schedule takes and how much it keeps alive, computed before it runs.

Each rank carries out its row in order. An action starts when its rank is free and everything it takes has
arrived; so one walk through the actions, each behind what it waits for, gives all times. Sums of gradients
run beside the computation, one after the other between the ranks that share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

from fivefold.errors import PlanError
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule, Wire, walk

__all__ = ["Link", "ScheduleTimes", "Span", "StageTimes", "place_sums", "simulate"]

Link = Mapping[Wire, float] | Callable[[int, int], float]
"""seconds that the activations of one micro-batch, or their gradients, travel from a source stage to a
target stage, by (source, target)"""

Span = tuple[float, float]
"""start and end in seconds from the start of the step"""


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one micro-batch takes, per stage."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    """of B"""
    input_s: tuple[float, ...]
    """of I"""
    weight_s: tuple[float, ...]
    """of W"""
    reduce_s: tuple[float, ...]
    """of the sum of the stage's gradients over its replicas"""

    def __post_init__(self) -> None:
        lengths = {field.name: len(getattr(self, field.name)) for field in fields(self)}
        if len(set(lengths.values())) > 1:
            told = ", ".join(f"{name} has {n}" for name, n in lengths.items())
            raise PlanError(f"times of stages need one number per stage each, but {told}")

    @classmethod
    def even(
        cls, stages: int, forward_s: float = 1.0, backward_s: float = 2.0, reduce_s: float = 0.0
    ) -> StageTimes:
        """All stages alike; I and W each take half of B."""
        half = backward_s / 2
        times = (forward_s, backward_s, half, half, reduce_s)
        return cls(*((seconds,) * stages for seconds in times))

    def of(self, action: Action) -> float:
        """Seconds of one action."""
        match action.op:
            case Op.FORWARD:
                times = self.forward_s
            case Op.BACKWARD:
                times = self.backward_s
            case Op.INPUT:
                times = self.input_s
            case Op.WEIGHT:
                times = self.weight_s
            case Op.REDUCE:
                times = self.reduce_s
        return times[action.stage]


@dataclass(frozen=True)
class ScheduleTimes:
    """When every action of a schedule starts and ends. Everything per rank is in the order of ranks."""

    schedule: Schedule
    spans: Mapping[Action, Span]

    @property
    def makespan_s(self) -> float:
        """From the start of the step to the end of its last action, sums included."""
        return max(end for _, end in self.spans.values())

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        return tuple(
            sum(end - start for start, end in (self.spans[a] for a in row if a.op is not Op.REDUCE))
            for row in self.schedule.rows
        )

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the step in which each rank does not compute."""
        return tuple(self.makespan_s - busy for busy in self.busy_s)

    @property
    def efficiency(self) -> float:
        """The part of all ranks' time that is spent computing, in 0..1."""
        return sum(self.busy_s) / (self.schedule.ranks * self.makespan_s)

    @property
    def peak_live(self) -> tuple[int, ...]:
        """The most activations alive at once on each rank, counted in (stage, micro-batch): F to B or W."""
        return self.peak_bytes((1,) * self.schedule.stages)

    def peak_bytes(self, stage_bytes: Sequence[int]) -> tuple[int, ...]:
        """The most bytes alive at once on each rank, given what one micro-batch keeps in each stage."""
        assert len(stage_bytes) == self.schedule.stages, "one number per stage"
        return tuple(self._peak(rank, stage_bytes) for rank in range(self.schedule.ranks))

    def _peak(self, rank: int, stage_bytes: Sequence[int]) -> int:
        alive = peak = 0
        for action in self.schedule.rows[rank]:
            if action.op is Op.FORWARD:
                alive += stage_bytes[action.stage]
                peak = max(peak, alive)
            elif action.op in (Op.BACKWARD, Op.WEIGHT):
                alive -= stage_bytes[action.stage]
        return peak


def simulate(
    schedule: Schedule,
    times: StageTimes,
    link: Link | None = None,
    *,
    skips: Iterable[Wire] = (),
    sends_block: bool = False,
) -> ScheduleTimes:
    """When everything happens. Raises `PlanError` where the schedule would come to a standstill.

    `link` is asked for (source stage, target stage) on different ranks, skip connections included; without
    it messages take no time. F of a stage waits for all stages that it takes something from, B and I for all
    that take something from it. Sends travel beside the computation, or with `sends_block` keep the rank
    from its next action, one send after the other.
    """
    if len(times.forward_s) != schedule.stages:
        raise PlanError(
            f"times of {len(times.forward_s)} stages for schedule {schedule.name!r}, which has "
            f"{schedule.stages}"
        )
    takes, gives = _flows(schedule, skips)
    free = [0.0] * schedule.ranks
    arrived: dict[
        tuple[int, int, int, int], float
    ] = {}  # by chain, micro-batch, from and to which stage
    spans: dict[Action, Span] = {}
    for rank, action in walk(schedule):
        if action.op is Op.REDUCE:
            spans[action] = (free[rank], free[rank])
            continue
        chain, stage, micro = action.chain, action.stage, action.micro
        came = (arrived[chain, micro, other, stage] for other in takes[action.op][stage])
        start = max((free[rank], *came))
        free[rank] = end = start + times.of(action)
        spans[action] = (start, end)
        for other in gives[action.op][stage]:
            travel_s = (
                _travel_s(link, stage, other) if schedule.rank_of(chain, other) != rank else 0.0
            )
            if sends_block:
                free[rank] = end = end + travel_s
            arrived[chain, micro, stage, other] = end if sends_block else end + travel_s
    place_sums(schedule, times, spans)
    return ScheduleTimes(schedule, spans)


_Flow = Mapping[Op, Sequence[Sequence[int]]]


def _flows(schedule: Schedule, skips: Iterable[Wire]) -> tuple[_Flow, _Flow]:
    """Per operation and stage: the stages that it takes something from, and those that it gives something."""
    wires = sorted(schedule.wires(skips))
    stages = range(schedule.stages)
    before = [[source for source, target in wires if target == stage] for stage in stages]
    behind = [[target for source, target in wires if source == stage] for stage in stages]
    none: list[list[int]] = [[] for _ in stages]
    takes = {Op.FORWARD: before, Op.BACKWARD: behind, Op.INPUT: behind, Op.WEIGHT: none}
    gives = {Op.FORWARD: behind, Op.BACKWARD: before, Op.INPUT: before, Op.WEIGHT: none}
    return takes, gives


def _travel_s(link: Link | None, one: int, other: int) -> float:
    wire = (min(one, other), max(one, other))
    if link is None:
        return 0.0
    if not isinstance(link, Mapping):
        return link(*wire)
    if wire not in link:
        raise PlanError(
            f"no time is given for messages from stage {wire[0]} to stage {wire[1]}; "
            f"given: {', '.join(f'{a} to {b}' for a, b in sorted(link)) or 'none'}"
        )
    return link[wire]


def place_sums(schedule: Schedule, times: StageTimes, spans: dict[Action, Span]) -> None:
    """A sum starts when all replicas have asked for it, and the one before on the same ranks is done."""
    asked: defaultdict[int, list[Action]] = defaultdict(list)
    for action in (a for a in spans if a.op is Op.REDUCE):
        asked[action.stage].append(action)
    ready = {stage: max(spans[a][0] for a in actions) for stage, actions in asked.items()}
    free: defaultdict[frozenset[int], float] = defaultdict(float)
    for stage in sorted(ready, key=lambda s: (ready[s], -s)):
        ranks = schedule.ranks_of(stage)
        start = max(ready[stage], free[ranks])
        free[ranks] = start + times.reduce_s[stage]
        for action in asked[stage]:
            spans[action] = (start, free[ranks])
