"""Losses of outputs that no longer lie in tiles: their samples are divided over the tile ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fivefold.plan import Layout
from small_models import judged

LAYOUTS = [Layout(height=3), Layout(data=2, height=2), Layout(height=2, width=2)]
SAMPLES = 5


def picture() -> nn.Module:
    """One pixel, which nothing but samples is left to divide of, and a picture made of it."""
    return nn.Sequential(nn.Conv2d(3, 4, (5, 4)), nn.Upsample(size=(6, 5)), nn.Sigmoid())


def vector() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, (5, 4)), nn.Flatten(), nn.Linear(4, 4), nn.Sigmoid())


def classes(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 4, (SAMPLES, *shape))


def numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(SAMPLES, *shape)


@pytest.mark.long(every=8)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    ("net", "loss", "targets"),
    [
        (picture, nn.L1Loss(), numbers(4, 6, 5)),
        (picture, nn.KLDivLoss(reduction="batchmean"), numbers(4, 6, 5)),
        (picture, nn.CrossEntropyLoss(ignore_index=2), classes(6, 5)),
        (vector, nn.MSELoss(), numbers(4)),
        (vector, nn.CrossEntropyLoss(), classes()),
        (vector, nn.MultiMarginLoss(), classes()),
        (vector, nn.CrossEntropyLoss(label_smoothing=0.1), numbers(4)),
    ],
)
def test_a_loss_of_samples_that_are_divided(
    net: Callable[[], nn.Module],
    loss: nn.Module,
    targets: Callable[[], Tensor],
    layout: Layout,
) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(SAMPLES, 3, 5, 4), targets()

    report = judged(net(), layout, 1, loss, batch)
    assert report.passed, (report.verdict(), report.notes, report.worst)
