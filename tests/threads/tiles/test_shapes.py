import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fivefold.parallel.program.costs import Fuse
from fivefold.parallel.program.program import Program
from fivefold.parallel.tiles.views import groups
from fivefold.plan import Layout
from tiles import expect_tiles

LAYOUTS = [Layout(height=2, width=2), Layout(height=3)]


class Calls(nn.Module):
    """A function as a net, with a convolution behind it that shows where its result lies."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> object:
        return self.function(x * self.scale)


def keeps_cuts(program: Program) -> None:
    """No result became whole."""
    for node in program.tape.nodes:
        assert not any(program.spreads[index].is_whole for index in node.outputs), node.name


# Together in one net, which is quick; each by itself with margins, which also says which one fails.
VIEWS = {
    "flatten batch": lambda x: x.flatten(0, 1),
    "unflatten channels": lambda x: x.unflatten(1, (2, 2)),
    "unsqueeze": lambda x: x.unsqueeze(-1).unsqueeze(2),
    "squeeze": lambda x: x.unsqueeze(2).squeeze(2),
    "squeeze all": lambda x: x[:1].squeeze(),
    "view 5": lambda x: x.view(x.size(0), 2, -1, *x.shape[2:]),
    "reshape": lambda x: torch.reshape(x, (1, *x.shape)).reshape(*x.shape),
    "view_as": lambda x: x.view(8, *x.shape[2:]).view_as(x),
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, -1).movedim(0, 2),
    "mT": lambda x: x.mT,
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, -1, -1, -1),
    "expand_as": lambda x: x[:, :1].expand_as(x) * x,
    "repeat": lambda x: x.repeat(2, 3, 1, 1).tile(2, 1, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 2).repeat_interleave(2, dim=1),
    "chunk": lambda x: torch.chunk(x, 2, 1),
    "split": lambda x: x.split([1, 3], dim=1),
    "tensor_split": lambda x: x.tensor_split(3, dim=1),
    "unbind": lambda x: x.unbind(1),
    "cat": lambda x: torch.cat([x, x[:, :1], x], 1),
    "stack": lambda x: torch.stack([x, x.tanh()], 2),
    "hstack": lambda x: torch.hstack([x, x]) + torch.vstack([x, x]).sum(),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_views_of_tiles_are_those_of_the_image(layout: Layout) -> None:
    net = Calls(lambda x: [function(x) for function in VIEWS.values()])
    expect_tiles(net, (2, 4, 11, 7), layout)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [Layout(height=3), Layout(height=2)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(2),
        lambda x: x.flatten(2).permute(0, 2, 1),
        lambda x: x.flatten(2).unflatten(2, (6, 14)),
        lambda x: x.view(2, 4, 3, 4, 7),
        lambda x: x.view(2, 4, 3, 4, 7).flatten(2, 3),
        lambda x: x.flatten(2).view(2, 4, 21, 4),
        lambda x: x.flatten(2).unsqueeze(1).squeeze(),
    ],
)
def test_the_first_dim_of_a_group_stays_cut(
    function: Callable[[Tensor], Tensor], layout: Layout
) -> None:
    expect_tiles(Calls(function), (2, 4, 12, 7), layout, check=keeps_cuts)


def averaged(tree: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    """Over neighbours in the last two dims: what comes before has to have margins."""
    tensors = [tree] if isinstance(tree, Tensor) else tree
    tensors = [y.flatten(0, 1) if y.dim() > 4 else y for y in tensors]
    return [F.avg_pool2d(y, (k, 3), 1, (k // 2, 1)) for k, y in enumerate(tensors, 1)]


@pytest.mark.long(every=8)
@pytest.mark.parametrize(
    "name", [name for name in VIEWS if not name.startswith(("un", "ex", "view"))]
)
def test_margins_behind_views(name: str) -> None:
    net = Calls(lambda x: averaged(VIEWS[name](x)))
    expect_tiles(net, (2, 4, 11, 7), Layout(height=2, width=2), fuse=4)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool1d(x.flatten(2), 9, 1, 4),
        lambda x: F.avg_pool2d(x.flatten(2).view(2, 4, 21, 4), 3, 1, 1),
        lambda x: F.avg_pool3d(x.view(2, 4, 3, 4, 7), 3, 1, 1),
        lambda x: F.avg_pool2d(x.view(2, 4, 3, 4, 7).flatten(2, 3), 3, 1, 1),
    ],
)
def test_margins_behind_groups_of_dims(function: Callable[[Tensor], Tensor]) -> None:
    expect_tiles(Calls(function), (2, 4, 12, 7), Layout(height=3), fuse=4, check=keeps_cuts)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", [Layout(height=2, width=2), Layout(width=3)], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(1),
        lambda x: x.flatten(2),
        lambda x: x.flatten(2).view(x.shape) + x,
        lambda x: x.flatten().view(-1, 5) * 2,
        lambda x: x.view(2, 3, 2, 2, 2, 5).permute(0, 2, 4, 1, 3, 5).reshape(8, 3, 2, 5),
    ],
)
@pytest.mark.parametrize("fuse", ["never", 3])
def test_what_would_lie_in_pieces_is_divided_anew(
    function: Callable[[Tensor], Tensor], layout: Layout, fuse: Fuse
) -> None:
    net = Calls(lambda x: function(F.avg_pool2d(x, 3, 1, 1)))
    expect_tiles(net, (2, 3, 8, 5), layout, fuse=fuse, check=keeps_cuts)


def test_samples_are_divided_rather_than_pieces_of_them() -> None:
    def by_samples(program: Program) -> None:
        made = program.spreads[program.tape.nodes[-1].outputs[0]]
        assert made.cut_dims == (0,)

    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(90, 4))
    expect_tiles(net, (5, 2, 8, 7), Layout(height=2, width=2), check=by_samples)


def test_joining_along_a_cut_gathers() -> None:
    expect_tiles(Calls(lambda x: torch.cat([x, x], 2)), (2, 3, 7, 5), Layout(height=2, width=2))


def test_a_classifier_of_flattened_pixels() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(True), nn.Flatten(), nn.Linear(90, 4))
    expect_tiles(net, (2, 2, 8, 7), Layout(height=2, width=2))


@given(st.data())
def test_groups_find_every_element(data: st.DataObject) -> None:
    numbers = st.lists(st.integers(1, 4), min_size=1, max_size=4)
    before, after = data.draw(numbers), data.draw(numbers)
    shape, other = (*before, *after), (*after, *before)
    x = torch.arange(math.prod(shape))
    found = groups(shape, other)
    assert found is not None
    for group in found:
        sizes = [other[dim] for dim in group.after]
        rows = sorted(data.draw(st.tuples(st.integers(0, sizes[0]), st.integers(0, sizes[0]))))
        if rows[0] == rows[1]:
            continue
        span = (rows[0], rows[1])
        whole = x[: group.numel]
        box = whole.view(group.sizes)[tuple(slice(*r) for r in group.needs(span))]
        wanted = whole.view(sizes)[slice(*span)]
        assert torch.equal(box.flatten()[slice(*group.crop(span))], wanted.flatten())


def test_tensors_that_lie_differently_are_joined() -> None:
    net = nn.Conv2d(3, 4, 2, stride=2)
    other = nn.MaxPool2d(2)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            small = other(x)
            return torch.cat([self.net(x)[:, :, :, :], small[:, :2]], 1)

    expect_tiles(Both(), (2, 3, 13, 11), Layout(height=2, width=2))


def test_a_row_of_one_pixel_is_no_dim_to_squeeze() -> None:
    expect_tiles(Calls(lambda x: x.squeeze()), (2, 1, 3, 2), Layout(height=3, width=2))


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(Layout(width=3), (2, 4, 11)), (Layout(depth=2, height=2), (1, 2, 5, 7, 3))],
    ids=str,
)
def test_lines_and_volumes(layout: Layout, shape: tuple[int, ...]) -> None:
    net = Calls(lambda x: torch.cat(x.unsqueeze(1).chunk(2, 2), 2).squeeze(1).movedim(1, -1))
    expect_tiles(net, shape, layout, check=keeps_cuts)
