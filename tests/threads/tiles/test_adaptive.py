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
    "net",
    [
        nn.AdaptiveAvgPool2d((6, 3)),
        nn.AdaptiveAvgPool2d(7),
        nn.AdaptiveAvgPool2d((None, 5)),
        nn.AdaptiveAvgPool2d((1, 3)),
        nn.AdaptiveAvgPool2d(1),
        nn.AdaptiveAvgPool2d((15, 20)),
        nn.AdaptiveMaxPool2d((4, 3)),
        nn.AdaptiveMaxPool2d((None, 9)),
        nn.AdaptiveMaxPool2d((5, 2)),
        nn.AdaptiveMaxPool2d(1),
    ],
    ids=repr,
)
def test_an_adaptive_pool_of_tiles_is_one_of_the_image(net: nn.Module, layout: Layout) -> None:
    expect_tiles(nn.Sequential(nn.ReLU(), net), (2, 2, 12, 9), layout)


@pytest.mark.parametrize(
    ("net", "layout", "shape"),
    [
        (nn.AdaptiveAvgPool1d(5), Layout(width=3), (2, 2, 11)),
        (nn.AdaptiveMaxPool1d(6), Layout(width=3), (2, 2, 12)),
        (nn.AdaptiveAvgPool3d((4, None, 2)), Layout(depth=2, height=2), (1, 2, 8, 7, 3)),
        (nn.AdaptiveMaxPool3d((4, 2, 2)), Layout(depth=2, height=2), (1, 2, 8, 6, 3)),
    ],
    ids=repr,
)
def test_lines_and_volumes(net: nn.Module, layout: Layout, shape: tuple[int, ...]) -> None:
    expect_tiles(nn.Sequential(nn.Tanh(), net), shape, layout)


@pytest.mark.parametrize("net", [nn.AdaptiveAvgPool2d(5), nn.AdaptiveMaxPool2d((6, 4))], ids=repr)
def test_no_tile_becomes_whole(net: nn.Module) -> None:
    def cut(program: Program) -> None:
        assert program.spreads[program.tape.nodes[-1].outputs[0]].cut_dims == (2, 3)

    layout = Layout(height=2, width=2)
    expect_tiles(nn.Sequential(nn.ReLU(), net), (2, 2, 12, 8), layout, check=cut)


@pytest.mark.parametrize(
    "net",
    [nn.AdaptiveAvgPool2d(5), nn.AdaptiveAvgPool2d((6, 4)), nn.AdaptiveMaxPool2d((6, 4))],
    ids=repr,
)
def test_margins_behind_adaptive_pools(net: nn.Module) -> None:
    net = nn.Sequential(nn.AvgPool2d(3, 1, 1), net, nn.AvgPool2d(3, 1, 1))
    expect_tiles(net, (2, 2, 12, 8), Layout(height=2, width=2), fuse=4, check=has_margin)
