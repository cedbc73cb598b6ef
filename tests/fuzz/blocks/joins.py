"""Samples, pixels and stages that meet where no call shows it; state that is no plain attribute."""

from __future__ import annotations

import array
import collections
import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fuzz.grammar import Block, Shape, channelwise, layer, mix, register


class _Scaled(torch.autograd.Function):
    """Forward treats every number by itself, backward does not."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(_ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] / (grads[0].norm() + 1e-3)


class _Rounded(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * 8.0).round() / 8.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grads[0] * (x.abs() < 2.0)


@torch.library.custom_op("fivefold_fuzz::scaled", mutates_args=())
def _scaled(x: Tensor) -> Tensor:
    return x * 2.0


_scaled.register_fake(torch.empty_like)
_scaled.register_autograd(lambda _ctx, grad: grad / (grad.norm() + 1e-3))


@register
class OwnBackward(Block):
    """A backward of the user's: what it joins no forward shows."""

    often = 2.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.shape, self.how = shape, how
        self.weight = nn.Parameter(torch.eye(shape.channels) * 0.7 + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "of_weight":
            return mix(x, _Scaled.apply(self.weight), None, self.shape)
        y = mix(x, self.weight, None, self.shape)
        if self.how == "rounded":
            return _Rounded.apply(y)
        return (_scaled(y) if self.how == "custom_op" else _Scaled.apply(y)).tanh()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["scaled", "custom_op", "of_weight", "rounded"])}


@register
class Frequency(Block):
    """An embedding whose gradients are divided by how often each row is used in the whole batch."""

    kinds = ("vector", "tokens")

    def __init__(self, shape: Shape, by_frequency: bool) -> None:
        super().__init__(shape)
        self.table = nn.Embedding(4, shape.channels, scale_grad_by_freq=by_frequency)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[..., 0].detach().abs() * 7).long() % 4)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"by_frequency": rng.random() < 0.7}


class _Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 1.0


_KEPT: dict[str, Any] = {
    "numpy": lambda: np.ones(2), "slots": _Slots, "bytearray": bytearray,
    "array": lambda: array.array("i"), "set": set, "ordered": collections.OrderedDict,
    "counter": collections.Counter, "deque": collections.deque, "tuple": tuple,
    "count": lambda: itertools.count(1), "iterator": lambda: iter(range(1, 999)),
    "generator": lambda: (n for n in range(1, 999)),
}  # fmt: skip


@register
class Kept(Block):
    """Counts its calls in something that is no plain attribute."""

    often = 2.0

    def __init__(self, shape: Shape, where: str) -> None:
        super().__init__(shape)
        self.where, self.state = where, _KEPT[where]()

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.0 + 0.1 * self.counted())

    def counted(self) -> float:
        if self.where == "numpy":
            self.state += 1
            return float(self.state.sum())
        if self.where == "slots":
            self.state.n += 1
            return self.state.n
        if self.where == "set":
            self.state.add(len(self.state))
        elif self.where in ("ordered", "counter"):
            self.state[f"call {len(self.state)}"] = 1
        elif self.where == "tuple":
            self.state = (*self.state, 1)
        elif self.where in ("count", "iterator", "generator"):
            return float(next(self.state))
        else:
            self.state.append(1)
        return float(len(self.state))

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"where": rng.choice(list(_KEPT))}


@register
class Recent(Block):
    """Means of the last batches, in a list or a deque: tensors that move from place to place."""

    def __init__(self, shape: Shape, bounded: bool) -> None:
        super().__init__(shape)
        self.shape, self.bounded = shape, bounded
        self.past: Any = collections.deque(maxlen=2) if bounded else []

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean([d for d in range(x.dim()) if d != self.shape.dim % x.dim()])
        y = x
        for past in self.past:
            y = y + 0.1 * channelwise(past, x, self.shape)
        if self.training:
            self.past.append(mean)
            if not self.bounded and len(self.past) > 2:
                self.past.pop(0)
        return y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"bounded": rng.random() < 0.5}


def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


@register
class Unseen(Block):
    """Calls that Python's dispatch does not see, or that change what backward gets."""

    often = 0.7

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.layer, self.how = layer(shape), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.how == "scripted":
            return torch.jit.script(_swish)(y)
        if self.how == "saved":
            with saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
                return y.tanh()
        if self.how == "on_cpu":
            with torch.autograd.graph.save_on_cpu():
                return y.tanh()
        if self.how == "enabled":
            with torch.no_grad(), torch.enable_grad():
                return y.tanh()
        with torch.inference_mode():
            bound = y.abs().amax()
        return y / (1.0 + float(bound > 1e6))

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["scripted", "saved", "on_cpu", "enabled", "inference"])}


@register
class Turned(Block):
    """Norms over a dim that holds the samples, or of what holds none."""

    kinds = ("vector",)

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.norm = nn.BatchNorm1d(shape.channels)
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 4 * shape.channels).view(4, -1))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "instance":
            return F.instance_norm((x * 1.0).t().unsqueeze(0), eps=0.1).squeeze(0).t()
        if self.how == "batch":
            return F.batch_norm((x * 1.0).t(), None, None, training=True, eps=0.1).t()
        if self.how == "layer":
            return F.layer_norm(x.t(), (x.shape[0],), eps=0.1).t()
        return x + self.norm(self.weight).sum(0)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["instance", "batch", "layer", "of_weight"])}


@register
class Ranked(Block):
    """Order statistics along channels, or along whatever comes last."""

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.gain = nn.Parameter(torch.tensor([0.9]))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain
        if self.how == "kth":
            return y + y.kthvalue(min(2, y.shape[-1]), -1, keepdim=True).values
        if self.how == "median":
            return y - y.median(1, keepdim=True).values
        if self.how == "quantile":
            return y - y.quantile(0.3, dim=1, keepdim=True)
        if self.how == "topk":
            return y + y.topk(1, 1).values
        return y + y.logcumsumexp(-1)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["kth", "median", "quantile", "topk", "logcumsumexp"])}
