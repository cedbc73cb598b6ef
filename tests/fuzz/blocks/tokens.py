"""Blocks on tokens (N, T, C) and vectors (N, C), and what leads from one to the other."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuzz.grammar import Block, Event, Shape, register


@register
class Dense(Block):
    kinds, often, same = ("vector", "tokens"), 5.0, False

    def __init__(self, shape: Shape, out: int, bias: bool = True) -> None:
        super().__init__(shape)
        self.linear = nn.Linear(shape.channels, out, bias)
        self.out = shape.with_channels(out)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        args: dict[str, Any] = {"out": shape.channels if same else rng.choice([2, 3, 4, 6])}
        if rng.random() < 0.2:
            args["bias"] = False
        return args


@register
class Attention(Block):
    """Queries, keys and values of one layer; the mask, if any, is a buffer or made in forward."""

    kinds, often = ("tokens",), 3.0

    def __init__(self, shape: Shape, mask: str, kernel: bool) -> None:
        super().__init__(shape)
        self.qkv = nn.Linear(shape.channels, 3 * shape.channels)
        self.last = nn.Linear(shape.channels, shape.channels)
        self.mask, self.kernel = mask, kernel
        if mask == "buffer":
            self.register_buffer("causal", torch.ones(64, 64).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = None
        if self.mask == "buffer":
            mask = self.causal[:t, :t]
        elif self.mask == "made":
            mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
        elif self.mask == "filled":
            mask = torch.full((t, t), float("-inf")).triu(1)
        if self.kernel:
            return x + self.last(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        scores = q @ k.transpose(1, 2) / math.sqrt(x.shape[2])
        if mask is not None:
            scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -1e9)
        return x + self.last(scores.softmax(-1) @ v)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {
            "mask": rng.choice(["none", "buffer", "made", "filled"]),
            "kernel": rng.random() < 0.5,
        }


@register
class MultiHead(Block):
    """torch's own attention, or its encoder layer."""

    kinds = ("tokens",)

    def __init__(self, shape: Shape, which: str) -> None:
        super().__init__(shape)
        c = shape.channels
        heads = 2 if c % 2 == 0 else 1
        self.which = which
        if which == "encoder":
            self.inner = nn.TransformerEncoderLayer(c, heads, 6, dropout=0.0, batch_first=True)
        else:
            self.inner = nn.MultiheadAttention(c, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.which == "encoder":
            return self.inner(x)
        return self.inner(x, x, x, need_weights=self.which == "weights")[0]

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"which": rng.choice(["encoder", "attention", "weights"])}


@register
class Positions(Block):
    """What tells tokens apart."""

    kinds, often = ("tokens",), 2.0

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        c = shape.channels
        self.how = how
        if how == "parameter":
            self.table = nn.Parameter(torch.randn(1, 64, c))
        elif how in ("embedding", "ids"):
            self.table = nn.Embedding(64, c)
        if how == "ids":
            self.register_buffer("position_ids", torch.arange(64).expand(1, -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        t, c = x.shape[1:]
        if self.how == "parameter":
            return x + self.table[:, :t]
        if self.how == "embedding":
            return x + self.table(torch.arange(t))
        if self.how == "ids":
            return x + self.table(self.position_ids[:, :t])
        angles = torch.arange(t).unsqueeze(1) * torch.exp(torch.arange(c) * (-1.0 / c))
        return x + angles.to(x.dtype).sin()

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["parameter", "embedding", "ids", "sine"])}


@register
class FirstToken(Block):
    """A learned token before all others, expanded to the batch."""

    kinds, same = ("tokens",), False

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.token = nn.Parameter(torch.randn(1, 1, shape.channels))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)


@register
class Recurrent(Block):
    """LSTM or GRU, with a state that torch makes, or forward does."""

    kinds = ("tokens",)

    def __init__(self, shape: Shape, which: str, made: bool, last: bool = False) -> None:
        super().__init__(shape)
        self.inner = getattr(nn, which)(shape.channels, shape.channels, batch_first=True)
        self.made, self.last, self.which = made, last, which

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        if self.made:
            state = torch.zeros(1, x.shape[0], x.shape[2], dtype=x.dtype)
            state = (state, state.clone()) if self.which == "LSTM" else state
        return self.inner(x, state)[0]

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"which": rng.choice(["LSTM", "GRU"]), "made": rng.random() < 0.5}


@register
class Packed(Block):
    """Sequences of different lengths, packed: lengths are read from the numbers, or told by the row."""

    kinds = ("tokens",)

    def __init__(self, shape: Shape, by: str) -> None:
        super().__init__(shape)
        self.inner, self.by = nn.GRU(shape.channels, shape.channels, batch_first=True), by

    def forward(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        if self.by == "numbers":
            lengths = (x.detach()[..., 0] > 0).sum(1).clamp(min=1)
        else:
            lengths = torch.full((x.shape[0],), t - 1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths, batch_first=True, enforce_sorted=False
        )
        y, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], True, total_length=t)
        return x + y

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"by": rng.choice(["numbers", "rows"])}


@register
class TokenConv(Block):
    """A convolution along the tokens; causal ones are padded on the left."""

    kinds = ("tokens",)

    def __init__(self, shape: Shape, causal: bool) -> None:
        super().__init__(shape)
        self.conv = nn.Conv1d(shape.channels, shape.channels, 3)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        y = F.pad(x.transpose(1, 2), (2, 0) if self.causal else (1, 1))
        return x + self.conv(y).transpose(1, 2)

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"causal": rng.random() < 0.5}


@register
class Rotary(Block):
    """Turns pairs of channels by an angle that depends on the position."""

    kinds = ("tokens",)

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.register_buffer("frequency", torch.rand(shape.channels), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(torch.arange(x.shape[1], dtype=x.dtype), self.frequency)
        a, b = x.split([x.shape[2] // 2, x.shape[2] - x.shape[2] // 2], -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


@register
class Quantised(Block):
    """The nearest of some codes, straight through; codes may follow the batch by hand (VQ)."""

    kinds = ("vector", "tokens")

    def __init__(self, shape: Shape, follow: bool) -> None:
        super().__init__(shape)
        self.codes = nn.Embedding(5, shape.channels)
        self.follow = follow
        self.register_buffer("used", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        nearest = torch.cdist(flat, self.codes.weight).argmin(1)
        if self.training and self.follow:
            counts = F.one_hot(nearest, 5).sum(0)
            self.used.mul_(0.9).add_(counts, alpha=0.1)
        codes = self.codes(nearest).view_as(x)
        return x + (codes - x).detach() + 0.1 * codes

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"follow": rng.random() < 0.4}


@register
class Summary(Block):
    """Tokens to vectors."""

    kinds, often, same = ("tokens",), 0.0, False

    def __init__(self, shape: Shape, how: str) -> None:
        super().__init__(shape)
        self.how, self.out = how, Shape("vector", shape.channels)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "mean":
            return x.mean(1)
        return x.amax(1) if self.how == "max" else x[:, 0]

    @classmethod
    def draw(cls, rng: random.Random, shape: Shape, same: bool) -> dict[str, Any]:
        return {"how": rng.choice(["mean", "max", "first"])}


@register
class Temperature(Block):
    """Divides by a number that is annealed."""

    kinds = ("vector", "tokens")

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x / self.temperature, -1) + x

    @classmethod
    def events(cls, rng: random.Random, args: dict[str, Any]) -> list[Event]:
        return [{"do": "set", "name": "temperature", "value": 0.5}]
