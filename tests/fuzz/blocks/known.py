"""Blocks as they stand in well-known nets, with what is peculiar to them."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import Block, Event, Shape, register


@register
class Bottleneck(Block):
    """ResNet: one activation in place for all, an addition in place, a last gain of zero."""

    kinds, often, same = ("image",), 2.0, False

    def __init__(self, shape: Shape, stride: int) -> None:
        super().__init__(shape)
        c = shape.channels
        self.conv1, self.bn1 = nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c)
        self.conv2 = nn.Conv2d(c, c, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c)
        self.relu = nn.ReLU(inplace=True)
        nn.init.constant_(self.bn2.weight, 0.1)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(
                nn.Conv2d(c, c, 1, stride, bias=False), nn.BatchNorm2d(c)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"stride": 1 if same else rng.choice([1, 2])}


@register
class InvertedResidual(Block):
    """EfficientNet: expansion, depthwise convolution, squeeze and excitation, stochastic depth."""

    kinds, often = ("image",), 2.0

    def __init__(self, shape: Shape, drop: float) -> None:
        super().__init__(shape)
        c, wide = shape.channels, shape.channels * 2
        self.expand = nn.Sequential(
            nn.Conv2d(c, wide, 1, bias=False),
            nn.BatchNorm2d(wide, momentum=0.01),
            nn.SiLU(inplace=True),
        )
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.norm = nn.BatchNorm2d(wide, eps=1e-3)
        self.squeeze, self.excite = nn.Conv2d(wide, 1, 1), nn.Conv2d(1, wide, 1)
        self.project = nn.Conv2d(wide, c, 1, bias=False)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.depthwise(self.expand(x))), inplace=True)
        gate = self.excite(F.silu(self.squeeze(F.adaptive_avg_pool2d(y, 1)))).sigmoid()
        y = self.project(gate * y)
        if self.training and self.drop > 0:
            keep = 1.0 - self.drop
            noise = torch.empty((y.shape[0], 1, 1, 1), dtype=y.dtype, device=y.device)
            y = y * noise.bernoulli_(keep).div_(keep)
        return y + x

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"drop": rng.choice([0.0, 0.3])}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "drop", "value": 0.5}]


@register
class Decoder(Block):
    """GPT: a causal mask in a buffer, dropout on attention and behind it, norms before."""

    kinds, often = ("tokens",), 2.0

    def __init__(self, shape: Shape, drop: float) -> None:
        super().__init__(shape)
        c = shape.channels
        self.ln_1, self.ln_2 = nn.LayerNorm(c), nn.LayerNorm(c)
        self.c_attn, self.c_proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.up, self.down = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
        self.attn_drop, self.drop = nn.Dropout(drop), nn.Dropout(drop)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (part.view(b, t, 1, c).transpose(1, 2) for part in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        y = y.transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.drop(self.c_proj(y))
        return x + self.drop(self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh")))

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"drop": rng.choice([0.0, 0.2])}


@register
class Discriminator(Block):
    """A GAN's last layers: spectral norm, and the deviation over the batch as a channel more."""

    kinds, often = ("image",), 0.3

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        conv = nn.Conv2d(shape.channels + 1, shape.channels, 3, padding=1)
        self.conv = nn.utils.parametrizations.spectral_norm(conv)

    def forward(self, x: Tensor) -> Tensor:
        n, _, h, w = x.shape
        deviation = (x.var(0, unbiased=False) + 1e-8).sqrt().mean()
        return F.leaky_relu(
            self.conv(torch.cat([x, deviation.expand(n, 1, h, w)], 1)), 0.2, inplace=True
        )
