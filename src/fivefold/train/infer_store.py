"""Where inference writes: a zarr group, which windows of it are done, and what they add to a score."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fivefold import comm
from fivefold.data.rasters import imported_zarr
from fivefold.errors import UsageError
from fivefold.mesh import Mesh
from fivefold.plan import AXES
from fivefold.trace import Tag

__all__ = ["OutputArray", "OutputPart", "OutputStore"]

ABOUT = "fivefold.json"
_MARKS = ".done"
_LOCK = ".lock"


@dataclass(frozen=True)
class OutputArray:
    """What is written of an image, or a part of it."""

    name: str
    shape: tuple[int, ...]
    """of all of it: what stands before pixels, and pixels"""
    chunk: tuple[int, ...]
    dtype: torch.dtype
    output: int
    """which of the net's outputs has these pixels"""
    shared: bool
    """whether windows share chunks, which one rank at a time may write then"""


OutputPart = tuple[OutputArray, tuple[tuple[int, int], ...], Tensor]
"""what is written of an array, and where: ranges of pixels"""


class OutputStore:
    """A zarr group, and which windows of it have been written. Creating it is collective.

    A window is marked by a file of its own, made after it: a kill may leave chunks half written. The mark
    holds what the window adds to the score, so that each is counted once, whoever computed it. Without a
    folder nothing is written, and only the score is kept.
    """

    def __init__(self, folder: Path | None, mesh: Mesh, job: str) -> None:
        self.mesh, self._job = mesh, job
        self._everyone = mesh.group(*AXES)
        self._sums: Tensor | None = None
        self.writes, self.complete = folder is not None, False
        if folder is None:
            return
        self._zarr, self._folder = imported_zarr("to write outputs"), folder
        about = self._told()
        if about is None and folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise UsageError(f"{folder} is there already: name another folder, or remove it")
        if about is not None and about["job"] != job:
            raise UsageError(
                f"{folder} holds outputs of other weights, images or windows: name another folder, or "
                "remove it"
            )
        self.complete = about is not None and bool(about["complete"])
        if about is not None and self.complete:
            self._sums = torch.tensor(about.get("sums", ()), dtype=torch.float64)
        self._meet()  # all have looked

    def _told(self) -> dict[str, Any] | None:
        """What made what is there."""
        return self._told_by_folder()

    def _told_by_folder(self) -> dict[str, Any] | None:
        try:
            return json.loads((self._folder / ABOUT).read_text())
        except (OSError, ValueError):
            return None

    def _about(self, *, complete: bool, sums: Tensor | None = None) -> str:
        told = {"job": self._job, "complete": complete}
        return json.dumps(told if sums is None else {**told, "sums": sums.tolist()})

    def _tell(self, about: str) -> None:
        new = self._folder / f"{ABOUT}.new"
        new.write_text(about)
        new.replace(self._folder / ABOUT)

    def _make(self) -> None:
        """The folder, unless it is there; not before windows are known to do."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._told_by_folder() is None:
            self._tell(self._about(complete=False))
        (self._folder / _MARKS).mkdir(exist_ok=True)
        self._zarr.open_group(self._folder, mode="a")

    def _meet(self) -> None:
        comm.all_reduce(torch.zeros(1, device=self.mesh.device), self._everyone, Tag.CONTROL)

    def begin(self, index: int, arrays: Sequence[OutputArray]) -> None:
        """Make the arrays of an image, unless they are there. Collective."""
        if not self.writes:
            return
        likes = [_numpy_dtype(array.dtype) for array in arrays]
        if self.mesh.rank == 0:
            self._make()
            group = self._zarr.open_group(self._folder, mode="r+")
            for array, like in zip(arrays, likes, strict=True):
                if (path := _path(index, array)) not in group:
                    group.create_array(path, shape=array.shape, chunks=array.chunk, dtype=like)
        self._meet()

    def has(self, index: int, number: int) -> bool:
        """Whether a window has been written. What it adds to the score is counted then."""
        if not self.writes:
            return False
        try:
            found = (self._folder / _MARKS / f"{index}-{number}").read_bytes()
        except FileNotFoundError:
            return False
        if found:
            self._add(torch.from_numpy(np.frombuffer(found, np.float64).copy()))
        return True

    def write(
        self, index: int, number: int, parts: Sequence[OutputPart], sums: Tensor | None
    ) -> None:
        """Write a window, and mark it; `sums` is what it adds to the score."""
        if self.writes:
            group = self._zarr.open_group(self._folder, mode="r+")
            for array, ranges, values in parts:
                where = (..., *(slice(a, b) for a, b in ranges))
                with self._alone() if array.shared else nullcontext():
                    group[_path(index, array)][where] = values.numpy()
            mark = self._folder / _MARKS / f"{index}-{number}"
            new = mark.with_suffix(".new")
            new.write_bytes(b"" if sums is None else sums.numpy().tobytes())
            new.replace(mark)
        if sums is not None:
            self._add(sums)

    def _add(self, sums: Tensor) -> None:
        if self._sums is not None and len(self._sums) != len(sums):
            raise UsageError(
                f"score returned {len(sums)} sums for one window and {len(self._sums)} for another"
            )
        self._sums = sums if self._sums is None else self._sums + sums

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Within the block no other rank is."""
        with (self._folder / _LOCK).open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # let go as the file is closed
            yield

    def finish(self) -> Tensor:
        """All has been written. The sums of the score, (sums,), float64; none without one. Collective."""
        if not self.complete:
            self._sums = self._joined()
            if self.mesh.rank == 0 and self.writes:
                self._make()  # of no images
                self._tell(self._about(complete=True, sums=self._sums))
                shutil.rmtree(self._folder / _MARKS)
                (self._folder / _LOCK).unlink(missing_ok=True)
        self._meet()
        assert self._sums is not None, "of a complete one, or joined"
        return self._sums.to(self.mesh.device)

    def _joined(self) -> Tensor:
        """The sums of all ranks, some of which may have had no windows."""
        mine, device = self._sums, self.mesh.device
        width = torch.tensor([0 if mine is None else len(mine)], device=device)
        widths = comm.all_gather(width, self._everyone, Tag.CONTROL).unique().tolist()
        if len(widths := [n for n in widths if n]) > 1:
            raise UsageError(f"score returned {' and '.join(map(str, widths))} sums for windows")
        total = torch.zeros(*(widths or [0]), dtype=torch.float64, device=device)
        if mine is not None:
            total += mine.to(device)
        return comm.all_reduce(total, self._everyone, Tag.LOSS).cpu()


def _numpy_dtype(dtype: torch.dtype) -> Any:
    try:
        return torch.empty(0, dtype=dtype).numpy().dtype
    except TypeError:
        raise UsageError(
            f"arrays cannot hold {dtype}: choose another one, such as then=lambda outputs: outputs.float()"
        ) from None


def _path(index: int, array: OutputArray) -> str:
    return f"{index}/{array.name}" if array.name else str(index)
