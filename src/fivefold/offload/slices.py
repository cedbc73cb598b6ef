"""Who evaluates which batches of one validation.

    batches  0 1 2 | 3 4 | 5 6 7 | 8 9 ...        (what is free is granted from the front)
             done    0's   1's     free

Pure: the caller passes the clock. A batch counts once, whoever answers first; what a helper leaves behind is
free again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Slices", "added"]

Sums = np.ndarray[Any, np.dtype[np.float64]]


@dataclass
class _Lease:
    helper: int
    batches: range
    since_s: float
    late: bool = False
    """others have got its batches as well"""


class Slices:
    """The batches of one validation, 0 to `batches` - 1, and the sums of those that are evaluated."""

    def __init__(self, batches: int) -> None:
        self._free = list(range(batches - 1, -1, -1))
        """the next one last"""
        self._own: list[int] = []
        """what no helper could evaluate"""
        self._leases: dict[int, _Lease] = {}
        self._rows: list[Sums | None] = [None] * batches
        self._left = batches
        self.by_helpers = 0
        """how many batches count by a helper's answer"""

    @property
    def complete(self) -> bool:
        """Whether the sums of all batches are there."""
        return self._left == 0

    @property
    def free(self) -> int:
        """How many batches nobody works on, not counting those that helpers failed at."""
        return len(self._free)

    def grant(self, lease: int, helper: int, most: int, now_s: float) -> range | None:
        """The next batches for a helper, at most so many; None if nothing is free."""
        if not self._free:
            return None
        batches = range(self._free[-1], self._free[-1] + 1)
        self._free.pop()
        while self._free and len(batches) < most and self._free[-1] == batches.stop:
            batches = range(batches.start, self._free.pop() + 1)
        self._leases[lease] = _Lease(helper, batches, now_s)
        return batches

    def size(self, lease: int) -> int:
        """How many batches a lease is about."""
        return len(self._leases[lease].batches)

    def since_s(self, lease: int) -> float:
        """When a lease was granted."""
        return self._leases[lease].since_s

    def done(self, lease: int, rows: Sums) -> bool:
        """A helper's answer, a row for each batch. Whether any of it is news."""
        before = self._left
        self.add(self._leases.pop(lease).batches, rows)
        self.by_helpers += before - self._left
        return self._left < before

    def add(self, batches: range | list[int], rows: Sums) -> None:
        """The sums of some batches."""
        news = 0
        for batch, row in zip(batches, rows, strict=True):
            if self._rows[batch] is None:
                self._rows[batch] = row
                news += 1
        self._left -= news
        if news:
            self._free = [batch for batch in self._free if self._rows[batch] is None]
            self._own = [batch for batch in self._own if self._rows[batch] is None]

    def drop(self, lease: int) -> None:
        """A lease is over without an answer: its batches are free again."""
        found = self._leases.pop(lease, None)
        if found is not None:
            self._return(found.batches)

    def fail(self, lease: int) -> None:
        """A helper failed: only the trainer can tell what is wrong with these batches."""
        found = self._leases.pop(lease, None)
        if found is not None:
            self._own += [batch for batch in found.batches if self._rows[batch] is None]

    def lost(self, helper: int) -> None:
        """A helper is gone: what it held is free again."""
        for lease in [n for n, held in self._leases.items() if held.helper == helper]:
            self.drop(lease)

    def oldest_s(self) -> float | None:
        """When the oldest lease was granted of those that are not late; None without any."""
        return min((held.since_s for held in self._leases.values() if not held.late), default=None)

    def overdue(self, before_s: float) -> bool:
        """Free the batches of leases granted before that time, which stay valid. Whether there were any."""
        late = [h for h in self._leases.values() if not h.late and h.since_s <= before_s]
        for held in late:
            held.late = True
            self._return(held.batches)
        return bool(late)

    def late(self) -> set[int]:
        """Helpers that hold a lease which is late."""
        return {held.helper for held in self._leases.values() if held.late}

    def take(self, most: int) -> list[int]:
        """Batches for the trainer itself, at most so many: first those that helpers failed at."""
        taken = [(self._own or self._free).pop() for _ in range(min(most, self._idle))]
        return sorted(taken)

    @property
    def _idle(self) -> int:
        return len(self._own) + len(self._free)

    @property
    def failed(self) -> int:
        """How many batches are left that helpers failed at."""
        return len(self._own)

    def _return(self, batches: range) -> None:
        back = {batch for batch in batches if self._rows[batch] is None}
        self._free = sorted(back.union(self._free) - set(self._own), reverse=True)

    def total(self) -> list[float]:
        """The sums over all batches; see `added`."""
        assert self.complete
        return added([row for row in self._rows if row is not None])


def added(rows: list[Sums]) -> list[float]:
    """The rows, at least one, added in their order, one after the other: alike wherever they were made."""
    total = np.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total.tolist()
