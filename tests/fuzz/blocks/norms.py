"""Norms, activations and dropout."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import IMAGES, Block, Event, Shape, channelwise, register


@register
class BatchNorm(Block):
    kinds, often = ("image", "volume", "vector"), 5.0

    def __init__(self, shape: Shape, frozen: bool = False, **args: Any) -> None:
        super().__init__(shape)
        self.norm = getattr(nn, f"BatchNorm{shape.dims or 1}d")(shape.channels, **args)
        self.frozen = frozen

    def train(self, mode: bool = True) -> BatchNorm:
        super().train(mode)
        if self.frozen:
            self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        args: dict[str, Any] = {}
        if rng.random() < 0.3:
            args["momentum"] = rng.choice([None, 0.3, 1.0])
        if rng.random() < 0.15:
            args["track_running_stats"] = False
        if rng.random() < 0.15:
            args["affine"] = False
        if rng.random() < 0.1:
            args["frozen"] = True
        return args

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [
            {"do": "mode", "below": "norm", "training": False},
            {"do": "set", "below": "norm", "name": "momentum", "value": 0.5},
            {"do": "set", "below": "norm", "name": "eps", "value": 0.1},
            {"do": "set", "below": "norm", "name": "track_running_stats", "value": False},
        ]


@register
class HandBatchNorm(Block):
    """A functional batch norm with buffers of its own."""

    kinds = ("image", "vector")

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("mean", torch.zeros(shape.channels))
        self.register_buffer("variance", torch.ones(shape.channels))
        self.gain = nn.Parameter(torch.ones(shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.variance, self.gain, None, self.training, 0.2)


@register
class GroupNorm(Block):
    kinds, often = ("image", "volume"), 2.0

    def __init__(self, shape: Shape, groups: int) -> None:
        super().__init__(shape)
        self.norm = nn.GroupNorm(groups, shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        fit = [g for g in (1, 2, 3) if shape.channels % g == 0]
        return {"groups": rng.choice(fit)}


@register
class InstanceNorm(Block):
    kinds = ("image", "volume")

    def __init__(self, shape: Shape, **args: Any) -> None:
        super().__init__(shape)
        self.norm = getattr(nn, f"InstanceNorm{shape.dims}d")(shape.channels, **args)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"affine": rng.random() < 0.5, "track_running_stats": rng.random() < 0.4}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "below": "norm", "name": "track_running_stats", "value": False}]


@register
class LayerNorm(Block):
    """Over channels; images are permuted for it, as in ConvNeXt."""

    often = 2.0

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape = shape
        self.norm = nn.LayerNorm(shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.shape.kind in IMAGES:
            return self.norm(x.movedim(1, -1)).movedim(-1, 1)
        return self.norm(x)


@register
class RootNorm(Block):
    """The root mean square by hand."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.shape, self.gain = shape, nn.Parameter(torch.ones(shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        scale = x.pow(2).mean(self.shape.dim, keepdim=True).add(1e-3).rsqrt()
        return x * scale * channelwise(self.gain, x, self.shape)


_ACTIVATIONS = {
    "relu": nn.ReLU, "relu_in_place": lambda: nn.ReLU(inplace=True), "silu": nn.SiLU, "gelu": nn.GELU,
    "leaky_in_place": lambda: nn.LeakyReLU(0.1, inplace=True), "tanh": nn.Tanh, "prelu": nn.PReLU,
    "hardswish_in_place": lambda: nn.Hardswish(inplace=True), "softplus": nn.Softplus, "elu": nn.ELU,
}  # fmt: skip


@register
class Activation(Block):
    often = 4.0

    def __init__(self, shape: Shape, which: str) -> None:
        super().__init__(shape)
        self.which = which
        if which in _ACTIVATIONS:
            self.function = _ACTIVATIONS[which]()

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "functional_in_place":
            return F.relu_(x * 1.0)
        if self.which == "method_in_place":
            # torch refuses the reverse order, but not under checkpoint.
            return (x + 0.1).mul_(2.0).tanh_()
        return self.function(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"which": rng.choice([*_ACTIVATIONS, "functional_in_place", "method_in_place"])}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        if args["which"] != "leaky_in_place":
            return []
        return [{"do": "set", "below": "function", "name": "negative_slope", "value": 0.5}]


@register
class Dropout(Block):
    often = 3.0

    def __init__(self, shape: Shape, which: str, p: float, inplace: bool) -> None:
        super().__init__(shape)
        self.which = which
        self.drop = getattr(nn, which)(p, inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(x * 1.0 if self.drop.inplace else x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        spatial = {"image": ["Dropout2d", "FeatureAlphaDropout"], "volume": ["Dropout3d"]}
        which = rng.choice(["Dropout", "Dropout", "AlphaDropout", *spatial.get(shape.kind, [])])
        return {"which": which, "p": rng.choice([0.2, 0.5]), "inplace": rng.random() < 0.2}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [
            {"do": "set", "below": "drop", "name": "p", "value": rng.choice([0.0, 0.7])},
            {"do": "mode", "below": "drop", "training": False},
        ]


@register
class DropoutTwice(Block):
    """A function with a module's training flag, called twice."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.p = 0.3

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, self.p, self.training).tanh(), 0.2, training=self.training)

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "p", "value": 0.6}]


@register
class DroppedPlaces(Block):
    """Masks of what no sample is in, with as many rows as a rank may have samples."""

    def __init__(self, shape: Shape, rows: int, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.places = nn.Parameter(torch.linspace(-1.0, 1.0, rows * 3).reshape(rows, 3))

    def forward(self, x: Tensor) -> Tensor:
        places = self.places * 2.0
        if self.how == "rand":
            places = places * torch.rand(places.shape, dtype=x.dtype)
        else:
            places = F.dropout(places, 0.4, self.training)
        return x * (1.0 + 0.1 * places.sum())

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"rows": rng.choice([1, 2, 3, 4, 6]), "how": rng.choice(["dropout", "rand"])}


@register
class StochasticDepth(Block):
    """Leaves out a branch of some samples, as timm and transformers write it."""

    def __init__(self, shape: Shape, how: str = "bernoulli_") -> None:
        super().__init__(shape)
        self.keep, self.how = 0.6, how
        self.gain = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x: Tensor) -> Tensor:
        branch = x.tanh() * self.gain
        if self.training:
            shape = (x.shape[0], *[1] * (x.dim() - 1))
            if self.how == "bernoulli_":
                noise = x.new_empty(shape).bernoulli_(self.keep)
            elif self.how == "rand":
                noise = (self.keep + torch.rand(shape, dtype=x.dtype, device=x.device)).floor_()
            else:
                noise = (torch.rand_like(x) < self.keep).to(x.dtype)
            branch = branch * noise.div_(self.keep)
        return x + branch

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["bernoulli_", "rand", "rand_like"])}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "keep", "value": 0.9}]
