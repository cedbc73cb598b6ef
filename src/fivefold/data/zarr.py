"""Arrays of samples in a zarr store, of which only the chunks are read that a window touches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fivefold.data.images import Transform
from fivefold.data.rasters import RasterImages, as_tensor, imported_zarr
from fivefold.data.windows import Box
from fivefold.errors import DataError

__all__ = ["ZarrImages"]


class ZarrImages(RasterImages):
    """Samples (image, target) of a zarr group: arrays N x C x H x W, or N x C x D x H x W.

    Args:
        root: folder of the group.
        images: name of the array of images in it.
        targets: name of the array of targets. One with as many dims as the images holds images, as does one
            with a dim less, without channels; any other holds N targets to be taken as they are. None: a
            sample is the image alone.
        transform: of images; under tile axes it has to work on windows.
        target_transform: the same, of targets that are images.

    Integers wider than a byte come as int32 or int64, images of classes (integers without channels) as int64.
    For fast reading of tiles, no chunk should be larger than a tile, or hold more than one sample.

    Raises:
        DataError: there is no such array, it has another number of dims, or zarr is not installed.
    """

    def __init__(
        self,
        root: str | Path,
        images: str = "images",
        targets: str | None = None,
        *,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
    ) -> None:
        array = _opened(Path(root), images)
        if array.ndim not in (4, 5):
            raise DataError(
                f"the array {images!r} of {root} has shape {tuple(array.shape)}; images are N x C x H x W or "
                "N x C x D x H x W"
            )
        dims = array.ndim - 2
        samples = [_Slice(array, n, dims) for n in range(array.shape[0])]
        answers: Sequence[Any] | None = None
        if targets is not None:
            other = _opened(Path(root), targets)
            if other.ndim in (dims + 1, dims + 2):
                answers = [_Slice(other, n, dims) for n in range(other.shape[0])]
            else:
                answers = list(np.asarray(other[...]))
        super().__init__(samples, answers, transform, target_transform)


class _Slice:
    """One sample of an array."""

    def __init__(self, array: Any, number: int, dims: int) -> None:
        self._array, self._number = array, number
        self.size: tuple[int, ...] = tuple(array.shape[-dims:])

    def read(self, box: Box) -> Tensor:
        """A window of it: (channels, *box.shape), or box.shape if there are no channels."""
        return as_tensor(np.asarray(self._array[(self._number, *box.slices)]))


def _opened(root: Path, name: str) -> Any:
    zarr = imported_zarr("to read zarr stores")
    try:
        return zarr.open_array(root / name, mode="r")
    except (FileNotFoundError, ValueError, KeyError) as error:
        raise DataError(
            f"there is no zarr array {name!r} in {root} ({error}); give the folder of a zarr group, and "
            "the names of arrays in it"
        ) from error
