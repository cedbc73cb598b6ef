"""Blocks on images only: what looks further than a convolution, moves pixels or makes its own."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import Block, Shape, register


@register
class Coordinates(Block):
    """Appends coordinates, which forward makes from the shape (CoordConv)."""

    kinds, same = ("image",), False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.conv = nn.Conv2d(shape.channels + 2, shape.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        rows = torch.linspace(-1, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(n, 1, h, w)
        columns = torch.arange(w, dtype=x.dtype).div(max(w - 1, 1)).expand(n, 1, h, w)
        return self.conv(torch.cat([x, rows, columns], 1))


@register
class Moved(Block):
    """Rearranges pixels or channels."""

    kinds = ("image",)

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "roll":
            return x.roll((1, 2), (2, 3))
        if self.how == "flip":
            return x + x.flip(3)
        if self.how == "pad":
            return F.pad(x, (1, 2, 0, 1))[:, :, 1:, : x.shape[3]].add(
                F.pad(x, (0, 0, 0, 0))[:, :, -1:]
            )
        if self.how == "shift":
            return torch.cat([x[:, :, 1:], torch.zeros_like(x[:, :, :1])], 2)
        n, c, h, w = x.shape
        groups = 2 if c % 2 == 0 else 1
        return x.view(n, groups, c // groups, h, w).transpose(1, 2).reshape(n, c, h, w)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["roll", "flip", "pad", "shift", "shuffle"])}


@register
class Blur(Block):
    """A fixed kernel in a buffer, made for the channels at hand."""

    kinds = ("image",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        line = torch.tensor([1.0, 2.0, 1.0]) / 4
        self.register_buffer("kernel", (line[:, None] * line)[None, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel.repeat(x.shape[1], 1, 1, 1)
        return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=x.shape[1])


@register
class MapAttention(Block):
    """Every pixel looks at all others."""

    kinds = ("image",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.qkv = nn.Conv2d(shape.channels, 3 * shape.channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        weights = torch.softmax(q.transpose(1, 2) @ k / x.shape[1] ** 0.5, -1)
        return x + (v @ weights.transpose(1, 2)).view_as(x)


@register
class Windows(Block):
    """Attention in shifted windows, as in Swin: padded, rolled, with a mask that regions are written to."""

    kinds = ("image",)

    def __init__(self, shape: Shape, shift: int, write: bool) -> None:
        super().__init__(shape)
        self.qkv = nn.Linear(shape.channels, 3 * shape.channels)
        self.shift, self.write = shift, write

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = F.pad(x, (0, -w % 4, 0, -h % 4)).roll((-self.shift, -self.shift), (2, 3))
        high, wide = y.shape[2] // 4, y.shape[3] // 4
        y = y.view(n, c, high, 4, wide, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
        q, k, v = self.qkv(y).chunk(3, -1)
        scores = q @ k.transpose(1, 2)
        if self.shift and self.write:
            mask = torch.zeros(high * 4, wide * 4)
            for number, rows in enumerate(
                (slice(0, -4), slice(-4, -self.shift), slice(-self.shift, None))
            ):
                mask[rows] += number
                mask[:, rows] += 3 * number
            mask = mask.view(high, 4, wide, 4).permute(0, 2, 1, 3).reshape(-1, 16)
            apart = (mask[:, None] != mask[:, :, None]).to(scores.dtype) * -100.0
            scores = (scores.view(n, -1, 16, 16) + apart).view(-1, 16, 16)
        y = (scores.softmax(-1) @ v).view(n, high, wide, 4, 4, c).permute(0, 5, 1, 3, 2, 4)
        y = y.reshape(n, c, high * 4, wide * 4).roll((self.shift, self.shift), (2, 3))
        return x + y[:, :, :h, :w]

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"shift": rng.choice([0, 2]), "write": rng.random() < 0.5}


@register
class Spread(Block):
    """A small U-net: down, up to the size of what skips, joined."""

    kinds = ("image",)

    def __init__(self, shape: Shape, join: str) -> None:
        super().__init__(shape)
        c = shape.channels
        self.down = nn.Conv2d(c, c + 2, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(c + 2)
        self.join = join
        self.last = nn.Conv2d(2 * c + 2 if join == "concat" else c + 2, c, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.down(x)))
        y = F.interpolate(y, size=x.shape[2:], mode="bilinear", align_corners=False)
        return self.last(torch.cat([x, y], 1) if self.join == "concat" else y) + x

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"join": rng.choice(["concat", "add"])}


@register
class Spectral(Block):
    """Scales the lowest frequencies (a Fourier neural operator)."""

    kinds = ("image",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.scale = nn.Parameter(torch.randn(shape.channels, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft2(x)
        low = F.pad(y[:, :, :2, :2] * self.scale, (0, y.shape[3] - 2, 0, y.shape[2] - 2))
        return x + torch.fft.irfft2(low, s=x.shape[2:])


@register
class ConvRecurrent(Block):
    """A gated cell over a few time steps, its state made in forward (ConvLSTM)."""

    kinds = ("image",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.gates = nn.Conv2d(2 * shape.channels, 2 * shape.channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.zeros(x.shape[0], x.shape[1], x.shape[2], x.shape[3], dtype=x.dtype)
        for _ in range(2):
            keep, new = self.gates(torch.cat([x, hidden], 1)).chunk(2, 1)
            hidden = keep.sigmoid() * hidden + new.tanh()
        return hidden
