"""Who makes which batch of a stream: a table of leases, without clock, thread or connection.

    position   0    1    2    3    4    5    6    7    8   ...
               consumed  |head|              |head + depth
                         arrived  held  free  not granted yet

The consumer takes batches in order. Positions in the window, from its head on, are granted to helpers; a
position may be held twice, when its first holder takes too long. The first answer counts, later ones are
duplicates. So every position arrives once, whatever becomes of the helpers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from fivefold.data.workers import Key

__all__ = ["OWN", "Grant", "Leases"]

OWN = -1
"""the holder that is the trainer itself"""

_MOST_HOLDERS = 2


@dataclass(frozen=True)
class Grant:
    """The right to produce the batch at a position."""

    lease: int
    position: int
    key: Key
    again: bool
    """whether somebody else holds it too, and takes long"""


@dataclass(frozen=True)
class _Held:
    position: int
    helper: int
    since_s: float


class Leases:
    """Leases on a row of keys, to which more may be added. Times are of any clock, in seconds.

    Args:
        new_id: gives a lease id that was never given before.
    """

    def __init__(self, new_id: Callable[[], int]) -> None:
        self.depth = 1
        """how many positions from the head on may be granted; may be changed at any time"""
        self.head = 0
        """position that the consumer takes next"""
        self._new_id = new_id
        self._keys: list[Key] = []
        self._base = 0  # position of the first of `_keys`
        self._next = 0  # never granted from here on
        self._back: list[int] = []  # a heap: granted, and nobody holds them any more
        self._arrived: set[int] = set()
        self._failed: set[int] = set()
        self._leases: dict[int, _Held] = {}
        self._holders: dict[int, list[int]] = {}  # position -> leases on it

    def extend(self, keys: Iterable[Key]) -> None:
        """Add keys behind the others."""
        del self._keys[: self.head - self._base]
        self._base = self.head
        self._keys.extend(keys)

    @property
    def end(self) -> int:
        """Position behind the last key."""
        return self._base + len(self._keys)

    def coming(self) -> list[Key]:
        """Keys from the head on."""
        return self._keys[self.head - self._base :]

    def key(self, position: int) -> Key:
        """The key at a position from the head on."""
        return self._keys[position - self._base]

    # ---- granting

    def grant(self, helper: int, now_s: float, *, overdue_s: float) -> Grant | None:
        """The next position for a helper: lost ones first, then new ones, then one that is overdue.

        `overdue_s`: age from which on a lease is granted a second time. None if there is nothing to do.
        """
        position = self._free(self.end)
        if position is not None:
            return self._given(position, helper, now_s)
        late = next(self._late(now_s, overdue_s, besides=helper), None)
        return None if late is None else self._given(late, helper, now_s, again=True)

    def take_own(
        self,
        now_s: float,
        *,
        ahead: bool,
        impatient: bool,
        overdue_s: float,
        end: int | None = None,
    ) -> Grant | None:
        """What the consumer, who waits for the head, produces itself; None if it had better wait.

        Nobody holds the head: the head. Else, if `ahead`, the next position before `end` that nobody holds.
        Else the head once more, if the wait for it was too long (`impatient`), or its lease is overdue.
        """
        head = self.head
        if head in self._arrived or head >= self.end:
            return None
        if head in self._failed or head not in self._holders:
            self._failed.discard(head)
            if head == self._next:
                self._next += 1
            return self._given(head, OWN, now_s)
        position = self._free(self.end if end is None else end) if ahead else None
        if position is not None:
            return self._given(position, OWN, now_s)
        late = impatient or head in self._late(now_s, overdue_s)
        return self._given(head, OWN, now_s, again=True) if late else None

    def _given(self, position: int, helper: int, now_s: float, *, again: bool = False) -> Grant:
        lease = self._new_id()
        self._leases[lease] = _Held(position, helper, now_s)
        self._holders.setdefault(position, []).append(lease)
        return Grant(lease, position, self.key(position), again)

    def _free(self, end: int) -> int | None:
        """Take the first position of the window, and before `end`, that nobody holds."""
        while self._back and self._back[0] < end:
            position = heapq.heappop(self._back)
            if self._is_open(position) and position not in self._holders:
                return position
        if self._next < min(self.head + self.depth, end, self.end):
            self._next += 1
            return self._next - 1
        return None

    def _is_open(self, position: int) -> bool:
        return (
            position >= self.head and position not in self._arrived and position not in self._failed
        )

    def _late(self, now_s: float, overdue_s: float, besides: int | None = None) -> Iterator[int]:
        """Positions, in order, with one lease that is overdue and not of `besides`."""
        found = (
            position
            for position, leases in self._holders.items()
            if len(leases) < _MOST_HOLDERS
            and self._is_open(position)
            and self._leases[leases[0]].helper not in (besides, OWN)
            and now_s - self._leases[leases[0]].since_s > overdue_s
        )
        return iter(sorted(found))

    # ---- answers

    def done(self, lease: int) -> int | None:
        """A lease was answered: the position that has arrived by it, None for a duplicate or an old lease."""
        held = self._ended(lease)
        if held is None or held.position < self.head or held.position in self._arrived:
            return None
        self._failed.discard(held.position)
        self._arrived.add(held.position)
        return held.position

    def failed(self, lease: int) -> int | None:
        """A helper could not produce it: only the consumer tries again, when it is its turn.

        Returns the position, None if it does not matter any more.
        """
        held = self._ended(lease)
        if held is None or not self._is_open(held.position):
            return None
        if held.position not in self._holders:
            self._failed.add(held.position)
        return held.position

    def returned(self, lease: int) -> None:
        """A lease came back without an answer: others get it."""
        held = self._ended(lease)
        if held is not None and self._is_open(held.position) and held.position not in self._holders:
            heapq.heappush(self._back, held.position)

    def lost(self, helper: int) -> list[int]:
        """A helper is gone, its leases return. Which they were."""
        leases = [lease for lease, held in self._leases.items() if held.helper == helper]
        for lease in leases:
            self.returned(lease)
        return leases

    def consumed(self) -> None:
        """The consumer has taken the batch at the head."""
        assert self.head in self._arrived, self.head
        self._arrived.remove(self.head)
        self.head += 1

    def spoiled(self) -> None:
        """What has arrived for the head makes no sense: only the consumer makes it again."""
        self._arrived.remove(self.head)
        self._failed.add(self.head)

    def _ended(self, lease: int) -> _Held | None:
        held = self._leases.pop(lease, None)
        if held is not None:
            holders = self._holders[held.position]
            holders.remove(lease)
            if not holders:
                del self._holders[held.position]
        return held

    # ---- looking

    def holder(self, position: int) -> int | None:
        """Who has held a position longest; None if nobody does."""
        leases = self._holders.get(position)
        return self._leases[leases[0]].helper if leases else None

    def stalled(self, now_s: float, overdue_s: float) -> set[int]:
        """Helpers with a lease older than that."""
        return {
            held.helper for held in self._leases.values() if now_s - held.since_s > overdue_s
        } - {OWN}

    def since_s(self, lease: int) -> float | None:
        """When a lease was granted; None if it is over."""
        held = self._leases.get(lease)
        return held.since_s if held else None

    def held_since_s(self, position: int) -> float | None:
        """When the oldest lease on a position was granted; None without."""
        leases = self._holders.get(position)
        return self._leases[leases[0]].since_s if leases else None

    def has_arrived(self, position: int) -> bool:
        """Whether the batch is there and not consumed."""
        return position in self._arrived

    @property
    def arrived(self) -> int:
        """Batches that are there and not consumed."""
        return len(self._arrived)

    @property
    def in_order(self) -> int:
        """Batches that are there from the head on without a gap: what the consumer can take at once."""
        position = self.head
        while position in self._arrived:
            position += 1
        return position - self.head
