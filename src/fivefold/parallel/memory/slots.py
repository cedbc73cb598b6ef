"""Bytes while each node of a step is computed, and its backward.

    forward     f1    f2    f3    loss
    backward              b3          b1          of node 2, which saves nothing, nobody tells: it counts as 3

What is computed again is so in the backward of the node that follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from fivefold.parallel.memory.saving import Watch

__all__ = ["Counts", "Slot", "SlotWatch"]

Slot = tuple[int, bool]
"""a node, and whether it is its backward"""


class Counts(Protocol):
    """Counts bytes."""

    def now(self) -> int:
        """Those that are alive."""
        ...

    def lately(self) -> int:
        """The most that were alive since the last call."""
        ...


class SlotWatch(Watch, ABC):
    """Tells its subclasses of the bytes that there are.

    Args:
        counts: gives who counts, at the first node: backward may have a thread of its own.
    """

    def __init__(self, counts: Callable[[], Counts | None]) -> None:
        self._counts = counts
        self._count: Counts | None = None
        self._slot: Slot | None = None
        """what is under way"""

    def computes(self, node: int) -> None:
        """See `Watch`."""
        self._next((node, False))

    def needs(self, node: int) -> None:
        """See `Watch`."""
        if self._slot != (node, True):
            self._next((node, True))

    def _next(self, slot: Slot) -> None:
        self.close(slot[0] if slot[1] else -1)
        self._count = self._count or self._counts()
        assert self._count is not None
        self._count.lately()
        self._slot = slot
        self.began(slot, self._count.now())

    def close(self, following: int = -1) -> None:
        """What was under way has ended; the backward of the node `following` comes next."""
        if self._count is not None and self._slot is not None:
            self.ended(self._slot, self._count.lately(), self._count.now(), following)
            self._slot = None

    @abstractmethod
    def began(self, slot: Slot, now: int) -> None:
        """With so many bytes."""

    @abstractmethod
    def ended(self, slot: Slot, most: int, now: int, following: int) -> None:
        """With so many bytes, after `most`; in backward, that of nodes behind `following` is part of it."""
