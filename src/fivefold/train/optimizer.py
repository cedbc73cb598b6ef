"""The optimiser that a plan asks for."""

from __future__ import annotations

import torch

from fivefold.parallel import ParallelModel
from fivefold.plan import Train

__all__ = ["optimizer_of"]


def optimizer_of(model: ParallelModel, t: Train) -> torch.optim.Optimizer:
    """For the parameters of a model, by the section `[train]`."""
    weights, rate, decay = model.parameters(), t.learning_rate, t.weight_decay
    if t.optimizer == "adam":
        betas = (t.momentum, 0.999)
        return torch.optim.Adam(weights, lr=rate, betas=betas, weight_decay=decay)
    return torch.optim.SGD(
        weights, lr=rate, momentum=t.momentum, weight_decay=decay, nesterov=t.momentum > 0
    )
