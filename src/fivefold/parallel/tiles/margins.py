"""Where ranks exchange, and where they compute their neighbours' border pixels themselves.

A chain of convolutions may exchange one row before each of them, or several rows once and then compute the
overlap redundantly. Going from the results to the inputs, every value is asked for the union of what its
readers want; it either is exchanged there, or its producer computes that much more:

    exchanged in front of every layer          fused over three layers
    x  |........|                              x  |........|<<<      one exchange of three rows
    y  |........|<   one row                   y  |........|++       two rows computed twice
    z  |........|<   one row                   z  |........|+        one row computed twice

Both are exact at the borders of the image, because each layer pads what lies outside by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fivefold.parallel.tiles.costs import Options, flops_of
from fivefold.parallel.tiles.exchange import Want
from fivefold.parallel.tiles.rule import Here, Local, Wants
from fivefold.parallel.tiles.spread import Cut, Range, Spread
from fivefold.parallel.tiles.tape import Node, Tape, Value

__all__ = ["Lower", "Margins", "with_margins"]

Lower = Callable[[Node, Sequence[Spread]], Local]
"""how a node is computed that shall give results that are held so"""


@dataclass
class _Asked:
    """What readers want of a value."""

    spread: Spread
    """the union of it, as what is held"""
    layers: int = 0
    """how many layers behind it would be fused"""
    readers: int = 1
    """how many want more than what is owned"""


@dataclass
class Margins:
    """How every value is held, and what is exchanged for several readers at once."""

    held: dict[int, Spread]
    shared: dict[int, Spread]


def with_margins(
    tape: Tape, spreads: dict[int, Spread], lower: Lower, here: Here, options: Options
) -> Margins:
    """How every value is held, given how they are owned.

    `options.fuse`: 1 or `never` lets no value have a margin, larger numbers fuse as many layers, and `greedy`
    does whatever costs less for each value by itself.
    """
    held, asked = dict(spreads), dict[int, _Asked]()
    for node in reversed(tape.nodes):
        layers = 0
        for index in node.outputs:
            wanted = asked.get(index)
            if wanted is not None and _decides(options, node, wanted, spreads[index], here):
                held[index] = wanted.spread
                layers = max(layers, wanted.layers)
        _alike(node, held)
        local = lower(node, [held[index] for index in node.outputs])
        for ref, wants in zip(node.operands, local.wants, strict=True):
            if isinstance(ref, Value):
                new = _asked_by(node, wants, spreads[ref.index], held, layers)
                if new is not None:
                    asked[ref.index] = _both(asked.get(ref.index), new)
    shared = {
        index: wanted.spread
        for index, wanted in asked.items()
        if wanted.readers > 1 and held[index] == spreads[index]
    }
    return Margins(held, shared)


def _decides(options: Options, node: Node, wanted: _Asked, owned: Spread, here: Here) -> bool:
    """Whether the producer of a value computes its margin."""
    if options.fuse == "never":
        return False
    if isinstance(options.fuse, int):
        return wanted.layers < options.fuse
    sizes = [math.prod(wanted.spread.local_shape(here.grid, r)) for r in range(here.grid.size)]
    own = [math.prod(owned.local_shape(here.grid, r)) for r in range(here.grid.size)]
    extra = max(a - b for a, b in zip(sizes, own, strict=True))
    # Backward costs twice the forward, and exchanges once more.
    computing = options.costs.compute_s(3 * extra * flops_of(node))
    return computing < 2 * options.costs.latency_s


def _alike(node: Node, held: dict[int, Spread]) -> None:
    """Give all results of one node the margins of the largest: they are computed together."""
    if len(node.outputs) < 2:
        return
    for dim in range(max(len(held[index].shape) for index in node.outputs)):
        cuts = [held[index].cuts[dim] for index in node.outputs if dim < len(held[index].shape)]
        first = cuts[0]
        if first is None or not all(first.same_as(cut) for cut in cuts):
            continue
        union = first
        for cut in cuts:
            assert cut is not None
            union = replace(union, held=_hull(union.held, cut.held))
        for index in node.outputs:
            held[index] = held[index].with_cut(dim, union)


def _asked_by(
    node: Node, wants: Wants, owned: Spread, held: dict[int, Spread], layers: int
) -> _Asked | None:
    """What one reader asks of a value; None if that is what ranks own, or takes an exchange in any case."""
    union, grows = owned, False
    for dim, (cut, want) in enumerate(zip(owned.cuts, wants, strict=True)):
        if cut is None:
            continue
        ranges = _ranges(cut, want, owned.shape[dim])
        if ranges is None:
            return None  # gathered, re-partitioned or in several pieces
        union = union.with_cut(dim, replace(cut, held=_hull(cut.held, ranges)))
        grows = grows or not _same_ranges(want, node, held)
    return None if union == owned else _Asked(union, layers + grows)


def _both(one: _Asked | None, other: _Asked) -> _Asked:
    if one is None:
        return other
    union = one.spread
    for dim in union.cut_dims:
        a, b = union.cuts[dim], other.spread.cuts[dim]
        assert a is not None
        assert b is not None
        union = union.with_cut(dim, replace(a, held=_hull(a.held, b.held)))
    return _Asked(union, max(one.layers, other.layers), one.readers + other.readers)


def _ranges(cut: Cut, want: Want, n: int) -> tuple[Range, ...] | None:
    """What every part wants inside the image, if it is one range along the same axes as the cut."""
    if want.axes != cut.axes or any(len(segments) != 1 for segments in want.segments):
        return None
    return tuple((max(a, 0), min(b, n)) for ((a, b),) in want.segments)


def _same_ranges(want: Want, node: Node, held: dict[int, Spread]) -> bool:
    """Whether a reader wants just the ranges that it has of its result: then it adds no layer."""
    ranges = tuple(segments[0] for segments in want.segments)
    return any(
        cut is not None and cut.axes == want.axes and cut.held == ranges
        for index in node.outputs
        for cut in held[index].cuts
    )


def _hull(one: Sequence[Range], other: Sequence[Range]) -> tuple[Range, ...]:
    return tuple(
        (min(a, c), max(b, d)) if c < d else (a, b)
        for (a, b), (c, d) in zip(one, other, strict=True)
    )
