"""Every model of the recipes in tiles, by the measure of `fivefold verify`, in float64.

The default suite has each of them under one layout or two, so that all layouts occur; `-m slow` has every
model under every layout, three steps each. `tiles.strict` is on: nothing is gathered as unknown.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fivefold.plan import Layout
from fivefold.recipes import models
from fivefold.train.verify.report import Report
from small_models import CLASSES, FLAT, SMALL, SOLID, judged, net_of, run

SPREAD = [
    ("resnet20", Layout(data=2, width=2), 1),
    ("resnet50", Layout(height=3), 1),
    ("amoebanet_d", Layout(width=2), 1),
    ("unet", Layout(height=3, width=2), 1),
    ("unet_bilinear", Layout(height=2, width=2), 2),
    ("edsr", Layout(height=3), 2),
    ("edsr", Layout(data=2, height=2), 1),  # three pictures on two replicas
    ("mobilenet_v2", Layout(height=2), 1),
    ("shufflenet_v2_x1_0", Layout(width=2), 1),
    ("densenet121", Layout(height=2, width=2), 1),
    ("vgg16_bn", Layout(height=2, width=2), 1),
    ("deeplabv3", Layout(height=2, width=2), 1),
    ("unet3d", Layout(depth=2, width=2), 1),
    ("unet3d", Layout(depth=3), 1),
]


def expect_exact(report: Report) -> None:
    assert report.passed, (report.verdict(), report.notes, report.worst)
    assert report.replicas.difference == 0


@pytest.mark.long(every=8)
@pytest.mark.parametrize(("name", "layout", "steps"), SPREAD, ids=str)
def test_a_model_in_tiles(name: str, layout: Layout, steps: int) -> None:
    expect_exact(run(name, layout, steps))


def _every() -> Iterator[tuple[str, Layout]]:
    for name in SMALL:
        for layout in FLAT if models.dims(name) == 2 else SOLID:
            yield name, layout


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), list(_every()), ids=str)
def test_every_model_under_every_layout(name: str, layout: Layout) -> None:
    expect_exact(run(name, layout, 3))


def test_no_model_is_forgotten() -> None:
    others = {"resnet18", "resnet34", "resnet56", "edsr_small"}  # more or fewer of the same layers
    assert set(SMALL) | others == set(models.names())


class TwoMaps(nn.Module):
    """Logits of pixels and their mean over the image, as a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net_of("unet")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x)
        return {"pixels": y, "image": y.mean((2, 3))}


class Both(nn.Module):
    def forward(self, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
        pixels = nn.functional.cross_entropy(outputs["pixels"], targets, ignore_index=1)
        return pixels + outputs["image"].square().mean()


@pytest.mark.filterwarnings("ignore:the loss", "ignore:Both")
def test_a_dict_of_outputs_and_a_loss_of_ones_own() -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(3, 3, 31, 29), torch.randint(0, CLASSES, (3, 31, 29))

    expect_exact(judged(TwoMaps(), Layout(data=2, height=2), 1, Both(), batch))


def test_squared_errors_of_a_picture() -> None:
    def batch() -> tuple[Tensor, Tensor]:
        return torch.randn(2, 3, 23, 19), torch.rand(2, 3, 46, 38)

    expect_exact(judged(net_of("edsr"), Layout(height=2, width=2), 1, nn.MSELoss(), batch))
