"""Blocks of blocks: skips, joins, modules used twice or named twice, checkpoints."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuzz.grammar import Block, Shape, build_chain, layer, register


class _Outer(Block):
    """Has a chain of blocks that keep the shape, in `inner`; the generator fills it."""

    def __init__(self, shape: Shape, inner: list[Any]) -> None:
        super().__init__(shape)
        self.inner = nn.Sequential(*build_chain(inner, shape)[0])


@register
class Residual(_Outer):
    often = 5.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


@register
class Concat(_Outer):
    def __init__(self, shape: Shape, inner: list[Any]) -> None:
        super().__init__(shape, inner)
        self.shape = shape
        self.last = layer(shape.with_channels(2 * shape.channels), shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([x, self.inner(x)], self.shape.dim))


@register
class UsedTwice(_Outer):
    often = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


@register
class NamedTwice(_Outer):
    """One module under two names, both used, or one only."""

    often = 0.5

    def __init__(self, shape: Shape, inner: list[Any], both: bool = False) -> None:
        super().__init__(shape, inner)
        self.alias = self.inner
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        y = self.alias(x)
        return self.inner(y.tanh()) if self.both else y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"both": rng.random() < 0.5}


@register
class Listed(_Outer):
    """The same modules in a list and in a dict, called in a loop that forward writes."""

    often = 0.4

    def __init__(self, shape: Shape, inner: list[Any]) -> None:
        super().__init__(shape, inner)
        self.steps = nn.ModuleDict({f"step{i}": module for i, module in enumerate(self.inner)})

    def forward(self, x: Tensor) -> Tensor:
        for name, step in self.steps.items():
            x = step(x) if name != "step7" else x
        return x


@register
class Checkpointed(_Outer):
    often = 2.0

    def __init__(self, shape: Shape, inner: list[Any], reentrant: bool) -> None:
        super().__init__(shape, inner)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"reentrant": rng.random() < 0.4}


@register
class CheckpointedFunction(Block):
    """A method is checkpointed, not a module, as in Hugging Face's models."""

    def __init__(self, shape: Shape, reentrant: bool) -> None:
        super().__init__(shape)
        self.layer = layer(shape)
        self.gradient_checkpointing, self.reentrant = True, reentrant

    def body(self, x: Tensor, scale: float) -> Tensor:
        return torch.tanh(self.layer(x)) * scale

    def forward(self, x: Tensor) -> Tensor:
        if self.gradient_checkpointing and self.training:
            return x + checkpoint(self.body, x, 0.5, use_reentrant=self.reentrant)
        return x + self.body(x, 0.5)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"reentrant": rng.random() < 0.4}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"do": "set", "name": "gradient_checkpointing", "value": False}]


@register
class Layerwise(_Outer):
    """Learned weights of what all blocks before gave (a dense net of sums)."""

    def __init__(self, shape: Shape, inner: list[Any]) -> None:
        super().__init__(shape, inner)
        self.shares = nn.ParameterList([nn.Parameter(torch.tensor([1.0])) for _ in self.inner])

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        for share, module in zip(self.shares, self.inner, strict=True):
            seen.append(module(sum(seen) * share))
        return torch.stack(seen).mean(0)


@register
class Direct(_Outer):
    """Calls `forward` of a module itself, past its hooks."""

    def forward(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module.forward(x)
        return x
