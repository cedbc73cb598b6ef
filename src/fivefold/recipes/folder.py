"""Any directory of images, one folder per class: the recipe for images of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.recipes.recipe import Images, Recipe

if TYPE_CHECKING:
    from fivefold.data.images import Transform

__all__ = ["RECIPE"]

# Of ImageNet: right for most photographs, and what torchvision's weights were trained with.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _read(directory: Path | None, train: bool, size: int, transform: Transform) -> Images:
    from fivefold.data.folder import ImageFolder

    assert directory is not None
    return ImageFolder(directory, train=train, size=size, transform=transform)


def _augment(size: int) -> Transform:
    from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat

    crop = RandomCrop(size, padding=size // 8)
    return Compose(crop, RandomFlip(), ToFloat(), Normalise(_MEAN, _STD))


def _prepare(size: int) -> Transform:
    del size
    from fivefold.data.transforms import Compose, Normalise, ToFloat

    return Compose(ToFloat(), Normalise(_MEAN, _STD))


RECIPE = Recipe(
    name="folder",
    summary="ResNet-18, or --model, on the images in --data, one folder per class, at --size",
    defaults={
        "train.model": "resnet18",
        "train.epochs": 30,
        "train.batch_size": 64,
        "train.learning_rate": 0.05,
        "train.warmup_epochs": 2.0,
        "numerics.precision": "bfloat16",
        "numerics.memory_format": "channels_last",
    },
    channels=3,
    size=64,
    read=_read,
    augment=_augment,
    prepare=_prepare,
    resizable=True,
    expects="pictures as CLASS/NAME.jpg (or .png, ...), or such folders in train/ and val/",
)
