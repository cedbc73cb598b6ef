"""Indexing every row by itself, as nets write it with the numbers of the rows.

    x[torch.arange(len(x)), last]                      x' = ByRow(x, last)
    rows = torch.arange(n)[:, None]; x[rows, columns]  the same, where rows has as many as x

Numbers of rows are those of the whole batch, so whoever has a part of it would need to know which part. What
is meant is that rows stay where they are, which needs no numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.parallel.graph.refs import Slot, Value
from fivefold.parallel.graph.tape import Node

__all__ = ["ByRow", "by_row"]

_SAME_ORDER = frozenset({
    "unsqueeze", "view", "reshape", "to", "long", "clone", "contiguous", "detach", "__getitem__",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ByRow:
    """`x[rows, *others]` for the numbers of the rows of `x` in the shape `rows`, one dim of which is -1."""

    rows: tuple[int, ...]

    def __call__(self, x: Tensor, *others: Tensor) -> Tensor:
        """What `x` has at these places of every row."""
        numbers = torch.arange(len(x), device=x.device).view(self.rows)
        return x[(numbers, *others)]


def by_row(nodes: Sequence[Node]) -> list[Node]:
    """The same nodes, with `ByRow` for those that index by the numbers of all rows."""
    counts: dict[int, int] = {}
    made: list[Node] = []
    for node in nodes:
        if (count := _counted(node, counts)) is not None:
            counts[node.outputs[0]] = count
        made.append(_of_rows(node, counts))
    return made


def _counted(node: Node, counts: dict[int, int]) -> int | None:
    """n, if a node makes the numbers from 0 to n - 1 in their order, along one dim; None otherwise."""
    if len(node.outputs) != 1:
        return None
    if node.name == "arange":
        options = {"dtype", "device", "layout", "pin_memory", "requires_grad"}
        numbers = [leaf for leaf in node.args if type(leaf) is int]
        plain = len(numbers) == len(node.args) and node.kwargs.keys() <= options
        if not plain or node.kwargs.get("dtype") not in (None, torch.int64):
            return None
        return {1: numbers[-1], 2: numbers[-1] if not numbers[0] else None}.get(len(numbers))
    first = node.operands[0] if len(node.operands) == 1 else None
    count = counts.get(first.index) if isinstance(first, Value) else None
    if count is None or node.name not in _SAME_ORDER or node.kwargs:
        return None
    if node.name == "__getitem__" and not all(
        entry is None or entry is Ellipsis or entry == slice(None) for entry in _entries(node)
    ):
        return None
    if any(isinstance(leaf, torch.dtype) and leaf != torch.int64 for leaf in node.args):
        return None
    long = [n for n in node.output_shapes[0] if n != 1]
    return count if long == [count] * (count != 1) else None


def _entries(node: Node) -> tuple[Any, ...]:
    index = node.args[1]
    return index if isinstance(index, tuple) else (index,)


def _of_rows(node: Node, counts: dict[int, int]) -> Node:
    """`ByRow`, if a node indexes by tensors of which the first are the numbers of all rows."""
    if node.name != "__getitem__" or len(node.operands) < 2 or node.kwargs:
        return node
    entries = _entries(node)
    if not all(isinstance(leaf, Slot) for leaf in (node.args[0], *entries)):
        return node
    numbers = node.operands[entries[0].index]
    shape = node.shapes[entries[0].index]
    rows = node.shapes[node.args[0].index][0]
    if not isinstance(numbers, Value) or counts.get(numbers.index) != rows:
        return node
    along = shape.index(rows)
    kept = [node.args[0].index, *(leaf.index for leaf in entries[1:])]
    return dataclasses.replace(
        node,
        function=ByRow(tuple(-1 if dim == along else 1 for dim in range(len(shape)))),
        name="by_row",
        args=tuple(map(Slot, range(len(kept)))),
        operands=tuple(node.operands[index] for index in kept),
        shapes=tuple(node.shapes[index] for index in kept),
    )
