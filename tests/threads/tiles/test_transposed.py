import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fivefold.parallel.tiles.transposed import Spray
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3)]


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "net",
    [
        nn.ConvTranspose2d(3, 4, 2, stride=2),
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(3, 4, 4, stride=2, padding=1, bias=False),
        nn.ConvTranspose2d(4, 6, (5, 3), (1, 3), (2, 0), (0, 2), groups=2),
        nn.ConvTranspose2d(3, 2, 2, stride=4, output_padding=3),
        nn.ConvTranspose2d(3, 2, 3, stride=2, padding=2, dilation=3, output_padding=2),
        nn.ConvTranspose2d(3, 2, 1, stride=3, padding=1),
        nn.ConvTranspose2d(3, 2, 7, padding=6),
    ],
    ids=repr,
)
def test_a_transposed_convolution_of_tiles_is_one_of_the_image(
    net: nn.ConvTranspose2d, layout: Layout
) -> None:
    expect_tiles(net, (2, net.in_channels, 11, 7), layout)


def test_margins_behind_transposed_convolutions() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1),
        nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.Conv2d(2, 2, 3, padding=1),
    )
    expect_tiles(net, (2, 2, 9, 11), Layout(height=2, width=2), fuse=4)


@pytest.mark.parametrize(
    ("net", "layout", "shape"),
    [
        (nn.ConvTranspose1d(2, 3, 4, 3, 1, 1), Layout(width=3), (2, 2, 11)),
        (nn.ConvTranspose3d(2, 3, 3, 2, 1, 1), Layout(depth=2, height=2), (1, 2, 5, 7, 3)),
    ],
    ids=repr,
)
def test_lines_and_volumes(net: nn.Module, layout: Layout, shape: tuple[int, ...]) -> None:
    expect_tiles(net, shape, layout)


@given(
    st.builds(Spray, st.integers(1, 6), st.integers(1, 6), st.integers(0, 6), st.integers(1, 4)),
    st.integers(0, 20),
    st.integers(1, 10),
)
def test_inputs_cover_the_outputs_that_need_them(spray: Spray, start: int, size: int) -> None:
    rows = (start, start + size)
    first, stop = spray.needs(rows)
    windows = {
        i: [i * spray.stride - spray.padding + spray.dilation * k for k in range(spray.kernel)]
        for i in range(-30, 60)
    }
    for i, outputs in windows.items():
        assert first <= i < stop or not any(start <= j < start + size for j in outputs)
    made = (stop - 1 - first) * spray.stride + spray.reach + 1
    assert first * spray.stride - spray.padding + spray.offset(rows) == start
    assert spray.offset(rows) >= 0
    assert spray.offset(rows) + size <= made
