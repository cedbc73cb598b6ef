"""TIFF files, of which only the window that is asked for is read and decoded.

Uncompressed files are mapped into memory; of tiled or compressed ones, the tiles or strips that the window
touches are decoded. Files that were written as one compressed strip have to be decoded whole.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fivefold.data.images import Transform, need
from fivefold.data.rasters import RasterImages, as_tensor, imported_zarr
from fivefold.data.windows import Box
from fivefold.errors import DataError

__all__ = ["TiffImages"]

_CHANNELS = "SC"


class TiffImages(RasterImages):
    """Samples (image, target) of TIFF files: C x H x W, or C x D x H x W.

    Args:
        files: one for each image, in order.
        targets: one for each image: anything, or paths of TIFF files, which are read like the images. Without
            targets, a sample is the image alone.
        dims: 2, or 3 for volumes.
        transform: of images; under tile axes it has to work on windows.
        target_transform: the same, of targets that are images.

    The file's first series is read, of a pyramid its largest level. Integers wider than a byte come as int32
    or int64; a target without channels, such as a map of classes, comes as H x W, integers as int64.

    Raises:
        DataError: a file is missing, no TIFF or not of that many dims, or a library is not installed.
    """

    def __init__(
        self,
        files: Sequence[str | Path],
        targets: Sequence[Any] | None = None,
        *,
        dims: int = 2,
        transform: Transform | None = None,
        target_transform: Transform | None = None,
    ) -> None:
        images = [_Tiff(Path(file), dims) for file in files]
        if targets is not None:
            targets = [
                _Tiff(Path(t), dims) if isinstance(t, (str, Path)) else t for t in list(targets)
            ]
        super().__init__(images, targets, transform, target_transform)


class _Tiff:
    """One file. It is opened anew whenever it is read: worker processes share no position in it."""

    def __init__(self, path: Path, dims: int) -> None:
        if not path.is_file():
            raise DataError(f"there is no file {path}; give the paths of TIFF files, one per image")
        self.path = path
        with _series(path) as series:
            shape, axes = tuple(series.shape), str(series.axes)
        self._order = _order(path, shape, axes, dims)
        self._shape = shape
        self.size = tuple(shape[axis] for axis in self._order[-dims:])

    def read(self, box: Box) -> Tensor:
        """A window of it: (channels, *box.shape), or box.shape if there are no channels."""
        spatial = dict(zip(self._order[-len(box.ranges) :], box.ranges, strict=True))
        cut = tuple(
            slice(spatial[axis].start, spatial[axis].stop) if axis in spatial else slice(None)
            for axis in range(len(self._shape))
        )
        with _series(self.path) as series:
            pixels = _pixels(self.path, series, cut)
        alone = tuple(axis for axis in range(pixels.ndim) if axis not in self._order)
        return as_tensor(pixels.transpose(*alone, *self._order)[(0,) * len(alone)])


def _order(path: Path, shape: tuple[int, ...], axes: str, dims: int) -> tuple[int, ...]:
    """Axes of the file in the order (channels,) (depth,) height, width; left out are others of size 1."""
    more = [axis for axis, name in enumerate(axes) if name not in "YX" and shape[axis] > 1]
    order = [axes.index(name) for name in "YX" if name in axes]
    if dims == 3:
        depths = [axis for axis in more if axes[axis] not in _CHANNELS]
        depth = axes.index("Z") if "Z" in axes else depths[0] if depths else None
        order = order if depth is None else [depth, *order]
        more = [axis for axis in more if axis != depth]
    if len(order) != dims or len(more) > 1:
        raise DataError(
            f"{path} holds {' x '.join(map(str, shape))} (axes {axes}), which is no image of {dims} dims and "
            "at most one axis of channels; choose dims=2 or dims=3, or store one image per file"
        )
    return (*more, *order)


def _pixels(path: Path, series: Any, cut: tuple[slice, ...]) -> np.ndarray:
    if series.dataoffset is not None:
        dtype = series.dtype.newbyteorder(series.keyframe.parent.byteorder)
        return np.memmap(path, dtype, "r", series.dataoffset, tuple(series.shape))[cut]
    zarr = imported_zarr("to read parts of TIFF files")
    store = series.aszarr(level=0)
    try:
        array: Any = zarr.open_array(store, mode="r")
        return np.asarray(array[cut])
    except ValueError as error:
        raise DataError(
            f"{path} cannot be read, it is damaged or compressed in an unknown way ({error}); "
            "pip install imagecodecs brings more ways"
        ) from error
    finally:
        store.close()


@contextmanager
def _series(path: Path) -> Generator[Any]:
    """The first image of a file."""
    try:
        import tifffile
    except ImportError as error:
        raise need("tifffile", "to read TIFF files", error, extra="images") from error
    try:
        with tifffile.TiffFile(path) as file:
            yield file.series[0]
    except (tifffile.TiffFileError, IndexError) as error:
        raise DataError(f"{path} is damaged or no TIFF file ({error})") from error
