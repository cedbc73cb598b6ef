"""Calls that change their first operand, as the net made them, where nobody else sees it.

A recorded call makes a new value, so a `relu_` becomes a `relu`. Where the value that it reads is read by
nothing else, and was made here in memory of its own, the call is carried out as it was recorded: what is
in the cache is written once, and no memory is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fivefold.parallel.graph.names import asks_in_place
from fivefold.parallel.graph.refs import Slot, Value
from fivefold.parallel.graph.tape import Node, Tape

__all__ = ["as_recorded", "changes_its_operand", "may_change"]

_MAKE_NEW = frozenset({
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "linear",
    "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "batch_norm", "add", "sub",
})  # fmt: skip
"""What makes memory of its own, and needs of its results nothing for its backward."""


def changes_its_operand(node: Node) -> bool:
    """Whether the net made this call in place, on an operand of the result's shape."""
    if len(node.outputs) != 1 or node.args[:1] != (Slot(0),):
        return False
    same = node.shapes[0] == node.output_shapes[0]
    return same and asks_in_place(node.function, node.args, node.kwargs)


def may_change(tape: Tape, node: Node, maker: Node | None) -> bool:
    """Whether `node` may change its first operand, a value that `maker` made on the same rank."""
    source = node.operands[0]
    return (
        maker is not None
        and maker.name in _MAKE_NEW
        and isinstance(source, Value)
        and source.index in maker.outputs
        and tape.uses[source.index] == 1
        and tape.dtypes[source.index] == tape.dtypes[node.outputs[0]]
        and maker.grad == node.grad
    )


def as_recorded(node: Node, operands: Sequence[Tensor]) -> Any:
    """Call what the net called."""
    args, kwargs = node.arguments(operands)
    return node.function(*args, **kwargs)
