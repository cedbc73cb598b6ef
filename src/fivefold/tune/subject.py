"""The net that is planned for: recorded, cut into stages and laid out in tiles, each once.

tape (samples) ──► cut (stages)
     │                 │
     └──► program (tiles) ──► Staged: what each stage computes, sends, holds
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fivefold.cluster.description import Cluster
from fivefold.errors import UsageError
from fivefold.mesh import owned
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.gathering import units_of
from fivefold.parallel.graph.record import record
from fivefold.parallel.graph.tape import Tape
from fivefold.parallel.pipeline.cut import Cut, balanced, states_of
from fivefold.parallel.pipeline.stages import Crossing, Stage, divided, holders
from fivefold.parallel.pipeline.timing import Timed
from fivefold.parallel.program.costs import Costs, Options
from fivefold.parallel.program.program import Compute, Program, planned
from fivefold.parallel.program.rule import Here
from fivefold.parallel.program.spread import Division, Grid, Spread
from fivefold.parallel.trees import call_with
from fivefold.plan import Layout
from fivefold.tune.measure import Measured
from fivefold.tune.saved import HeldBytes
from fivefold.tune.work import Work

__all__ = ["Staged", "Subject"]

_MOST_STAGES = 64
"""longer pipelines are not looked at"""
_MOST_PARTS = 8
"""of an axis: in a finer grid, a tile with as many pixels and neighbours does the same"""


@dataclass(frozen=True, eq=False)
class Staged:
    """A net in stages, in the middle tile of a grid. Everything per stage is in the order of stages."""

    program: Program
    here: Here
    work: Work
    spans: tuple[range, ...]
    """steps of the program"""
    takes_bytes: tuple[float, ...]
    """that cross the bound in front of the stage, per sample; of the first stage, its inputs"""
    bound_bytes: tuple[float, ...]
    """what a stage took and gave and keeps only until its gradient comes or goes, per sample"""
    packed_bytes: tuple[float, ...]
    """copies of several values that a stage sends in one message, per sample"""
    gradient_bytes: np.ndarray
    """of parameters, by step: those that backward of the step is the first to make"""
    parameter_bytes: tuple[int, ...]
    """buffers included"""
    trained_bytes: tuple[int, ...]


@dataclass(frozen=True)
class _Shape:
    """What a program is made for."""

    grid: Grid
    rows: int
    replicas: bool = False
    """whether norms see other replicas, where that makes a difference to what is computed"""


@dataclass(frozen=True, eq=False)
class _Laid:
    program: Program
    here: Here
    work: Work
    timed: Timed | None


class Subject:
    """A net for samples of one shape, on devices of a cluster."""

    def __init__(
        self,
        net: nn.Module,
        sample: tuple[int, ...],
        cluster: Cluster,
        *,
        measured: Measured | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """With `measured`, what candidates compute is timed here, and so are the messages within a node.

        `dtype` is that of samples: int64 for a net that takes numbers of tokens.
        """
        if measured is not None:
            device = dataclasses.replace(cluster.device, alone=measured.alone)
            link = measured.link or cluster.within
            cluster = dataclasses.replace(cluster, device=device, within=link)
        self.net, self.sample, self.cluster, self.measured = net, sample, cluster, measured
        self.dtype = dtype
        self._tapes: dict[tuple[int, ...], Tape] = {}
        self._programs: dict[_Shape, _Laid] = {}
        self._staged: dict[tuple[_Shape, int], Staged] = {}
        self._parameters: dict[Cut, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    @property
    def pixels(self) -> tuple[int, ...]:
        """Size of an image along the axes that can be divided; nothing for other samples."""
        return self.sample[1:] if len(self.sample) in (3, 4) else ()

    @property
    def most_stages(self) -> int:
        """Into how many stages the net is cut at most."""
        return min(_MOST_STAGES, len(self.tape(1).nodes))

    @functools.cached_property
    def units_bytes(self) -> tuple[int, int]:
        """Of parameters: the most of layers that gather together, and what belongs to none of these."""
        every = sum(parameter.nbytes for parameter in self.net.parameters())
        sizes = [sum(p.nbytes for p in unit.parameters()) for unit in units_of(self.net)]
        return max(sizes, default=0), every - sum(sizes)

    @property
    def programs(self) -> int:
        """How many plans of tiles were made so far."""
        return len(self._programs)

    def tape(self, rows: int, sample: tuple[int, ...] | None = None) -> Tape:
        """The net recorded for `rows` samples, of another shape if one is given.

        Raises `UsageError` for a net that cannot be recorded, or does not take such samples.
        """
        shape = (rows, *(sample or self.sample))
        if shape not in self._tapes:
            example = torch.empty(shape, dtype=self.dtype, device="meta")
            with _told_briefly(shape):
                self._tapes[shape] = record(self.net, call_with, example, [torch.Size(shape)])
        return self._tapes[shape]

    def staged(self, layout: Layout, stages: int, rows: int) -> Staged:
        """The net in `stages` and in the tiles of `layout`, for micro-batches of `rows` samples.

        Raises `PlanError` or `UsageError` for a net that cannot be cut so.
        """
        grid = _grid(layout)
        if self.measured is not None:
            shape = _Shape(grid, rows, layout.data > 1 and grid.size == 1)
        else:  # what is estimated grows with the samples; but with enough of them, tiles turn to samples
            shape = _Shape(grid, grid.size if 1 < grid.size <= rows else 1)
        if (shape, stages) not in self._staged:
            self._staged[shape, stages] = self._divided(shape, stages)
        return self._staged[shape, stages]

    def _divided(self, shape: _Shape, stages: int) -> Staged:
        laid = self._program(shape)
        program, here = laid.program, laid.here
        if stages == 1:
            cut, spans = Cut((), ()), (range(len(program.steps)),)
            tile = program.spreads[program.tape.inputs[0]].local_shape(here.grid, here.rank)
            takes, bound, packed = (
                (1.0 * self.dtype.itemsize * math.prod(tile) / shape.rows,),
                (0.0,),
                (0.0,),
            )
        else:
            # Runs cut by estimates that grow with the batch, or by what they measure.
            tape = program.tape if laid.timed else self.tape(1)
            cut = balanced(tape, stages, node_s=laid.timed.node_s() if laid.timed else None)
            parts = divided(program, cut, {}, here.grid, here.rank)
            spans = tuple(part.span for part in parts)
            takes = tuple(sum(map(_bytes, part.takes)) / shape.rows for part in parts)
            bound = tuple(_bound_bytes(laid.work.held, part) / shape.rows for part in parts)
            packed = tuple(_packed_bytes(part, program) / shape.rows for part in parts)
        sizes = takes, bound, packed, self._gradient_bytes(program), *self._parameters_of(cut)
        return Staged(program, here, laid.work, spans, *sizes)

    def _program(self, shape: _Shape) -> _Laid:
        if shape not in self._programs:
            few, sample = _fewer(shape.grid, self.sample)
            here = Here(few, _middle(few), rows=shape.rows, fewest=shape.rows)
            program, timed = self._planned(shape, here, (shape.rows, *sample))
            work = Work.of(program, here, self.cluster.device, timed)
            self._programs[shape] = _Laid(program, here, work, timed)
        return self._programs[shape]

    def _planned(
        self, shape: _Shape, here: Here, samples: tuple[int, ...]
    ) -> tuple[Program, Timed | None]:
        device, link = self.cluster.device, self.cluster.link(shape.grid.size)
        costs = Costs(link.latency_s, link.bytes_per_s, device.flops_per_s, device.bytes_per_s / 2)
        with warnings.catch_warnings():
            # What has to be gathered is in the costs; who trains is told.
            warnings.simplefilter("ignore", UserWarning)
            if self.measured is not None:
                tiles = dict(zip(here.grid.axes, here.grid.sizes, strict=True))
                layout = Layout(data=1 + shape.replicas, **tiles)
                timed = self.measured.steps(layout, here.rank, samples, costs)
                return timed.program, timed
            tape = self.tape(samples[0], samples[1:])
            inputs = [_tiled(samples, here.grid)]
            return planned(tape, inputs, here, Options("never", costs=costs)), None

    def _gradient_bytes(self, program: Program) -> np.ndarray:
        left = {name: p.nbytes for name, p in self.net.named_parameters() if p.requires_grad}
        found = np.zeros(len(program.steps))
        for number in reversed(range(len(program.steps))):
            step = program.steps[number]
            if isinstance(step, Compute):
                found[number] = sum(left.pop(name, 0) for name in states_of(step.node))
        return found

    def _parameters_of(self, cut: Cut) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of what stages hold, and of what they train."""
        if cut not in self._parameters:
            stages = holders(self.net, self.tape(1), cut)
            held, trained = [0] * cut.stages, [0] * cut.stages
            for name, tensor in (*self.net.named_parameters(), *self.net.named_buffers()):
                size = tensor.numel() * tensor.element_size()
                for stage in stages[name]:
                    held[stage] += size
                    trained[stage] += size if tensor.requires_grad else 0
            self._parameters[cut] = tuple(held), tuple(trained)
        return self._parameters[cut]


def _grid(layout: Layout) -> Grid:
    axes = tuple(axis for axis in TILE_DIMS if getattr(layout, axis) > 1)
    return Grid(axes, tuple(int(getattr(layout, axis)) for axis in axes))


def _fewer(grid: Grid, sample: tuple[int, ...]) -> tuple[Grid, tuple[int, ...]]:
    """A grid of a few tiles, and a sample of which they are as large as those of `grid` are of `sample`."""
    sizes, shape = tuple(min(n, _MOST_PARTS) for n in grid.sizes), list(sample)
    for axis, n, fewer in zip(grid.axes, grid.sizes, sizes, strict=True):
        shape[TILE_DIMS[axis]] = shape[TILE_DIMS[axis]] * fewer // n
    return Grid(grid.axes, sizes), tuple(shape)


def _middle(grid: Grid) -> int:
    """A rank with neighbours on all sides, where there is one."""
    rank = 0
    for size in grid.sizes:
        rank = rank * size + size // 2
    return rank


def _tiled(shape: tuple[int, ...], grid: Grid) -> Spread:
    spread = Spread.whole(shape)
    for index, (axis, parts) in enumerate(zip(grid.axes, grid.sizes, strict=True)):
        dim = len(shape) + TILE_DIMS[axis]
        bounds = [owned(shape[dim], parts, part).start for part in range(parts)]
        spread = spread.with_cut(dim, Division.at((index,), (*bounds, shape[dim])))
    return spread


@contextmanager
def _told_briefly(shape: tuple[int, ...]) -> Generator[None]:
    """Say with what samples a net was tried that does not take them, or cannot be recorded."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # would print a traceback of its own
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except UsageError as problem:
        raise UsageError(f"with a batch of shape {shape}, {problem}") from problem
    finally:
        log.setLevel(level)


def _bound_bytes(held: HeldBytes, stage: Stage) -> float:
    """Of what a stage takes, but for the images, and gives."""
    taken = stage.takes if stage.span.start else ()
    return held.unsaved_bytes(stage.span, (value.index for value in (*taken, *stage.gives)))


def _packed_bytes(stage: Stage, program: Program) -> float:
    sends = stage.span.stop < len(program.steps) and len(stage.gives) > 1
    return float(sum(map(_bytes, stage.gives))) if sends else 0.0


def _bytes(crossing: Crossing) -> int:
    return math.prod(crossing.shape) * crossing.dtype.itemsize
