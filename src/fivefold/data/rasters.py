"""Samples of images on disk that can be read in part: what TIFF files and zarr arrays have in common."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fivefold.data.images import Transform, need
from fivefold.data.windows import Box
from fivefold.errors import DataError

__all__ = ["Raster", "RasterImages", "as_tensor", "imported_zarr"]

_END_S = 10.0
"""how long the thread of zarr may take to end"""
_WIDER = {"uint16": np.int32, "uint32": np.int64}


class Raster(Protocol):
    """One image on disk."""

    @property
    def size(self) -> tuple[int, ...]:
        """Pixels: (height, width), or (depth, height, width)."""
        ...

    def read(self, box: Box) -> Tensor:
        """A window of it: (channels, *box.shape), or box.shape if there are no channels."""
        ...


class RasterImages(Dataset[Any]):
    """Samples (image, target), or the image alone, of which any window can be read.

    A target may be an image as well, of a size of its own. Integers wider than a byte come as int32 or
    int64; an image of classes (integers, no channels) comes as int64, as losses want it.
    """

    transforms_last = True

    def __init__(
        self,
        images: Sequence[Raster],
        targets: Sequence[Any] | None,
        transform: Transform | None,
        target_transform: Transform | None,
    ) -> None:
        if targets is not None and len(targets) != len(images):
            raise DataError(
                f"there are {len(images)} images and {len(targets)} targets; give one target for each image"
            )
        self.images = images
        self.targets = targets
        self.transform = transform
        self.target_transform = target_transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        size = self.sizes(index)
        if self.targets is None:
            return self.window(index, Box.whole(size))
        return self.window(index, tuple(n and Box.whole(n) for n in size))

    def sizes(self, index: int) -> Any:
        """(height, width) or (depth, height, width) of the image, and of the target if that is an image."""
        size = self.images[index].size
        if self.targets is None:
            return size
        return size, getattr(self.targets[index], "size", None) if self._pictured(index) else None

    def window(self, index: int, boxes: Any) -> Any:
        """The sample, cut to `boxes`."""
        if self.targets is None:
            return self._image(index, boxes)
        box, target_box = boxes
        return self._image(index, box), self._target(index, target_box)

    def _pictured(self, index: int) -> bool:
        return self.targets is not None and hasattr(self.targets[index], "read")

    def _image(self, index: int, box: Box) -> Tensor:
        image = self.images[index].read(box)
        image = image if image.dim() > len(box.size) else image[None]
        return self.transform(image) if self.transform else image

    def _target(self, index: int, box: Box | None) -> Any:
        assert self.targets is not None
        target = self.targets[index]
        if box is not None:
            target = target.read(box)
            if target.dim() == len(box.size) and not target.is_floating_point():
                target = target.long()
            return self.target_transform(target) if self.target_transform else target
        return target


def as_tensor(pixels: np.ndarray) -> Tensor:
    """A copy of an array that lies on disk, as a tensor of a dtype that torch computes with."""
    dtype = _WIDER.get(pixels.dtype.newbyteorder("=").name, pixels.dtype.newbyteorder("="))
    return torch.from_numpy(np.array(pixels, dtype=dtype, order="C"))


def imported_zarr(purpose: str) -> Any:
    """The package zarr, for a `purpose` ("to read zarr stores"). Raises `DataError` if it is not there."""
    try:
        import zarr
    except ImportError as error:
        raise need("zarr", purpose, error, extra="images") from error
    _end_its_thread_at_exit()
    return zarr


@functools.cache
def _end_its_thread_at_exit() -> None:
    atexit.register(_end_its_thread)


def _end_its_thread() -> None:
    # Zarr itself waits a fifth of a second, which is too short where cores are busy, and then fails.
    from zarr.core import sync

    loops, threads = getattr(sync, "loop", [None]), getattr(sync, "iothread", [None])
    if loops[0] is not None and threads[0] is not None:
        loops[0].call_soon_threadsafe(loops[0].stop)
        threads[0].join(_END_S)
