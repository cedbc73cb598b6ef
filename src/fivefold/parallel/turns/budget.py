"""What turns may keep between their visits under `memory.budget`.

budget = parameters, gradients, the optimiser's state, the batch      there anyway
       + what one turn takes while it computes a segment              an upper bound, from shapes
       + what all turns keep between visits                           the rest: what is more goes to a disk
       + all that backward needs of some segments                     what is left: others are computed again
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.mesh.unread import Unread
from fivefold.parallel.memory.link import measured_link
from fivefold.parallel.memory.optimizers import OptimizerStates
from fivefold.parallel.memory.spill import Pool
from fivefold.parallel.memory.step import store_of
from fivefold.parallel.program.costs import flops_of
from fivefold.parallel.program.program import Compute, Move, Program
from fivefold.parallel.turns.segments import HELD, Segment, segments_of
from fivefold.parallel.turns.shelf import Shelf
from fivefold.plan import Memory
from fivefold.sections import bytes_of

__all__ = ["TurnBudget"]

_KEPT_BYTES_PER_S = 1e8
"""what keeping counts as where nothing but memory keeps: it is scarce then"""
_WINDOW = 8
"""a part of what is kept, on its way out, and as much on its way back"""
_FLOWS = 2
"""times the largest value: what backward has under way beside what it was given"""


class TurnBudget:
    """Of one net. Raises `UsageError` where nothing can be spilled to what the plan names."""

    def __init__(self, net: nn.Module, mesh: Mesh) -> None:
        memory: Memory = mesh.plan.memory
        self._net, self._told = net, memory.budget
        self._budget_bytes = bytes_of(memory.budget)
        self._store = store_of(memory, mesh.device)
        self._on_cpu = mesh.device.type == "cpu"
        self._optimizers = OptimizerStates(net, mesh.device)
        self.keeps_bytes_per_s = _KEPT_BYTES_PER_S
        """how fast what is kept is put away"""
        if self._store is not None:
            self.keeps_bytes_per_s = measured_link(self._store, mesh.device).out_bytes_per_s
        self._pools: dict[int, Pool] = {}

    def shelf(
        self,
        programs: Sequence[Program],
        batch: Iterable[Tensor],
        mine: Iterable[Tensor],
    ) -> tuple[Shelf, list[frozenset[int]]]:
        """For one step; and by turn the segments that are not computed again in backward.

        Raises `UsageError` where too little is left.
        """
        trains = torch.is_grad_enabled()
        visit, kept = self._needed(programs, trains=trains)
        standing = self._standing_bytes(batch, trains=trains)
        limit = self._budget_bytes - standing - visit
        if limit <= 0:
            raise UsageError(
                f"memory.budget = {self._told} is too little: {_mib(standing)} are parameters, gradients, "
                f"the optimiser's state and the batch, and a turn takes up to {_mib(visit)}: let tiles.turns "
                "make more of them, or allow more"
            )
        if self._store is None:
            if kept > limit:
                raise UsageError(
                    f"memory.budget = {self._told} is too little: turns keep up to {_mib(kept)} between "
                    f"their visits, and {_mib(limit)} are left for that. Name a local disk as memory.disk, "
                    "let more layers share an exchange (tiles.fuse), or allow more"
                )
            return Shelf(), _whole(programs, limit - kept)
        window = limit // _WINDOW
        growth, limit = limit + visit if self._on_cpu else 0, limit - 2 * window
        whole = _whole(programs, limit - kept)
        for program, numbers in zip(programs, whole, strict=True):
            limit -= sum(_again(program)[number][0] for number in numbers)
        return Shelf(limit, self._pool(window), mine, growth), whole

    def load(self, programs: Sequence[Program], batch: Iterable[Tensor], *, spills: bool) -> float:
        """What turns take of what there is for them, as `shelf` has it: up to 1 they fit.

        Where what is kept between `spills` to a disk, they leave as much as they take for it.
        """
        trains = torch.is_grad_enabled()
        room = self._budget_bytes - self._standing_bytes(batch, trains=trains)
        visit, kept = self._needed(programs, trains=trains)
        if self._store is None:
            return (visit + kept) / max(room, 1)
        if spills:
            return 2 * visit / max(room, 1)
        return (visit + kept * _WINDOW / (_WINDOW - 2)) / max(room, 1)

    def _pool(self, window_bytes: int) -> Pool:
        assert self._store is not None
        if window_bytes not in self._pools:
            self._pools[window_bytes] = Pool(self._store, window_bytes)
        return self._pools[window_bytes]

    def _needed(self, programs: Sequence[Program], *, trains: bool) -> tuple[int, int]:
        """Bytes that a turn takes at most, and that all of them keep between their visits."""
        sizes = [_bytes_of_turn(program, trains=trains) for program in programs]
        return max(visit for visit, _ in sizes), sum(kept for _, kept in sizes)

    def _standing_bytes(self, batch: Iterable[Tensor], *, trains: bool) -> int:
        """What is there anyway; of the optimiser's state, until it is seen, twice what is trained."""
        there = [one for one in batch if self._store is None or not isinstance(one, Unread)]
        held = sum(t.nbytes for t in (*self._net.parameters(), *self._net.buffers(), *there))
        if not trains:
            return held
        trained = sum(p.nbytes for p in self._net.parameters() if p.requires_grad)
        return held + trained + self._optimizers.bytes_of(2 * trained)


def _bytes_of_turn(program: Program, *, trains: bool) -> tuple[int, int]:
    """What a turn has at most while it computes, and what it keeps at most between; found once."""
    key = "bytes", trains
    if key not in program.found:
        segments = segments_of(program)
        visit = max((_visit_bytes if trains else _pass_bytes)(program, one) for one in segments)
        program.found[key] = visit, (_kept_bytes if trains else _alive_bytes)(program, segments)
    return program.found[key]


def _pass_bytes(program: Program, segment: Segment) -> int:
    """At most what one turn has while it computes a segment without gradients: values die meanwhile."""
    here = {index: _bytes(program, index) for index in segment.span.takes}
    most = 0
    for number in segment.steps:
        made, step = _made_bytes(program, number), program.steps[number]
        names = step.node.outputs if isinstance(step, Compute) else [step.target]
        here |= dict(zip(names, made, strict=True))
        most = max(most, sum(here.values()) + max(made, default=0))
        for index in program.dying[number]:
            here.pop(index, None)
    return most


def _visit_bytes(program: Program, segment: Segment) -> int:
    """At most what one turn has while it computes a segment, forward or backward."""
    made = [size for number in segment.steps for size in _made_bytes(program, number)]
    taken = sum(_bytes(program, index) for index in segment.span.takes)
    return taken + sum(made) + _FLOWS * max(made, default=0)


def _kept_bytes(program: Program, segments: Sequence[Segment]) -> int:
    """At most what one turn keeps: what segments give, and the gradients of what one of them takes."""
    gives = [[_bytes(program, index) for index in one.span.gives] for one in segments[:-1]]
    takes = (sum(_bytes(program, index) for index in one.span.takes) for one in segments)
    return sum(map(sum, gives)) + (max(takes) if gives else 0)


def _alive_bytes(program: Program, segments: Sequence[Segment]) -> int:
    """At most what one turn keeps without gradients: what segments give, until nobody reads it any more."""
    alive, most = dict[int, int](), 0
    for one in segments[:-1]:
        alive |= {index: _bytes(program, index) for index in one.span.gives}
        alive = {index: size for index, size in alive.items() if index not in one.dies}
        most = max(most, sum(alive.values()))
    return most


def _whole(programs: Sequence[Program], spare_bytes: int) -> list[frozenset[int]]:
    """Segments of which `spare_bytes` hold all that backward needs, by turn.

    What takes longest to compute again, for its size, comes first. What is put away meanwhile would come back
    more slowly than that, so all that is kept has its place before.
    """
    found: list[set[int]] = [set() for _ in programs]
    if spare_bytes <= 0 or not torch.is_grad_enabled():
        return [frozenset(one) for one in found]
    every = [
        (flops / max(size, 1), size, turn, number)
        for turn, program in enumerate(programs)
        for number, (size, flops) in enumerate(_again(program))
    ]
    for _, size, turn, number in sorted(every, reverse=True):
        if size <= spare_bytes:
            found[turn].add(number)
            spare_bytes -= size
    return [frozenset(one) for one in found]


def _again(program: Program) -> list[tuple[int, float]]:
    """What computing segments again saves of memory, and the operations that it takes; not of the last one.

    Memory is what a step has measured, and before what all values take that a segment makes.
    """
    if "again" not in program.found:
        made: list[tuple[int, float]] = []
        for segment in segments_of(program)[:-1]:
            steps = [program.steps[number] for number in segment.steps]
            nodes = [step.node for step in steps if isinstance(step, Compute)]
            flops = sum(  # the last node has saved what it needs before it is computed
                flops_of(node) * _elements(program, index)
                for node in nodes[:-1]
                for index in node.outputs
            )
            made.append((sum(sum(_made_bytes(program, n)) for n in segment.steps), flops))
        program.found["again"] = made
    return [
        (program.found.get((HELD, number), size), flops)
        for number, (size, flops) in enumerate(program.found["again"])
    ]


def _made_bytes(program: Program, number: int) -> list[int]:
    step = program.steps[number]
    if isinstance(step, Move):
        each = program.tape.element_bytes(step.source)
        return [math.prod(step.exchange.result) * each]
    return [_bytes(program, index) for index in step.node.outputs]


def _bytes(program: Program, index: int) -> int:
    dtype = program.tape.dtypes.get(index)
    return 0 if dtype is None else _elements(program, index) * dtype.itemsize


def _elements(program: Program, index: int) -> int:
    here, spread = program.here, program.spreads.get(index)
    if here is None or spread is None:
        return 0  # what a move made: it lives within a segment
    return math.prod(spread.local_shape(here.grid, here.rank))


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
