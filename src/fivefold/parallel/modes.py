"""Evaluation of nets: the mode of their modules, and the sums that scores are."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.errors import UsageError

__all__ = ["evaluating", "sums_of"]


@contextmanager
def evaluating(net: nn.Module) -> Generator[None]:
    """Within the block all modules are in evaluation mode; afterwards each is in its own again.

    By way of `train`, which modules override: to merge weights for evaluation, and part them again.
    """
    before = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        if any(before.values()):
            net.train()
        for module, training in before.items():
            module.training = training


def sums_of(sums: Any) -> Tensor:
    """What a score returned, which has to be sums (sums,), float64; else raises `UsageError`."""
    if not isinstance(sums, Tensor) or sums.dim() != 1 or sums.dtype != torch.float64:
        found = f"{sums.dtype} {tuple(sums.shape)}" if isinstance(sums, Tensor) else repr(sums)
        raise UsageError(
            f"score returned {found}: it has to return the sums of a batch, a tensor of one dim, float64"
        )
    return sums
