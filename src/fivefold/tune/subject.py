"""The net that is planned for: recorded, cut into stages and laid out in tiles, each once.

tape (samples) ──► cut (stages)
     │                 │
     └──► program (tiles) ──► Staged: what each stage computes, sends, holds
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fivefold.cluster.description import Cluster
from fivefold.errors import UsageError
from fivefold.mesh import owned
from fivefold.mesh.ownership import TILE_DIMS
from fivefold.parallel.pipeline.cut import Cut, balanced
from fivefold.parallel.pipeline.stages import Crossing, divided, owners
from fivefold.parallel.tiles.costs import Costs, Options
from fivefold.parallel.tiles.program import Program, planned
from fivefold.parallel.tiles.record import record
from fivefold.parallel.tiles.rule import Here
from fivefold.parallel.tiles.spread import Cut as TileCut
from fivefold.parallel.tiles.spread import Grid, Spread
from fivefold.parallel.tiles.tape import Tape
from fivefold.parallel.trees import call_with
from fivefold.plan import Layout
from fivefold.tune.work import Factors, Work

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
    parameter_bytes: tuple[int, ...]
    """buffers included"""
    trained_bytes: tuple[int, ...]


class Subject:
    """A net for samples of one shape, on devices of a cluster."""

    def __init__(
        self,
        net: nn.Module,
        sample: tuple[int, ...],
        cluster: Cluster,
        *,
        fuse: str = "never",
        factors: Factors | None = None,
    ) -> None:
        """`fuse` is how many layers are taken to share a halo; "auto" takes long for nets of many layers."""
        self.net, self.sample, self.cluster = net, sample, cluster
        self._fuse, self._factors = fuse, factors or {}
        self._tapes: dict[tuple[int, ...], Tape] = {}
        self._cuts: dict[int, Cut] = {}
        self._programs: dict[tuple[Grid, int], tuple[Program, Here, Work]] = {}
        self._staged: dict[tuple[Grid, int, int], Staged] = {}
        self._owners: dict[int, Mapping[str, int]] = {}

    @property
    def pixels(self) -> tuple[int, ...]:
        """Size of an image along the axes that can be divided; nothing for other samples."""
        return self.sample[1:] if len(self.sample) in (3, 4) else ()

    @property
    def most_stages(self) -> int:
        """Into how many stages the net is cut at most."""
        return min(_MOST_STAGES, len(self.tape(1).nodes))

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
            example = torch.empty(shape, device="meta")
            with _told_briefly(shape):
                self._tapes[shape] = record(self.net, call_with, example, [torch.Size(shape)])
        return self._tapes[shape]

    def staged(self, layout: Layout, stages: int, rows: int) -> Staged:
        """The net in `stages` and in the tiles of `layout`, for micro-batches of `rows` samples.

        Raises `PlanError` or `UsageError` for a net that cannot be cut so.
        """
        grid = _grid(layout)
        as_samples = (
            grid.size if 1 < grid.size <= rows else 1
        )  # from there on tiles turn to samples
        key = (grid, as_samples, stages)
        if key not in self._staged:
            self._staged[key] = self._divided(grid, as_samples, stages)
        return self._staged[key]

    def _divided(self, grid: Grid, rows: int, stages: int) -> Staged:
        program, here, work = self._program(grid, rows)
        grid = here.grid
        if stages == 1:
            spans = (range(len(program.steps)),)
            tile = program.spreads[program.tape.inputs[0]].local_shape(grid, here.rank)
            takes = (4.0 * math.prod(tile) / rows,)
        else:
            parts = divided(program, self._cut(stages), grid, here.rank)
            spans = tuple(part.span for part in parts)
            takes = tuple(sum(map(_bytes, part.takes)) / rows for part in parts)
        held, trained = self._parameters(stages)
        return Staged(program, here, work, spans, takes, held, trained)

    def _program(self, grid: Grid, rows: int) -> tuple[Program, Here, Work]:
        if (grid, rows) not in self._programs:
            device, link = self.cluster.device, self.cluster.link(grid.size)
            few, sample = _fewer(grid, self.sample)
            tape = self.tape(rows, sample)
            here = Here(few, _middle(few), 1, fewest=rows)
            costs = Costs(
                link.latency_s, link.bytes_per_s, device.flops_per_s, device.bytes_per_s / 2
            )
            with warnings.catch_warnings():
                # What has to be gathered is in the costs; who trains is told.
                warnings.simplefilter("ignore", UserWarning)
                inputs = [_tiled((rows, *sample), few)]
                program = planned(tape, inputs, here, Options(self._fuse, costs=costs))
            work = Work.of(program, here, device, self._factors)
            self._programs[grid, rows] = (program, here, work)
        return self._programs[grid, rows]

    def _cut(self, stages: int) -> Cut:
        if stages not in self._cuts:
            self._cuts[stages] = balanced(self.tape(1), stages)
        return self._cuts[stages]

    def _parameters(self, stages: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of what stages hold, and of what they train."""
        if stages not in self._owners:
            cut = self._cut(stages) if stages > 1 else Cut(())
            self._owners[stages] = owners(self.net, self.tape(1), cut)
        held, trained = [0] * stages, [0] * stages
        for name, tensor in (*self.net.named_parameters(), *self.net.named_buffers()):
            stage, size = self._owners[stages][name], tensor.numel() * tensor.element_size()
            held[stage] += size
            trained[stage] += size if tensor.requires_grad else 0
        return tuple(held), tuple(trained)


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
        spread = spread.with_cut(dim, TileCut.at((index,), (*bounds, shape[dim])))
    return spread


@contextmanager
def _told_briefly(shape: tuple[int, ...]) -> Generator[None]:
    """Make a `UsageError` of what a net says to samples that it does not take."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # would print a traceback of its own
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except UsageError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError) as problem:
        said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise UsageError(f"the model cannot take a batch of shape {shape}: {said}") from problem
    finally:
        log.setLevel(level)


def _bytes(crossing: Crossing) -> int:
    return math.prod(crossing.shape) * crossing.dtype.itemsize
