"""What a net does in place, as functions that leave their operands alone and return what became of them.

x[:, 2:5] = y            x' = assigned(x, y)                     x is read as x' from here on
x.view(-1).mul_(2)       v' = mul(view(x), 2)    x' = reshape(v')
torch._foreach_add_(..)  a', b' = Functional(_foreach_add_)(a, b)
with no_grad: x.mul_(2)  x' = renumbered(x, mul(x, 2))           other numbers, the gradient of x
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fivefold.parallel.graph.refs import filled
from fivefold.torch_private import pytree

__all__ = ["Functional", "assigned", "renumbered"]


def assigned(x: Tensor, index: Any, value: Any) -> Tensor:
    """`x` after `x[index] = value`."""
    changed = x.clone()
    changed[index] = value
    return changed


def renumbered(old: Tensor, new: Tensor) -> Tensor:
    """The numbers of `new` where autograd sees `old`: what `old.data.copy_(new)` or no_grad make of it."""
    return cast(Tensor, _Renumbered.apply(old, new))


class _Renumbered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG004 - see `renumbered`
        return new.detach().clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        return grads[0], None


class Functional:
    """A call that changes some of its operands: returns its other results, then what became of those.

    `placed` are args and kwargs with a `Slot` for every tensor; `written` are the slots that are changed.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        placed: tuple[tuple[Any, ...], dict[str, Any]],
        written: Sequence[int],
    ) -> None:
        self.function, self.placed = function, placed
        self.written = tuple(written)

    def __call__(self, *operands: Tensor) -> tuple[Tensor, ...]:
        """Compute on copies of what is changed."""
        own = list(operands)
        for slot in self.written:
            own[slot] = own[slot].clone()
        args, kwargs = filled(self.placed, own)
        changed = [own[slot] for slot in self.written]
        return (*self.others(self.function(*args, **kwargs), changed), *changed)

    @staticmethod
    def others(result: Any, changed: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a result that are none of `changed`."""
        flat = [leaf for leaf in pytree.tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        return [leaf for leaf in flat if all(leaf is not one for one in changed)]
