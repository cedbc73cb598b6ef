"""Hooks that a forward registers on tensors, as nodes right behind what makes these tensors.

y = conv(x);  y.register_hook(h)         y  = conv(x)
z = y + 1                                y' = hooked(y)      forward: y;  backward: h of the gradient
                                         z  = y' + 1
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fivefold.parallel.graph.refs import Ref, Slot, Value
from fivefold.parallel.graph.tape import Node

if TYPE_CHECKING:
    from fivefold.parallel.graph.recorder import CallRecorder

__all__ = ["Hooked", "hooked"]


class Hooked:
    """Hooks of one tensor, called one after the other on its complete gradient."""

    def __init__(self, hooks: list[Callable[[Tensor], Tensor | None]]) -> None:
        self.hooks = hooks

    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient that goes on."""
        for hook in self.hooks:
            found = hook(gradient)
            gradient = gradient if found is None else found
        return gradient


def hooked(recorder: CallRecorder) -> tuple[list[Node], Callable[[Ref], Ref]]:
    """The recorder's nodes with those of hooks between them, and what values are called behind them."""
    hooks: dict[int, list[Any]] = {}
    for one in recorder.hooks:
        if one.there():
            hooks.setdefault(one.value, []).append(one.hook)
    if not hooks:
        return recorder.nodes, lambda ref: ref
    new: dict[int, int] = {}
    for value in hooks:
        new[value] = len(recorder.shapes)
        recorder.shapes[new[value]] = recorder.shapes[value]
        recorder.dtypes[new[value]] = recorder.dtypes[value]

    def rename(ref: Ref) -> Ref:
        return Value(new.get(ref.index, ref.index)) if isinstance(ref, Value) else ref

    def node(value: int, like: Node | None) -> Node:
        shape = recorder.shapes[value]
        return Node(
            function=Hooked(hooks[value]), name="hooked", args=(Slot(0),), kwargs={},
            operands=(Value(value),),
            shapes=(shape,), outputs=(new[value],), output_shapes=(shape,),
            output_bytes=recorder.dtypes[value].itemsize, scope="" if like is None else like.scope,
            call=value, draw=0, grad=True, line="" if like is None else like.line,
        )  # fmt: skip

    nodes = [node(value, None) for value in recorder.inputs if value in hooks]
    for one in recorder.nodes:
        nodes.append(replace(one, operands=tuple(map(rename, one.operands))))
        nodes.extend(node(value, one) for value in one.outputs if value in hooks)
    return nodes, rename
