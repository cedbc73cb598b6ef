"""Where inference writes one image: a zarr group first, which becomes a TIFF file as all of it is there.

    windows ──► FILE.zarr ──► FILE.zarr/tiff.new ──► FILE
                      tile by tile           renamed, then FILE.zarr is removed

Until then a run that was killed goes on from the group, and several ranks write it. What has made the file
stands in its tag Software.
"""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fivefold import comm
from fivefold.data.images import need
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.trace import Tag
from fivefold.train.infer_store import ABOUT, OutputArray, OutputStore

__all__ = ["TiffStore", "is_tiff"]

_SUFFIXES = {".tif", ".tiff"}
_NEW = "tiff.new"
_SOFTWARE = "fivefold "
_UNIT = 16
"""of which the edges of tiles are multiples"""
_LARGEST = 1024
"""pixels of an edge of a tile"""
_SIGN_S = 0.5
"""seconds after which the others are told that the file is still being written"""


def is_tiff(path: str | Path) -> bool:
    """Whether a name is that of a TIFF file."""
    return Path(path).suffix.lower() in _SUFFIXES


class TiffStore(OutputStore):
    """A tiled BigTIFF file of one image, its channels samples of a pixel. Creating it is collective.

    Raises `UsageError` for several images and volumes, and where the file is there already, unless the same
    job has written it; `DataError` where tifffile is not installed.
    """

    def __init__(self, file: Path, mesh: Mesh, job: str, sizes: Sequence[tuple[int, ...]]) -> None:
        if len(sizes) != 1:
            raise _refused(file, f"one image, and the data set has {len(sizes)}")
        if len(sizes[0]) != 2:
            raise _refused(file, f"images of 2 dims, and that of the data set has {len(sizes[0])}")
        self._file = file
        self._tifffile = _imported()
        super().__init__(file.with_name(f"{file.name}.zarr"), mesh, job)

    def _told(self) -> dict[str, Any] | None:
        self._made = self._file.exists()
        if not self._made:
            return self._told_by_folder()
        try:
            with self._tifffile.TiffFile(self._file) as file:
                written = str(file.pages[0].tags["Software"].value)
            about = json.loads(written.removeprefix(_SOFTWARE))
            if written.startswith(_SOFTWARE) and about["job"] == self._job:
                return about
        except (OSError, ValueError, LookupError, TypeError):
            pass  # not ours, or no TIFF file at all, which is a ValueError
        raise UsageError(f"{self._file} is there already: name another file, or remove it")

    def begin(self, index: int, arrays: Sequence[OutputArray]) -> None:
        """Make the array, unless it is there. Collective."""
        (array, *others) = arrays
        if others or array.name:
            names = ", ".join(one.name for one in arrays)
            raise _refused(self._file, f"one array, and the net returns {names}")
        if len(array.shape) > 3:
            raise _refused(self._file, f"one dim of channels, and the output is {array.shape}")
        if array.dtype == torch.bool:
            raise _refused(self._file, "numbers, which torch.bool is not")
        super().begin(index, arrays)

    def finish(self) -> torch.Tensor:
        """All has been written: make the file. Collective."""
        sums = super().finish()
        if self.mesh.rank == 0:
            if not self._made:
                self._convert(self._about(complete=True, sums=sums.cpu()))
            self._remove()
            self._sign(goes_on=False)
        else:
            while self._sign(goes_on=True):
                pass
        return sums

    def _sign(self, *, goes_on: bool) -> bool:
        """Whether the first rank has more to do. Collective: nobody waits for all of it at once."""
        sign = torch.full((1,), float(goes_on or self.mesh.rank > 0), device=self.mesh.device)
        return bool(comm.all_reduce(sign, self._everyone, Tag.CONTROL) == self.mesh.size)

    def _convert(self, about: str) -> None:
        array: Any = self._zarr.open_array(self._folder / "0", mode="r")
        new, (*lead, height, width) = self._folder / _NEW, array.shape
        channels = lead[0] if lead and lead[0] > 1 else 0
        edges = tuple(min(-(-n // _UNIT) * _UNIT, _LARGEST) for n in array.chunks[-2:])
        kind: str = array.dtype.kind
        rgb = channels == 3 and kind == "u" and array.dtype.itemsize <= 2
        with self._tifffile.TiffWriter(new, bigtiff=True) as file:
            file.write(
                self._tiles(array, edges),
                shape=(height, width, channels) if channels else (height, width),
                dtype=array.dtype, tile=edges,
                photometric="rgb" if rgb else "minisblack",
                planarconfig="contig" if channels else None,
                compression="zlib" if kind in "iu" else None,  # classes get small
                maxworkers=1,  # several would hold more tiles
                software=_SOFTWARE + about,
            )  # fmt: skip
        if self._file.exists():
            raise UsageError(f"{self._file} is there by now: name another file, or remove it")
        new.replace(self._file)

    def _tiles(self, array: Any, edges: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Row by row, samples last; those at the end filled up with zeros."""
        last = time.monotonic()
        *_, height, width = array.shape
        for y, x in itertools.product(range(0, height, edges[0]), range(0, width, edges[1])):
            found = array[..., y : y + edges[0], x : x + edges[1]]
            found = np.moveaxis(found, 0, -1) if found.ndim > 2 else found[..., None]
            missing = [(0, edge - n) for edge, n in zip(edges, found.shape, strict=False)]
            yield np.pad(found, [*missing, (0, 0)])
            if time.monotonic() - last > _SIGN_S:
                self._sign(goes_on=True)
                last = time.monotonic()

    def _remove(self) -> None:
        """Remove the group; what tells that it is ours goes last."""
        about = self._told_by_folder()
        if about is None or about["job"] != self._job:
            return
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != ABOUT:
                path.unlink()
        (self._folder / ABOUT).unlink()
        self._folder.rmdir()


def _refused(file: Path, holds: str) -> UsageError:
    return UsageError(
        f"{file}: a TIFF file holds {holds}; name a zarr group, such as {file.with_suffix('.zarr')}"
    )


def _imported() -> Any:
    try:
        import tifffile
    except ImportError as error:
        raise need("tifffile", "to write TIFF files", error, extra="images") from error
    return tifffile
