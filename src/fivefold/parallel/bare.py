"""What a bare `loss.backward()`, outside of `step`, does with what `model(x)` returned.

Replicas average gradients, as users of DistributedDataParallel expect. That is the gradient of a mean over
samples if every replica counts as much as it has samples of the batch, which the gradients that come back
to the outputs are weighed with:

    mean over replicas of (rows here * replicas / rows of all) * gradient here

In tiles and stages a rank's outputs are a part of the net's, of which no loss of one rank can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.trees import leaves, map_tensors

__all__ = ["refused", "weighed"]


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


def weighed(outputs: Any, weight: Callable[[], float]) -> Any:
    """The outputs of a net, to which gradients come back times `weight()`."""

    def weigh(leaf: Tensor) -> Tensor:
        return _Weighed.apply(leaf, weight) if leaf.requires_grad else leaf  # pyright: ignore[reportReturnType]

    return map_tensors(weigh, outputs)


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], float]) -> Tensor:
        ctx.weight = weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.weight(), None
