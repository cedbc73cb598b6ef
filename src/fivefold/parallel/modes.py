"""Training and evaluation mode of nets."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn

__all__ = ["evaluating"]


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
