"""Nets whose results are held with margins: what a rank computes of its neighbours' pixels is exact too, and
what is done with it counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fivefold.parallel.tiles.program import Program
from fivefold.plan import Layout
from tiles import expect_tiles

__all__ = ["expect_margins"]


def expect_margins(net: nn.Module, shape: Sequence[int], layout: Layout) -> None:
    """Run `net`, which returns one image; each rank looks at one pixel more than it owns."""
    behind = nn.Sequential(net, nn.AvgPool2d(3, 1, 1))
    expect_tiles(behind, shape, layout, fuse=8, tolerance=1e-10, check=_has_margins)


def _has_margins(program: Program) -> None:
    spreads = [program.spreads[index] for node in program.tape.nodes[:-1] for index in node.outputs]
    assert any(spread != spread.tight() for spread in spreads)
