"""Buffers that forward changes, by every route."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, channelwise, register

ROUTES = (
    "assign", "copied", "in_place", "data", "detached", "slice", "foreach", "lerp", "out", "setattr",
    "dictionary",
)  # fmt: skip


@register
class Running(Block):
    """A running number for each channel: of the batch, of nothing in the batch, or of each row alone."""

    often = 4.0

    def __init__(self, shape: Shape, route: str, of: str, used: bool) -> None:
        super().__init__(shape)
        self.shape, self.route, self.of, self.used = shape, route, of, used
        self.register_buffer("running", torch.ones(shape.channels))
        self.register_buffer("other", torch.zeros(shape.channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self.gain = nn.Parameter(torch.ones(shape.channels))

    def value(self, x: Tensor) -> Tensor:
        if self.of == "constant":
            return torch.linspace(0.1, 0.9, self.shape.channels)
        if self.of == "weights":
            return self.gain.detach() * 1.5
        dims = [d for d in range(x.dim()) if d != self.shape.dim % x.dim()]
        return x.detach().mean(dims) if self.of == "batch" else x.detach().abs().amax(dims)

    @torch.no_grad()
    def update(self, new: Tensor) -> None:
        getattr(self, f"_{self.route}")(self.running, new)

    def _assign(self, old: Tensor, new: Tensor) -> None:
        self.running = 0.9 * old + 0.1 * new

    def _setattr(self, old: Tensor, new: Tensor) -> None:
        setattr(self, "running", old.lerp(new, 0.1))  # noqa: B010 - a route

    def _dictionary(self, old: Tensor, new: Tensor) -> None:
        self._buffers["running"] = 0.9 * old + 0.1 * new

    def _copied(self, old: Tensor, new: Tensor) -> None:
        old.copy_(0.9 * old + 0.1 * new)

    def _in_place(self, old: Tensor, new: Tensor) -> None:
        old.mul_(0.9).add_(new, alpha=0.1)

    def _data(self, old: Tensor, new: Tensor) -> None:
        old.data = old.data * 0.9 + 0.1 * new

    def _detached(self, old: Tensor, new: Tensor) -> None:
        old.detach().mul_(0.9).add_(new * 0.1)

    def _slice(self, old: Tensor, new: Tensor) -> None:
        old[:] = 0.9 * old + 0.1 * new
        old[0] += 0.01

    def _foreach(self, old: Tensor, new: Tensor) -> None:
        torch._foreach_mul_([old, self.other], 0.9)
        torch._foreach_add_([old, self.other], [new * 0.1, new])

    def _lerp(self, old: Tensor, new: Tensor) -> None:
        old.lerp_(new, 0.1)

    def _out(self, old: Tensor, new: Tensor) -> None:
        torch.add(old * 0.9, new * 0.1, out=old)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
            self.update(self.value(x))
        x = x * channelwise(self.gain, x, self.shape)
        return x / (channelwise(self.running, x, self.shape).abs() + 1.0) if self.used else x

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {
            "route": rng.choice(ROUTES),
            "of": rng.choice(["constant", "weights", "batch", "largest"]),
            "used": rng.random() < 0.5,
        }


@register
class Tracked(Block):
    """Counts batches in a buffer, and scales by the count."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if self.how == "add":
                self.count.add_(1)
            elif self.how == "plus":
                self.count += 1
            else:
                self.count = self.count + 1
        return x * (1.0 + 0.1 * self.count)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["add", "plus", "assign"])}


@register
class Queue(Block):
    """The means of the last batches, written in turn (MoCo's queue of keys)."""

    kinds = ("vector",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("queue", torch.zeros(4, shape.channels))
        self.register_buffer("at", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        y = x + x @ self.queue.clone().t() @ self.queue.clone()
        if self.training:
            with torch.no_grad():
                self.queue[int(self.at)] = x.mean(0).tanh()
                self.at[...] = (self.at + 1) % 4
        return y
