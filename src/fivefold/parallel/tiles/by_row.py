"""Indexing every row by itself: whoever has the rows needs nothing of others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fivefold.parallel.graph.numbered import ByRow
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Operation, Wants, call, rule, want_of
from fivefold.parallel.program.spread import Spread

__all__ = ["ByRows"]


@rule("by_row")
class ByRows:
    """By samples: every rank indexes the rows that it has."""

    def _dim(self, op: Operation) -> tuple[int, int]:
        """Which dim of the result the rows are on, and how many dims all indices have together."""
        assert isinstance(op.node.function, ByRow)
        rows = op.node.function.rows
        numbers = [op.node.shapes[0][0] if n == -1 else 1 for n in rows]
        joined = torch.broadcast_shapes(tuple(numbers), *op.node.shapes[1:])
        return len(joined) - len(rows) + rows.index(-1), len(joined)

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the rows are; everything else has to be whole."""
        given, (dim, dims) = op.given[0], self._dim(op)
        made = Spread.whole(op.node.output_shapes[0])
        if any(given.cuts[1:]):
            return None
        cut = given.cuts[0]
        for spread in op.given[1:]:
            at = dim - dims + len(spread.shape)
            for number, other in enumerate(spread.cuts):
                if other is not None and (number != at or not other.same_as(cut)):
                    return None
        return [made.with_cut(dim, cut)]

    def lower(self, op: Operation) -> Local:
        """The same call on the rows that are here."""
        dim, dims = self._dim(op)
        cut, rows = op.made[0].cuts[dim], op.node.shapes[0][0]
        first = op.given[0].shape
        wants: list[Wants] = [(want_of(rows, cut), *map(Want.all_of, first[1:]))]
        for spread in op.given[1:]:
            at = dim - dims + len(spread.shape)
            wants.append(
                tuple(
                    want_of(n, cut if number == at and n == rows else None)
                    for number, n in enumerate(spread.shape)
                )
            )
        return Local(tuple(wants), call(op.node))
