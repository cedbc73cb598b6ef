"""Weights that are computed, shared, normalised, dropped or left alone."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fuzz.grammar import Block, Event, Shape, channelwise, layer, mix, register


@register
class Normed(Block):
    """Weight norm and spectral norm, by hooks and by parametrizations."""

    often = 3.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        inner = layer(shape)
        if how == "weight_hook":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                self.layer = nn.utils.weight_norm(inner)
        elif how == "spectral_hook":
            self.layer = nn.utils.spectral_norm(inner)
        elif how == "spectral":
            self.layer = parametrizations.spectral_norm(inner)
        elif how == "orthogonal":
            self.layer = parametrizations.orthogonal(inner) if not shape.dims else inner
        else:
            self.layer = parametrizations.weight_norm(inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {
            "how": rng.choice(["weight_hook", "weight", "spectral_hook", "spectral", "orthogonal"])
        }


@register
class Standardised(Block):
    """Weight standardisation: the weight is computed in every forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.channels, shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean(1, keepdim=True)) / (w.var(1, keepdim=True, unbiased=False) + 1e-3).sqrt()
        return mix(x, w, None, self.shape)


@register
class LowRank(Block):
    """A frozen weight and a product of two small ones (LoRA), joined before use or after."""

    often = 2.0

    def __init__(self, shape: Shape, joined: bool) -> None:
        super().__init__(shape)
        c = shape.channels
        self.shape, self.joined = shape, joined
        self.frozen = nn.Parameter(torch.randn(c, c) / c, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(1, c)), nn.Parameter(torch.randn(c, 1) * 0.1)
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        if self.joined:
            return mix(x, self.frozen + self.scale * self.up @ self.down, None, self.shape)
        low = mix(mix(x, self.down, None, self.shape), self.up, None, self.shape)
        return mix(x, self.frozen, None, self.shape) + self.scale * low

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"joined": rng.random() < 0.5}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "scale", "value": 2.0}]


@register
class TiedWeight(Block):
    """One weight, used forth and back (an auto-encoder), or by two layers."""

    def __init__(self, shape: Shape, back: bool) -> None:
        super().__init__(shape)
        self.shape, self.back = shape, back
        self.first, self.second = layer(shape), layer(shape)
        if not back:
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        if not self.back:
            return self.second(y)
        matrix = self.first.weight.flatten(1).t()
        return mix(y, matrix, self.second.bias, self.shape)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"back": rng.random() < 0.5}


@register
class DroppedWeight(Block):
    """Dropout of a weight (DropConnect)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        self.weight = nn.Parameter(torch.randn(shape.channels, shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        return mix(x, F.dropout(self.weight, 0.3, self.training), None, self.shape)


@register
class Unused(Block):
    """Parameters that forward does not use, uses in eval mode only, or multiplies by zero."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.shape, self.how = shape, how
        self.left = nn.Parameter(torch.randn(shape.channels))
        self.used = nn.Parameter(torch.randn(shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x * channelwise(self.used, x, self.shape)
        if self.how == "zero":
            return x + 0.0 * self.left.sum()
        if self.how == "eval" and not self.training:
            return x + channelwise(self.left, x, self.shape)
        return x

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["never", "eval", "zero"])}


@register
class Several(Block):
    """Parameters in a list and in a dict, stacked and picked."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape, c = shape, shape.channels
        self.rows = nn.ParameterList([nn.Parameter(torch.randn(c)) for _ in range(c)])
        self.named = nn.ParameterDict({"gain": nn.Parameter(torch.ones(c))})

    def forward(self, x: Tensor) -> Tensor:
        y = mix(x, torch.stack(list(self.rows)), None, self.shape)
        return y * channelwise(self.named["gain"], x, self.shape)


@register
class Frozen(Block):
    """Half of it is frozen from the start."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.fixed, self.free = layer(shape), layer(shape)
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(x).tanh() + self.free(x)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "require", "below": "fixed", "value": True}]


@register
class Averaged(Block):
    """A copy of a layer that follows it slowly (a teacher), written in forward under no_grad."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.student, self.teacher = layer(shape), layer(shape)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
                for slow, fast in pairs:
                    slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.student(x) + self.teacher(x).detach()
