"""Super-resolution of photographs with a small EDSR: pictures of twice the size, nothing to download.

After Lim et al. 2017, section 4, but with crops of 24 x 24 pixels in batches of 8, which take a processor
without an accelerator further in a minute than larger ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.recipes.recipe import Images, Recipe

if TYPE_CHECKING:
    from fivefold.data.images import Transform

__all__ = ["RECIPE"]


def _read(directory: Path | None, train: bool, size: int, transform: Transform) -> Images:
    del directory
    from fivefold.data.photos import Photos

    return Photos(train=train, size=size, transform=transform)


def _augment(size: int) -> Transform:
    from fivefold.data.photos import SCALE
    from fivefold.data.transforms import Compose, RandomCrop, RandomFlip, ToFloat

    return Compose(RandomCrop(SCALE * size), RandomFlip(), ToFloat(), _centre())


def _prepare(size: int) -> Transform:
    del size
    from fivefold.data.transforms import Compose, ToFloat

    return Compose(ToFloat(), _centre())


def _centre() -> Transform:
    from fivefold.data.transforms import Normalise

    return Normalise((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))  # values still span 1, as PSNR takes them


def _bicubic(tests: Images) -> str:
    import torch

    from fivefold.data.photos import enlarged
    from fivefold.train.task import PICTURES

    sums = torch.zeros(3, dtype=torch.float64)
    for index in range(len(tests)):
        small, picture = tests[index]
        sums += PICTURES.sums(enlarged(small).clamp(-0.5, 0.5), picture)
    _, square, count = sums.tolist()
    return f"bicubic        {PICTURES.score(square / count):.2f} dB, by interpolation of the same images"


RECIPE = Recipe(
    name="photos",
    summary="a small EDSR on the photographs inside scikit-learn and scikit-image: twice the size",
    defaults={
        "train.model": "edsr_small",
        "train.epochs": 16,
        "train.batch_size": 8,
        "train.optimizer": "adam",
        "train.learning_rate": 0.002,
        "train.weight_decay": 0.0,
        "train.warmup_epochs": 0.4,
    },
    channels=3,
    size=24,
    read=_read,
    augment=_augment,
    prepare=_prepare,
    resizable=True,
    returns="picture",
    axis="width",
    baseline=_bicubic,
)
