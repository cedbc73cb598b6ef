"""Dims moved about, stretched or repeated: permute, transpose, expand, repeat."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import (
    Local,
    Moment,
    Operation,
    Wants,
    as_held,
    call,
    plain,
    rule,
    want_of,
)
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.tiles.lines import Repeated, lowered, placed
from fivefold.parallel.tiles.pointwise import broadcast, broadcast_wants

__all__ = ["Expand", "Permute", "Repeat", "RepeatRows"]


def _order(node: Node) -> list[int]:
    """Which dim of the operand every dim of the result is: the call itself says so, of a tensor without
    numbers whose sizes are all different.
    """
    probe = torch.empty([dim + 1 for dim in range(len(node.shapes[0]))], device="meta")
    args, kwargs = node.arguments([probe])
    return [n - 1 for n in plain(node.function)(*args, **kwargs).shape]


@rule(
    "H", "T", "adjoint", "mH", "mT", "movedim", "moveaxis", "permute", "swapaxes", "swapdims", "t",
    "transpose",
)  # fmt: skip
class Permute:
    """The dims in another order."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Every dim as it was."""
        given = op.given[0]
        cuts = tuple(given.cuts[dim] for dim in _order(op.node))
        return [Spread(op.node.output_shapes[0], cuts).tight()]

    def lower(self, op: Operation) -> Local:
        """The same call on what is held."""
        order, shape = _order(op.node), op.node.shapes[0]
        cuts = [op.made[0].cuts[order.index(dim)] for dim in range(len(shape))]
        return Local((tuple(map(want_of, shape, cuts)),), call(op.node))


@rule("broadcast_to", "expand", "expand_as")
class Expand:
    """Dims of size one stretched, and new ones in front."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Cut as the operand is, or by samples; the second operand of `expand_as` gives but its shape."""
        made = broadcast(op.given[:1], op.node.output_shapes[0])
        return [_by_samples(op, made)]

    def lower(self, op: Operation) -> Local:
        """Expanded to the shape of what is held."""
        made, here = op.made[0], op.here
        local = made.local_shape(here.grid, here.rank)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            return operands[0].expand(local)

        others = tuple(as_held(spread) for spread in op.given[1:])
        return Local((broadcast_wants(op.node.shapes[0], made), *others), run)


@rule("repeat", "tile")
class Repeat:
    """Copies one behind the other, in dims that are not cut."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Cut as the operand is, unless that would have to be repeated along a cut."""
        made = broadcast(op.given, op.node.output_shapes[0])
        cut = len(op.given[0].cut_dims)
        return [_by_samples(op, made)] if len(made.cut_dims) == cut else None

    def lower(self, op: Operation) -> Local:
        """As many copies as are held."""
        made, shape = op.made[0], op.node.shapes[0]
        if made.cuts[:1] in {(), (None,)} or (len(made.shape) == len(shape) and shape[0] != 1):
            return Local((_repeat_wants(op),), call(op.node))
        local = made.local_shape(op.here.grid, op.here.rank)

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            own = (1,) * (len(local) - len(shape)) + tuple(operands[0].shape)
            return operands[0].repeat([n // m for n, m in zip(local, own, strict=True)])

        return Local((_repeat_wants(op),), run)


def _by_samples(op: Operation, made: Spread) -> Spread:
    """What is stretched to the samples is divided as they are."""
    shape = op.node.shapes[0]
    stretched = len(made.shape) > len(shape) or shape[:1] == (1,)
    cut = op.here.fresh(op.node).cuts[0] if made.shape and stretched else None
    free = cut is not None and made.cuts[0] is None and not set(cut.axes) & set(made.axes)
    return made.with_cut(0, cut) if free else made


def _repeat_wants(op: Operation) -> Wants:
    made, shape = op.made[0], op.node.shapes[0]
    shift = len(made.shape) - len(shape)
    return tuple(
        Want.all_of(n) if n == 1 else want_of(n, made.cuts[dim + shift])
        for dim, n in enumerate(shape)
    )


@rule("repeat_interleave")
class RepeatRows:
    """Every row several times, one behind the other; the same number of times for all rows."""

    def _lines(self, node: Node) -> dict[int, Repeated] | None:
        a = node.bound(("input", "repeats", "dim"))
        times, dim, shape = a["repeats"], a.get("dim"), node.shapes[0]
        if not isinstance(times, int) or not isinstance(dim, int):
            return None
        dim %= len(shape)
        return {dim: Repeated(shape[dim] * times, times)}

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Bounds times the number."""
        lines = self._lines(op.node)
        return None if lines is None else [placed(op.given[0], op.node.output_shapes[0], lines)]

    def lower(self, op: Operation) -> Local:
        """Rows that are held in part are repeated, and what is too much is cut off."""
        lines = self._lines(op.node)
        assert lines is not None
        ((dim, line),) = lines.items()
        if op.given[0].cuts[dim] is not None:
            return lowered(op, lines, lambda x: x)
        return lowered(op, lines, lambda x: x.repeat_interleave(line.times, dim))
