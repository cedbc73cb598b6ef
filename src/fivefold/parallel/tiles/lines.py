"""Operations that take every row of their result from rows of their operand, dim by dim.

row of the result      0  1  2  3 | 4  5  6  7
row of the operand     1  0  1  2 | 3  4  5  4        6 rows, reflected with one in front and one behind

Dims that are cut are computed here, from the rows that a part needs; the others are left to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fivefold.parallel.program.exchange import Segments, Want
from fivefold.parallel.program.rule import Local, Moment, Operation, as_held, want_of
from fivefold.parallel.program.spread import Range, Spread
from fivefold.parallel.program.windows import follow

__all__ = [
    "Circular",
    "Flipped",
    "Line",
    "Mapped",
    "Repeated",
    "Shifted",
    "lowered",
    "placed",
    "take",
]


class Line(Protocol):
    """How the rows of a result come from those of an operand."""

    @property
    def n(self) -> int:
        """Rows of the result."""
        ...

    def bound(self, bound: int) -> int:
        """The first row of the result that belongs behind row `bound` of the operand, unclamped."""
        ...

    def needs(self, rows: Range) -> Segments:
        """Rows of the operand from which rows of the result come; beyond the operand means fill."""
        ...

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """Rows of the result, from what `needs` gives."""
        ...


@dataclass(frozen=True)
class Shifted:
    """Padded with a constant, or cropped: row j is row j - offset."""

    n: int
    offset: int

    def bound(self, bound: int) -> int:
        """Where the row went."""
        return bound + self.offset

    def needs(self, rows: Range) -> Segments:
        """The same rows, filled beyond the operand."""
        return ((rows[0] - self.offset, rows[1] - self.offset),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:  # noqa: ARG002 - see `Line`
        """Nothing to do."""
        return x


@dataclass(frozen=True)
class Circular:
    """Row j is row (j - offset) modulo `size`: padded in a circle, or rolled."""

    n: int
    size: int
    offset: int
    stays: bool = False
    """whether bounds stay, and rows move over them"""

    def bound(self, bound: int) -> int:
        """Where the row went, unless bounds stay."""
        return bound if self.stays else bound + self.offset

    def needs(self, rows: Range) -> Segments:
        """A segment for every time that the rows go round."""
        start, stop = rows[0] - self.offset, rows[1] - self.offset
        found: list[Range] = []
        while start < stop:
            round_start = start // self.size * self.size
            upto = min(stop, round_start + self.size)
            found.append((start - round_start, upto - round_start))
            start = upto
        return tuple(found) or ((0, 0),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:  # noqa: ARG002 - see `Line`
        """Nothing to do: segments lie one after the other."""
        return x


@dataclass(frozen=True)
class Flipped:
    """Row j is row n - 1 - j; bounds stay."""

    n: int

    def bound(self, bound: int) -> int:
        """As it was."""
        return bound

    def needs(self, rows: Range) -> Segments:
        """The rows at the other end."""
        return ((self.n - rows[1], self.n - rows[0]),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:  # noqa: ARG002 - see `Line`
        """Turned round."""
        return x.flip(dim)


@dataclass(frozen=True)
class Mapped:
    """Row j is row `source(j)`, which is never far from row j - offset."""

    n: int
    offset: int
    source: Callable[[int], int]

    def bound(self, bound: int) -> int:
        """Where the row went."""
        return bound + self.offset

    def needs(self, rows: Range) -> Segments:
        """From the first to the last one needed."""
        found = [self.source(j) for j in range(*rows)]
        return ((min(found), max(found) + 1),) if found else ((0, 0),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """One by one, where they are not in order already."""
        ((first, _),) = self.needs(rows)
        return take(x, dim, [self.source(j) - first for j in range(*rows)])


@dataclass(frozen=True)
class Repeated:
    """Row j is row j // times."""

    n: int
    times: int

    def bound(self, bound: int) -> int:
        """Where the row went."""
        return bound * self.times

    def needs(self, rows: Range) -> Segments:
        """Each row once."""
        return ((rows[0] // self.times, -(-rows[1] // self.times)),)

    def take(self, x: Tensor, dim: int, rows: Range) -> Tensor:
        """Several times, those cut off that are too many."""
        skipped = rows[0] % self.times
        return x.repeat_interleave(self.times, dim).narrow(dim, skipped, rows[1] - rows[0])


def take(x: Tensor, dim: int, rows: Sequence[int]) -> Tensor:
    """Rows of `x` along `dim`."""
    if list(rows) == list(range(x.shape[dim])):
        return x
    return x.index_select(dim, torch.tensor(rows, device=x.device, dtype=torch.long))


def placed(given: Spread, shape: tuple[int, ...], lines: Mapping[int, Line]) -> Spread:
    """How a result of `shape` lies: as the operand, bounds mapped by `lines`; whole along a dim of which some
    part would have nothing.
    """
    made = Spread(shape, given.cuts)
    for dim, line in lines.items():
        cut = given.cuts[dim]
        if cut is not None:
            mapped = follow(cut, line.n, line.bound)
            made = made.with_cut(dim, None if mapped.empty else mapped)
    return made.tight()


def lowered(
    op: Operation,
    lines: Mapping[int, Line],
    rest: Callable[[Tensor], Tensor],
    fill: float = 0.0,
) -> Local:
    """`lines` along the dims that are cut, then `rest`, which does the other dims.

    Operands behind the first one are taken as they are.
    """
    given, made, here = op.given[0], op.made[0], op.here
    held = made.held(here.grid, here.rank)
    wants: list[Want] = []
    for dim, (n, cut) in enumerate(zip(given.shape, made.cuts, strict=True)):
        line = lines.get(dim)
        if line is None or given.cuts[dim] is None:
            wants.append(want_of(n, cut))
        elif cut is None:
            wants.append(Want((), (line.needs((0, line.n)),)))
        else:
            wants.append(Want(cut.axes, tuple(map(line.needs, cut.held))))
    mine = {dim: line for dim, line in lines.items() if given.cuts[dim] is not None}

    def run(_moment: Moment, operands: Sequence[Tensor]) -> Tensor:
        x = operands[0]
        for dim, line in mine.items():
            x = line.take(x, dim, held[dim])
        return rest(x)

    others = tuple(as_held(spread) for spread in op.given[1:])
    return Local((tuple(wants), *others), run, fills=(fill,))
