"""Convolutions in two parts, the tile and what was received: the same numbers, and no copy of the tile."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.parallel.program.border import border
from fivefold.parallel.program.exchange import Exchange, Lines, Want
from fivefold.parallel.program.program import Compute, Program
from fivefold.parallel.program.windows import Window
from fivefold.plan import Layout
from ranks import run_ranks
from tiles import expect_tiles, grid_of, spread_of


def borders(program: Program) -> int:
    return sum(step.border is not None for step in program.steps if isinstance(step, Compute))


def expect_borders(program: Program) -> None:
    convolutions = sum(node.name.startswith("conv") for node in program.tape.nodes)
    assert borders(program) == convolutions


def chain(*layers: nn.Module) -> nn.Module:
    """Layers behind a pointwise one, so that what they are given has a gradient of its own."""
    return nn.Sequential(nn.Tanh(), *layers)


@pytest.mark.parametrize(
    ("net", "shape", "layout"),
    [
        (chain(nn.Conv2d(3, 4, 3, padding=1)), (2, 3, 17, 13), Layout(height=2, width=2)),
        (chain(nn.Conv2d(3, 4, 3, padding=1)), (1, 3, 5, 9), Layout(height=3)),
        (chain(nn.Conv2d(4, 6, 5, padding=2, groups=2)), (2, 4, 12, 11), Layout(width=3)),
        (chain(nn.Conv2d(3, 4, 3, padding=3, dilation=3)), (2, 3, 16, 16), Layout(width=2, height=2)),
        (chain(nn.Conv2d(3, 4, (3, 5), padding=(1, 2), bias=False)), (2, 3, 9, 8), Layout(width=2)),
        (chain(nn.Conv2d(3, 4, 7, 2, 3), nn.Conv2d(4, 4, 3, 2, 1)), (1, 3, 32, 32), Layout(height=2)),
        (chain(nn.Conv2d(3, 4, 1, 2)), (2, 3, 16, 12), Layout(height=2)),
        (chain(nn.Conv1d(3, 4, 3, padding=1)), (2, 3, 11), Layout(width=2)),
        (chain(nn.Conv3d(2, 3, 3, padding=1)), (1, 2, 6, 7, 8), Layout(depth=2, height=2)),
        (chain(nn.Conv3d(2, 3, 3, padding=1)), (1, 2, 5, 5, 6), Layout(depth=2, height=1, width=2)),
    ],
    ids=repr,
)  # fmt: skip
def test_in_two_parts(net: nn.Module, shape: tuple[int, ...], layout: Layout) -> None:
    expect_tiles(net, shape, layout, check=expect_borders)


@pytest.mark.parametrize("recompute", [0, 2])
def test_a_chain_with_norms(recompute: int) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    expect_tiles(net, (2, 3, 14, 10), Layout(height=2, width=2), recompute=recompute)


def test_ranks_whose_windows_begin_elsewhere_put_their_tile_together() -> None:
    """Tiles of 17 rows begin at 0, 5 and 11: with a stride of two, not every one begins with a window."""
    found: list[int] = []
    net = chain(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    expect_tiles(net, (2, 3, 17, 6), Layout(height=3), check=lambda p: found.append(borders(p)))
    assert min(found) < max(found)


class Twice(nn.Module):
    """Two readers of one value, which share what they receive."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(3, 2, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        return self.narrow(x) + self.wide(x)


def test_readers_that_share_an_exchange() -> None:
    expect_tiles(Twice(), (2, 3, 12, 12), Layout(height=2), check=none)


def none(program: Program) -> None:
    assert borders(program) == 0


def test_the_adjoint() -> None:
    """<Fx, y> = <x, F*y>, summed over ranks, the operation taken as a map of all tiles at once."""
    layout = Layout(height=2, width=2)
    grid, weight = grid_of(layout), torch.randn(4, 3, 3, 3, dtype=torch.float64)
    lies = spread_of((1, 3, 9, 8), grid)
    window = Window(3, padding=1)

    def products(mesh: Mesh) -> tuple[float, float]:
        rank = mesh.group("height", "width").rank()
        wants = [Want.all_of(1), Want.all_of(3)]
        wants += [Want.ranges(c.axes, [window.needs(r) for r in c.held]) for c in lies.cuts if c]
        plan = Exchange.of(lies, wants, grid, rank)
        outputs = lies.local_shape(grid, rank)[2:]
        two = border(
            plan, [window] * 2, [True] * 2, outputs,
            lambda operands, padding, _bias: F.conv2d(operands[0], weight, padding=padding),
        )  # fmt: skip
        assert two is not None
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(plan.shape, dtype=torch.float64, generator=generator, requires_grad=True)
        group = mesh.group("height", "width")
        fx = two.run([x], Lines(group, group))
        y = torch.randn(fx.shape, dtype=torch.float64, generator=generator)
        (adjoint,) = torch.autograd.grad(fx, x, y)
        return float((fx.detach() * y).sum()), float((x.detach() * adjoint).sum())

    found = run_ranks(layout, products)
    assert sum(a for a, _ in found) == pytest.approx(sum(b for _, b in found), rel=1e-12)
