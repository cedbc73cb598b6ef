"""Room of a store: stretches of addresses, taken and given back."""

from __future__ import annotations

import bisect
import threading
from collections import deque

__all__ = ["PAGE", "Room", "whole_pages"]

PAGE = 4096


class Room:
    """What is free of it. Free neighbours are one; of those that are large enough the smallest is used."""

    def __init__(self) -> None:
        self._free: list[tuple[int, int]] = []
        """(start, stop), in order"""
        self._given: deque[tuple[int, int]] = deque()
        """not joined yet: giving waits for no lock, since a garbage collector may give at any time"""
        self._lock = threading.Lock()

    def take(self, size: int) -> int | None:
        """Where so much is free, which it is no longer; None if it is not."""
        with self._lock:
            self._join()
            fits = [
                (stop - start, n)
                for n, (start, stop) in enumerate(self._free)
                if stop - start >= size
            ]
            if not fits:
                return None
            _, n = min(fits)
            start, stop = self._free[n]
            self._free[n : n + 1] = [(start + size, stop)] if stop - start > size else []
            return start

    def give(self, start: int, size: int) -> None:
        """[start, start + size) is free from now on; it must not be."""
        if size:
            self._given.append((start, start + size))

    def withdraw(self, start: int, stop: int) -> bool:
        """Whether all of [start, stop) was free; it is not any more."""
        with self._lock:
            self._join()
            n = bisect.bisect_right(self._free, (start, stop + 1)) - 1
            if n < 0 or self._free[n][1] < stop or self._free[n][0] > start:
                return False
            first, last = self._free[n]
            rest = [(first, start), (stop, last)]
            self._free[n : n + 1] = [(a, b) for a, b in rest if a < b]
            return True

    def _join(self) -> None:
        while self._given:
            start, stop = self._given.popleft()
            n = bisect.bisect(self._free, (start, stop))
            if n < len(self._free) and self._free[n][0] == stop:
                stop = self._free.pop(n)[1]
            if n and self._free[n - 1][1] == start:
                n -= 1
                start = self._free.pop(n)[0]
            self._free.insert(n, (start, stop))


def whole_pages(size_bytes: int) -> int:
    """The same, rounded up."""
    return -(-size_bytes // PAGE) * PAGE
