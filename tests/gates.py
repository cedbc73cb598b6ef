"""A net whose parts may stay unused, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Gate", "X", "Y", "chosen"]

torch.manual_seed(8)
X, Y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)


class Gate(nn.Module):
    """Which of its parts are used depends on the samples, or on what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 3).double() for _ in range(3))
        self.use: Callable[[Tensor], str] = lambda _x: "ab"

    def forward(self, x: Tensor) -> Tensor:
        return sum((getattr(self, name)(x) for name in self.use(x)), x.new_zeros(len(x), 3))


def chosen(use: str) -> Callable[[Tensor], str]:
    """As if by the samples: what depends on their numbers is not recorded, so ranks cannot compare it."""
    return lambda x: use if x.isfinite().all() else ""
