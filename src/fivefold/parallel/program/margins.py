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
from dataclasses import dataclass, field, replace

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.program.costs import Options, flops_of
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Here, Local, Wants
from fivefold.parallel.program.spread import Division, Grid, Range, Spread

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
    meanwhile_s: float | None = None
    """what its one reader computes while messages travel; None: what travels is put together first"""


@dataclass
class Margins:
    """How every value is held, and what is exchanged for several readers at once."""

    held: dict[int, Spread]
    shared: dict[int, Spread]


@dataclass
class _Draft:
    """A plan that is being made, from the results backwards."""

    held: dict[int, Spread] = field(default_factory=dict[int, Spread])
    """values with a margin"""
    asked: dict[int, _Asked] = field(default_factory=dict[int, _Asked])
    cost_s: float = 0.0
    """of exchanges, and of what is computed twice"""

    def copy(self) -> _Draft:
        return _Draft(dict(self.held), dict(self.asked), self.cost_s)


_DRAFTS = 24
"""how many drafts `auto` goes on with"""


def with_margins(
    tape: Tape, spreads: dict[int, Spread], lower: Lower, here: Here, options: Options
) -> Margins:
    """How every value is held, given how they are owned.

    `options.fuse`: 1 or `never` lets no value have a margin, larger numbers fuse as many layers. With
    `auto` every exchange is weighed against what is computed twice, and the cheapest drafts go on.
    """
    planner = _Planner(spreads, lower, here, options)
    drafts = [_Draft()]
    for node in reversed(tape.nodes):
        drafts = planner.best([new for draft in drafts for new in planner.before(node, draft)])
    last = [draft.copy() for draft in drafts]
    for draft in last:
        for index in tape.inputs:
            planner.exchanged(draft, index)
    chosen = drafts[min(range(len(last)), key=lambda number: last[number].cost_s)]
    shared = {
        index: wanted.spread
        for index, wanted in chosen.asked.items()
        if wanted.readers > 1 and index not in chosen.held
    }
    return Margins({**spreads, **chosen.held}, shared)


class _Planner:
    def __init__(
        self, spreads: dict[int, Spread], lower: Lower, here: Here, options: Options
    ) -> None:
        self._spreads, self._lower, self._here, self._options = spreads, lower, here, options
        self._done: set[int] = set()
        """values whose producer has been looked at"""
        self._lowered: dict[tuple[int, tuple[Spread, ...]], Local] = {}

    def before(self, node: Node, draft: _Draft) -> list[_Draft]:
        """What may be planned in front of a node, given what is planned behind it."""
        asked = [index for index in node.outputs if index in draft.asked]
        if not asked:
            return [self._with(node, draft, ())]
        auto = self._options.fuse == "auto"
        may = not self._lower_once(node, tuple(self._spreads[i] for i in node.outputs)).tight
        choices: list[tuple[int, ...]] = []
        if auto or not (may and self._fuses(draft, asked)):
            choices.append(())
        if may and (auto or self._fuses(draft, asked)):
            choices.append(tuple(asked))
        return [self._with(node, draft.copy(), fused) for fused in choices]

    def _fuses(self, draft: _Draft, asked: Sequence[int]) -> bool:
        """Whether so few layers would be fused that the producer may compute a margin."""
        fuse = self._options.fuse
        return isinstance(fuse, int) and all(draft.asked[i].layers < fuse for i in asked)

    def _with(self, node: Node, draft: _Draft, fused: tuple[int, ...]) -> _Draft:
        """Let the producer compute the margins of `fused`; the others are exchanged."""
        layers = 0
        for index in node.outputs:
            if index in fused:
                draft.held[index] = draft.asked[index].spread
                layers = max(layers, draft.asked[index].layers)
            else:
                self.exchanged(draft, index)
        held = {index: draft.held.get(index, self._spreads[index]) for index in node.outputs}
        _alike(node, held)
        for index, spread in held.items():
            if spread != self._spreads[index]:
                draft.held[index] = spread
                extra = self._margin(index, spread) * flops_of(node)
                # Backward costs twice the forward.
                draft.cost_s += self._options.costs.compute_s(3 * extra)
        local = self._lower_once(node, tuple(held.values()))
        for ref, wants in zip(node.operands, local.wants, strict=True):
            if isinstance(ref, Value):
                new = _asked_by(node, wants, self._spreads[ref.index], held, layers)
                if new is not None:
                    new.meanwhile_s = self._meanwhile(node, ref, local, held)
                    draft.asked[ref.index] = _both(draft.asked.get(ref.index), new)
        self._done.update(node.outputs)
        return draft

    def _lower_once(self, node: Node, made: tuple[Spread, ...]) -> Local:
        key = (id(node), made)
        if key not in self._lowered:
            self._lowered[key] = self._lower(node, made)
        return self._lowered[key]

    def exchanged(self, draft: _Draft, index: int) -> None:
        """Add what it costs to exchange the margin that is asked of a value."""
        wanted = draft.asked.get(index)
        if wanted is None or index in draft.held:
            return
        grid = self._here.grid
        axes = [axis for axis in wanted.spread.axes if axis != grid.data]
        neighbours = math.prod(min(grid.sizes[axis], 3) for axis in axes) - 1
        sent, costs = 4 * self._margin(index, wanted.spread), self._options.costs
        if wanted.meanwhile_s is not None:
            draft.cost_s += costs.apart_s(neighbours, sent, wanted.meanwhile_s)
        else:
            held = 4 * _most(wanted.spread, grid)
            draft.cost_s += costs.together_s(neighbours, sent, held)

    def _meanwhile(
        self, node: Node, ref: Value, local: Local, held: dict[int, Spread]
    ) -> float | None:
        """Seconds for which a reader computes its own part before it needs what is received, if any."""
        tight = all(spread == self._spreads[index] for index, spread in held.items())
        apart = self._options.bordered and local.bordered is not None
        if not (apart and tight and ref == node.operands[0]):
            return None
        elements = sum(_most(spread, self._here.grid) for spread in held.values())
        return self._options.costs.compute_s(elements * flops_of(node))

    def _margin(self, index: int, spread: Spread) -> int:
        """The most elements that a rank holds beyond what it owns."""
        here, owned = self._here, self._spreads[index]
        return max(
            math.prod(spread.local_shape(here.grid, rank))
            - math.prod(owned.local_shape(here.grid, rank))
            for rank in range(here.grid.tiles)  # replicas differ by a sample at most
        )

    def best(self, drafts: list[_Draft]) -> list[_Draft]:
        """The cheapest drafts; of those that leave the same to do, the cheapest one."""
        found: dict[object, _Draft] = {}
        for draft in sorted(drafts, key=self._at_least):
            todo = frozenset(
                (index, wanted.spread, wanted.layers)
                for index, wanted in draft.asked.items()
                if index not in self._done
            )
            found.setdefault(todo, draft)
        return list(found.values())[:_DRAFTS]

    def _at_least(self, draft: _Draft) -> float:
        """What a draft costs in the end at least: an open question takes one exchange."""
        still = any(index not in self._done for index in draft.asked)
        return draft.cost_s + (2 * self._options.costs.latency_s if still else 0.0)


def _most(spread: Spread, grid: Grid) -> int:
    """The most elements that a rank holds."""
    return max(math.prod(spread.local_shape(grid, rank)) for rank in range(grid.tiles))


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


def _ranges(cut: Division, want: Want, n: int) -> tuple[Range, ...] | None:
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
