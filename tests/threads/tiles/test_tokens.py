"""Attention and recurrence over pixels: what looks at everything is gathered, queries stay where they are."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.program.program import Compute, Program
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(width=3)]


class Attends(nn.Module):
    """A transformer layer among pixels, and one of its parts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = self.layer(x.flatten(2).transpose(1, 2))
        there = tokens.transpose(0, 1)
        tokens = tokens + self.attention(there, there, there, need_weights=False)[0].transpose(0, 1)
        weights = self.attention(there, there, there)[1]
        return x + tokens.transpose(1, 2).reshape(n, c, h, w) * weights.mean()


class Reads(nn.Module):
    """Rows of pixels read one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(4, 5, batch_first=True), nn.GRU(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.mean(3).transpose(1, 2)
        found, (last, _) = self.lstm(rows)
        return x + self.gru(found)[0].transpose(1, 2)[..., None] + last.mean()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("net", [Attends(), Reads()], ids=lambda net: type(net).__name__)
def test_what_looks_at_everything_is_gathered(net: nn.Module, layout: Layout) -> None:
    expect_tiles(net, (2, 4, 5, 4), layout)


class OverAll(nn.Module):
    """Attention over the pixels of all frames, as middle blocks of autoencoders have it."""

    def __init__(self, how: Callable[["OverAll", int], dict[str, Any]], pixels: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 12, 1), nn.Conv3d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.bias = nn.Parameter(torch.zeros(2, pixels, pixels))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        n, _, *sizes = x.shape
        tokens = self.first(x).permute(0, 2, 3, 4, 1).flatten(1, 3)
        q, k, v = (t.unflatten(2, (2, 2)).transpose(1, 2) for t in tokens.chunk(3, 2))
        found = self.attend(q, k, v)
        found = self.norm(found.transpose(1, 2).flatten(2).transpose(1, 2)).transpose(1, 2)
        return x + self.last(found.unflatten(1, sizes).permute(0, 4, 1, 2, 3)).reshape(n, 4, *sizes)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.how(self, q.shape[2]))


class WrittenOut(OverAll):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.matmul((q @ k.transpose(2, 3)).softmax(-1), v)


class InBatches(OverAll):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [t.flatten(0, 1) for t in (q, k, v)]
        weights = torch.bmm(flat[0], flat[1].mT).softmax(-1)
        return torch.bmm(weights, flat[2]).unflatten(0, q.shape[:2])


def frames(_net: OverAll, tokens: int) -> dict[str, Any]:
    """As HunyuanVideo: a frame sees those before it."""
    of_frame = torch.arange(3).repeat_interleave(tokens // 3)
    later = of_frame[:, None] < of_frame[None]
    return {"attn_mask": torch.where(later, float("-inf"), 0.0).to(torch.float64)[None, None]}


def allowed(_net: OverAll, tokens: int) -> dict[str, Any]:
    numbers = torch.arange(tokens)
    return {"attn_mask": (numbers[:, None] + numbers[None]) % 3 < 2}


HOWS: dict[str, Callable[[OverAll, int], dict[str, Any]]] = {
    "plain": lambda _net, _tokens: {},
    "frames": frames,
    "allowed": allowed,
    "one row": lambda net, _tokens: {"attn_mask": net.bias[:, :1]},
    "trained": lambda net, _tokens: {"attn_mask": net.bias, "scale": 0.3},
}


def stays_cut(program: Program) -> None:
    """What follows attention lies as the image does."""
    made = [step.node for step in program.steps if isinstance(step, Compute)]
    names = {"scaled_dot_product_attention", "matmul", "__matmul__", "bmm"}
    attention = next(number for number, node in enumerate(made) if node.name in names)
    for node in made[attention:]:
        assert all(not program.spreads[index].is_whole for index in node.outputs), node.where
    *_, unflattened = (node for node in made[attention:] if node.name == "unflatten")
    image = program.spreads[program.tape.inputs[0]]
    cut = program.spreads[unflattened.outputs[0]]
    assert [one for one in cut.cuts if one] == [one for one in image.cuts if one]


@pytest.mark.parametrize(
    ("layout", "sizes"),
    [
        (Layout(height=2, width=2), (3, 5, 3)),
        (Layout(width=3), (3, 2, 7)),
        (Layout(depth=2, height=2), (3, 5, 2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", HOWS)
def test_queries_stay_where_they_are(how: str, layout: Layout, sizes: tuple[int, ...]) -> None:
    net = OverAll(HOWS[how], sizes[0] * sizes[1] * sizes[2])
    expect_tiles(net, (2, 4, *sizes), layout, check=stays_cut)


@pytest.mark.parametrize("kind", [WrittenOut, InBatches])
def test_rows_of_products_stay_where_they_are(kind: type[OverAll]) -> None:
    net = kind(HOWS["plain"], 45)
    expect_tiles(net, (2, 4, 3, 5, 3), Layout(height=2, width=2), check=stays_cut)


def test_queries_that_are_counted_are_gathered() -> None:
    net = OverAll(lambda _net, _tokens: {"is_causal": True}, 30)
    expect_tiles(net, (2, 4, 3, 5, 2), Layout(height=2, width=2))


class TwoWays(nn.Module):
    """One dim that becomes those that it was made of, and others, beside a dim that is divided too."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        tokens = x.flatten(2).relu()
        image = tokens.unflatten(2, (h, w)) * x
        turned = tokens.unflatten(2, (w, h)).transpose(2, 3) * x
        pairs = tokens.reshape(n, c // 2, 2, h, w).sum(2).repeat_interleave(2, 1)
        together = tokens.reshape(n, c * h, w).reshape(n, c, h, w)
        return image + turned + pairs + together


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(height=3)], ids=str)
def test_dims_that_become_one_and_several_again(layout: Layout) -> None:
    expect_tiles(TwoWays(), (2, 4, 7, 5), layout)
