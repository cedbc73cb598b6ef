"""In-place calls in tiles: they mean what they meant, and are made in place where nobody can tell."""

import pytest
import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.program import Compute
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import expect_tiles


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x)
        single = x.float()
        single += x.double() * 0.5  # stays in float32
        mask = torch.zeros_like(x).fill_(2.0).mul_(x.mean((2, 3), keepdim=True))
        mask.clamp_(-1, 1).add_(1)
        copied = x.new_empty(x.shape).copy_(x)
        flags = (x > 0).logical_not_()
        y = torch.special.expit(torch.arctan(copied * mask))
        return [single.double() * 1e-6, y + torch.ones_like(y).zero_(), flags, y.data]


@pytest.mark.parametrize("layout", [Layout(height=2, width=2), Layout(width=3)], ids=str)
def test_in_place_calls_mean_what_they_meant(layout: Layout) -> None:
    expect_tiles(InPlace(), (2, 2, 7, 5), layout)


class Block(nn.Module):
    """Calls that may stay in place, and some that must not: their operand is read elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.norm(self.first(x)), inplace=True)
        z = nn.functional.relu6(self.second(y), True)
        z += y
        z.relu_()
        both = self.first(y)
        kept = both.tanh()
        flat = self.second(both).flatten(2)
        flat.relu_()
        last = self.first(z)
        last += y
        return last + z.view(z.shape) + kept + flat.view(x.shape) * y


@pytest.mark.parametrize("layout", [Layout(height=2), Layout(height=2, width=2)], ids=str)
@pytest.mark.parametrize("recompute", [0, 2, 5, 100])
def test_what_stays_in_place_is_exact(layout: Layout, recompute: int) -> None:
    expect_tiles(Block(), (2, 3, 9, 8), layout, recompute=recompute)


def test_only_what_nobody_else_reads_is_changed() -> None:
    def found(mesh: Mesh) -> list[str]:
        tiles = RecordedNet(Block(), mesh)
        x = torch.empty(2, 3, 8, 8, device="meta")
        program = tiles.plan_for(x, mesh.share)
        return [s.node.name for s in program.steps if isinstance(s, Compute) and s.in_place]

    assert run_ranks(Layout(height=2), found)[0] == ["relu", "relu6", "relu", "add"]


class Stale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        view = y.view(y.shape)
        nn.functional.hardtanh(y, -1.0, 1.0, True)
        return view


def test_a_view_that_another_one_has_changed_is_made_again() -> None:
    expect_tiles(Stale(), (2, 3, 9, 8), Layout(height=2))
