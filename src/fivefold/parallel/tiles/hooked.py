"""Hooks on tensors within a net: called on the complete gradient, whatever part of it a rank has.

backward   own part of the gradient ── summed over ranks that hold the same ── gathered ──► hook ──► own part
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.parallel.graph.hooks import Hooked
from fivefold.parallel.program.exchange import Exchange, Lines, exchange
from fivefold.parallel.program.rule import Local, Moment, Operation, as_held, everything, rule
from fivefold.parallel.program.spread import Spread
from fivefold.trace import Tag

__all__ = ["HookedTensor"]


@rule("hooked")
class HookedTensor:
    """Forward: nothing. Backward: the hooks."""

    def place(self, op: Operation) -> Sequence[Spread] | None:
        """As the operand, without margins: of what lies there, the gradient would be another rank's."""
        return [op.given[0].tight()]

    def lower(self, op: Operation) -> Local:
        """All ranks call the hooks on the same tensor."""
        made, here = op.made[0].tight(), op.here
        whole = Exchange.of(made, everything(made.shape), here.grid, here.rank)
        axes = tuple(range(len(here.grid.axes)))
        others = tuple(axis for axis in axes if axis not in made.axes)
        box = tuple(slice(*r) for r in made.owned(here.grid, here.rank))
        hooks = cast(Hooked, op.node.function)

        def run(moment: Moment, operands: Sequence[Tensor]) -> Tensor:
            alike = moment.groups(others, False)
            return cast(Tensor, _Hooked.apply(operands[0], hooks, whole, moment.lines, alike, box))

        return Local((as_held(made),), run, collective="gradients for a hook", tight=True)


class _Hooked(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        x: Tensor,
        hooks: Hooked,
        whole: Exchange,
        lines: Lines,
        alike: dist.ProcessGroup,
        box: tuple[slice, ...],
    ) -> Tensor:
        ctx.hooks, ctx.whole, ctx.lines, ctx.alike, ctx.box = hooks, whole, lines, alike, box
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        own = grads[0].contiguous()
        if ctx.alike.size() > 1:
            own = comm.all_reduce(own.clone(), ctx.alike, Tag.HALO)
        complete = exchange(own, ctx.whole, ctx.lines)
        found = ctx.hooks(complete)[ctx.box]
        return found / ctx.alike.size(), *(None,) * 5
