"""Tiles that are turned into samples where they would become thin, and back where a skip wants them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.program.costs import Costs
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.program import Move, Program
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3), Layout(width=2)]


class Skip(nn.Module):
    """Down to a few pixels and up again, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(*(self._block(4, 4, stride=2) for _ in range(6)))
        self.first, self.last = self._block(3, 4), nn.Conv2d(8, 2, 3, padding=1)

    @staticmethod
    def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        low = nn.functional.interpolate(
            self.down(x), size=x.shape[-2:], mode="bilinear", align_corners=False
        )
        return self.last(torch.cat([x, low], 1))


def classifier() -> nn.Module:
    convolutions = [
        layer
        for _ in range(4)
        for layer in (nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU())
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.0), nn.Linear(4, 5))
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *convolutions, *head)


def turned(program: Program) -> bool:
    return any(spread.cut_dims == (0,) for spread in program.spreads.values())


def expect_turned(program: Program) -> None:
    assert turned(program)
    assert not any(spread.is_whole for index, spread in program.spreads.items() if index)


def expect_gathered(program: Program) -> None:
    assert not turned(program)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("fuse", ["never", "auto"])
def test_the_tail_of_a_classifier_becomes_data_parallel(layout: Layout, fuse: str) -> None:
    expect_tiles(classifier(), (5, 3, 19, 17), layout, fuse=fuse, check=expect_turned)


def test_fewer_samples_than_tiles_are_gathered() -> None:
    expect_tiles(classifier(), (3, 3, 19, 17), LAYOUTS[0], check=expect_gathered)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_samples_become_tiles_again_at_a_skip(layout: Layout) -> None:
    def both(program: Program) -> None:
        assert turned(program)
        outputs = program.tape.outputs
        assert program.spreads[outputs.index].cut_dims in ((2, 3), (2,), (3,))

    # Where bytes are dear and latency is not, tiles stay tiles as long as they can.
    costs = Costs(latency_s=0.0, bytes_per_s=1.0)
    expect_tiles(Skip(), (4, 3, 67, 61), layout, costs=costs, check=both)


def test_turning_takes_one_exchange() -> None:
    def check(program: Program) -> None:
        moves = [s for s in program.steps if isinstance(s, Move) and s.exchange.moves]
        assert len(moves) <= 1

    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 2, (2, 3), (2, 3)), nn.ReLU())
    expect_tiles(net, (2, 3, 4, 3), Layout(width=2), check=check)


class Stages(nn.Module):
    """Every stage after a layer that leaves one pixel, and so nothing to divide but samples."""

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 4, 2, 2), nn.Upsample(size=(6, 5)))
        self.stages = nn.ModuleList(stages)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.first(x)
        functional = [
            x.flip(-1), x.roll((1, 2), (2, 3)), x[:, :, 1:4:2, -3:], x.mean((2, 3)), x.flatten(1),
            x.sum(), x.view(-1, 2, 2, 6, 5).transpose(1, 2).reshape(-1, 4, 30),
            x.amax((2, 3), keepdim=True) * x,
            torch.cat([x, x[:, :1]], 1), x.chunk(2, 1)[1], x.softmax(-1), x.permute(0, 2, 3, 1),
            x.std((1, 2, 3)), x[:, 0], torch.stack([x, x], 1), nn.functional.pixel_shuffle(x, 2),
        ]  # fmt: skip
        return [*functional, *(stage(x) for stage in self.stages)]


@pytest.mark.parametrize("layout", [Layout(height=2), Layout(height=2, width=2)], ids=str)
def test_everything_works_on_samples_that_are_divided(layout: Layout) -> None:
    stages = (
        nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, ceil_mode=True), nn.AdaptiveAvgPool2d(3),
        nn.AdaptiveAvgPool2d(1),
        nn.ConvTranspose2d(4, 2, 3, 2, 1), nn.Upsample(scale_factor=1.5, mode="bilinear"),
        nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True, track_running_stats=True), nn.LayerNorm((6, 5)),
        nn.BatchNorm2d(4), nn.Linear(5, 3), nn.ReflectionPad2d(2), nn.CircularPad2d(1), nn.PReLU(4),
        nn.Softmax2d(),
        nn.LocalResponseNorm(2), nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
    )  # fmt: skip
    expect_tiles(Stages(*stages), (5, 3, 2, 2), layout, check=expect_turned_somewhere)


def expect_turned_somewhere(program: Program) -> None:
    assert turned(program)


class WithIndices(nn.Module):
    """An operation with two results that nobody knows in tiles."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(nn.functional.max_pool2d(x, 3, 1, 1, return_indices=True))


@pytest.mark.filterwarnings("ignore:.* is not known to Fivefold's tiles")
def test_all_results_of_an_unknown_operation_are_cut_again() -> None:
    net = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), WithIndices())
    expect_tiles(net, (2, 3, 9, 7), Layout(height=2, width=2), strict=False)


def test_replicas_of_uneven_size_turn_tiles_into_samples_at_the_same_place() -> None:
    """Statistics are joined over all replicas, so one that chose otherwise would wait for ever."""

    def check(mesh: Mesh) -> list[tuple[int, ...]]:
        tiles = RecordedNet(classifier().double(), mesh)
        image = torch.empty(9, 3, 67, 61, dtype=torch.float64)
        program = tiles.plan_for(image, mesh.share)
        return [program.spreads[node.outputs[0]].cut_dims for node in program.tape.nodes]

    plans = run_ranks(Layout(data=2, height=2, width=2), check)
    assert plans == [plans[0]] * 8
