from typing import Any

import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.program.program import Program
from fivefold.parallel.tiles.resample import Averaged, Nearest, Scaled, Weighted
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3)]


def has_margin(program: Program) -> None:
    """What the last node reads is held with a margin by somebody."""
    (ref,) = program.tape.nodes[-1].operands
    assert isinstance(ref, Value)
    spread = program.spreads[ref.index]
    assert spread != spread.tight()


class Resized(nn.Module):
    """`F.interpolate` of something that has a gradient."""

    def __init__(self, *options: dict[str, Any]) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        x = x.tanh()
        found = [F.interpolate(x, **options) for options in self.options]
        return found[0] if len(found) == 1 else found


# Together in one net, which is quick; each by itself with margins, which also says which one fails.
OPTIONS: list[dict[str, Any]] = [
    {"scale_factor": 2},
    {"scale_factor": 3, "mode": "nearest"},
    {"size": (26, 7)},
    {"size": 10, "mode": "nearest-exact"},
    {"scale_factor": (2, 3), "mode": "nearest-exact"},
    {"scale_factor": 2, "mode": "bilinear"},
    {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
    {"scale_factor": (1.7, 0.6), "mode": "bilinear"},
    {"scale_factor": (1.7, 0.6), "mode": "nearest"},
    {"scale_factor": 1.3, "mode": "bilinear", "recompute_scale_factor": True},
    {"size": (39, 4), "mode": "bilinear"},
    {"size": (5, 31), "mode": "bilinear", "align_corners": True},
    {"scale_factor": 2, "mode": "bicubic"},
    {"scale_factor": (0.5, 1.5), "mode": "bicubic"},
    {"size": (9, 14), "mode": "bicubic", "align_corners": True},
    {"size": (5, 20), "mode": "area"},
    {"scale_factor": 1.6, "mode": "area"},
    {"size": (20, 6), "mode": "bilinear", "antialias": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("half", [OPTIONS[::2], OPTIONS[1::2]], ids=["even", "odd"])
def test_interpolation_of_tiles_is_that_of_the_image(
    half: list[dict[str, Any]], layout: Layout
) -> None:
    expect_tiles(Resized(*half), (2, 2, 13, 9), layout)


@pytest.mark.parametrize("options", [{"size": (6, 6)}, {"scale_factor": (0.5, 1 / 3)}], ids=str)
def test_shrinking_by_whole_numbers(options: dict[str, Any]) -> None:
    modes = ["nearest", "nearest-exact", "bilinear", "bicubic", "area"]
    net = Resized(*({**options, "mode": mode} for mode in modes))
    expect_tiles(net, (1, 2, 12, 18), Layout(height=2, width=2))


@pytest.mark.long(every=8)
@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_margins_behind_interpolation(options: dict[str, Any]) -> None:
    net = nn.Sequential(nn.AvgPool2d(2, 1), Resized(options), nn.AvgPool2d(3, 1, 1))
    expect_tiles(net, (2, 2, 14, 10), Layout(height=2, width=2), fuse=4, check=has_margin)


@pytest.mark.parametrize(
    ("mode", "layout", "shape"),
    [
        ("linear", Layout(width=3), (2, 2, 11)),
        ("nearest", Layout(width=3), (2, 2, 11)),
        ("nearest-exact", Layout(depth=2, height=2), (1, 2, 5, 7, 3)),
        ("trilinear", Layout(depth=2, height=2), (1, 2, 5, 7, 3)),
        ("area", Layout(depth=2, height=2), (1, 2, 5, 7, 3)),
    ],
)
def test_lines_and_volumes(mode: str, layout: Layout, shape: tuple[int, ...]) -> None:
    net = Resized(*({"scale_factor": factor, "mode": mode} for factor in (2, 1.3)))
    expect_tiles(net, shape, layout)


def test_the_modules_are_known() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.UpsamplingNearest2d(scale_factor=2),
        nn.UpsamplingBilinear2d(size=(21, 17)),
    )
    expect_tiles(net, (2, 2, 7, 5), Layout(height=2, width=2))


sizes = st.integers(2, 30)


@given(sizes, sizes, st.booleans(), st.booleans(), st.data())
def test_weights_add_up_to_one_and_lie_in_what_is_wanted(
    before: int, n: int, cubic: bool, corners: bool, data: st.DataObject
) -> None:
    ratio = (before - 1) / (n - 1) if corners else before / n
    line = data.draw(
        st.sampled_from(
            [Weighted(before, n, ratio, cubic, corners), Averaged(before, n, before / n)]
        )
    )
    low = data.draw(st.integers(0, n - 1))
    high = data.draw(st.integers(low + 1, n))
    ((start, stop),) = line.needs((low, high))
    assert start >= 0 and stop <= before
    for row in range(low, high):
        taps, weights = line.tap(row)
        assert abs(sum(weights) - 1) < 1e-12
        assert all(start <= tap < stop for tap in taps)


@given(sizes, sizes, st.booleans(), st.data())
def test_the_nearest_row_is_among_those_wanted(
    before: int, n: int, exact: bool, data: st.DataObject
) -> None:
    line = Nearest(before, n, before / n, exact, None)
    row = data.draw(st.integers(0, n - 1))
    ((start, stop),) = line.needs((row, row + 1))
    nearest = (2 * row + exact) * before // (2 * n)
    assert 0 <= start <= nearest < stop <= before


@given(st.integers(2, 12), st.integers(1, 4), st.booleans(), st.integers(0, 2), st.data())
def test_units_hold_what_is_cut_out_of_them(
    small: int, times: int, grows: bool, margin: int, data: st.DataObject
) -> None:
    before, n = (small, small * times) if grows else (small * times, small)
    line = Scaled(before, n, before / n, margin)
    low = data.draw(st.integers(0, n - 1))
    high = data.draw(st.integers(low + 1, n))
    ((start, stop),) = line.needs((low, high))
    crop, comes = line.crop((low, high)), (stop - start) * line.up // line.down
    assert 0 <= crop.start < crop.stop <= comes
    assert start * n // before + crop.start == low
