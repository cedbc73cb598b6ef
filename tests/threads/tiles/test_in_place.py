"""In-place calls in tiles: they make new values, and mean what they meant."""

import pytest
import torch
from torch import Tensor, nn

from fivefold.plan import Layout
from tiles import expect_tiles


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.body(x)
        single = x.float()
        single += x.double() * 0.5  # stays in float32
        mask = torch.zeros_like(x).fill_(2.0).mul_(x.mean((2, 3), keepdim=True))
        mask.clamp_(-1, 1).add_(1)
        copied = x.new_empty(x.shape).copy_(x)
        flags = (x > 0).logical_not_()
        y = torch.special.expit(torch.arctan(copied * mask))
        return [single.double() * 1e-6, y + torch.ones_like(y).zero_(), flags, y.data]


@pytest.mark.parametrize("layout", [Layout(height=2, width=2), Layout(width=3)], ids=str)
def test_in_place_calls_mean_what_they_meant(layout: Layout) -> None:
    expect_tiles(InPlace(), (2, 2, 7, 5), layout)
