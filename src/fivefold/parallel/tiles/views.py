"""Views that give the same numbers another shape: view, reshape, flatten, unflatten, squeeze, unsqueeze.

Dims are matched in groups whose products agree; the result of a group may be divided along its first dim, the
one whose parts lie in one piece each:

    (N, C, H, W) -> (N, C, H W)         groups N|N  C|C  H W|HW      cut along H: cut along HW
    (N, H W, C)  -> (N, H, W, C)        groups N|N  HW|H W  C|C      bounds move to whole rows
    (N, C, H, W) -> (N, C, H W)         cut along W: its parts lie in pieces, so HW is divided anew,
                                        or samples are, if there are as many as ranks
    (N, C, H W) -> (N, C, H, W)         of what was divided so: H and W are cut as they were before
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fivefold.mesh import owned
from fivefold.parallel.program.exchange import Want
from fivefold.parallel.program.rule import Local, Moment, Operation, Wants, as_held, rule
from fivefold.parallel.program.spread import Box, Division, Grid, Range, Spread
from fivefold.parallel.program.windows import follow

__all__ = ["DimGroup", "View", "groups"]


@dataclass(frozen=True)
class DimGroup:
    """Dims of the operand that become dims of the result; those of size one belong to no group."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    minor_before: int
    """product of the sizes behind the first dim"""
    minor_after: int
    sizes: tuple[int, ...]
    """of the dims before"""

    @property
    def numel(self) -> int:
        """Product of all sizes."""
        return math.prod(self.sizes)

    def bound(self, bound: int) -> int:
        """The first row of the result that starts at row `bound` of the operand, or nearest to it."""
        return (2 * bound * self.minor_before + self.minor_after) // (2 * self.minor_after)

    def needs(self, rows: Range) -> Box:
        """Where in the operand rows of the result lie: rows of some dim, single ones of those before it."""
        start, stop = self.flat(rows)
        if start >= stop:
            return ((0, 0), *((0, n) for n in self.sizes[1:]))
        found: list[Range] = []
        minor, single = self.numel, True
        for n in self.sizes:
            minor //= n
            low, high = start // minor % n, (stop - 1) // minor % n
            found.append((low, high + 1) if single else (0, n))
            single = single and low == high
        return tuple(found)

    def flat(self, rows: Range) -> Range:
        """Where rows of the result lie in the flattened group."""
        return (rows[0] * self.minor_after, rows[1] * self.minor_after)

    def crop(self, rows: Range) -> Range:
        """Where rows of the result lie in what `needs` gives, flattened."""
        start, stop = self.flat(rows)
        offset, minor = 0, self.numel
        for n, (low, _) in zip(self.sizes, self.needs(rows), strict=True):
            minor //= n
            offset += low * minor
        return (start - offset, stop - offset)

    def cut(self, cuts: Sequence[Division | None], n: int, grid: Grid) -> Division | None:
        """How the first dim of the result, of `n` rows, is divided, given how the operand's dims are."""
        major, *minor = cuts
        if len(self.before) == len(self.after) == 1:
            return None if major is None else major.tight()
        if not any(minor):
            return None if major is None else follow(major, n, self.bound)
        axes = tuple(axis for cut in cuts if cut is not None for axis in cut.axes)
        parts = math.prod(grid.sizes[axis] for axis in axes)
        if n < parts:
            return None
        # What replicas have stays theirs.
        alone = major is None or major.axes != (grid.data,)
        replicas = [0, n] if alone or major is None else follow(major, n, self.bound).bounds
        each = parts // (len(replicas) - 1)
        bounds = [
            a + owned(b - a, each, part).start
            for a, b in itertools.pairwise(replicas)
            for part in range(each)
        ]
        made = Division.at(axes, [*bounds, n])
        if grid.data in axes or len(self.after) > 1:
            return made
        return replace(made, source=Spread(self.sizes, tuple(cuts)).tight())

    def restored(self, cut: Division | None, shape: Sequence[int]) -> Spread | None:
        """The dims that the one dim of the operand was made of, if it becomes them again."""
        source = None if cut is None or len(self.before) > 1 else cut.source
        same = source is not None and source.shape == tuple(shape[dim] for dim in self.after)
        return source if same else None


def groups(before: Sequence[int], after: Sequence[int]) -> list[DimGroup] | None:
    """How dims of sizes `before` become dims of sizes `after`; None where a size is zero."""
    if math.prod(before) == 0 or math.prod(before) != math.prod(after):
        return None
    left = [dim for dim, n in enumerate(before) if n != 1]
    right = [dim for dim, n in enumerate(after) if n != 1]
    found: list[DimGroup] = []
    while left:
        i, j = 1, 1
        while (a := _product(before, left[:i])) != (b := _product(after, right[:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        minors = _product(before, left[1:i]), _product(after, right[1:j])
        sizes = tuple(before[dim] for dim in left[:i])
        found.append(DimGroup(tuple(left[:i]), tuple(right[:j]), *minors, sizes))
        left, right = left[i:], right[j:]
    return found


def _product(shape: Sequence[int], dims: Sequence[int]) -> int:
    return math.prod(shape[dim] for dim in dims)


@rule(
    "atleast_1d", "atleast_2d", "atleast_3d", "flatten", "ravel", "reshape", "reshape_as", "squeeze",
    "unflatten", "unsqueeze", "view", "view_as",
)  # fmt: skip
class View:
    """Bounds follow the first of dims that become one, or that one becomes; if others are cut, gathered."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """Cut along the first dims of the groups of which some dim is cut; nothing else can be."""
        given, shape = op.given[0], op.node.output_shapes[0]
        found = groups(given.shape, shape)
        bits = any(isinstance(a, torch.dtype) for a in (*op.node.args, *op.node.kwargs.values()))
        if found is None or bits or len(op.node.outputs) != 1:
            return None
        pieces = any(given.cuts[dim] is not None for group in found for dim in group.before[1:])
        if pieces and _may_turn_to_samples(op):
            return None
        others = [group for group in found if len(group.after) > 1 or len(group.before) > 1]
        alone = sum(any(given.cuts[dim] for dim in group.before) for group in others) == 1
        made = Spread.whole(shape)
        for group in found:
            cuts, first = [given.cuts[dim] for dim in group.before], group.after[0]
            source = group.restored(cuts[0], shape) if alone else None
            if source is None:
                made = made.with_cut(first, group.cut(cuts, shape[first], op.here.grid))
                continue
            for dim, cut in zip(group.after, source.cuts, strict=True):
                made = made.with_cut(dim, cut)
        return [made]

    def lower(self, op: Operation) -> Local:
        """Take the rows in which the result lies, cut off what is too much, and reshape."""
        made, here = op.made[0], op.here
        found = groups(op.node.shapes[0], made.shape)
        assert found is not None
        held, local = made.held(here.grid, here.rank), made.local_shape(here.grid, here.rank)
        cuts = [made.cuts[group.after[0]] for group in found]
        wants = _wants(op.node.shapes[0], found, cuts)
        restored = [group for group in found if any(made.cuts[dim] for dim in group.after[1:])]
        if restored:
            return self._restored(op, restored, wants)
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
        return Local((wants, *others), run)

    def _restored(self, op: Operation, restored: Sequence[DimGroup], wants: Wants) -> Local:
        """Take the pieces of what was divided otherwise before it became one dim; crop nothing."""
        made, here, every = op.made[0], op.here, list(wants)
        for group in restored:
            sizes = tuple(made.shape[dim] for dim in group.after)
            dims = Spread(sizes, tuple(made.cuts[dim] for dim in group.after))
            parts = {here.grid.part(rank, dims.axes): rank for rank in range(here.grid.size)}
            flat = (dims.flat(here.grid, parts[part]) for part in range(len(parts)))
            every[group.before[0]] = Want(dims.axes, tuple(flat))
        local = made.local_shape(here.grid, here.rank)
        others = tuple(as_held(spread) for spread in op.given[1:])
        return Local((tuple(every), *others), lambda _, operands: operands[0].reshape(local))


def _may_turn_to_samples(op: Operation) -> bool:
    """Whether every rank could have whole samples instead: what comes then needs no neighbours at all."""
    here = op.here
    return here.fewest >= here.grid.tiles > 1 and op.given[0].shape[0] == here.rows


def _held_elements(group: DimGroup, cut: Division | None, rows: Range) -> int:
    if cut is None:
        return group.numel
    return math.prod(stop - start for start, stop in group.needs(rows))


def _wants(
    shape: Sequence[int], found: Sequence[DimGroup], cuts: Sequence[Division | None]
) -> Wants:
    wants = [Want.all_of(n) for n in shape]
    for group, cut in zip(found, cuts, strict=True):
        if cut is not None:
            boxes = zip(*map(group.needs, cut.held), strict=True)
            for dim, ranges in zip(group.before, boxes, strict=True):
                wants[dim] = Want.ranges(cut.axes, ranges)
    return tuple(wants)
