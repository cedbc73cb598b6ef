"""Random masks in tiles are those of the unmodified layout; other random numbers are alike on all ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.program.costs import Options
from fivefold.parallel.program.program import Program
from fivefold.parallel.randomness import uniform, uniform_box
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import _Case, _one_rank, expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


class Drops(nn.Module):
    """The dropout family, several calls of one module, and a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.off = nn.Dropout(0.3), nn.Dropout(0.0)
        self.channels, self.alpha = nn.Dropout2d(0.4), nn.AlphaDropout(0.2)
        self.features = nn.FeatureAlphaDropout(0.3)
        self.place = nn.Dropout(0.5, inplace=True)
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.off(self.conv(x)))
        x = self.channels(x) + F.dropout(x, 0.1) + self.twice(F.dropout(x, 0.6, training=False))
        x = self.place(self.alpha(x)) + F.dropout(x)
        return self.features(x) + F.dropout(x.mean((2, 3), keepdim=True), 0.5)


class Depth(nn.Module):
    """Stochastic depth, as torchvision and as timm have it; and a mask for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype, device=x.device)
        noise = noise.bernoulli_(0.7)
        noise.div_(0.7)
        x = x + self.body(x) * noise
        x = x + self.body(x) * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.5).div_(0.5)
        x = x * (0.7 + torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), dtype=x.dtype)).floor_()
        x = x * torch.rand_like(x) + torch.rand([]) * torch.rand(x.shape, dtype=x.dtype)
        x = x * x.new_empty(x.shape).bernoulli_(p=0.8) + torch.empty_like(x).bernoulli_(0.5)
        return x + x.new_full(x.shape, 2.0) + x.new_zeros(1, 3, 1, 1) + x.new_ones(x.shape[2:])


class Own(nn.Module):
    """Numbers that torch would draw otherwise in one process: what counts is that all ranks agree."""

    def forward(self, x: Tensor) -> list[Tensor]:
        drawn = torch.rand(x.shape[0], 3, dtype=x.dtype) + torch.randint(9, (3,))
        noise = torch.rand_like(x) + torch.randn_like(x) + x.clone().uniform_(-1, 1)
        drop = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return [drawn, noise, drop, F.gumbel_softmax(x, dim=1), torch.bernoulli(torch.sigmoid(x))]


def _has_margins(program: Program) -> None:
    assert any(spread != spread.tight() for spread in program.spreads.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_masks_are_those_of_the_whole_batch(layout: Layout) -> None:
    expect_tiles(Drops(), (2, 6, 11, 7), layout)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_stochastic_depth_is_that_of_the_whole_batch(layout: Layout) -> None:
    expect_tiles(Depth(), (3, 3, 7, 5), layout)


def test_masks_of_margins() -> None:
    net = nn.Sequential(Drops(), nn.Conv2d(6, 3, 3, padding=1), Depth(), nn.MaxPool2d(3, 2))
    expect_tiles(net, (2, 6, 7, 7), Layout(height=2, width=2), fuse=6, check=_has_margins)


def test_masks_of_volumes() -> None:
    net = nn.Sequential(nn.Conv3d(2, 3, 3), nn.Dropout(), nn.Dropout3d(), nn.Tanh())
    expect_tiles(net, (2, 2, 7, 7, 4), Layout(depth=2, height=2))


@pytest.mark.filterwarnings("ignore:.*draws random numbers in the model")
def test_other_numbers_are_alike_on_all_ranks_and_under_all_layouts() -> None:
    image = torch.randn(2, 4, 7, 5, dtype=torch.float64)
    kinds = [torch.empty(2, 3), image, image, image, image]
    assembled = [[torch.zeros_like(y, dtype=torch.float64) for y in kinds] for _ in range(2)]
    for found, layout in zip(assembled, (Layout(height=2, width=2), Layout(width=3)), strict=True):
        for rank in run_ranks(
            layout, _one_rank, _Case(Own(), image, Options("never", strict=True), 0, None), kinds
        ):
            for y, (box, part) in zip(found, rank["outputs"], strict=True):
                known = y[box] != 0
                assert torch.equal(y[box][known], part[known].double())
                y[box] = part
    for one, other in zip(*assembled, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
    assert abs(assembled[0][1].mean()) < 0.7  # uniform, normal and uniform again: 0.5 on average
    assert 0.5 < assembled[0][1].var() < 3


@pytest.mark.parametrize("origin", [(0, 0, 0), (1, 0, 3), (1, 2, 4)])
def test_a_box_has_the_numbers_of_the_whole(origin: tuple[int, ...]) -> None:
    sizes, shape = torch.Size((3, 4, 7)), (2, 1, 3)
    whole = uniform(sizes, 0, 1234567890123456789, torch.device("cpu"))
    box = tuple(slice(start, start + n) for start, n in zip(origin, shape, strict=True))
    found = uniform_box(origin, shape, sizes, 1234567890123456789, torch.device("cpu"))
    assert torch.equal(found, whole[box])
