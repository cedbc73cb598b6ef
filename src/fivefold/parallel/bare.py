"""What a bare `loss.backward()`, outside of `step`, does with what `model(x)` returned.

Replicas average gradients, as users of DistributedDataParallel expect. That is the gradient of a mean over
samples if every replica counts as much as it has samples of the batch, which the gradients that come back
to the outputs are weighed with:

    mean over replicas of (rows here * replicas / rows of all) * gradient here

`torch.autograd.grad` of inputs alone gives each sample's own, unweighed. What is made of them, a penalty,
is a mean over samples again, so what comes back to them is weighed. Of parameters it would give this rank's.

In tiles and stages a rank's outputs are a part of the net's, of which no loss of one rank can be made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.torch_private import is_reached

__all__ = ["entered", "refused", "weighed"]

_Weight = Callable[[], float]


def refused(outputs: Any, why: str) -> Any:
    """The outputs of a net, from which backward raises `UsageError`. Those without a graph begin one."""

    def refuse(_gradient: Tensor) -> NoReturn:
        raise UsageError(f"loss.backward() outside of model.step: {why}. Use model.step(x, y)")

    for leaf in leaves(outputs) if torch.is_grad_enabled() else ():
        if leaf.grad_fn is None and (leaf.is_floating_point() or leaf.is_complex()):
            leaf.requires_grad_()
        if leaf.requires_grad:
            leaf.register_hook(refuse)
    return outputs


def weighed(outputs: Any, weight: _Weight, trained: Sequence[Tensor]) -> Any:
    """The outputs of a net, to which gradients come back times `weight()`; `trained` are its parameters.

    `torch.autograd.grad` of one of these raises `UsageError`.
    """
    always = torch.zeros((), requires_grad=True)

    def weigh(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        return _Weighed.apply(leaf, always, weight, trained)  # pyright: ignore[reportReturnType]

    return map_tensors(weigh, outputs)


def entered(inputs: Any, weight: _Weight) -> Any:
    """The inputs of a net; what is made of their gradients gets its own times `weight()`."""

    def weigh(gradient: Tensor) -> Tensor | None:
        return _Times.apply(gradient, weight) if torch.is_grad_enabled() else None  # pyright: ignore[reportReturnType]

    def enter(leaf: Tensor) -> Tensor:
        if not leaf.requires_grad:
            return leaf
        view = leaf.view_as(leaf)  # its own: the same tensor may be given again
        view.register_hook(weigh)
        return view

    return map_tensors(enter, inputs)


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, always: Tensor, weight: _Weight, trained: Sequence[Tensor]
    ) -> Tensor:
        ctx.always, ctx.weight, ctx.trained = always, weight, trained
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        try:
            adds = is_reached(ctx.always) or any(map(is_reached, ctx.trained))
        except ValueError:
            raise UsageError(
                "torch.autograd.grad outside of model.step would give the gradients of parameters for this "
                "rank's samples alone: use model.step(x, y), or loss.backward() and p.grad"
            ) from None
        return grads[0] * ctx.weight() if adds else grads[0], None, None, None


class _Times(torch.autograd.Function):
    """The same number, whose gradient is weighed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: _Weight) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.weight(), None
