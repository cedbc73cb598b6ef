"""Blocks on images and volumes, and those that turn them into vectors and tokens."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import IMAGES, Block, Event, Shape, register


def _of(shape: Shape, name: str) -> Any:
    return getattr(nn, f"{name}{shape.dims}d")


@register
class Conv(Block):
    kinds, often, same = IMAGES, 6.0, False

    def __init__(self, shape: Shape, out: int, k: int, **args: Any) -> None:
        super().__init__(shape)
        self.conv = _of(shape, "Conv")(shape.channels, out, k, **args)
        self.out = shape.with_channels(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        k, dilation = rng.choice([1, 3, 3, 3, 5]), rng.choice([1, 1, 1, 2])
        groups = shape.channels if rng.random() < 0.2 else 1
        out = shape.channels if same or groups > 1 else rng.choice([2, 3, 4, 6])
        args: dict[str, Any] = {"out": out, "k": k, "bias": rng.random() < 0.8}
        args["padding"] = dilation * (k // 2)
        if dilation > 1:
            args["dilation"] = dilation
        if groups > 1:
            args["groups"] = groups
        if not same and rng.random() < 0.35:
            args["stride"] = 2
        if not same and rng.random() < 0.15:
            args["padding"] = rng.choice([0, k // 2])
        if rng.random() < 0.1 and args["padding"] and shape.kind == "image":
            args["padding_mode"] = rng.choice(["reflect", "replicate", "circular"])
        return args

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        if args["k"] != 3 or args["padding"] != 1 or "padding_mode" in args:
            return []
        return [{"do": "dilate", "below": "conv", "value": 2}]


@register
class Transposed(Block):
    kinds, same = IMAGES, False

    def __init__(self, shape: Shape, out: int, k: int, **args: Any) -> None:
        super().__init__(shape)
        self.conv = _of(shape, "ConvTranspose")(shape.channels, out, k, **args)
        self.out = shape.with_channels(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        if same:
            return {"out": shape.channels, "k": 3, "padding": 1}
        k, stride = rng.choice([(2, 2), (3, 2), (3, 1), (4, 2)])
        return {
            "out": rng.choice([2, 3]),
            "k": k,
            "stride": stride,
            "padding": k // 2 if k > 2 else 0,
        }


@register
class Separable(Block):
    kinds = IMAGES

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        c = shape.channels
        self.depthwise = _of(shape, "Conv")(c, c, 3, padding=1, groups=c, bias=False)
        self.pointwise = _of(shape, "Conv")(c, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(F.silu(self.depthwise(x)))


@register
class Pool(Block):
    kinds, often, same = IMAGES, 2.0, False

    def __init__(self, shape: Shape, how: str, k: int, **args: Any) -> None:
        super().__init__(shape)
        self.pool = _of(shape, "MaxPool" if how == "max" else "AvgPool")(k, **args)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        how = rng.choice(["max", "average"])
        if same:
            return {"how": how, "k": 3, "stride": 1, "padding": 1}
        args: dict[str, Any] = {"how": how, "k": rng.choice([2, 3]), "stride": 2}
        args["padding"] = rng.choice([0, 1])
        if rng.random() < 0.3:
            args["ceil_mode"] = True
        if how == "average" and rng.random() < 0.3:
            args["count_include_pad"] = False
        return args


@register
class AdaptivePool(Block):
    kinds, same = IMAGES, False

    def __init__(self, shape: Shape, size: int, how: str) -> None:
        super().__init__(shape)
        self.pool = _of(shape, "AdaptiveMaxPool" if how == "max" else "AdaptiveAvgPool")(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"size": rng.choice([2, 3, 4]), "how": rng.choice(["max", "average"])}


@register
class Upsample(Block):
    kinds, same = ("image",), False

    def __init__(self, shape: Shape, mode: str, scale: float, align: bool) -> None:
        super().__init__(shape)
        self.mode, self.scale = mode, scale
        self.align = None if mode == "nearest" else align

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=self.scale, mode=self.mode, align_corners=self.align)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        mode = rng.choice(["nearest", "bilinear", "bicubic"])
        return {"mode": mode, "scale": rng.choice([2.0, 1.5]), "align": rng.random() < 0.4}


@register
class PixelShuffle(Block):
    kinds, same = ("image",), False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.conv = nn.Conv2d(shape.channels, 8, 1)
        self.out = shape.with_channels(2)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.conv(x), 2)


@register
class SqueezeExcite(Block):
    kinds, often = IMAGES, 2.0

    def __init__(self, shape: Shape, way: str) -> None:
        super().__init__(shape)
        self.way = way
        self.down = _of(shape, "Conv")(shape.channels, 2, 1)
        self.up = _of(shape, "Conv")(2, shape.channels, 1)
        self.pool = _of(shape, "AdaptiveAvgPool")(1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = (
            self.pool(x) if self.way == "pool" else x.mean(tuple(range(2, x.dim())), keepdim=True)
        )
        return x * self.up(F.relu(self.down(pooled), inplace=True)).sigmoid()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"way": rng.choice(["pool", "mean"])}


@register
class Flatten(Block):
    """Images to vectors."""

    kinds, often, same = IMAGES, 0.0, False

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how
        self.out = Shape("vector", shape.channels * (1 if how != "grid" else 2**shape.dims))
        self.pool = _of(shape, "AdaptiveAvgPool")(1 if how == "pool" else 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x.mean(tuple(range(2, x.dim())))
        if self.how == "max":
            return x.flatten(2).amax(2)
        return torch.flatten(self.pool(x), 1)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["pool", "grid", "mean", "max"])}


@register
class Patches(Block):
    """Images to tokens."""

    kinds, often, same = ("image",), 0.0, False

    def __init__(self, shape: Shape, k: int) -> None:
        super().__init__(shape)
        self.embed = nn.Conv2d(shape.channels, 4, k, stride=k, padding=k - 1)
        self.out = Shape("tokens", 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x).flatten(2).transpose(1, 2)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"k": rng.choice([2, 3, 4])}
