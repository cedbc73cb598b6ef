"""What a net returns besides a row for each sample, and a loss of the user's own takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fivefold.plan import Layout
from joined import Net, expect_exact

LAYOUTS = [Layout(data=2), Layout(data=3), Layout(pipe=2)]
ROWS = (4, 6, 5, 4)
"""shares of two and three, which are also the sizes of what is no sample's"""


class Returning(Net):
    """Returns something beside the outputs."""

    def __init__(self, middle: Any, **held: Any) -> None:
        super().__init__(lambda _net, x: x.tanh(), **held)
        self.beside = middle
        self.two, self.three = nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.beside(self, x)


def vectors(net: Returning, _x: Tensor) -> Any:
    return {"two": net.two.exp(), "three": net.three * 2}


def number(net: Returning, _x: Tensor) -> Tensor:
    return net.two.exp().sum() + net.first.weight.square().mean()


def by_time(net: Returning, x: Tensor) -> Tensor:
    """Two steps of time, on the leading dim."""
    return torch.stack([net.first(x), net.first(x * 2)])


def several(net: Returning, x: Tensor) -> Tensor:
    """Three rows of every sample."""
    return net.first(x).view(-1, 2)


def added(outputs: tuple[Tensor, Any], targets: Tensor) -> Tensor:
    found, beside = outputs
    total = (found - targets).square().mean()
    for leaf in beside.values() if isinstance(beside, dict) else [beside]:
        total = total + (leaf * torch.arange(1.0, leaf.numel() + 1).view(leaf.shape)).sin().sum()
    return total


@pytest.mark.filterwarnings("ignore:the loss 'added' is not one that Fivefold can take apart")
@pytest.mark.filterwarnings("ignore:the loss cannot be computed in tiles")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("beside", [vectors, number, by_time, several])
def test_outputs_are_gathered_along_the_samples_and_no_others(beside: Any, layout: Layout) -> None:
    expect_exact(layout, beside, kind=Returning, criterion=lambda: added, rows=ROWS)
