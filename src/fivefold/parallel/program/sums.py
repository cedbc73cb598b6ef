"""Sums and extremes over tiles, and what they give back.

A result that is whole on several ranks is used by each of them for its own tile, so each has a part of its
gradient. The adjoint of "sum, and give the sum to all" is therefore the same once more:

    forward    s = x_0 + x_1 + x_2      on every rank
    backward   g = g_0 + g_1 + g_2      on every rank, and dx_r = g
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold import comm
from fivefold.parallel.asked import Extreme, Shared, Sum, TurnGroup
from fivefold.trace import Tag

__all__ = ["all_extreme", "all_sum", "complete_gradient", "shared_gradient"]


def all_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the ranks' `x` (*s), on every rank; differentiable. Collective, in backward too."""
    if group.size() == 1:
        return x
    if isinstance(group, TurnGroup):
        return group.ask(Sum(), lambda: x, trains=x.requires_grad)
    return cast(Tensor, _AllSum.apply(x, group))


def all_extreme(
    x: Tensor, dims: tuple[int, ...], largest: bool, group: dist.ProcessGroup
) -> Tensor:
    """`torch.amax(x, dims, keepdim=True)` over the tensor whose parts along `dims` the ranks have; or `amin`.

    What is tied for the extreme shares its gradient evenly, wherever it lies, as torch has it. Collective, in
    backward too.
    """
    if isinstance(group, TurnGroup):
        return _extreme_of_turns(x, dims, largest, group)
    return cast(Tensor, _AllExtreme.apply(x, dims, largest, group))


def complete_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have; in backward each gets the sum of their gradients. Collective there."""
    return cast(Tensor, _Completed.apply(x, group)) if x.requires_grad else x


def shared_gradient(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`x`, which all ranks have; the gradient of each, the same on all, becomes its share of it."""
    return cast(Tensor, _Shared.apply(x, group.size())) if x.requires_grad else x


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        return grads[0] / ctx.ranks, None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(torch.view_as_real(total) if x.is_complex() else total, group, Tag.HALO)
    return total


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        return _summed(grads[0], ctx.group), None


class _Completed(_AllSum):
    """Backward as there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)


def _own_extreme(x: Tensor, dims: tuple[int, ...], largest: bool) -> Tensor:
    return x.amax(dims, True) if largest else x.amin(dims, True)


def _extreme_of_turns(x: Tensor, dims: tuple[int, ...], largest: bool, group: TurnGroup) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)  # half precision cannot count

    def own() -> Tensor:
        return _own_extreme(x.detach(), dims, largest)

    found = group.ask(Extreme(largest), own, trains=False)
    if not x.requires_grad:
        return found
    ties = group.ask(
        Sum(), lambda: (x.detach() == found).sum(dims, keepdim=True).to(wide), trains=False
    )
    return group.ask(Shared(), lambda: cast(Tensor, _Tied.apply(x, found, ties)), trains=True)


class _Tied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, found: Tensor, ties: Tensor) -> Tensor:
        ctx.save_for_backward(x, found, ties)
        return found.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        x, found, ties = ctx.saved_tensors
        return (x == found) * (grads[0] / ties).to(grads[0].dtype), None, None


class _AllExtreme(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dims: tuple[int, ...], largest: bool, group: dist.ProcessGroup
    ) -> Tensor:
        own = _own_extreme(x, dims, largest)
        every = comm.all_gather(own, group, Tag.HALO)
        found = every.amax(0) if largest else every.amin(0)
        ctx.save_for_backward(x, found)
        ctx.dims, ctx.group = dims, group
        return found

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, found = ctx.saved_tensors
        tied = x == found
        ties = tied.sum(ctx.dims, keepdim=True)
        wide = torch.promote_types(grad.dtype, torch.float32)  # half precision cannot count
        total, count = _summed(torch.stack([grad.to(wide), ties.to(wide)]), ctx.group)
        return tied * (total / count).to(grad.dtype), None, None, None
