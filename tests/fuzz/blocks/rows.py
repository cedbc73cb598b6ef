"""Rows that meet: what a sample becomes depends on the others, or on how many there are."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, register

MEETINGS = (
    "centred", "softmax", "contrast", "sorted", "cumulated", "flipped", "rolled", "deviation", "largest",
    "selected", "paired", "count", "count_branch", "count_range", "whitened",
)  # fmt: skip
APART = ("loop", "unbind", "split", "nested_loop", "mapped")


@register
class Meeting(Block):
    often = 3.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.gain = nn.Parameter(torch.tensor([0.8]))

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, f"_{self.how}")(x * self.gain)

    def _centred(self, y: Tensor) -> Tensor:
        return y - y.mean(0)

    def _softmax(self, y: Tensor) -> Tensor:
        return y + torch.softmax(y, 0)

    def _contrast(self, y: Tensor) -> Tensor:
        flat = y.flatten(1)
        return y + (torch.softmax(flat @ flat.t(), 1) @ flat).view_as(y)

    def _sorted(self, y: Tensor) -> Tensor:
        return y + y.sort(0).values

    def _cumulated(self, y: Tensor) -> Tensor:
        return y.cumsum(0)

    def _flipped(self, y: Tensor) -> Tensor:
        return y + 0.5 * y.flip(0)

    def _rolled(self, y: Tensor) -> Tensor:
        return 0.7 * y + 0.3 * y.roll(1, 0)

    def _deviation(self, y: Tensor) -> Tensor:
        return y + (y.var(0, unbiased=False) + 1e-3).sqrt().mean()

    def _largest(self, y: Tensor) -> Tensor:
        return y / (y.abs().amax() + 0.1)

    def _selected(self, y: Tensor) -> Tensor:
        chosen = y[y.flatten(1)[:, 0] > 0]
        return y + (chosen.sum(0) / max(len(chosen), 1))

    def _paired(self, y: Tensor) -> Tensor:
        return y + (y.unsqueeze(1) - y.unsqueeze(0)).tanh().sum(1)

    def _count(self, y: Tensor) -> Tensor:
        return y / y.shape[0]

    def _count_branch(self, y: Tensor) -> Tensor:
        return y * 2.0 if len(y) > 2 else y.tanh()

    def _count_range(self, y: Tensor) -> Tensor:
        rows = torch.arange(y.shape[0]).to(y.dtype)
        return y * (1.0 + rows.view(-1, *[1] * (y.dim() - 1)))

    def _whitened(self, y: Tensor) -> Tensor:
        return (y - y.mean(0)) / (y.std(0, unbiased=False) + 0.1)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(MEETINGS)}


@register
class Apart(Block):
    """Rows that are taken apart and put together again, without meeting."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.gain = nn.Parameter(torch.tensor([0.8]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain
        if self.how == "loop":
            return torch.stack([row.tanh() for row in y])
        if self.how == "unbind":
            return torch.stack([row / (1.0 + row.abs().max()) for row in y.unbind(0)])
        if self.how == "split":
            return torch.cat([part * 2.0 for part in y.split(1)])
        if self.how == "mapped":
            return torch.vmap(lambda row: row - row.mean())(y)
        return torch.cat([torch.stack([y[i]]) for i in range(y.shape[0])])

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(APART)}
