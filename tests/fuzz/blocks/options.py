"""What forward reads beside tensors: attributes of all kinds, closures, globals."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import GLOBALS, Block, Event, Shape, channelwise, register


@register
class AttributeFloat(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.factor = 0.8

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "factor", "value": 1.3}]


@register
class AttributeFlag(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.bent = True

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.bent else x * 0.5

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "bent", "value": False}]


@register
class AttributeString(Block):
    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.mode = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch, self.mode)(x)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "mode", "value": "sin"}]


@register
class AttributeNested(Block):
    """A list, a dict, and an object within an object."""

    def __init__(self, shape: Shape, where: str) -> None:
        super().__init__(shape)
        self.where = where
        self.listed, self.named = [0.5, 1.5], {"a": {"b": 0.7}}
        self.config = SimpleNamespace(inner=SimpleNamespace(scale=1.1), tags=("x", 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "list":
            return x * sum(self.listed)
        return x * (self.named["a"]["b"] if self.where == "dict" else self.config.inner.scale)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"where": rng.choice(["list", "dict", "object"])}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        path = {"list": ["listed", 0], "dict": ["named", "a", "b"]}
        return [
            {
                "do": "deep",
                "path": path.get(args["where"], ["config", "inner", "scale"]),
                "value": 0.3,
            }
        ]


@register
class Closure(Block):
    """A function that remembers, or one that is taken from an attribute."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        holder = {"scale": 0.9}

        def function(x: Tensor) -> Tensor:
            return x * holder["scale"]

        def change(value: float) -> None:
            holder["scale"] = value

        self.function, self.change = function, change

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "call", "name": "change", "value": 0.4}]


@register
class Global(Block):
    """Reads a variable of its module."""

    def forward(self, x: Tensor) -> Tensor:
        return x * GLOBALS["scale"]

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "global", "name": "scale", "value": 1.7}]


@register
class Flagged(Block):
    """Computes otherwise where torch is set to be deterministic."""

    often = 4.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (0.6 if torch.are_deterministic_algorithms_enabled() else 1.2)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "deterministic", "value": True}]


@register
class AttributeTensor(Block):
    """A tensor that is neither parameter nor buffer: read, reassigned, or written to in place."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape, self.table = shape, torch.linspace(0.5, 1.5, shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        return x * channelwise(self.table, x, self.shape)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [
            {"do": "tensor", "name": "table", "value": 2.0},
            {"do": "fill", "name": "table", "value": 0.3},
        ]


@register
class Constants(Block):
    """Tensors that forward makes from numbers, with and without a dtype."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        ramp = torch.arange(self.shape.channels) / 4 + torch.tensor(0.5)
        ones = x.new_ones(self.shape.channels) * self.gain
        return x * channelwise(ramp.to(x) + ones, x, self.shape)


@register
class BufferValue(Block):
    """A buffer that the training loop changes: in place, or by another tensor."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("level", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.level

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [
            {"do": "tensor", "name": "level", "value": 1.5},
            {"do": "fill", "name": "level", "value": 0.2},
        ]


@register
class Replaceable(Block):
    """A module that the training loop replaces by another one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.function: nn.Module = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "replace", "name": "function"}, {"do": "method", "name": "function"}]
