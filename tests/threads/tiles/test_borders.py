from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.program.program import Program
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3)]


def has_margin(program: Program) -> None:
    """What the last node reads is held with a margin by somebody."""
    (ref,) = program.tape.nodes[-1].operands
    assert isinstance(ref, Value)
    spread = program.spreads[ref.index]
    assert spread != spread.tight()


class Calls(nn.Module):
    """A function as a net, between operations whose results lie by their own bounds."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.first = nn.Conv2d(2, 2, 3, stride=1)

    def forward(self, x: Tensor) -> object:
        return self.function(self.first(x))


# Together in one net, which is quick; each by itself with margins, which also says which one fails.
MOVES = {
    "constant": lambda x: F.pad(x, (1, 2, 3, 0), value=1.5),
    "crop": lambda x: F.pad(x, (-1, 2, -2, -1)),
    "crop to nothing of one tile": lambda x: F.pad(x, (0, 0, -6, 0)),
    "channels": lambda x: F.pad(x, (1, 1, 0, 0, 1, 0)),
    "reflect": lambda x: F.pad(x, (2, 4, 3, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (2, 1, 0, 5), mode="replicate"),
    "circular": lambda x: F.pad(x, (2, 3, 4, 1), mode="circular"),
    "circle of one dim": lambda x: F.pad(x, (0, 0, 0, 8), mode="circular"),
    "roll": lambda x: x.roll((3, -2), (-2, -1)),
    "roll one": lambda x: x.roll(-1, 2).roll(1, 1),
    "roll far": lambda x: x.roll(10, 2),
    "flip": lambda x: x.flip(2, 1).flip((3,)),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_borders_of_tiles_are_those_of_the_image(layout: Layout) -> None:
    net = Calls(lambda x: [function(x) for function in MOVES.values()])
    expect_tiles(net, (2, 2, 13, 9), layout)


@pytest.mark.parametrize("name", MOVES)
def test_margins_behind_borders(name: str) -> None:
    net = nn.Sequential(Calls(MOVES[name]), nn.AvgPool2d(3, 1, 1))
    expect_tiles(net, (2, 2, 13, 9), Layout(height=2, width=2), fuse=4, check=has_margin)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
def test_convolutions_pad_in_every_mode(mode: str) -> None:
    net = nn.Conv2d(2, 3, 5, stride=2, padding=(2, 1), padding_mode=mode)
    expect_tiles(net, (2, 2, 11, 8), Layout(height=2, width=2))


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize(
    ("layout", "shape"),
    [(Layout(width=3), (2, 3, 11)), (Layout(depth=2, height=2), (1, 2, 5, 7, 3))],
    ids=str,
)
def test_lines_and_volumes(layout: Layout, shape: tuple[int, ...], mode: str) -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(x * 1, (1, 2) * (len(shape) - 2), mode=mode)

    expect_tiles(Padded(), shape, layout)
