"""What a bare `loss.backward()`, outside of `step`, does with what `model(x)` returned.

Replicas average gradients, as users of DistributedDataParallel expect. That is the gradient of a mean over
samples if every replica counts as much as it has samples of the batch, which the gradients that come back
to the outputs are weighed with:

    mean over replicas of (rows here * replicas / rows of all) * gradient here

Behind the inputs gradients are unweighed again: another model may have made them, which weighs them itself.

`torch.autograd.grad` of inputs alone gives each sample's own, unweighed. What is made of them, a penalty,
is a mean over samples again, so what comes back to them is weighed. Of parameters it would give this rank's.

In tiles and stages a rank's outputs are a part of the net's, of which no loss of one rank can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError
from fivefold.parallel.trees import leaves, map_tensors
from fivefold.torch_private import is_reached

__all__ = ["Weighing", "refused"]


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


class Weighing:
    """One call of a net: gradients within it are weighed, with `weight()`."""

    def __init__(self, weight: Callable[[], float], net: nn.Module) -> None:
        self.weight, self._net = weight, net
        self.always = torch.zeros((), requires_grad=True)
        """a leaf that every `loss.backward()` through the outputs reaches"""

    def entered(self, inputs: Any) -> Any:
        """The inputs of the net; what is made of their gradients gets its own times `weight()`."""

        def leave(gradient: Tensor) -> Tensor:
            gradient = gradient / self.weight() if self.adds() else gradient
            return _Times.apply(gradient, self.weight) if torch.is_grad_enabled() else gradient  # pyright: ignore[reportReturnType]

        def enter(leaf: Tensor) -> Tensor:
            if not leaf.requires_grad:
                return leaf
            view = leaf.view_as(leaf)  # its own: the same tensor may be given again
            view.register_hook(leave)
            return view

        return map_tensors(enter, inputs)

    def left(self, outputs: Any) -> Any:
        """The outputs of the net, to which gradients come back times `weight()`.

        `torch.autograd.grad` of one of its parameters raises `UsageError`.
        """

        def weigh(leaf: Tensor) -> Tensor:
            return _Weighed.apply(leaf, self.always, self) if leaf.requires_grad else leaf  # pyright: ignore[reportReturnType]

        return map_tensors(weigh, outputs)

    def adds(self) -> bool:
        """Whether the backward that runs now adds to gradients of parameters."""
        try:
            trained = (p for p in self._net.parameters() if p.requires_grad)
            return is_reached(self.always) or any(map(is_reached, trained))
        except ValueError:
            raise UsageError(
                "torch.autograd.grad outside of model.step would give the gradients of parameters for this "
                "rank's samples alone: use model.step(x, y), or loss.backward() and p.grad"
            ) from None


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _always: Tensor, of: Weighing) -> Tensor:
        ctx.of = of
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] * ctx.of.weight() if ctx.of.adds() else grads[0], None, None


class _Times(torch.autograd.Function):
    """The same number, whose gradient is weighed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Callable[[], float]) -> Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.weight(), None
