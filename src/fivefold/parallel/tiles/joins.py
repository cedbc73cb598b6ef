"""Several tensors to one, and one to several: cat, stack, chunk, split, unbind.

Along the dim in question tensors have to be whole; along the others they are cut alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, Wants, call, rule, want_of
from fivefold.parallel.program.spread import Box, Division, Range, Spread
from fivefold.parallel.tiles.pointwise import broadcast

__all__ = ["Join", "Split", "Stack"]


def _dim(node: Node, names: Sequence[str], size: int) -> int:
    options = node.bound(names)
    return int(options.get("dim", options.get("axis", 0))) % size


@rule("cat", "column_stack", "concat", "concatenate", "dstack", "hstack", "vstack", "row_stack")
class Join:
    """Tensors one behind the other, along a dim that is not cut."""

    def _along(self, node: Node) -> int:
        size = len(node.output_shapes[0])
        fixed = {"hstack": min(1, size - 1), "vstack": 0, "row_stack": 0, "dstack": 2}
        fixed["column_stack"] = 1
        found = fixed.get(node.name)
        return _dim(node, ("tensors", "dim"), size) if found is None else found

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the first operand that is cut; None if one is cut along the dim in which they are joined."""
        shape, along = op.node.output_shapes[0], self._along(op.node)
        if any(len(given.shape) != len(shape) or along in given.cut_dims for given in op.given):
            return None
        return _placed(op, shape)

    def lower(self, op: Operation) -> Local:
        """The same call; every operand where the result is."""
        along, made = self._along(op.node), op.made[0]
        wants = tuple(
            tuple(
                Want.all_of(n) if dim == along else want_of(n, made.cuts[dim])
                for dim, n in enumerate(shape)
            )
            for shape in op.node.shapes
        )
        return Local(wants, call(op.node))


@rule("stack")
class Stack:
    """Tensors side by side along a new dim."""

    def _along(self, node: Node) -> int:
        return _dim(node, ("tensors", "dim"), len(node.output_shapes[0]))

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the first operand that is cut."""
        along, shape = self._along(op.node), op.node.output_shapes[0]
        found = _placed(op, shape[:along] + shape[along + 1 :])
        if found is None:
            return None
        cuts = found[0].cuts
        return [Spread(shape, (*cuts[:along], None, *cuts[along:]))]

    def lower(self, op: Operation) -> Local:
        """The same call; every operand where the result is."""
        along, cuts = self._along(op.node), op.made[0].cuts
        kept = cuts[:along] + cuts[along + 1 :]
        return Local(
            tuple(tuple(map(want_of, shape, kept)) for shape in op.node.shapes), call(op.node)
        )


def _placed(op: Operation, shape: tuple[int, ...]) -> list[Spread] | None:
    """Cut as the operands are; None if two dims would be cut along one axis."""
    made = broadcast(op.given, shape)
    axes = [axis for cut in made.cuts if cut is not None for axis in cut.axes]
    return [made] if len(axes) == len(set(axes)) else None


@rule(
    "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "unsafe_chunk", "unsafe_split"
)
class Split:
    """One tensor in several pieces, along a dim that is not cut."""

    _names = ("input", "sizes", "dim")

    def _along(self, node: Node) -> int:
        names = ("input", "dim") if node.name == "unbind" else self._names
        return _dim(node, names, len(node.shapes[0]))

    def _cuts(self, spread: Spread, node: Node) -> tuple[Division | None, ...]:
        """Those of a piece, one for every dim of the operand."""
        along = self._along(node)
        if node.name != "unbind":
            return spread.cuts
        return (*spread.cuts[:along], None, *spread.cuts[along:])

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand; None if that is cut along the dim in question."""
        given, along = op.given[0], self._along(op.node)
        if len(op.given) != 1 or given.cuts[along] is not None:
            return None
        cuts = given.cuts
        if op.node.name == "unbind":
            cuts = cuts[:along] + cuts[along + 1 :]
        return [Spread(shape, cuts).tight() for shape in op.node.output_shapes]

    def lower(self, op: Operation) -> Local:
        """The same call on all that is held of any piece; of every piece what is held of that one."""
        grid, rank = op.here.grid, op.here.rank
        wants: Wants = tuple(
            _hull_want(n, cuts)
            for n, *cuts in zip(
                op.node.shapes[0], *(self._cuts(made, op.node) for made in op.made), strict=True
            )
        )
        held = [made.held(grid, rank) for made in op.made]
        return Local((wants,), _cropping(call(op.node), op.made, held))


def _hull_want(n: int, cuts: Sequence[Division | None]) -> Want:
    first = cuts[0]
    if first is None:
        return Want.all_of(n)
    ranges = [cut.held for cut in cuts if cut is not None]
    return Want.ranges(first.axes, [_hull(parts) for parts in zip(*ranges, strict=True)])


def _hull(ranges: Sequence[Range]) -> Range:
    return (min(start for start, _ in ranges), max(stop for _, stop in ranges))


def _cropping(
    split: Callable[[Moment, Sequence[Tensor]], Any], made: Sequence[Spread], held: Sequence[Box]
) -> Callable[[Moment, Sequence[Tensor]], Any]:
    """`split`, and of every piece what is held of it."""
    alike = [
        tuple(_hull([box[dim] for box in held]) if spread.cuts[dim] is not None else own
              for dim, own in enumerate(mine))
        for spread, mine in zip(made, held, strict=True)
    ]  # fmt: skip
    if all(mine == hull for mine, hull in zip(held, alike, strict=True)):
        return split
    slices = [
        tuple(
            slice(start - offset, stop - offset)
            for (start, stop), (offset, _) in zip(mine, hull, strict=True)
        )
        for mine, hull in zip(held, alike, strict=True)
    ]

    def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
        pieces = split(moment, operands)
        return tuple(piece[crop] for piece, crop in zip(pieces, slices, strict=True))

    return run
