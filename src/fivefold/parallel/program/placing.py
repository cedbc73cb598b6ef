"""How every value of a net is divided, decided from the inputs on.

Mostly an operation's results lie as its operands do. Where tiles become thin, deep in a network whose images
have become small, tiles are turned into samples: each rank gets whole images of some samples, and what
follows is data parallelism on the same ranks. With fewer samples than ranks, everything is gathered instead.

    4 samples on 2 tiles     rank 0: upper halves of 0 1 2 3        rank 0: whole images of 0 1
                             rank 1: lower halves of 0 1 2 3   -->  rank 1: whole images of 2 3
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from fivefold.errors import UsageError, warn
from fivefold.mesh import owned
from fivefold.parallel.graph.marked import is_pointwise
from fivefold.parallel.graph.names import is_own, is_users
from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.intercept import is_quiet
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import (
    Here,
    Local,
    Operation,
    Rule,
    call,
    everything,
    rule_of,
    want_of,
)
from fivefold.parallel.program.spread import Division, Grid, Spread
from fivefold.parallel.program.trial import MOST_TRIED, Call, each_by_itself, keeps_promise, numbers
from fivefold.torch_private import without_modes

__all__ = ["ValuePlacement", "by_samples", "place"]

# ---- Operations without a rule that treat every sample by itself: found out by trying
#
# An operation of torch's is called once on some samples of random numbers, and once on each of them alone.
# Where that gives the same results and gradients, replicas may compute their own samples; anything else is
# gathered. Functions of the user's are not tried: they may do more than compute.

_ROWS = 3


class RowWise:
    """For nodes that no rule knows, whose operands are divided along their first dim only."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """By samples, as the operands are."""
        cuts = {spread.cuts[0] for spread in op.given if not spread.is_whole}
        if len(cuts) != 1 or any(spread.cut_dims not in {(), (0,)} for spread in op.given):
            return None
        (cut,) = cuts
        rows = next(s.shape[0] for s in op.given if not s.is_whole)
        divided = tuple(not spread.is_whole for spread in op.given)
        fits = all(shape[:1] == (rows,) for shape in op.node.output_shapes)
        if not fits or not op.node.outputs or not _by_rows(op.node, divided):
            return None
        return [Spread.whole(shape).with_cut(0, cut) for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """The same call on the samples that are here."""
        made = op.made[0]
        wants = tuple(
            everything(s.shape) if s.is_whole
            else (want_of(s.shape[0], made.cuts[0]), *map(Want.all_of, s.shape[1:]))
            for s in op.given
        )  # fmt: skip
        return Local(wants, call(op.node))


def _by_rows(node: Node, divided: tuple[bool, ...]) -> bool:
    """Whether a function of torch's gives for some samples what it gives for each of them."""
    function = node.function
    module = str(getattr(function, "__module__", "") or type(function).__module__)
    torchs = module.startswith("torch") or type(function).__module__ == "builtins"
    small = all(
        torch.Size(shape).numel() <= MOST_TRIED * max(shape[0] if shape else 1, 1)
        for shape in node.shapes
    )
    if is_own(function) or isinstance(function, torch.nn.Module) or not torchs or not small:
        return False
    if is_users(function) and node.grad:  # its backward may join samples, if they are many, say
        return False
    try:
        return _tried(node, divided)
    except Exception:  # noqa: BLE001 - whatever it objects to: it is gathered then
        return False


def _tried(node: Node, divided: Sequence[bool]) -> bool:
    generator = torch.Generator().manual_seed(0)
    dims = [0 if cut else None for cut in divided]
    with without_modes():
        for dtype in (torch.float64, torch.int64):  # indices, where it takes no other numbers
            try:
                given = [
                    numbers(
                        (_ROWS, *shape[1:]) if cut else shape,
                        dtype if cut else torch.float64,
                        generator,
                    )
                    for shape, cut in zip(node.shapes, divided, strict=True)
                ]
                whole = Call(node, given)
            except (RuntimeError, TypeError, IndexError):
                continue
            return each_by_itself(whole, dims)
    return False


ROW_WISE = RowWise()


@dataclass
class ValuePlacement:
    """How values lie, and by which rule every node is computed."""

    spreads: dict[int, Spread] = field(default_factory=dict[int, Spread])
    rules: dict[Node, Rule | None] = field(default_factory=dict[Node, Rule | None])
    """None: operands are gathered"""
    given: dict[Node, tuple[Spread, ...]] = field(default_factory=dict[Node, tuple[Spread, ...]])
    """how a rule takes its operands; they are exchanged where they do not lie so"""
    gathered: list[Node] = field(default_factory=list[Node])
    """nodes whose operands had to be gathered because nobody knows how to cut them"""


def place(
    tape: Tape, inputs: Sequence[Spread], here: Here, *, strict: bool = False, thinnest: int = 1
) -> ValuePlacement:
    """Decide how every value lies. Tiles of fewer than `thinnest` pixels are turned into samples.

    Raises `UsageError` with `strict` where an operation would have to gather a tiled value.
    """
    placing = _Placing(tape, here, strict, thinnest)
    placing.done.spreads.update(zip(tape.inputs, inputs, strict=True))
    for node in tape.nodes:
        placing.add(node)
    return placing.done


def by_samples(spread: Spread, grid: Grid) -> Spread:
    """Whole images, the samples of every replica divided over its tile ranks."""
    n, cut = spread.shape[0], spread.cuts[0]
    replicas = (0, n) if grid.data is None or cut is None else cut.bounds
    bounds = [
        a + owned(b - a, grid.tiles, part).start
        for a, b in itertools.pairwise(replicas)
        for part in range(grid.tiles)
    ]
    axes = (
        range(len(grid.axes))
        if len(replicas) > 2 or grid.data is None
        else range(1, len(grid.axes))
    )
    return Spread.whole(spread.shape).with_cut(0, Division.at(tuple(axes), (*bounds, n)))


class _Placing:
    def __init__(self, tape: Tape, here: Here, strict: bool, thinnest: int) -> None:
        self.done = ValuePlacement()
        self._here, self._strict, self._thinnest = here, strict, thinnest
        shape = tape.shapes[tape.inputs[0]] if tape.inputs else ()
        self._rows = shape[0] if shape else 0

    def add(self, node: Node) -> None:
        lie = tuple(
            _filled(self.done.spreads[ref.index]) if isinstance(ref, Value) else Spread.whole(shape)
            for ref, shape in zip(node.operands, node.shapes, strict=True)
        )
        chosen = rule_of(node)
        if is_pointwise(node.function) and chosen is not None and not keeps_promise(node, lie):
            warn(
                f"{node.where} is marked by fivefold.pointwise, but has other results or gradients for parts "
                "of what it takes than for the whole: the mark does not count"
            )
            chosen = None
        for given in self._choices(lie) if chosen is not None else ():
            assert chosen is not None
            made = chosen.place(Operation(node, given, self._here))
            if made is not None and self._fits(made):
                self.done.spreads.update(zip(node.outputs, made, strict=True))
                self.done.rules[node], self.done.given[node] = chosen, given
                return
        if self._by_trial(node, lie):
            return
        self._gather(node, lie, known=chosen is not None)

    def _by_trial(self, node: Node, lie: tuple[Spread, ...]) -> bool:
        """Divide by samples what no rule can divide, if each sample is computed by itself."""
        if all(spread.is_whole for spread in lie):
            return False
        made = ROW_WISE.place(Operation(node, lie, self._here))
        if made is None:
            return False
        self.done.spreads.update(zip(node.outputs, made, strict=True))
        self.done.rules[node], self.done.given[node] = ROW_WISE, lie
        return True

    def _choices(self, lie: tuple[Spread, ...]) -> Iterator[tuple[Spread, ...]]:
        """How operands may be taken, the best first."""
        yield lie
        grid = self._here.grid
        samples = [spread for spread in lie if self._has_samples_cut(spread)]
        tiled = [spread for spread in lie if self._in_tiles(spread) and spread not in samples]
        if samples and tiled:  # back to tiles
            yield tuple(self._by_replicas(s, tiled) if s in samples else s for s in lie)
        if tiled and self._here.fewest >= grid.tiles:
            yield tuple(
                by_samples(s, grid) if s in tiled and s.shape[0] == self._rows else s for s in lie
            )

    def _in_tiles(self, spread: Spread) -> bool:
        """Whether it is divided among the tile ranks of a replica."""
        return any(axis != self._here.grid.data for axis in spread.axes)

    def _has_samples_cut(self, spread: Spread) -> bool:
        """Whether the tile ranks of a replica have whole images of different samples."""
        rows = bool(spread.shape) and spread.cut_dims == (0,) and spread.shape[0] == self._rows
        return rows and self._in_tiles(spread)

    def _by_replicas(self, spread: Spread, tiled: Sequence[Spread]) -> Spread:
        """Whole images, of the samples that replicas have by the cut of some others."""
        cuts = [s.cuts[0] for s in tiled if s.shape and s.shape[0] == self._rows]
        data = self._here.grid.data
        same = next(
            (c for c in cuts if c is not None and data is not None and c.axes == (data,)), None
        )
        return Spread.whole(spread.shape).with_cut(0, same)

    def _fits(self, made: Sequence[Spread]) -> bool:
        """Whether no part is empty, or thinner than wanted."""
        return not any(
            stop - start < (1 if self._by_rows(spread, cut) else self._thinnest)
            for spread in made
            for cut in spread.cuts
            if cut is not None
            for start, stop in cut.owned
        )

    def _by_rows(self, spread: Spread, cut: Division) -> bool:
        """Whether a cut divides samples, not pixels."""
        return cut.axes == (self._here.grid.data,) or self._has_samples_cut(spread)

    def _gather(self, node: Node, lie: Sequence[Spread], known: bool) -> None:
        tiled = [spread for spread in lie if not spread.is_whole]
        if tiled and not known:
            self._tell_unknown(node, tiled)
            self.done.gathered.append(node)
        for index, shape in zip(node.outputs, node.output_shapes, strict=True):
            self.done.spreads[index] = Spread.whole(shape) if known else _as_before(tiled, shape)
        self.done.rules[node] = None
        self.done.given[node] = tuple(Spread.whole(shape) for shape in node.shapes)

    def _tell_unknown(self, node: Node, tiled: Sequence[Spread]) -> None:
        elements = sum(math.prod(spread.shape) for spread in tiled)
        text = (
            f"{node.where} is not known to Fivefold's tiles: every rank gathers the whole of what it takes "
            f"({elements * node.output_bytes / 2**20:.1f} MiB) and computes all of it"
        )
        if self._strict:
            raise UsageError(f"{text}; tiles.strict = true in the plan forbids that")
        if not is_quiet():
            warn(f"{text}. The result is exact")


def _filled(spread: Spread) -> Spread:
    """Dims of which some part is empty, whole: a batch may have fewer samples than there are replicas."""
    for dim in spread.cut_dims:
        cut = spread.cuts[dim]
        if cut is not None and cut.empty:
            spread = spread.with_cut(dim, None)
    return spread


def _as_before(tiled: Sequence[Spread], shape: tuple[int, ...]) -> Spread:
    """What an unknown operation returns is cut again like its operand where it has the same size."""
    spread = Spread.whole(shape)
    for before in tiled:
        if len(before.shape) == len(shape):
            for dim in before.cut_dims:
                if before.shape[dim] == shape[dim]:
                    spread = spread.with_cut(dim, before.cuts[dim])
            return spread.tight()
    return spread
