"""Memory of a segment given out in pieces, by the one process that owns it."""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from collections import deque

from fivefold.arena.native import ArenaError
from fivefold.arena.segment import Segment

__all__ = ["Heap"]

_UNIT = 4096
"""pieces begin on pages: no two share a cache line, and vectors are aligned"""


class Heap:
    """Pieces of a sparse segment. What was given back is given out first: its pages are there already.

    Peers that have mapped the segment see every piece at its offset. A piece goes back when the last
    reference to its buffer goes. Any thread may ask.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.touched_bytes = 0
        """the segment up to here has been in use"""
        self._free: list[tuple[int, int]] = []
        """(offset, size) of what was given back, by offset; neighbours are joined"""
        self._returned: deque[tuple[int, int]] = deque()
        """given back, perhaps by the collector of garbage in the middle of anything: sorted in later"""
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """A piece as a buffer of exactly `size_bytes`, its contents undefined.

        Raises `ArenaError` when the segment, the machine or the control group has no room.
        """
        size = max(_UNIT, -(-size_bytes // _UNIT) * _UNIT)
        with self._lock:
            while self._returned:
                self._give_back(*self._returned.popleft())
            offset = self._reused(size)
            if offset is None:
                offset = self._fresh(size)
        piece = self.segment.view(offset, size_bytes)
        weakref.finalize(piece, self._returned.append, (offset, size)).atexit = False
        return piece

    def offset_of(self, address: int) -> int:
        """Where an address of this process lies in the segment."""
        return address - self.segment.address

    def _reused(self, size: int) -> int | None:
        fitting = [(length, offset) for offset, length in self._free if length >= size]
        if not fitting:
            return None
        length, offset = min(fitting)
        self._free.remove((offset, length))
        if length > size:
            bisect.insort(self._free, (offset + size, length - size))
        return offset

    def _fresh(self, size: int) -> int:
        offset = self.touched_bytes
        if offset + size > self.segment.size_bytes:
            raise ArenaError(
                f"the arena of {self.segment.size_bytes >> 20} MiB has no room for {size >> 20} MiB more"
            )
        self.segment.touch(offset, size, "a tensor in the arena")
        self.touched_bytes += size
        return offset

    def _give_back(self, offset: int, size: int) -> None:
        at = bisect.bisect(self._free, (offset, size))
        if at < len(self._free) and offset + size == self._free[at][0]:
            size += self._free.pop(at)[1]
        if at and sum(self._free[at - 1]) == offset:
            before, length = self._free.pop(at - 1)
            offset, size = before, length + size
        bisect.insort(self._free, (offset, size))
