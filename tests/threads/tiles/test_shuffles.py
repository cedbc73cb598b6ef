import pytest
from torch import nn

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


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.PixelShuffle(2), (2, 8, 7, 5)),
        (nn.PixelShuffle(3), (9, 7, 5)),
        (nn.PixelUnshuffle(2), (2, 2, 10, 14)),
        (nn.PixelUnshuffle(3), (2, 9, 9, 6)),
        (nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.PixelShuffle(2)), (1, 3, 9, 7)),
    ],
    ids=repr,
)
def test_pixels_go_where_they_go_in_the_image(
    net: nn.Module, shape: tuple[int, ...], layout: Layout
) -> None:
    net = nn.Sequential(nn.Tanh(), net)
    expect_tiles(net, shape, layout)


@pytest.mark.parametrize(
    "net", [nn.PixelShuffle(2), nn.PixelShuffle(3), nn.PixelUnshuffle(2)], ids=repr
)
def test_margins_behind_shuffles(net: nn.Module) -> None:
    channels = 36 if isinstance(net, nn.PixelShuffle) else 1
    net = nn.Sequential(nn.AvgPool2d(3, 1, 1), net, nn.AvgPool2d(3, 1, 1))
    expect_tiles(net, (1, channels, 10, 6), Layout(height=2, width=2), fuse=4, check=has_margin)
