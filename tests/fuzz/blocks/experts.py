"""Mixtures of experts: rows that go different ways, experts that get none, losses on the side."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, register


@register
class Experts(Block):
    """Every row goes to the expert that its gate prefers; one that gets no row may not run at all."""

    kinds, often = ("vector", "tokens"), 2.0

    def __init__(self, shape: Shape, how: str, experts: int) -> None:
        super().__init__(shape)
        c = shape.channels
        self.gate = nn.Linear(c, experts)
        self.experts = nn.ModuleList([nn.Linear(c, c) for _ in range(experts)])
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares = self.gate(flat).softmax(-1)
        best, chosen = shares.max(-1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.how == "masked":
                made = made + expert(flat) * (chosen == number).unsqueeze(-1)
                continue
            rows = (chosen == number).nonzero().squeeze(-1)
            if self.how == "skipped" and not len(rows):
                continue
            made = made.index_add(0, rows, expert(flat[rows]))
        return x + (made * best.unsqueeze(-1)).view_as(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {
            "how": rng.choice(["masked", "gathered", "skipped"]),
            "experts": rng.choice([2, 5]),
        }


@register
class Balanced(Block):
    """Soft experts, with a balance that forward leaves behind for the loss."""

    kinds = ("vector", "tokens", "image")

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        self.gate = nn.Linear(shape.channels, 2)
        self.scale = nn.Parameter(torch.randn(2, shape.channels))
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(self.shape.dim, -1)
        shares = self.gate(y).softmax(-1)
        self.aux = shares.flatten(0, -2).mean(0).square().sum()
        return x + (y * (shares @ self.scale)).movedim(-1, self.shape.dim)


@register
class Sometimes(Block):
    """A branch that runs in every other forward, so that its parameters have a gradient only then."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.runs = 0
        self.even, self.odd = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.runs += 1
        return x * (self.even if self.runs % 2 == 0 else self.odd)
