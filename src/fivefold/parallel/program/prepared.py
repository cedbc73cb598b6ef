"""What a run of a recorded net needs, and what it returns."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.parallel.intercept import Share
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.program import Program
from fivefold.parallel.program.rule import Moment, Piece

__all__ = ["GridSamples", "Outputs", "Prepared"]


@dataclass(frozen=True)
class GridSamples:
    """The samples that a grid computes together."""

    bounds: tuple[int, ...]
    """replica i has [bounds[i], bounds[i + 1]) of them"""
    pieces: tuple[Piece, ...]
    """where they stand in the global batch"""
    replica: int = 0
    """whose rank this is"""

    @property
    def rows(self) -> int:
        """Their number."""
        return self.bounds[-1]

    @property
    def fewest(self) -> int:
        """Those of the smallest replica."""
        return min(b - a for a, b in itertools.pairwise(self.bounds))

    @property
    def own(self) -> int:
        """Those of this replica."""
        return self.bounds[self.replica + 1] - self.bounds[self.replica]

    def want(self, axis: int) -> Want:
        """To want those of one's own replica, `axis` being the data axis of the grid."""
        return Want.ranges((axis,), tuple(itertools.pairwise(self.bounds)))


@dataclass(frozen=True)
class Prepared:
    """Everything to run a net on one batch."""

    program: Program
    inputs: tuple[Tensor, ...]
    """this rank's parts, as the plan has them"""
    moment: Moment
    share: Share
    samples: GridSamples


@dataclass(frozen=True)
class Outputs:
    """What a net returns: this rank's parts, and how they lie. Both trees have the same structure."""

    parts: Any
    spreads: Any
    ready: Prepared

    @property
    def samples(self) -> GridSamples:
        """The samples that were computed together."""
        return self.ready.samples
