"""Who has called and not proved yet who it is: few at a time, and few of one address.

    a caller ── add ──> waits for its proof ── left ──> known, or gone
                          │ too many
                          └─ whoever has waited longest is hung up on

Who knows the key proves it within milliseconds, so those who wait long are those who do not.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fivefold.closing import Closing

__all__ = ["Callers"]


@dataclass(frozen=True)
class _Caller:
    address: str
    hang_up: Callable[[], object]


class Callers(Closing):
    """Bounds how many callers wait to be known. Any thread may call its methods.

    Args:
        most: in all.
        of_one: of one address; an empty address, which a Unix socket has, counts in `most` only.
    """

    def __init__(self, most: int, of_one: int) -> None:
        self._most, self._of_one = most, of_one
        self._waiting: dict[int, _Caller] = {}
        """in the order in which they called"""
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def add(self, address: str, hang_up: Callable[[], object]) -> int:
        """Take in a caller; `hang_up` wakes whoever listens to it. A number for `left`."""
        with self._lock:
            alike = [n for n, one in self._waiting.items() if address and one.address == address]
            if len(alike) >= self._of_one:
                self._refuse(alike[0])
            elif len(self._waiting) >= self._most:
                self._refuse(next(iter(self._waiting)))
            number = next(self._numbers)
            self._waiting[number] = _Caller(address, hang_up)
            return number

    def left(self, number: int) -> None:
        """A caller has proved who it is, or is gone. Calling it again does nothing."""
        with self._lock:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """Hang up on all."""
        with self._lock:
            for number in [*self._waiting]:
                self._refuse(number)

    def __len__(self) -> int:
        return len(self._waiting)

    def _refuse(self, number: int) -> None:
        with contextlib.suppress(OSError):
            self._waiting.pop(number).hang_up()
