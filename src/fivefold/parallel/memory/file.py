"""A file as slower memory of CPUs: it has no name, and ends with its process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.memory.room import PAGE, Room, whole_pages
from fivefold.parallel.memory.spill import Copy, Like, Rates

__all__ = ["FileStore"]

_SECTORS = (512, 4096)
_ALIGNED = 64
"""bytes: torch's own tensors begin at multiples"""
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")


class _Written:
    """A copy that a thread makes."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> None:
        self._future.result()

    def cancel(self) -> bool:
        return self._future.cancel()


class FileStore:
    """A file without a name in a folder. One thread writes, another reads.

    Where the file system can, bytes go between tensors and disk directly: main memory would else fill with
    what is to spare it. That takes addresses, positions and lengths that are multiples of a sector; what a
    tensor has before its first and after its last sector stays here.

        tensor   |..|========|========|====|.|      . in `_edges`
        file        |========|========|====|

    Raises `UsageError` where the folder cannot be used, and when its disk or `limit_bytes` are full.
    """

    def __init__(self, folder: Path, limit_bytes: int | None = None, ranks: int = 1) -> None:
        self._folder, self._limit_bytes = folder, limit_bytes
        self._file, self._sector = _nameless(folder)
        self._room, self._end = Room(), 0
        self._edges: dict[int, tuple[bytes, bytes]] = {}
        self._writer = ThreadPoolExecutor(1, "fivefold-spill")
        self._reader = ThreadPoolExecutor(1, "fivefold-fetch")
        self.rates, self.edge_bytes = Rates(), self._sector
        free = os.fstatvfs(self._file)
        self.room_bytes = min(free.f_bavail * free.f_frsize // ranks, limit_bytes or sys.maxsize)

    def take(self, size_bytes: int) -> int:
        """See `Store`."""
        room = whole_pages(size_bytes)
        slot = self._room.take(room)
        if slot is None:
            slot, end = self._end, self._end + room
            if self._limit_bytes is not None and end > self._limit_bytes:
                raise UsageError(
                    f"memory.host = {self._limit_bytes:,} bytes is full, and {size_bytes:,} more are to be "
                    "spilled: allow more, or a larger memory.budget"
                )
            try:
                os.posix_fallocate(self._file, slot, room)
            except OSError as problem:
                raise UsageError(
                    f"cannot spill {size_bytes:,} bytes to {self._folder}: {problem.strerror}; name another "
                    "folder as memory.disk, or allow a larger memory.budget"
                ) from None
            self._end = end
        return slot

    def give(self, slot: int, size_bytes: int) -> None:
        """See `Store`."""
        self._room.give(slot, whole_pages(size_bytes))

    def out(self, flat: Tensor, slot: int) -> Copy:
        """See `Store`."""
        if flat.data_ptr() % _ALIGNED:
            flat = flat.clone()  # not torch's own memory
        lead = min(-flat.data_ptr() % self._sector, flat.nbytes)
        view = _bytes_of(flat)
        whole = (len(view) - lead) // self._sector * self._sector
        self._edges[slot] = bytes(view[:lead]), bytes(view[lead + whole :])
        return _Written(self._writer.submit(self._write, view[lead : lead + whole], slot))

    def back(self, slot: int, like: Like) -> tuple[Tensor, Copy]:
        """See `Store`."""
        (head, tail), size = self._edges[slot], like.elements * like.dtype.itemsize
        raw = torch.empty(size + self._sector, dtype=torch.uint8)
        first = -(raw.data_ptr() + len(head)) % self._sector
        made = raw[first : first + size].view(like.dtype)
        view = _bytes_of(made)
        view[: len(head)], view[size - len(tail) :] = head, tail
        inner = view[len(head) : size - len(tail)]
        return made, _Written(self._reader.submit(self._read, inner, slot))

    def _write(self, view: memoryview, slot: int) -> None:
        began, at = time.perf_counter(), 0
        while at < len(view):
            at += os.pwrite(self._file, view[at:], slot + at)
        self.rates.add(0, len(view), time.perf_counter() - began)

    def _read(self, view: memoryview, slot: int) -> None:
        began, at = time.perf_counter(), 0
        while at < len(view):
            got = os.preadv(self._file, [view[at:]], slot + at)
            if not got:
                raise OSError(errno.EIO, f"spilled bytes are missing in {self._folder}")
            at += got
        self.rates.add(1, len(view), time.perf_counter() - began)

    def close(self) -> None:
        """See `Store`."""
        self._writer.shutdown(cancel_futures=True)
        self._reader.shutdown(cancel_futures=True)
        os.close(self._file)


def _nameless(folder: Path) -> tuple[int, int]:
    """A file that ends with its process, and the bytes of a sector; 1 if it goes through main memory."""
    kind = _kind_of(folder)
    if kind in _IN_MEMORY:
        raise UsageError(
            f"memory.disk = {str(folder)!r} is in main memory ({kind}), which spilling is to spare: name a "
            "folder of a local disk"
        )
    flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
    try:
        cached = os.open(folder, flags, 0o600)
    except OSError as problem:
        raise UsageError(
            f"cannot spill to memory.disk = {str(folder)!r}: {problem.strerror}; name a folder of a local "
            "disk that this user may write"
        ) from None
    with contextlib.suppress(OSError):
        file = os.open(folder, flags | os.O_DIRECT, 0o600)
        for sector in _SECTORS:
            # Of a page's last bytes, so that no larger sector would do as well.
            with contextlib.suppress(OSError), mmap.mmap(-1, 2 * PAGE) as page:
                with memoryview(page)[PAGE - sector : PAGE] as last:
                    os.pwrite(file, last, 0)
                os.close(cached)
                return file, sector
        os.close(file)
    warnings.warn(
        f"memory.disk = {str(folder)!r} ({kind}) cannot be written past the system's cache, which takes main "
        "memory, and time: a folder of another file system may do better",
        stacklevel=2,
    )
    return cached, 1


def _kind_of(folder: Path) -> str:
    """The type of the file system that a folder is in; empty if that is not known."""
    with contextlib.suppress(OSError):
        device = folder.stat().st_dev
        own = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mounted, _, kind = line.partition(" - ")
            if mounted.split()[2] == own:
                return kind.split()[0]
    return ""


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a tensor (n,), which lives as long; `numpy` would keep it from being resized."""
    memory: Any = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    memory.owner = flat
    return memoryview(memory).cast("B")
