"""Photographs for super-resolution, inside scikit-learn and scikit-image: nothing to download.

A Chinese temple and a flower (427 x 640 pixels), a retina (1411 x 1411) and the Hubble deep field
(872 x 1000), all in colour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from fivefold.data.images import Transform, need
from fivefold.data.pictures import decoded
from fivefold.errors import UsageError

__all__ = ["SCALE", "Photos", "enlarged", "shrunk"]

SCALE = 2
"""how many times larger the targets are, in each direction"""
_HELD_OUT = 4  # one column in so many, at the right of every photograph


class Photos(Dataset[tuple[Tensor, Tensor]]):
    """Samples (small picture, picture): float32, 3 x size x size and 3 x 2 size x 2 size.

    Of each photograph the left three quarters are to train with, the rest to test with. A test sample is
    a cell of a grid; a training sample is all of a photograph's part, from which `transform` has to cut
    2 size x 2 size pixels, and there are as many of them as cells. Photographs too small for one cell are
    left out. The small picture is made of what `transform` returns, which must not change what it is given.

    Raises:
        DataError: scikit-learn or scikit-image is not installed.
        UsageError: no photograph is large enough for `size`.
    """

    classes: tuple[str, ...] = ()

    def __init__(self, *, train: bool, size: int, transform: Transform) -> None:
        self.transform = transform
        side = SCALE * size
        self.windows: list[Tensor] = []
        for photo in _photographs():
            border = photo.shape[2] - photo.shape[2] // _HELD_OUT
            part = photo[:, :, :border] if train else photo[:, :, border:]
            cells = [cell for rows in part.split(side, 1) for cell in rows.split(side, 2)]
            whole = [cell for cell in cells if cell.shape[1:] == (side, side)]
            self.windows += [part] * len(whole) if train else whole
        if not self.windows:
            raise UsageError(
                f"--size {size} needs parts of {side} x {side} pixels for {SCALE} x super-resolution, but "
                "no photograph is that large: choose a smaller --size"
            )

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        picture = self.transform(self.windows[index])
        return shrunk(picture), picture


def shrunk(picture: Tensor) -> Tensor:
    """Half the size, by bicubic interpolation of the low frequencies (`antialias`), as is usual here."""
    size = [side // SCALE for side in picture.shape[1:]]
    return F.interpolate(picture[None], size, mode="bicubic", antialias=True)[0]


def enlarged(picture: Tensor) -> Tensor:
    """Twice the size, by bicubic interpolation: what a model has to beat."""
    return F.interpolate(picture[None], scale_factor=SCALE, mode="bicubic")[0]


def _photographs() -> list[Tensor]:
    """All of them, 3 x H x W uint8."""
    try:
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise need("scikit-learn", "for the photographs that come with it", error) from error
    try:
        import skimage
    except ImportError as error:
        raise need("scikit-image", "for the photographs that come with it", error) from error
    samples: Any = load_sample_images()
    # By path: skimage.data would download what it does not find.
    folder = Path(skimage.__file__).parent / "data"
    files = [decoded(folder / name) for name in ("retina.jpg", "hubble_deep_field.jpg")]
    pixels = [*samples.images, *(np.asarray(image) for image in files)]
    return [torch.from_numpy(np.array(p)).permute(2, 0, 1).contiguous() for p in pixels]
