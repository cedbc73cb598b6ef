"""Gradients of weights that are computed later than those of inputs.

In a zero-bubble schedule, I computes what the stage before waits for, and W the rest. Convolutions and linear
layers, where the time goes, are therefore recorded on their own: backward asks them for the gradient of
their input and leaves that of the weights to a list.

    forward   y = conv(x, w)                with its own small graph
    I         dx = d<y, dy>/dx              and (graph, dy) is put aside
    W         dw = d<y, dy>/dw

Nothing is communicated in W: exchanges lie on the way to x, not to w.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.parallel.program.program import Compute
from fivefold.torch_private import base_of

__all__ = ["Deferred"]

_DEFERRED = ("conv", "linear")


class Deferred:
    """What W has to do for one stage and micro-batch."""

    def __init__(self) -> None:
        self._todo: list[tuple[GradientEdge, Tensor, list[nn.Parameter], list[Tensor]]] = []

    def __call__(
        self, step: Compute, run: Callable[[Sequence[Tensor]], Any], operands: Sequence[Tensor]
    ) -> Any:
        """Compute a step; a `Defer` for `carry_out`."""
        if not (operands and step.node.name.startswith(_DEFERRED)):
            return run(operands)
        trained = [t for t in operands[1:] if t.requires_grad]
        weights = [t for t in trained if isinstance(t, nn.Parameter)]
        waits = operands[0].requires_grad and not isinstance(operands[0], nn.Parameter)
        # A weight that is computed has a graph of its own, which backward has to go on into.
        if not (weights and waits and len(weights) == len(trained)):
            return run(operands)
        return _InputOnly.apply(operands[0], self, run, operands, weights)

    def put(
        self, y: GradientEdge, dy: Tensor, weights: list[nn.Parameter], own: list[Tensor]
    ) -> None:
        """Leave the gradients of `weights`, which stand as `own` in the graph of `y`, for later."""
        self._todo.append((y, dy, weights, own))

    def finish(self, *, counted: bool) -> None:
        """Compute what was left, and add it to the gradients of the parameters; zeros unless `counted`."""
        while self._todo:
            y, dy, weights, leaves = self._todo.pop()
            grads = torch.autograd.grad(y, leaves, dy)
            for parameter, found in zip(weights, grads, strict=True):
                # A view that is made here nobody else could change in place.
                own = found if base_of(found) is None else found.clone()
                grad = own if counted else torch.zeros_like(own)
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _InputOnly(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        x: Tensor,
        deferred: Deferred,
        run: Callable[[Sequence[Tensor]], Tensor],
        operands: Sequence[Tensor],
        weights: list[nn.Parameter],
    ) -> Tensor:
        own_x = x.detach().requires_grad_()
        own = {id(w): w.detach().requires_grad_() for w in weights}
        with torch.enable_grad():
            y = run([own_x, *(own.get(id(t), t) for t in operands[1:])])
        # Of y only its graph: the numbers may go when nobody else wants them.
        ctx.kept = deferred, own_x, get_gradient_edge(y), weights, [own[id(w)] for w in weights]
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        deferred, x, y, weights, own = ctx.kept
        ctx.kept = None
        (dx,) = torch.autograd.grad(y, x, grads[0], retain_graph=True)
        deferred.put(y, grads[0], weights, own)
        return dx, *(None,) * 4
