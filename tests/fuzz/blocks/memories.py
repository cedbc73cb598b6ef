"""What forward writes beside tensors: counters, flags, caches, what it has seen last."""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import GLOBALS, Block, Shape, channelwise, register


@register
class Counter(Block):
    """Counts its calls; may scale by the count."""

    often = 1.5

    def __init__(self, shape: Shape, read: bool) -> None:
        super().__init__(shape)
        self.calls, self.read = 0, read

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * (1.0 + 0.1 * self.calls) if self.read else x * 1.1

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"read": rng.random() < 0.5}


@register
class FirstTime(Block):
    """Does something in its first forward only: a flag, a constant, or weights that fit the batch."""

    def __init__(self, shape: Shape, what: str) -> None:
        super().__init__(shape)
        self.shape, self.what, self.ready = shape, what, False
        self.offset: Tensor | None = None
        self.gain = nn.Parameter(torch.ones(shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            self.ready = True
            if self.what == "constant":
                self.offset = torch.linspace(0, 1, self.shape.channels)
            elif self.what == "fit":
                dims = [d for d in range(x.dim()) if d != self.shape.dim % x.dim()]
                with torch.no_grad():
                    self.gain.data.copy_(1.0 / (x.abs().mean(dims) + 0.1))
            else:
                return x * 2.0
        x = x * channelwise(self.gain, x, self.shape)
        return x if self.offset is None else x + channelwise(self.offset, x, self.shape)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"what": rng.choice(["flag", "constant", "fit"])}


@functools.lru_cache(maxsize=8)
def _ramp(n: int) -> Tensor:
    return torch.linspace(0.5, 1.0, n)


def forget() -> None:
    """Begin without what other nets have left in the cache of a function."""
    _ramp.cache_clear()


@register
class Cache(Block):
    """A constant of the shape at hand, made once and kept: where, is the question."""

    often = 2.0

    def __init__(self, shape: Shape, where: str) -> None:
        super().__init__(shape)
        self.shape, self.where = shape, where
        self.kept: Tensor | None = None
        self.by_size: dict[Any, Tensor] = {}

    def made(self, x: Tensor) -> Tensor:
        n = x.shape[self.shape.dim]
        if self.where == "attribute":
            if self.kept is None or len(self.kept) != n:
                self.kept = torch.linspace(0.5, 1.0, n)
            return self.kept
        if self.where == "dict":
            key = tuple(x.shape[1:])
            if key not in self.by_size:
                self.by_size[key] = torch.arange(n).to(x.dtype) / n + 0.5
            return self.by_size[key]
        if self.where == "function":
            return _ramp(n)
        cache = GLOBALS["cache"]
        if n not in cache:
            cache[n] = torch.linspace(0.5, 1.0, n)
        return cache[n]

    def forward(self, x: Tensor) -> Tensor:
        return x * channelwise(self.made(x).to(x.dtype), x, self.shape)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"where": rng.choice(["attribute", "dict", "function", "global"])}


@register
class SpaceCache(Block):
    """Coordinates of pixels, kept by the size of the image."""

    kinds = ("image",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.grid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.grid is None or self.grid.shape != x.shape[2:]:
            h, w = x.shape[2:]
            self.grid = torch.arange(h * w, dtype=x.dtype).view(h, w) / (h * w)
        return x + self.grid


@register
class KeepsLast(Block):
    """Keeps what it has seen last, for whoever wants to look; as it is or detached."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.last: Any = None
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        if self.how == "graph":
            self.last = y
        elif self.how == "detached":
            self.last = {"y": y.detach()}
        else:
            self.sizes.append(x.dim())
        return y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["graph", "detached", "history"])}


@register
class Carried(Block):
    """State that goes from step to step: of each row, or a mean over the batch."""

    kinds = ("vector", "tokens", "image")

    def __init__(self, shape: Shape, of: str) -> None:
        super().__init__(shape)
        self.shape, self.of = shape, of
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        dims = [d for d in range(x.dim()) if d != self.shape.dim % x.dim()]
        if self.of == "rows":
            if not self.training:
                return x  # a rank has the state of its own rows
            y = x if self.state is None else x + 0.5 * self.state.tanh()
            self.state = y.detach()
            return y
        y = x if self.state is None else x + 0.5 * channelwise(self.state, x, self.shape).tanh()
        if self.training:
            self.state = y.detach().mean(dims)
        return y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"of": rng.choice(["rows", "mean"])}


@register
class Late(Block):
    """A buffer that forward registers when it runs first."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if "late" not in self._buffers:
            self.register_buffer("late", torch.ones(self.shape.channels) * 0.5)
        return x * channelwise(self.late, x, self.shape)
