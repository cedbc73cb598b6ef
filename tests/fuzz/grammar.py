"""What blocks of nets have in common: how they are named, drawn and built."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "BLOCKS", "GLOBALS", "IMAGES", "Block", "Event", "Shape", "build_block", "build_chain", "channelwise",
    "layer", "mix", "register", "tag_of",
]  # fmt: skip

IMAGES = ("image", "volume")
Event = dict[str, Any]

GLOBALS: dict[str, Any] = {}
"""module-level state that nets of some tags read and write; `nets.build` makes it anew"""


@dataclass(frozen=True)
class Shape:
    """What a block is given: image (N, C, H, W), volume (N, C, D, H, W), vector (N, C), tokens (N, T, C)."""

    kind: str
    channels: int

    @property
    def dims(self) -> int:
        """How many dims of space there are."""
        return {"image": 2, "volume": 3}.get(self.kind, 0)

    @property
    def dim(self) -> int:
        """Where channels are."""
        return -1 if self.kind == "tokens" else 1

    def with_channels(self, channels: int) -> Shape:
        return replace(self, channels=channels)


class Block(nn.Module):
    """A part of a net. Arguments are plain data, drawn by `draw`."""

    kinds: tuple[str, ...] = ("image", "volume", "vector", "tokens")
    often = 1.0
    """how often it is drawn"""
    same = True
    """whether what it returns has the shape of what it is given, for all arguments"""
    loose = 0.0
    """relative error that rounding within may cause; 0: none beyond float64's"""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.out = shape

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        """Arguments; with `same`, such that the shape stays."""
        return {}

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        """What may happen to it between steps; `at` is added by the caller."""
        return []


BLOCKS: dict[str, type[Block]] = {}


def tag_of(cls: type) -> str:
    """SqueezeExcite -> squeeze_excite."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def register(cls: type[Block]) -> type[Block]:
    """Make a block known by its tag."""
    assert tag_of(cls) not in BLOCKS, f"two blocks are called {tag_of(cls)}"
    BLOCKS[tag_of(cls)] = cls
    return cls


def build_block(told: Iterable[Any], shape: Shape) -> Block:
    name, args = told
    return BLOCKS[name](shape, **args)


def build_chain(told: Iterable[Any], shape: Shape) -> tuple[list[Block], Shape]:
    """Blocks one behind the other, and what comes out at the end."""
    made: list[Block] = []
    for each in told:
        made.append(build_block(each, shape))
        shape = made[-1].out
    return made, shape


def channelwise(value: Tensor, x: Tensor, shape: Shape) -> Tensor:
    """A number for each channel, so that it broadcasts against `x`."""
    return value if shape.kind == "tokens" else value.view(1, -1, *[1] * (x.dim() - 2))


def mix(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    """A linear map of channels by a matrix (out, in)."""
    if shape.kind in IMAGES:
        conv = F.conv2d if shape.dims == 2 else F.conv3d
        return conv(x, weight.view(*weight.shape, *[1] * shape.dims), bias)
    return F.linear(x, weight, bias)


def layer(shape: Shape, out: int | None = None) -> nn.Module:
    """torch's own layer that maps channels."""
    out = out or shape.channels
    if shape.kind == "image":
        return nn.Conv2d(shape.channels, out, 1)
    if shape.kind == "volume":
        return nn.Conv3d(shape.channels, out, 1)
    return nn.Linear(shape.channels, out)
