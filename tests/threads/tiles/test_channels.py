"""Operations along dims that are not cut, and products: parts suffice where they should."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.program.program import Move, Program
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]
Functions = dict[str, Callable[[Tensor], Any]]

IN_PARTS: Functions = {
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: F.log_softmax(x, dim=-3),
    "softmin without a dim": lambda x: torch.softmax(x, 0),
    "glu": lambda x: F.glu(x, 1),
    "cumsum": lambda x: x.cumsum(dim=1),
    "sort": lambda x: torch.sort(x, dim=1, descending=True)[0],
    "topk": lambda x: x.topk(2, 1),
    "normalize": F.normalize,
    "local_response_norm": lambda x: F.local_response_norm(x, 3),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.1, -0.2, 0.3, 0.4], dtype=x.dtype)),
    "prelu with one weight": lambda x: F.prelu(x, torch.tensor(0.1, dtype=x.dtype)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin()),
    "argmax": lambda x: x.argmax(1),
    "max": lambda x: x.max(1, keepdim=True),
    "var_mean": lambda x: torch.var_mean(x, 1),
    "embedding": lambda x: F.embedding((x > 0).long(), torch.arange(6.0).view(2, 3).to(x.dtype)),
    "one_hot": lambda x: F.one_hot((x > 0).long(), 3),
    "einsum": lambda x: torch.einsum("nchw,cd->ndhw", x, torch.arange(8.0).view(4, 2).to(x.dtype)),
    "einsum of two": lambda x: torch.einsum("nchw, nchw -> nhw", x, x.cos()),
}
RELATIVE: Functions = {
    "softmax": lambda x: x.softmax(-1).softmax(-2),
    "log_softmax": lambda x: F.log_softmax(x, 2),
    "softmin": lambda x: F.softmin(x * 50, 2),
    "normalize": lambda x: F.normalize(x, dim=(2, 3)),
    "normalize zeros": lambda x: F.normalize(x.clamp(max=0).round(), dim=3),
}
GATHERED: Functions = {
    "cumsum": lambda x: x.cumsum(2).cumsum(3),
    "sort": lambda x: x.sort()[0].sort(2)[0],
    "normalize": lambda x: F.normalize(x, 1.0, dim=(2, 3)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "matmul": lambda x: x @ x.transpose(2, 3),
    "einsum": lambda x: torch.einsum("nchw,nchv->nwv", x, x),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.sin(), 3).sum(2),
    "linear": lambda x: F.linear(x, torch.ones(2, x.shape[-1], dtype=x.dtype)),
}


class Several(nn.Module):
    def __init__(self, functions: Functions) -> None:
        super().__init__()
        self._functions = functions

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in self._functions.items()}


class Tokens(nn.Module):
    """Channels last: linear layers, layer norm and attention among the channels of a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(4), nn.Linear(4, 6)
        self.down, self.act = nn.Linear(6, 4, bias=False), nn.PReLU(6)
        self.mix = nn.Parameter(torch.empty(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = self.down(F.gelu(self.up(self.norm(x)))) @ self.mix
        x = F.scaled_dot_product_attention(x[..., None], x[..., None], x[..., None])[..., 0]
        return self.act(self.up(x).permute(0, 3, 1, 2))


def _nothing_moves(program: Program) -> None:
    assert not any(isinstance(step, Move) and step.exchange.moves for step in program.steps)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lines_that_are_whole_need_no_neighbour(layout: Layout) -> None:
    expect_tiles(Several(IN_PARTS), (2, 4, 11, 7), layout, check=_nothing_moves)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lines_that_are_cut_are_combined(layout: Layout) -> None:
    expect_tiles(Several(RELATIVE), (2, 4, 11, 7), layout, check=_nothing_moves)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_lines_that_are_cut_are_gathered(layout: Layout) -> None:
    expect_tiles(Several(GATHERED), (2, 4, 11, 7), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens(layout: Layout) -> None:
    expect_tiles(Tokens(), (2, 4, 7, 5), layout, check=_nothing_moves)


def test_volumes() -> None:
    names = ("softmax", "glu", "topk", "normalize", "cosine_similarity", "max")
    functions = {name: IN_PARTS[name] for name in names}
    expect_tiles(Several(functions), (2, 4, 5, 7, 4), Layout(depth=2, height=2))


class Between(nn.Module):
    """Such operations in front of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 3, padding=1)
        self.tokens = Tokens()

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(F.softmax(self.first(x), 1))[:, :4]
        x = x.sort(1)[0] * F.cosine_similarity(x, x.cos())[:, None]
        values, indices = x.max(1, keepdim=True)
        x = self.last(x + F.normalize(F.softmax(x, 3), dim=2))[:, :1] + x
        return self.last(x + values * indices)


def test_margins() -> None:
    expect_tiles(Between(), (2, 4, 7, 5), Layout(height=2, width=2), fuse=6)
