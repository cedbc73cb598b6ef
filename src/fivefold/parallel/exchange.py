"""Exchanges: linear operations on sharded tensors, each with its adjoint.

For an exchange F and any x, y: <F x, y> = <x, F* y>, summed over ranks. Autograd runs F* in backward, so
gradients cross ranks as exactly as values do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fivefold import comm
from fivefold.trace import Tag

__all__ = ["gather_rows", "row_counts"]


def gather_rows(rows: Tensor, counts: Sequence[int], group: dist.ProcessGroup, tag: Tag) -> Tensor:
    """The rows of all ranks, in rank order: (counts[rank], *s) -> (sum(counts), *s) on every rank.

    Backward adds what every rank does with a row and returns it to the row's owner. A value computed alike
    on all ranks must therefore enter the loss divided by the number of ranks, to count once.
    """
    if group.size() == 1:
        return rows
    return cast(Tensor, _GatherRows.apply(rows, tuple(counts), group, tag))


def row_counts(rows: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """How many rows each rank of `group` has, given one's own number."""
    mine = torch.tensor([rows], dtype=torch.int64, device=device)
    return comm.all_gather(mine, group, Tag.CONTROL).flatten().tolist()


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: tuple[int, ...], group: dist.ProcessGroup, tag: Tag
    ) -> Tensor:
        ctx.counts, ctx.group, ctx.tag = counts, group, tag
        padded = rows.new_zeros((max(counts), *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        blocks = comm.all_gather(padded, group, tag)
        return torch.cat([blocks[r, :n] for r, n in enumerate(counts)])

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        counts: tuple[int, ...] = ctx.counts
        blocks = grad.new_zeros((len(counts), max(counts), *grad.shape[1:]))
        for rank, part in enumerate(grad.split(list(counts))):
            blocks[rank, : part.shape[0]] = part
        own = comm.reduce_scatter(blocks, ctx.group, ctx.tag)
        return own[: counts[ctx.group.rank()]], None, None, None
