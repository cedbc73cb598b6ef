"""All ways to run a net on some devices that are worth a look, without torch.

devices = data x pipe x tiles          every divisor of each, tiles in strips along one axis or nearly square
pipe > 1: schedule, micro-batches      those that fit the samples of a replica
tiles or pipe: recompute               none, or some
where that is too large: see `smaller`
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.pipeline.schedules import PAIRED, SCHEDULES, make
from fivefold.plan import TILE_AXES, Layout

__all__ = ["Candidate", "candidates", "grids", "smaller"]

_LEAST_PIXELS = 16
"""a tile has at least as many along an axis that is divided"""
_SEGMENTS = 8
"""of which the borders are kept where activations are computed again, without stages"""
_SEGMENTS_OF_STAGE = 2


@dataclass(frozen=True)
class Candidate:
    """Decisions that a planner makes."""

    layout: Layout
    schedule: str = ""
    """empty without stages"""
    micro_batches: int = 1
    """of a replica"""
    stages_per_rank: int = 1
    recompute: int = 0
    shard: str = "none"
    """as `memory.shard` of a plan"""
    budget: str = ""
    """as `memory.budget` of a plan"""

    @property
    def stages(self) -> int:
        """Into how many the net is cut."""
        return self.layout.pipe * self.stages_per_rank

    @property
    def chains(self) -> int:
        """2 where the stages are held twice, in opposite orders."""
        return 2 if self.schedule in PAIRED else 1

    @property
    def reducers(self) -> int:
        """How many ranks sum the gradients of a parameter."""
        return self.layout.data * self.layout.tiles * self.chains

    @property
    def parts(self) -> int:
        """Among how many replicas parameters and the optimiser's numbers are divided."""
        return 1 if self.shard == "none" else self.layout.data

    def make(self) -> Schedule:
        """The schedule of a replica; without stages, the whole batch on one rank."""
        name = self.schedule or "layer"
        return make(name, self.layout.pipe, self.micro_batches, self.stages_per_rank)

    def values(self) -> dict[str, object]:
        """The keys of a plan that were decided, and their values."""
        axes = ("data", "pipe", *TILE_AXES)
        found: dict[str, object] = {f"layout.{axis}": getattr(self.layout, axis) for axis in axes}
        if self.schedule:
            found["pipeline.schedule"] = self.schedule
            found["pipeline.micro_batches"] = self.micro_batches
            found["pipeline.stages_per_rank"] = self.stages_per_rank
        found["memory.recompute"] = self.recompute
        if self.shard != "none":
            found["memory.shard"] = self.shard
        if self.budget:
            found["memory.budget"] = self.budget
            if self.layout.tiles > 1:  # margins of layers that share an exchange take room
                found["tiles.fuse"] = "never"
        return found

    def __str__(self) -> str:
        words = [str(self.layout)]
        if self.schedule:
            words.append(f"{self.schedule} x {self.micro_batches}")
        if self.recompute:
            words.append(f"recompute {self.recompute}")
        if self.shard != "none":
            words.append(f"shard {self.shard}")
        if self.budget:
            words.append("within budget")
        return ", ".join(words)


def candidates(
    devices: int, pixels: Sequence[int], batch: int, most_stages: int
) -> Iterator[Candidate]:
    """Every candidate for images of `pixels` along each axis, and a global batch.

    `most_stages` is how many a net can be cut into.
    """
    for layout in _layouts(devices, pixels, batch, most_stages):
        if layout.pipe > 1:
            yield from _staged(layout, batch // layout.data, most_stages)
        else:
            yield Candidate(layout)
            if layout.tiles > 1:
                yield Candidate(layout, recompute=_SEGMENTS)


def smaller(candidate: Candidate, memory_bytes: int) -> Iterator[Candidate]:
    """What holds less than a candidate that does not fit into so many bytes, but takes longer.

    Where a candidate fits, these gain next to nothing: they gather parameters, or compute activations again.
    So they are looked at only where it does not, which keeps their number small. A budget decides better what
    is computed again than a number of segments, so nothing is added to the latter. With `shard =
    "parameters"` there is no budget: it could only keep all or nothing, see `fivefold.parallel.memory.plain`.
    """
    layout = candidate.layout
    if candidate.recompute or candidate.budget:
        return
    if candidate.shard != "parameters":
        yield replace(candidate, budget=_text(memory_bytes))
    if candidate.shard == "none" and layout.data > 1 and candidate.chains == 1:
        yield replace(candidate, shard="optimizer")
        if layout.size == layout.data:
            yield replace(candidate, shard="parameters")


def grids(tiles: int, pixels: Sequence[int]) -> list[tuple[int, ...]]:
    """Ways to divide an image into `tiles`: strips along one axis, and those with the least border.

    >>> grids(4, (512, 512))
    [(1, 4), (2, 2), (4, 1)]
    """
    if tiles == 1:
        return [(1,) * len(pixels)]
    fit = [
        grid
        for grid in _factors(tiles, len(pixels))
        if all(n == 1 or n * _LEAST_PIXELS <= size for n, size in zip(grid, pixels, strict=True))
    ]
    strips = [grid for grid in fit if max(grid) == tiles]
    square = [min(fit, key=lambda grid: _border(grid, pixels))] if fit else []
    return sorted({*strips, *square})


def _layouts(devices: int, pixels: Sequence[int], batch: int, most_stages: int) -> Iterator[Layout]:
    axes = TILE_AXES[len(TILE_AXES) - len(pixels) :]
    for data in _divisors(devices):
        for pipe in _divisors(devices // data):
            if data > batch or pipe > most_stages:
                continue
            for grid in grids(devices // data // pipe, pixels) if pixels else [()]:
                if math.prod(grid) * data * pipe == devices:
                    yield Layout(data=data, pipe=pipe, **dict(zip(axes, grid, strict=True)))


def _staged(layout: Layout, samples: int, most_stages: int) -> Iterator[Candidate]:
    for schedule in SCHEDULES:
        each = 2 if schedule == "interleaved" else 1
        if layout.pipe * each > most_stages:
            continue
        for micro_batches in _doubling(samples):
            if _sensible(schedule, micro_batches):
                for segments in (0, _SEGMENTS_OF_STAGE * layout.pipe * each):
                    yield Candidate(layout, schedule, micro_batches, each, segments)


def _sensible(schedule: str, micro_batches: int) -> bool:
    """Whether a schedule works with so many, and is no other one then."""
    if schedule == "layer":
        return micro_batches == 1
    least = {"gems": 2, "gems-overlap": 2, "chimera": 4}.get(schedule, 2)
    return micro_batches >= least and (schedule not in PAIRED or micro_batches % 2 == 0)


def _text(size_bytes: int) -> str:
    """Bytes as a plan has them; less than a thousandth is left out.

    >>> _text(17179869184), _text(16492674416), _text(1000)
    ('16GiB', '15728MiB', '1000B')
    """
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes % scale == 0 or size_bytes >= 1024 * scale:
            return f"{size_bytes // scale}{unit}"
    return f"{size_bytes}B"


def _doubling(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _factors(n: int, dims: int) -> Iterator[tuple[int, ...]]:
    """All ordered products of `dims` numbers that give `n`."""
    if dims == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factors(n // first, dims - 1):
            yield (first, *rest)


def _border(grid: Sequence[int], pixels: Sequence[int]) -> float:
    """Pixels along all cuts of an image."""
    whole = math.prod(pixels)
    return sum((n - 1) * whole / size for n, size in zip(grid, pixels, strict=True))
