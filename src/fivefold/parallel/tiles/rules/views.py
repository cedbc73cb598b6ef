"""Views that give the same numbers another shape: view, reshape, flatten, unflatten, squeeze, unsqueeze.

Dims are matched in groups whose products agree; a group may be divided along its first dim, which is the one
whose parts lie in one piece each:

    (N, C, H, W) -> (N, C, H W)         groups N|N  C|C  H W|HW      cut along H: cut along HW
    (N, H W, C)  -> (N, H, W, C)        groups N|N  HW|H W  C|C      bounds move to whole rows
    (N, C, H, W) -> (N, C, H W)         cut along W: its parts lie in pieces, so all is gathered
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.parallel.tiles.exchange import Want
from fivefold.parallel.tiles.rule import Local, Moment, Operation, Wants, as_held, rule
from fivefold.parallel.tiles.spread import Cut, Range, Spread
from fivefold.parallel.tiles.windows import follow

__all__ = ["Group", "View", "groups"]


@dataclass(frozen=True)
class Group:
    """Dims of the operand that become dims of the result; those of size one belong to no group."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    minor_before: int
    """product of the sizes behind the first dim"""
    minor_after: int
    numel: int

    def bound(self, bound: int) -> int:
        """The first row of the result that starts at row `bound` of the operand, or nearest to it."""
        return (2 * bound * self.minor_before + self.minor_after) // (2 * self.minor_after)

    def needs(self, rows: Range) -> Range:
        """The rows of the operand in which rows of the result lie."""
        start, stop = self.flat(rows)
        return (start // self.minor_before, -(-stop // self.minor_before))

    def flat(self, rows: Range) -> Range:
        """Where rows of the result lie in the flattened group."""
        return (rows[0] * self.minor_after, rows[1] * self.minor_after)

    def crop(self, rows: Range) -> Range:
        """Where rows of the result lie in what `needs` gives, flattened."""
        start, stop = self.flat(rows)
        offset = self.needs(rows)[0] * self.minor_before
        return (start - offset, stop - offset)


def groups(before: Sequence[int], after: Sequence[int]) -> list[Group] | None:
    """How dims of sizes `before` become dims of sizes `after`; None where a size is zero."""
    if math.prod(before) == 0 or math.prod(before) != math.prod(after):
        return None
    left = [dim for dim, n in enumerate(before) if n != 1]
    right = [dim for dim, n in enumerate(after) if n != 1]
    found: list[Group] = []
    while left:
        i, j = 1, 1
        while (a := _product(before, left[:i])) != (b := _product(after, right[:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        minors = _product(before, left[1:i]), _product(after, right[1:j])
        found.append(Group(tuple(left[:i]), tuple(right[:j]), *minors, a))
        left, right = left[i:], right[j:]
    return found


def _product(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


@rule(
    "atleast_1d", "atleast_2d", "atleast_3d", "flatten", "ravel", "reshape", "reshape_as", "squeeze",
    "unflatten", "unsqueeze", "view", "view_as",
)  # fmt: skip
class View:
    """`place`: bounds follow the first dim of every group; `lower`: reshape what is held."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Cut along the first dims of the groups whose first dim is cut; nothing else can be."""
        given, shape = op.given[0], op.node.output_shapes[0]
        found = groups(given.shape, shape)
        bits = any(isinstance(a, torch.dtype) for a in (*op.node.args, *op.node.kwargs.values()))
        if found is None or bits or len(op.node.outputs) != 1:
            return None
        made = Spread.whole(shape)
        for group in found:
            if any(given.cuts[dim] is not None for dim in group.before[1:]):
                return None
            cut = given.cuts[group.before[0]]
            if cut is not None:
                first = group.after[0]
                made = made.with_cut(first, follow(cut, shape[first], group.bound))
        return [made]

    def lower(self, op: Operation) -> Local:
        """Take the rows in which the result lies, cut off what is too much, and reshape."""
        made, here = op.made[0], op.here
        found = groups(op.node.shapes[0], made.shape)
        assert found is not None
        held, local = made.held(here.grid, here.rank), made.local_shape(here.grid, here.rank)
        cuts = [made.cuts[group.after[0]] for group in found]
        crops = [
            (0, group.numel) if cut is None else group.crop(held[group.after[0]])
            for group, cut in zip(found, cuts, strict=True)
        ]
        cropped = any(
            stop - start != _held_elements(group, cut, held[group.after[0]])
            for group, cut, (start, stop) in zip(found, cuts, crops, strict=True)
        )

        def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            x = operands[0]
            if cropped:
                x = x.reshape([_product(x.shape, group.before) for group in found])
                x = x[tuple(slice(*crop) for crop in crops)]
            return x.reshape(local)

        others = tuple(as_held(spread) for spread in op.given[1:])  # only their shape is read
        return Local((_wants(op.node.shapes[0], found, cuts), *others), run)


def _held_elements(group: Group, cut: Cut | None, rows: Range) -> int:
    if cut is None:
        return group.numel
    start, stop = group.needs(rows)
    return (stop - start) * group.minor_before


def _wants(shape: Sequence[int], found: Sequence[Group], cuts: Sequence[Cut | None]) -> Wants:
    wants = [Want.all_of(n) for n in shape]
    for group, cut in zip(found, cuts, strict=True):
        if cut is not None:
            wants[group.before[0]] = Want.ranges(cut.axes, [group.needs(r) for r in cut.held])
    return tuple(wants)
