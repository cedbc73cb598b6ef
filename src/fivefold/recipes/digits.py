"""Handwritten digits with ResNet-20: the first run of a newcomer, with nothing to download.

The images are 8 x 8; they are enlarged, so that the three resolutions of the network have something to see.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.recipes.recipe import Images, Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from fivefold.data.images import Transform

__all__ = ["RECIPE"]


class _Enlarge:
    """Bilinear interpolation to size x size."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, image: Tensor) -> Tensor:
        from torch.nn.functional import interpolate

        return interpolate(image[None], (self.size, self.size), mode="bilinear")[0]


def _read(directory: Path | None, train: bool, size: int, transform: Transform) -> Images:
    del directory, size
    from fivefold.data.digits import Digits

    return Digits(train=train, transform=transform)


def _augment(size: int) -> Transform:
    from fivefold.data.transforms import Compose, RandomShift

    return Compose(_Enlarge(size), RandomShift(size // 8), _normalise())


def _prepare(size: int) -> Transform:
    from fivefold.data.transforms import Compose

    return Compose(_Enlarge(size), _normalise())


def _normalise() -> Transform:
    from fivefold.data.transforms import Normalise

    return Normalise((0.305,), (0.319,))


RECIPE = Recipe(
    name="digits",
    summary="ResNet-20 on the handwritten digits inside scikit-learn; half a minute on two cores",
    defaults={
        "train.model": "resnet20",
        "train.epochs": 15,
        "train.batch_size": 128,
        "train.learning_rate": 0.1,
        "train.warmup_epochs": 2.0,
        "numerics.precision": "bfloat16",
        "numerics.memory_format": "channels_last",
    },
    channels=1,
    size=16,
    read=_read,
    augment=_augment,
    prepare=_prepare,
)
