"""Indexing by numbers and slices, narrow, select: every part takes those of its rows that are asked for.

x[..., 3:12:2, :]       rows 3 5 | 7 9 11        bounds move to the first row behind them
x[:, :, 5]              row 5, for everybody
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fivefold.parallel.graph.refs import Slot
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import (
    Local,
    Moment,
    Operation,
    as_held,
    everything,
    rule,
    want_of,
)
from fivefold.parallel.program.spread import Division, Range, Spread
from fivefold.parallel.program.windows import follow
from fivefold.parallel.trees import in_graph

__all__ = ["Assign", "Index", "RowRange"]


@dataclass(frozen=True)
class RowRange:
    """Rows start, start + step, ... of a dim; `count` of them."""

    start: int
    step: int
    count: int

    def bound(self, bound: int) -> int:
        """The first of them at `bound` or behind it, unclamped."""
        return -((self.start - bound) // self.step)

    def needs(self, rows: Range) -> Range:
        """From the first to the last."""
        if rows[1] <= rows[0]:
            return (self.start, self.start)
        return (self.start + rows[0] * self.step, self.start + (rows[1] - 1) * self.step + 1)


_Entry = RowRange | int | None | Any
"""of an index: rows, a single row, a new dim, or something else, which takes the place of one dim"""


def _entries(node: Node) -> list[_Entry] | None:
    """The index in a form that names every dim; None if it cannot be followed."""
    shape, name = node.shapes[0], node.name
    if name == "__getitem__":
        index = node.args[1]
        return _normal(list(index) if isinstance(index, tuple) else [index], shape, node.shapes)
    names = {
        "narrow": ("input", "dim", "start", "length"),
        "select": ("input", "dim", "index"),
        "index_select": ("input", "dim", "index"),
    }[name]
    a = node.bound(names)
    if not isinstance(a["dim"], int) or (name == "narrow" and not isinstance(a["start"], int)):
        return None
    entry: Any = a.get("index")
    if name == "narrow":
        start = a["start"] % max(shape[a["dim"]], 1) if a["start"] < 0 else a["start"]
        entry = slice(start, start + a["length"])
    index = [slice(None)] * len(shape)
    index[a["dim"]] = entry
    return _normal(index, shape, node.shapes)


def _normal(
    index: list[Any], shape: Sequence[int], shapes: Sequence[tuple[int, ...]]
) -> list[_Entry] | None:
    if sum(entry is Ellipsis for entry in index) == 0:
        index = [*index, Ellipsis]
    named = sum(entry is not None and entry is not Ellipsis for entry in index)
    found: list[_Entry] = []
    dim, special = 0, 0
    for entry in index:
        if entry is Ellipsis:
            missing = len(shape) - named
            found.extend(RowRange(0, 1, n) for n in shape[dim : dim + missing])
            dim += missing
        elif entry is None:
            found.append(None)
        elif isinstance(entry, slice):
            rows = range(*entry.indices(shape[dim]))
            found.append(RowRange(rows.start, rows.step, len(rows)))
            dim += 1
        elif isinstance(entry, int) and not isinstance(entry, bool):
            found.append(entry % shape[dim])
            dim += 1
        elif _is_line(entry, shapes):
            found.append(entry)
            dim, special = dim + 1, special + 1
        else:
            return None
    # Where torch puts the dim of an index of tensors depends on what stands beside it.
    mixed = special > 1 or (special and any(isinstance(e, int) for e in found))
    return None if mixed else found


def _is_line(entry: Any, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether an entry is a list of rows, or a tensor of one dim."""
    if isinstance(entry, Slot):
        return len(shapes[entry.index]) == 1
    return isinstance(entry, list) and all(type(row) is int for row in entry)


@rule("__getitem__", "narrow", "select", "index_select")
class Index:
    """The rows asked for belong to whom they belonged. Lists of rows and masks: in dims that are whole."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """A dim of which some part would have nothing becomes whole; lists of rows only in dims that are."""
        entries, given = _entries(op.node), op.given[0]
        if entries is None:
            return None
        cuts: list[Division | None] = []
        for dim, entry in _by_dim(entries):
            before = None if dim is None else given.cuts[dim]
            if isinstance(entry, int):
                continue
            if before is None:
                cuts.append(None)
            elif isinstance(entry, RowRange):
                cut = follow(before, entry.count, entry.bound)
                cuts.append(None if cut.empty else cut)
            else:
                return None
        return [Spread(op.node.output_shapes[0], tuple(cuts))]

    def lower(self, op: Operation) -> Local:
        """The same index, relative to the rows that are wanted."""
        entries, given = _entries(op.node), op.given[0]
        assert entries is not None
        made = iter(op.made[0].cuts)
        wants: list[Want] = []
        index: list[Any] = []
        for dim, entry in _by_dim(entries):
            cut = None if isinstance(entry, int) else next(made)
            if dim is None:
                index.append(None)
                continue
            before, n = given.cuts[dim], given.shape[dim]
            want, local = _localised(entry, n, before, cut)
            wants.append(want)
            index.append(local)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            local = (operands[e.index] if isinstance(e, Slot) else e for e in index)
            return operands[0][tuple(local)]

        return Local((tuple(wants), *map(everything, op.node.shapes[1:])), run)


@rule("assigned")
class Assign:
    """Every part takes those rows of `y` that fall into it. Lists of rows and masks are gathered."""

    def _entries(self, node: Node) -> list[_Entry] | None:
        """Rows and single rows only: lists and masks are gathered."""
        index = node.args[1]
        entries = _normal(
            list(index) if isinstance(index, tuple) else [index], node.shapes[0], node.shapes
        )
        plain = entries is not None and all(
            e is None or isinstance(e, (RowRange, int)) for e in entries
        )
        return entries if plain and isinstance(node.args[0], Slot) else None

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As what is assigned to; where that is whole, as what is assigned."""
        entries, given = self._entries(op.node), op.given[0]
        if entries is None:
            return None
        if not given.is_whole or len(op.given) == 1 or op.given[1].is_whole:
            return [given.tight()]
        made, value = given, op.given[1]
        for dim, position, entry in _matched(entries, len(value.shape)):
            cut = None if position is None else value.cuts[position]
            if (
                cut is not None
                and isinstance(entry, RowRange)
                and value.shape[position or 0] == entry.count
            ):
                inner = [entry.start + bound * entry.step for bound in cut.bounds[1:-1]]
                made = made.with_cut(dim, Division.at(cut.axes, (0, *inner, given.shape[dim])))
        return [made]

    def lower(self, op: Operation) -> Local:
        """The same index, relative to what is held."""
        entries, made, here = self._entries(op.node), op.made[0], op.here
        assert entries is not None
        shape = op.node.shapes[1] if len(op.node.shapes) > 1 else ()
        wants = [Want.all_of(n) for n in shape]
        index: list[Any] = [slice(None)] * len(made.shape)
        held, nothing = made.held(here.grid, here.rank), False
        for dim, position, entry in _matched(entries, len(shape)):
            cut = made.cuts[dim]
            ranges = [(0, made.shape[dim])] if cut is None else list(cut.held)
            rows = [_rows_within(entry, r) for r in ranges]
            mine = _rows_within(entry, held[dim])
            nothing = nothing or mine[0] >= mine[1]
            first = entry if isinstance(entry, int) else entry.start + mine[0] * entry.step
            step = 1 if isinstance(entry, int) else entry.step
            start = first - held[dim][0]
            stop = start + (mine[1] - mine[0] - 1) * step + 1
            index[dim] = start if isinstance(entry, int) else slice(start, max(stop, start), step)
            if position is not None and cut is not None and shape[position] != 1:
                wants[position] = Want.ranges(cut.axes, rows)
        new = [number for number, entry in enumerate(entries) if entry is None]
        for number in new:
            index.insert(number, None)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            if nothing:
                return in_graph(operands[0].clone(), operands[1:])
            value = operands[1] if len(operands) > 1 else op.node.args[2]
            return op.node.function(operands[0], tuple(index), value)

        others = (tuple(wants),) if len(op.node.shapes) > 1 else ()
        chosen = any(
            made.cuts[dim] is not None and entry != RowRange(0, 1, made.shape[dim])
            for dim, _, entry in _matched(entries, len(shape))
        )
        return Local((as_held(made), *others), run, differs_apart=chosen)


def _rows_within(entry: RowRange | int, held: Range) -> Range:
    """Which rows of what is assigned fall into what is held."""
    if isinstance(entry, int):
        return (0, 1) if held[0] <= entry < held[1] else (0, 0)
    low = max(-((entry.start - held[0]) // entry.step), 0)
    high = min(-((entry.start - held[1]) // entry.step), entry.count)
    return (low, max(high, low))


def _matched(entries: Sequence[_Entry], rank: int) -> list[tuple[int, int | None, RowRange | int]]:
    """Every dim that is assigned to, the dim of the value that goes there, if any, and the rows."""
    found: list[tuple[int, int | None, RowRange | int]] = []
    result = sum(not isinstance(entry, int) for entry in entries)
    dim, there = 0, rank - result
    for entry in entries:
        if entry is None:
            there += 1
            continue
        assert isinstance(entry, (RowRange, int))
        rows = isinstance(entry, RowRange)
        found.append((dim, there if rows and there >= 0 else None, entry))
        dim, there = dim + 1, there + rows
    return found


def _by_dim(entries: Sequence[_Entry]) -> list[tuple[int | None, _Entry]]:
    """Every entry with the dim of the operand that it is for."""
    dims = iter(range(len(entries)))
    return [(None if entry is None else next(dims), entry) for entry in entries]


def _localised(
    entry: _Entry, n: int, before: Division | None, cut: Division | None
) -> tuple[Want, Any]:
    """What to want of a dim of `n` rows, and the index of that."""
    if isinstance(entry, int):
        return (
            (Want.all_of(n), entry) if before is None else (Want((), (((entry, entry + 1),),)), 0)
        )
    if not isinstance(entry, RowRange):
        return want_of(n, cut), entry
    if before is None:
        return want_of(n, cut), slice(
            entry.start, entry.start + entry.count * entry.step, entry.step
        )
    step = slice(None, None, entry.step)
    if cut is None:
        return Want((), ((entry.needs((0, entry.count)),),)), step
    return Want.ranges(cut.axes, [entry.needs(r) for r in cut.held]), step
