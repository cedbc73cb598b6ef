from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.program.program import Program
from fivefold.parallel.tiles.slices import RowRange
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
    """A function as a net."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x.tanh())


# Together in one net, which is quick; some by themselves with margins, too.
SLICES = {
    "steps": lambda x: x[:, :, ::2, 1::3],
    "negative": lambda x: x[..., 1:-2, -5:],
    "interleaved": lambda x: x[:, :1, 0::2] + x[:, 1:2, 0::2],
    "number": lambda x: x[:, :, 7] + x[:, :, -1],
    "numbers": lambda x: x[0, 1, 3],
    "new dims": lambda x: x[:, None, ..., None, 2:],
    "only new": lambda x: x[None],
    "a corner": lambda x: x[:, :, :2, :2],
    "nothing": lambda x: x[:, 2:2, 1:],
    "list of channels": lambda x: x[:, [2, 0, 0]],
    "tensor of channels": lambda x: x[:, torch.tensor([2, 0])] * x[:, :1],
    "index_select": lambda x: x.index_select(1, torch.tensor([1, 2])),
    "narrow": lambda x: x.narrow(2, 3, 6).narrow(1, 0, 2),
    "select": lambda x: x.select(3, 2).select(1, -1),
    "list of samples": lambda x: x[[1, 0], :, 2:],
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_slices_of_tiles_are_those_of_the_image(layout: Layout) -> None:
    net = Calls(lambda x: [function(x) for function in SLICES.values()])
    expect_tiles(net, (2, 3, 13, 9), layout)


@pytest.mark.parametrize("name", ["steps", "negative", "interleaved", "list of channels", "narrow"])
def test_margins_behind_slices(name: str) -> None:
    net = nn.Sequential(nn.AvgPool2d(2, 1), Calls(SLICES[name]), nn.AvgPool2d(3, 1, 1))
    expect_tiles(net, (2, 3, 17, 13), Layout(height=2, width=2), fuse=4, check=has_margin)


@pytest.mark.parametrize(
    "function", [lambda x: x[:, :, [1, 0, 5]], lambda x: x[:, :, torch.tensor([[1, 0], [3, 3]])]]
)
def test_lists_of_pixels_are_gathered(function: Callable[[Tensor], Tensor]) -> None:
    def whole(program: Program) -> None:
        assert program.spreads[program.tape.nodes[-1].outputs[0]].cuts[2] is None

    expect_tiles(Calls(function), (2, 3, 7, 5), Layout(height=2, width=2), check=whole)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(Layout(width=3), (2, 4, 11)), (Layout(depth=2, height=2), (1, 2, 5, 7, 3))],
    ids=str,
)
def test_lines_and_volumes(layout: Layout, shape: tuple[int, ...]) -> None:
    expect_tiles(Calls(lambda x: x[:, 1:, ..., 1::2]), shape, layout)


@given(st.data())
def test_rows_lie_where_slices_say(data: st.DataObject) -> None:
    n, step = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 5))
    found = range(
        *slice(data.draw(st.integers(-50, 50)), data.draw(st.integers(-50, 50)), step).indices(n)
    )
    rows = RowRange(found.start, step, len(found))
    bound = data.draw(st.integers(0, n))
    first = min(max(rows.bound(bound), 0), rows.count)
    assert all(row < bound for row in found[:first])
    assert all(row >= bound for row in found[first:])
    low = data.draw(st.integers(0, rows.count))
    high = data.draw(st.integers(low, rows.count))
    start, stop = rows.needs((low, high))
    assert list(range(start, stop, step)) == list(found[low:high])
