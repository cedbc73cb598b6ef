"""Tensors that all ranks of a group see, where its backend has such."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from fivefold.comm.shared_group import SharedGroup

__all__ = ["shared_zeros"]


def shared_zeros(count: int, like: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Zeros (count,) of the dtype and device of `like`.

    In memory that the ranks of `group` share, if they do: collectives of it then need no copies. Ask for the
    same count on every rank.
    """
    if like.device.type == "cpu" and isinstance(group, SharedGroup):
        return group.allocate_tensor(count, dtype=like.dtype).zero_()
    return like.new_zeros(count)
