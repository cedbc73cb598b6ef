"""Schedules as data: which rank of a pipeline does what, and in which order.

A model is cut into *stages*, a batch into *micro-batches*. A *chain* is one order of the stages over the
ranks; a second chain runs against the first, so that every rank holds an early stage of one and a late
stage of the other:

    rank            0    1    2    3
    chain 0, stage  0    1    2    3      with two stages per rank:  0,4  1,5  2,6  3,7
    chain 1, stage  3    2    1    0

Ranks are positions on the pipe axis. Each rank carries out its row of actions from left to right; what it
needs from another rank it waits for, what it sends never makes it wait.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from fivefold.errors import PlanError

__all__ = ["Action", "Op", "Row", "Schedule", "Wire", "needs", "walk"]

Wire = tuple[int, int]
"""(source stage, target stage): the target takes something that the source computes"""


class Op(StrEnum):
    """What an action does to its stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """gradients of the inputs and of the weights"""
    INPUT = "I"
    """gradients of the inputs only, so that the stage before can go on"""
    WEIGHT = "W"
    """gradients of the weights, which I has left for later"""
    REDUCE = "R"
    """starts to sum the gradients of the stage's parameters over its replicas"""


_TEXT = re.compile(r"(?P<op>[FBIW])(?P<stage>\d+)\.(?P<micro>\d+)|R(?P<sum>\d+)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of a row. Written `F2.5`: forward of stage 2 for micro-batch 5; `f2.5` on chain 1.

    >>> print(Action.parse("b0.12"), Action(0, 3, Op.REDUCE))
    b0.12 R3
    """

    chain: int
    stage: int
    op: Op
    micro: int = -1
    """-1 for R, which comes behind all micro-batches"""

    def __str__(self) -> str:
        text = f"{self.op}{self.stage}" + (f".{self.micro}" if self.micro >= 0 else "")
        return text.lower() if self.chain else text

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what `str` wrote. Raises `PlanError`."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(
                f"{text!r} is no action: write F2.5 for the forward of stage 2 and micro-batch 5 "
                f"(F, B, I or W; lower case on the second chain), or R2 for the sum of stage 2"
            )
        chain = int(text[0].islower())
        if match["sum"]:
            return cls(chain, int(match["sum"]), Op.REDUCE)
        return cls(chain, int(match["stage"]), Op(match["op"].upper()), int(match["micro"]))

    def same(self, op: Op, stage: int) -> Action:
        """Another operation for the same micro-batch on the same chain."""
        return Action(self.chain, stage, op, self.micro)

    @property
    def result(self) -> Action:
        """What others wait for: B gives them what I would."""
        return self.same(Op.INPUT, self.stage) if self.op is Op.BACKWARD else self


Row = tuple[Action, ...]
"""what one rank does, in order"""


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does in one training step."""

    name: str
    ranks: int
    stages: int
    micro_batches: int
    """of the whole step, over all chains"""
    rows: tuple[Row, ...]
    """per rank"""
    chains: int = 1

    def rank_of(self, chain: int, stage: int) -> int:
        """The rank that holds a stage of a chain."""
        rank = stage % self.ranks
        return self.ranks - 1 - rank if chain else rank

    def micros_of(self, chain: int) -> range:
        """The micro-batches that go through a chain, in order."""
        return range(chain, self.micro_batches, self.chains)

    def held(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(chain, stage) of everything that a rank holds."""
        chains = range(self.chains)
        return tuple(
            (c, s) for c in chains for s in range(self.stages) if self.rank_of(c, s) == rank
        )

    def stages_of(self, rank: int) -> frozenset[int]:
        """The stages whose parameters a rank holds, over all chains."""
        return frozenset(stage for _, stage in self.held(rank))

    def ranks_of(self, stage: int) -> frozenset[int]:
        """The ranks that hold a stage: they sum its gradients among themselves."""
        return frozenset(self.rank_of(chain, stage) for chain in range(self.chains))

    def wires(self, skips: Iterable[Wire] = ()) -> frozenset[Wire]:
        """Every stage to its next one, and the skip connections. Raises `PlanError` for an impossible one."""
        found = {(stage, stage + 1) for stage in range(self.stages - 1)}
        for source, target in skips:
            if not 0 <= source < target < self.stages:
                raise PlanError(
                    f"a skip from stage {source} to stage {target} is impossible: "
                    f"it leads to a later one of the {self.stages} stages"
                )
            found.add((source, target))
        return frozenset(found)

    def peers(self, rank: int, skips: Iterable[Wire] = ()) -> frozenset[int]:
        """The other ranks that a rank exchanges activations and their gradients with."""
        found: set[int] = set()
        for source, target in self.wires(skips):
            for chain in range(self.chains):
                ends = {self.rank_of(chain, source), self.rank_of(chain, target)}
                found |= ends if rank in ends else set()
        return frozenset(found - {rank})


def needs(action: Action, stages: int) -> tuple[Action, ...]:
    """The results that an action waits for, on any rank.

    Skip connections add nothing: what comes from an earlier stage is there when the stage before is done.
    """
    stage = action.stage
    match action.op:
        case Op.FORWARD:
            return (action.same(Op.FORWARD, stage - 1),) if stage else ()
        case Op.BACKWARD | Op.INPUT:
            own = action.same(Op.FORWARD, stage)
            return (own, action.same(Op.INPUT, stage + 1)) if stage + 1 < stages else (own,)
        case Op.WEIGHT:
            return (action.same(Op.INPUT, stage),)
        case Op.REDUCE:
            return ()


def walk(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Rank and action, one by one, each behind everything that it waits for.

    Raises `PlanError` when ranks wait for each other, naming who waits for whom.
    """
    rows = [list(reversed(row)) for row in schedule.rows]
    done: set[Action] = set()

    def missing(action: Action) -> list[Action]:
        return [need for need in needs(action, schedule.stages) if need not in done]

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row and not missing(row[-1]):
                action = row.pop()
                done.add(action.result)
                moved = True
                yield rank, action
    stuck = [(rank, row[-1]) for rank, row in enumerate(rows) if row]
    if stuck:
        waits = "; ".join(_wait(schedule, rank, a, missing(a)[0]) for rank, a in stuck)
        raise PlanError(f"schedule {schedule.name!r} comes to a standstill: {waits}")


def _wait(schedule: Schedule, rank: int, action: Action, need: Action) -> str:
    other = schedule.rank_of(need.chain, need.stage)
    of = ", which it does later itself" if other == rank else f" of rank {other}"
    what = f"{need} (or {need.same(Op.BACKWARD, need.stage)})" if need.op is Op.INPUT else f"{need}"
    return f"rank {rank} at {action} waits for {what}{of}"
