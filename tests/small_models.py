"""The models of `fivefold.recipes.models`, small enough to train a few steps of them in a test.

Every layer is there, with few channels; `said` tells what is smaller. Sizes of images are odd or prime, so
that no tile is as large as another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.mesh import Mesh
from fivefold.plan import Layout, Plan, Tiles
from fivefold.recipes import models
from fivefold.recipes.models.shufflenet import ShuffleNetV2
from fivefold.train.verify import verify
from fivefold.train.verify.report import Report
from ranks import run_ranks

__all__ = [
    "CLASSES",
    "FLAT",
    "SMALL",
    "SOLID",
    "Small",
    "batch_of",
    "judged",
    "loss_of",
    "net_of",
    "run",
]

CLASSES = 4
FLAT = (
    Layout(height=2), Layout(height=3), Layout(width=2), Layout(height=2, width=2),
    Layout(height=3, width=2), Layout(data=2, width=2),
)  # fmt: skip
"""layouts of images: rows, columns, squares, and with data parallelism"""
SOLID = (
    Layout(depth=2), Layout(depth=3), Layout(height=2), Layout(depth=2, width=2),
    Layout(depth=2, height=2), Layout(data=2, depth=2),
)  # fmt: skip
"""layouts of volumes"""


@dataclass(frozen=True)
class Small:
    """How a model is made small, and what it is fed."""

    image: tuple[int, ...]
    """size without channels"""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    samples: int = 2
    said: str = ""
    """the options in words, where they are not enough"""

    @property
    def size(self) -> str:
        """What is smaller, in words."""
        return self.said or ", ".join(f"{k} {v}" for k, v in self.options.items()) or "as it is"


SMALL: Mapping[str, Small] = {
    "resnet20": Small((37, 29), samples=3),
    "resnet50": Small((97, 71), {"width": 4}),
    "amoebanet_d": Small((41, 37), {"layers": 3, "filters": 16}),
    "unet": Small((53, 41), {"width": 4, "depth": 3}),
    "unet_bilinear": Small((53, 47), {"width": 4, "depth": 3}),
    "edsr": Small((31, 23), {"blocks": 3, "features": 8}, samples=3),
    "mobilenet_v2": Small((67, 61)),
    "shufflenet_v2_x1_0": Small((97, 67), said="widths (8, 12, 24, 48, 32)"),
    "densenet121": Small((97, 71), {"growth": 4, "blocks": (3, 4, 4, 3)}),
    "vgg16_bn": Small((79, 67), {"width": 4, "hidden": 16, "pool": 2}),
    "deeplabv3": Small(
        (61, 53), {"blocks": (1, 2, 2, 1), "width": 4, "features": 8, "rates": (2, 3, 5)}
    ),
    "unet3d": Small((17, 13, 19), {"width": 2, "depth": 2}),
}
"""every model that has layers of its own; the others are these with more or fewer of them"""


def net_of(name: str) -> nn.Module:
    """The small model, with the weights of one seed."""
    torch.manual_seed(2)
    if name == "shufflenet_v2_x1_0":
        return ShuffleNetV2((8, 12, 24, 48, 32), CLASSES)
    return models.build(name, CLASSES, **SMALL[name].options)


def run(name: str, layout: Layout, steps: int, *, strict: bool = True) -> Report:
    """Train a small model under a layout, and judge it; if `strict`, nothing may be gathered as unknown."""
    plan = Plan(layout=layout, tiles=Tiles(strict=strict))
    return judged(net_of(name), plan, steps, loss_of(name), lambda: batch_of(name))


def judged(
    net: nn.Module,
    layout: Layout | Plan,
    steps: int,
    loss: Callable[..., Any],
    batch: Callable[[], tuple[Any, Any]],
    *,
    timeout_s: float = 100,
) -> Report:
    """Train `steps` steps in float64 on ranks that are threads."""
    torch.manual_seed(3)
    batches = [batch() for _ in range(steps)]

    def check(mesh: Mesh) -> Report:
        return verify(
            lambda: copy.deepcopy(net), mesh, loss=loss, batch=batches.__getitem__, steps=steps
        )

    plan = Plan(layout=layout, tiles=Tiles(strict=True)) if isinstance(layout, Layout) else layout
    return run_ranks(plan.layout, check, plan=plan, timeout_s=timeout_s)[0]


def loss_of(name: str) -> nn.Module:
    """What the model is trained with here."""
    if models.returns(name) == "picture":
        return nn.L1Loss()
    return nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 3.0]), ignore_index=1)


def batch_of(name: str, samples: int = 0) -> tuple[Tensor, Tensor]:
    """Images and targets; `samples` where not the model's own number."""
    small = SMALL[name]
    samples = samples or small.samples
    images = torch.randn(samples, 3, *small.image)
    if models.returns(name) == "picture":
        return images, torch.rand(samples, 3, *(2 * n for n in small.image))
    if models.returns(name) == "classes":
        classes = torch.randint(0, CLASSES, (samples,))
        classes[0] = 2  # not every image is ignored
        return images, classes
    classes = torch.randint(0, CLASSES, (samples, *small.image))
    classes[0, : small.image[0] // 3] = 1  # ignored: tiles count differently many pixels
    return images, classes
