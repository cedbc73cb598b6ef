from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.plan import Layout
from tiles import expect_tiles


class Calls(nn.Module):
    """A function as a net."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> object:
        return self.function(x.tanh())


PATCHES = {
    "patches": lambda x: x.unfold(2, 3, 2).unfold(3, 2, 2),
    "one dim": lambda x: x.unfold(-2, 4, 1),
    "channels": lambda x: x.unfold(1, 2, 1),
    "columns": lambda x: F.unfold(x, 3, padding=1),
    "sparse columns": lambda x: F.unfold(x, (2, 3), (2, 1), (0, 2), (3, 2)),
    "columns averaged": lambda x: F.avg_pool1d(F.unfold(x, 3, padding=1), 5, 1),
}


@pytest.mark.parametrize("layout", [Layout(height=2, width=2), Layout(height=3)], ids=str)
def test_patches_of_tiles_are_those_of_the_image(layout: Layout) -> None:
    net = Calls(lambda x: [function(x) for function in PATCHES.values()])
    expect_tiles(net, (2, 3, 13, 9), layout, fuse=3)
