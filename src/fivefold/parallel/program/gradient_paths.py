"""Gradients of what is compiled are None where one process has None, not zero.

A compiled graph takes gradients of all of its outputs, and zeros for those that the loss does not use. Then a
parameter that has no part in the loss would get a gradient of zeros, by which optimisers decay it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["around"]

Run = Callable[..., Sequence[Tensor]]
Reached = Sequence[Sequence[bool]]
"""by output that has a gradient: which of the inputs that have one it depends on"""


def around(run: Run, reached: Reached) -> Run:
    """`run`, which gives no gradient to inputs that are not reached from outputs that are used."""

    def wrapped(*inputs: Tensor) -> Sequence[Tensor]:
        used: list[bool] = []
        given = [*inputs]
        trained = [n for n, tensor in enumerate(given) if tensor.requires_grad]
        entered = _Enter.apply(used, reached, *(given[n] for n in trained))
        for n, tensor in zip(trained, entered, strict=True):
            given[n] = tensor
        made = [*run(*given)]
        differentiable = [n for n, tensor in enumerate(made) if tensor.requires_grad]
        left = _Leave.apply(used, *(made[n] for n in differentiable))
        for n, tensor in zip(differentiable, left, strict=True):
            made[n] = tensor
        return made

    return wrapped


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, used: list[bool], reached: Reached, *inputs: Tensor) -> Any:
        ctx.used, ctx.reached = used, reached
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        paths = [row for row, used in zip(ctx.reached, ctx.used, strict=True) if used]
        kept = (g if any(row[n] for row in paths) else None for n, g in enumerate(grads))
        return (None, None, *kept)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, used: list[bool], *outputs: Tensor) -> Any:
        ctx.used = used
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        ctx.used[:] = [grad is not None for grad in grads]
        return (None, *grads)
