"""Padding of all kinds, cropping by negative padding, roll and flip."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.rule import Local, Operation, rule
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.tiles.lines import (
    Circular,
    Flipped,
    Line,
    Mapped,
    Shifted,
    lowered,
    placed,
)

__all__ = ["Flip", "Pad", "Roll"]


def _reflected(n: int, before: int, row: int) -> int:
    row = abs(row - before)
    return row if row < n else 2 * (n - 1) - row


def _replicated(n: int, before: int, row: int) -> int:
    return min(max(row - before, 0), n - 1)


def _padded(mode: str, n: int, before: int, behind: int) -> Line:
    """A dim of `n` rows, padded at both ends."""
    rows = n + before + behind
    if mode == "constant":
        return Shifted(rows, before)
    if mode == "circular":
        return Circular(rows, n, before)
    source = _reflected if mode == "reflect" else _replicated
    return Mapped(rows, before, functools.partial(source, n, before))


@rule("pad", "constant_pad_nd")
class Pad:
    """`F.pad` in every mode; a negative number crops."""

    def _options(self, node: Node) -> tuple[list[int], str, float]:
        """Padding (before and behind the last dim, then the one before it), mode, value."""
        names = (
            ("input", "pad", "value") if node.name != "pad" else ("input", "pad", "mode", "value")
        )
        a = node.bound(names)
        return [int(n) for n in a["pad"]], a.get("mode", "constant"), float(a.get("value") or 0)

    def _lines(self, op: Operation) -> dict[int, Line]:
        pads, mode, _ = self._options(op.node)
        shape = op.node.shapes[0]
        return {
            len(shape) - 1 - index: _padded(
                mode, shape[len(shape) - 1 - index], pads[2 * index], pads[2 * index + 1]
            )
            for index in range(len(pads) // 2)
        }

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """The borders belong to the tiles at the border."""
        return [placed(op.given[0], op.node.output_shapes[0], self._lines(op))]

    def lower(self, op: Operation) -> Local:
        """Along the dims that are cut, padding is part of what is wanted."""
        pads, mode, value = self._options(op.node)
        dims = len(op.node.shapes[0])
        for dim in op.given[0].cut_dims:
            index = dims - 1 - dim
            if 2 * index < len(pads):
                pads[2 * index : 2 * index + 2] = [0, 0]

        def rest(x: Tensor) -> Tensor:
            if not any(pads):
                return x
            return F.pad(x, pads, mode, value) if mode == "constant" else F.pad(x, pads, mode)

        return lowered(op, self._lines(op), rest, fill=value)


def _dims(value: Any, rank: int) -> list[int]:
    values = value if isinstance(value, Sequence) else (value,)
    return [int(dim) % rank for dim in values]


@rule("roll")
class Roll:
    """Rows that leave at one end come in at the other. Bounds stay."""

    def _shifts(self, node: Node) -> dict[int, int] | None:
        """How far along every dim; None if the image is rolled as one long line."""
        a = node.bound(("input", "shifts", "dims"))
        shape, shifts, dims = node.shapes[0], a["shifts"], a.get("dims")
        if dims is None or dims == ():
            return (
                {0: int(shifts if isinstance(shifts, int) else shifts[0])}
                if len(shape) == 1
                else None
            )
        found: dict[int, int] = {}
        shifts = shifts if isinstance(shifts, Sequence) else (shifts,)
        for dim, shift in zip(_dims(dims, len(shape)), shifts, strict=True):
            found[dim] = (found.get(dim, 0) + int(shift)) % max(shape[dim], 1)
        return found

    def _lines(self, op: Operation, shifts: dict[int, int]) -> dict[int, Line]:
        shape = op.node.shapes[0]
        return {dim: Circular(shape[dim], shape[dim], s, stays=True) for dim, s in shifts.items()}

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand."""
        return None if self._shifts(op.node) is None else [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """Every part wants the rows that come to it."""
        shifts = self._shifts(op.node)
        assert shifts is not None
        uncut = {dim: s for dim, s in shifts.items() if op.given[0].cuts[dim] is None and s}

        def rest(x: Tensor) -> Tensor:
            return torch.roll(x, tuple(uncut.values()), tuple(uncut)) if uncut else x

        return lowered(op, self._lines(op, shifts), rest)


@rule("flip", "fliplr", "flipud")
class Flip:
    """Rows in the other order. Bounds stay."""

    def _dims(self, node: Node) -> list[int]:
        if node.name != "flip":
            return [1 if node.name == "fliplr" else 0]
        values = node.args[1:] or (node.kwargs["dims"],)
        return _dims(values[0] if isinstance(values[0], Sequence) else values, len(node.shapes[0]))

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand."""
        return [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """Every part wants the rows at the other end."""
        dims, shape = self._dims(op.node), op.node.shapes[0]
        lines = {dim: Flipped(shape[dim]) for dim in dims}
        uncut = [dim for dim in dims if op.given[0].cuts[dim] is None]
        return lowered(op, lines, lambda x: x.flip(uncut) if uncut else x)
