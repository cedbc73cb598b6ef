"""Decisions in forward, numbers taken out of tensors, and randomness that nobody controls."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, register


@register
class Asserts(Block):
    """Looks at numbers, but only to complain."""

    often = 1.5

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "item":
            assert x.detach().abs().max().item() < 1e6, "too large"
        elif self.how == "bool":
            if torch.isnan(x).any():
                raise ValueError("not a number")
        elif self.how == "all":
            assert torch.isfinite(x).all()
        else:
            assert x.dim() >= 2 and x.shape[0] > 0
        return x.tanh()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["item", "bool", "all", "shape"])}


@register
class Branch(Block):
    """Takes one way or the other, by shape, mode or numbers."""

    often = 1.5

    def __init__(self, shape: Shape, on: str) -> None:
        super().__init__(shape)
        self.on, self.gain = on, nn.Parameter(torch.tensor([1.1]))

    def forward(self, x: Tensor) -> Tensor:
        if self.on == "shape":
            first = x.shape[-1] % 2 == 0
        elif self.on == "mode":
            first = self.training
        elif self.on == "grad":
            first = torch.is_grad_enabled()
        elif self.on == "mean":
            first = bool(x.mean() > 0.01)
        else:
            first = float(x.detach().flatten()[0]) > 0
        return x * self.gain if first else x.sin()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"on": rng.choice(["shape", "mode", "grad", "mean", "first"])}


@register
class Number(Block):
    """A number that is taken out of a tensor and used."""

    def __init__(self, shape: Shape, of: str) -> None:
        super().__init__(shape)
        self.of, self.level = of, nn.Parameter(torch.tensor(0.5))
        self.register_buffer("fixed", torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        if self.of == "input":
            return x / (1.0 + x.detach().abs().max().item())
        if self.of == "weight":
            return x * float(self.level) + self.level
        return x * self.fixed.item()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"of": rng.choice(["input", "weight", "buffer"])}


@register
class Chance(Block):
    """Draws in Python; every rank is seeded alike."""

    def __init__(self, shape: Shape, by: str) -> None:
        super().__init__(shape)
        self.by = by
        self.gain = nn.Parameter(torch.tensor([1.2]))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        drawn = random.random() if self.by == "python" else float(np.random.rand())  # noqa: NPY002
        return x * self.gain if drawn < 0.5 else x * (1.0 + drawn)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"by": rng.choice(["python", "numpy"])}


@register
class Noise(Block):
    """Draws from torch's generator, as no layout can."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        if self.how == "randn_like":
            return x + 0.1 * torch.randn_like(x)
        if self.how == "randn":
            return x * torch.randn(x.shape)
        return x[torch.randperm(x.shape[0])]

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["randn_like", "randn", "randperm"])}


@register
class Shapes(Block):
    """Shapes as tensors and numbers, and back."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.tensor(x.shape[1:])
        return x.reshape(x.size(0), *sizes.tolist()) / float(sizes.prod()) ** 0.1
