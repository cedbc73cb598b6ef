"""Street-view house numbers with ResNet-20. Digits are shifted but never mirrored."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.recipes.recipe import Images, Recipe

if TYPE_CHECKING:
    from fivefold.data.images import Transform

__all__ = ["RECIPE"]

_MEAN, _STD = (0.438, 0.444, 0.473), (0.198, 0.201, 0.197)


def _read(directory: Path | None, train: bool, size: int, transform: Transform) -> Images:
    del size
    from fivefold.data.svhn import Svhn

    assert directory is not None
    return Svhn(directory, train=train, transform=transform)


def _augment(size: int) -> Transform:
    from fivefold.data.transforms import Compose, Normalise, RandomCrop, ToFloat

    return Compose(RandomCrop(size, padding=2), ToFloat(), Normalise(_MEAN, _STD))


def _prepare(size: int) -> Transform:
    del size
    from fivefold.data.transforms import Compose, Normalise, ToFloat

    return Compose(ToFloat(), Normalise(_MEAN, _STD))


RECIPE = Recipe(
    name="svhn",
    summary="ResNet-20 on SVHN, from the files train_32x32.mat and test_32x32.mat in --data",
    defaults={
        "train.model": "resnet20",
        "train.epochs": 30,
        "train.batch_size": 128,
        "train.learning_rate": 0.1,
        "train.warmup_epochs": 1.0,
        "numerics.precision": "bfloat16",
        "numerics.memory_format": "channels_last",
    },
    channels=3,
    size=32,
    read=_read,
    augment=_augment,
    prepare=_prepare,
    expects="train_32x32.mat and test_32x32.mat, the cropped digits (format 2) of "
    "http://ufldl.stanford.edu/housenumbers",
)
