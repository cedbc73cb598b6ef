"""Layers that share an exchange: exact, with fewer messages, whatever is fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fivefold.parallel.graph.record import record
from fivefold.parallel.program.costs import Costs, Options
from fivefold.parallel.program.program import Program, exchange_of, planned
from fivefold.parallel.program.rule import Here
from fivefold.parallel.trees import call_with
from fivefold.plan import Layout
from tiles import expect_tiles, grid_of, spread_of

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]
FUSES = [2, 3, 8, "auto"]


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(True),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(4), Residual(4),
        nn.Conv2d(4, 4, 3, 1, 2, dilation=2), nn.AvgPool2d(3, 1, 1), Residual(4),
    )  # fmt: skip


def plan(
    net: nn.Module, shape: tuple[int, ...], layout: Layout, fuse: int | str, rank: int = 0
) -> Program:
    tape = record(net, call_with, torch.empty(shape), [torch.Size(shape)])
    grid = grid_of(layout)
    return planned(tape, [spread_of(shape, grid)], Here(grid, rank), Options(fuse))


def messages(program: Program) -> int:
    return sum(m[1].messages() for s in program.steps if (m := exchange_of(s)) is not None)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fuse", FUSES)
def test_fused_layers_are_exact_at_the_borders_too(fuse: int | str, layout: Layout) -> None:
    expect_tiles(network(), (2, 3, 67, 59), layout, fuse=fuse)


def test_fusing_saves_messages_and_never_moves_more_than_once_per_value() -> None:
    net = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(12)))
    counts = {
        fuse: messages(plan(net, (1, 2, 64, 64), Layout(width=2), fuse))
        for fuse in ("never", 1, 2, 4, 12)
    }
    assert counts == {"never": 12, 1: 12, 2: 6, 4: 3, 12: 1}


def test_auto_fuses_where_latency_is_dear_and_not_where_computing_is() -> None:
    net = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(8)))
    shape, layout = (1, 64, 128, 128), Layout(width=2)
    tape = record(net, call_with, torch.empty(shape), [torch.Size(shape)])
    grid = grid_of(layout)

    def chosen(costs: Costs) -> int:
        here = Here(grid, 0)
        return messages(planned(tape, [spread_of(shape, grid)], here, Options("auto", costs=costs)))

    assert chosen(Costs(latency_s=1.0)) == 1
    assert chosen(Costs(latency_s=1e-7, flops_per_s=1e9)) == 8


def test_readers_of_one_value_share_its_exchange() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 5, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x) + nn.functional.max_pool2d(x, 3, 1, 1)

    assert messages(plan(Branches(), (1, 2, 9, 9), Layout(width=2), "never")) == 1
    expect_tiles(Branches(), (1, 2, 9, 9), Layout(width=2, height=2))
