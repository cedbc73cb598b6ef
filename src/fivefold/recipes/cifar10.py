"""CIFAR-10 with ResNet-20, as in He et al. 2015, section 4.2, but with a cosine schedule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.recipes.recipe import Images, Recipe

if TYPE_CHECKING:
    from fivefold.data.images import Transform

__all__ = ["RECIPE"]

_MEAN, _STD = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)


def _read(directory: Path | None, train: bool, size: int, transform: Transform) -> Images:
    del size
    from fivefold.data.cifar import Cifar10

    assert directory is not None
    return Cifar10(directory, train=train, transform=transform)


def _augment(size: int) -> Transform:
    from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat

    return Compose(RandomCrop(size, padding=4), RandomFlip(), ToFloat(), Normalise(_MEAN, _STD))


def _prepare(size: int) -> Transform:
    del size
    from fivefold.data.transforms import Compose, Normalise, ToFloat

    return Compose(ToFloat(), Normalise(_MEAN, _STD))


RECIPE = Recipe(
    name="cifar10",
    summary="ResNet-20 on CIFAR-10, from the files data_batch_1 to test_batch in --data",
    defaults={
        "train.model": "resnet20",
        "train.epochs": 100,
        "train.batch_size": 128,
        "train.learning_rate": 0.1,
        "train.warmup_epochs": 2.0,
        "numerics.precision": "bfloat16",
        "numerics.memory_format": "channels_last",
    },
    channels=3,
    size=32,
    read=_read,
    augment=_augment,
    prepare=_prepare,
    expects="data_batch_1 to data_batch_5 and test_batch, unpacked from cifar-10-python.tar.gz, the "
    '"CIFAR-10 python version" of https://www.cs.toronto.edu/~kriz/cifar.html',
)
