"""Gradient clipping over the whole mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.parallel.model import ParallelModel
from fivefold.parallel.sharded import joint_norm, local
from fivefold.torch_private import is_dtensor

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Call it on every rank, after `model.step` and before the optimiser. Gradients are complete when `step`
    returns, so on the data axis every rank computes the same norm and nothing is communicated; on the pipe
    axis each rank knows its own stages', and where replicas divide parameters (`memory.shard`) its own parts,
    and they tell each other.
    """
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    parts = [local(grad) for grad in grads]
    if model.stages is not None:
        total = model.stages.norm(norm_type)
    elif grads and is_dtensor(grads[0]):
        data = grads[0].device_mesh.get_group("data")
        total = joint_norm(parts, norm_type, data, parts[0].device)
    else:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    _scale(parts, max_norm, total)
    return total


def _scale(grads: list[Tensor], max_norm: float, total: Tensor) -> None:
    """Scale as `torch.nn.utils.clip_grads_with_norm_` does, which takes no parts of tensors."""
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor.to(grad))
