"""Memory that processes share until one of them writes to it: what it writes, it alone sees.

    segment    ──────── what all see ────────
    own view   ──────────┐ page ┌──────────      a page that this process has written to is its own,
                         └──────┘                until the change is shared, or forgotten

Linux does this for private mappings of memory files, page by page, and tells which pages are a process's own.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os

import numpy as np

from fivefold.arena.native import ArenaError
from fivefold.arena.segment import Segment

__all__ = ["CopyOnWrite"]

_ENTRY_BYTES = 8
_FIRST_BIT, _OF_FILE = np.uint64(61), np.uint64(1)
"""From bit 61 on an entry says: of a file, in swap, in memory (Linux, admin-guide/mm/pagemap)"""


class CopyOnWrite:
    """A segment as this process sees it and as all do. Buffers that are still held keep it mapped.

    `own` is the buffer that keeps the changes of this process to itself, `shared` the one that does not.
    """

    def __init__(self, segment: Segment) -> None:
        """Takes the segment over.

        Raises `ArenaError` where the system does not tell which pages a process has changed.
        """
        if why := _problem():
            raise ArenaError(
                f"this system does not tell which pages a process has changed (/proc/self/pagemap: {why}), "
                'which instances need that share weights: set instances.weights = "own"'
            )
        self.size_bytes = segment.size_bytes
        self.shared = segment.view(0, segment.size_bytes)
        self.own = mmap.mmap(segment.fd, segment.size_bytes, mmap.MAP_PRIVATE)
        segment.close()
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.own))

    def changed(self) -> list[tuple[int, int]]:
        """Pages that this process has changed: where runs of them begin and end, in bytes of the segment."""
        return _changed(self._address, self.size_bytes)

    def differs(self, begin: int, end: int) -> bool:
        """Whether this process sees other bytes there than those that are shared."""
        return memoryview(self.own)[begin:end] != memoryview(self.shared).cast("B")[begin:end]

    def share(self, begin: int, end: int) -> None:
        """Let all see what this process sees there."""
        ctypes.memmove(ctypes.addressof(self.shared) + begin, self._address + begin, end - begin)

    def forget(self, begin: int, end: int) -> None:
        """Give up the changes of this process there, from the beginning of a page on."""
        self.own.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def _changed(address: int, size_bytes: int) -> list[tuple[int, int]]:
    pages = -(-size_bytes // mmap.PAGESIZE)
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        told = os.pread(fd, pages * _ENTRY_BYTES, address // mmap.PAGESIZE * _ENTRY_BYTES)
    finally:
        os.close(fd)
    kinds = np.frombuffer(told, np.uint64) >> _FIRST_BIT
    changed = (kinds != 0) & (kinds & _OF_FILE == 0)
    if not changed.any():
        return []
    edges = np.flatnonzero(np.diff(changed.astype(np.int8), prepend=0, append=0))
    ends = np.minimum(edges * mmap.PAGESIZE, size_bytes).reshape(-1, 2)
    return [(int(begin), int(end)) for begin, end in ends]


@functools.cache
def _problem() -> str:
    """Why what the system tells of pages cannot be relied on, or nothing. Tried once."""
    with Segment.create("probe", 2 * mmap.PAGESIZE) as probe:
        own = mmap.mmap(probe.fd, probe.size_bytes, mmap.MAP_PRIVATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(own))
        try:
            seen: list[object] = [own[0], _changed(address, probe.size_bytes)]
            own[mmap.PAGESIZE] = 1
            seen.append(_changed(address, probe.size_bytes))
        except OSError as problem:
            return str(problem)
    right = seen == [0, [], [(mmap.PAGESIZE, 2 * mmap.PAGESIZE)]]
    return "" if right else "what it says is wrong"
