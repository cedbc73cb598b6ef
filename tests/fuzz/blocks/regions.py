"""Parts of forward under another regime: no gradient, another precision, a backward of one's own."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Event, Shape, layer, mix, register


@register
class NoGrad(Block):
    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.other, self.how = layer(shape), layer(shape), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return self.other(x) * self.layer(x).detach()
        if self.how == "straight":
            y = self.layer(x)
            return y + (y.sign() - y).detach()
        if self.how == "switched":
            with torch.set_grad_enabled(not self.training):
                y = self.layer(x)
            return self.other(x) + y
        with torch.no_grad():
            y = self.layer(x).mul_(0.5)
            if self.how == "nested":
                with torch.enable_grad():
                    z = self.other(x)
                return y + z
        return self.other(x) + y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["no_grad", "nested", "detach", "straight", "switched"])}


@register
class Autocast(Block):
    """A region in bfloat16, with a frozen weight; what rounding does there is made to show.

    Autocast leaves float64 alone, so it is float32 that goes in.
    """

    loose = 1e-3

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.how, self.shape = layer(shape), how, shape
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.layer.weight.flatten(1)
        given = x.detach().float()
        with torch.autocast("cpu", torch.bfloat16):
            y = mix(given, weight.float(), None, self.shape)
            with torch.autocast("cpu", enabled=self.how == "on"):
                z = mix(given, weight.float(), None, self.shape)
        exact = mix(x.detach(), weight, None, self.shape)
        apart = (y.to(x.dtype) - exact) + 2.0 * (z.to(x.dtype) - exact)
        return x + (10.0 * apart).tanh()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["on", "inner_off"])}


@register
class AutocastTrained(Block):
    """A region in bfloat16 whose weights are trained: their gradients are rounded sums."""

    loose = 0.05

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape, self.weight = shape, nn.Parameter(torch.eye(shape.channels))
        self.by_rows = False
        """round the gradient of every sample alone, as the most ranks would"""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self._of(row) for row in x.split(1)]) if self.by_rows else self._of(x)

    def _of(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = mix(x.float(), self.weight.float(), None, self.shape)
            wide = y.dtype == torch.float32
        return x + y.to(x.dtype) * (1.0 if wide else 0.5)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * grad, None


@register
class Reversal(Block):
    """An autograd function of one's own: the gradient is reversed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.layer, self.factor = layer(shape), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(_Reversed.apply(x, self.factor))

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "factor", "value": 2.0}]


@register
class InnerGradient(Block):
    """A gradient that forward itself takes (an energy), with or without a graph."""

    kinds = ("vector",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.energy = nn.Linear(shape.channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            energy = self.energy(y.tanh()).sum()
            (slope,) = torch.autograd.grad(energy, y, create_graph=self.training)
        return x - 0.5 * slope
