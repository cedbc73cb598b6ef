"""Gradient clipping over the whole mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.parallel.model import ParallelModel

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Call it on every rank, after `model.step` and before the optimiser. Gradients are complete when `step`
    returns, so on the data axis every rank computes the same norm and nothing is communicated; on the pipe
    axis each rank knows its own stages', and they tell each other.
    """
    if model.stages is not None:
        total = model.stages.norm(norm_type)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, total)
        return total
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
