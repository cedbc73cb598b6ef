"""Gradient clipping over the whole mesh."""

from __future__ import annotations

import torch
from torch import Tensor

from fivefold.parallel.model import ParallelModel

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(model: ParallelModel, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale the gradients so that their joint norm is at most `max_norm`; returns the norm before.

    Call it on every rank, after `model.step` and before the optimiser. Gradients are complete when `step`
    returns, so on the data axis every rank computes the same norm and nothing is communicated.
    """
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
