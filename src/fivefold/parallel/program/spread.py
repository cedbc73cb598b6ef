"""Where the parts of a tensor lie on the tile ranks.

    97 rows over 3 tiles, and a convolution with stride 2 and padding 1 behind it

    input    owned   0 ........ 31 | 32 ........ 63 | 64 ........ 96
             held    0 ........ 31 | 32 ........ 63 | 64 ........ 96
    wanted          -1 ........ 31 | 31 ........ 63 | 63 ........ 97      -1 and 97: padding
    output   owned   0 ........ 15 | 16 ........ 31 | 32 ........ 48

Every element has one owner. A rank may hold more than it owns: a margin that it computes redundantly, so as
not to be sent it. A dim that is not cut is whole on every rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

__all__ = ["Box", "Division", "Grid", "Range", "Spread"]

Range = tuple[int, int]
"""[start, stop) in global coordinates"""
Box = tuple[Range, ...]
"""one range per dim of a tensor"""


@functools.cache
def _coordinates(sizes: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(itertools.product(*map(range, sizes)))


@dataclass(frozen=True)
class Grid:
    """Ranks that compute one batch together, row-major along the axes that are larger than one.

    The data axis comes first, if it is one of them: samples are then divided as images are.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes)

    @property
    def data(self) -> int | None:
        """The number of the data axis."""
        return 0 if self.axes[:1] == ("data",) else None

    @property
    def replicas(self) -> int:
        """Size of the data axis; 1 if it is not one of the axes."""
        return 1 if self.data is None else self.sizes[0]

    @property
    def tiles(self) -> int:
        """Number of tile ranks of a replica; those of the first one are the first ranks."""
        return self.size // self.replicas

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Position of rank `rank` along every axis."""
        return _coordinates(self.sizes)[rank]

    def part(self, rank: int, axes: Sequence[int]) -> int:
        """Which part rank `rank` has of a dim that is cut along `axes`, row-major."""
        coordinates, index = self.coordinates(rank), 0
        for axis in axes:
            index = index * self.sizes[axis] + coordinates[axis]
        return index


@dataclass(frozen=True)
class Division:
    """How one dim is divided."""

    axes: tuple[int, ...]
    """which axes of the grid its parts lie along; all of them for samples after tiles-to-batch"""
    bounds: tuple[int, ...]
    """part i owns [bounds[i], bounds[i + 1])"""
    held: tuple[Range, ...]
    """what part i has: its own, and possibly a margin"""
    source: Spread | None = field(default=None, compare=False)
    """of dims that have become one: how they were divided, and may be again"""

    @classmethod
    def at(cls, axes: tuple[int, ...], bounds: Sequence[int]) -> Division:
        """A cut without margins."""
        return cls(axes, tuple(bounds), tuple(itertools.pairwise(bounds)))

    @property
    def owned(self) -> tuple[Range, ...]:
        """What every part owns."""
        return tuple(itertools.pairwise(self.bounds))

    @property
    def empty(self) -> bool:
        """Whether some part owns nothing."""
        return any(start >= stop for start, stop in self.owned)

    def tight(self) -> Division:
        """The same without margins."""
        return replace(self, held=self.owned)

    def same_as(self, other: Division | None) -> bool:
        """Whether both cut alike, margins apart."""
        return other is not None and self.axes == other.axes and self.bounds == other.bounds


@dataclass(frozen=True)
class Spread:
    """A tensor's global shape, and how each of its dims is divided (None: whole on every rank)."""

    shape: tuple[int, ...]
    cuts: tuple[Division | None, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Spread:
        """A tensor that every tile rank has completely."""
        return cls(tuple(shape), (None,) * len(shape))

    @property
    def is_whole(self) -> bool:
        """Whether no dim is cut."""
        return not any(self.cuts)

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """The dims that are divided."""
        return tuple(dim for dim, cut in enumerate(self.cuts) if cut is not None)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the grid along which some dim is divided."""
        return tuple(sorted({axis for cut in self.cuts if cut is not None for axis in cut.axes}))

    def held(self, grid: Grid, rank: int) -> Box:
        """What tile rank `rank` has."""
        return self._box(grid, rank, held=True)

    def owned(self, grid: Grid, rank: int) -> Box:
        """What tile rank `rank` owns."""
        return self._box(grid, rank, held=False)

    def _box(self, grid: Grid, rank: int, held: bool) -> Box:
        return tuple(
            (0, n) if cut is None else (cut.held if held else cut.owned)[grid.part(rank, cut.axes)]
            for n, cut in zip(self.shape, self.cuts, strict=True)
        )

    def flat(self, grid: Grid, rank: int) -> tuple[Range, ...]:
        """Where what tile rank `rank` has lies in the flattened tensor, in order."""
        box, last, minor = self.held(grid, rank), len(self.shape) - 1, 1
        while last and box[last] == (0, self.shape[last]):  # part of a row
            minor *= self.shape[last]
            last -= 1
        (start, stop), n = box[last], self.shape[last]
        found: list[Range] = []
        for lead in itertools.product(*(range(*edge) for edge in box[:last])):
            row = 0
            for here, size in zip(lead, self.shape, strict=False):
                row = row * size + here
            found.append(((row * n + start) * minor, (row * n + stop) * minor))
        return tuple(found) or ((0, 0),)

    def local_shape(self, grid: Grid, rank: int) -> tuple[int, ...]:
        """Shape of what tile rank `rank` has."""
        return tuple(stop - start for start, stop in self.held(grid, rank))

    def with_cut(self, dim: int, cut: Division | None) -> Spread:
        """The same tensor, its dim `dim` divided otherwise."""
        return replace(self, cuts=(*self.cuts[:dim], cut, *self.cuts[dim + 1 :]))

    def tight(self) -> Spread:
        """The same without margins."""
        return replace(self, cuts=tuple(c if c is None else c.tight() for c in self.cuts))
