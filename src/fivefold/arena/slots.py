"""Slots: a segment in pieces of equal size that processes take, pass to each other, and drop.

    holder 0 (reader)   take -> 3     fill     "3 is full" ->    drop
    holder 1 (trainer)                         hold 3   read     drop -> 3 is free again

A reference is one bit of a word per slot, so nothing that a killed process held is lost: whoever notices
its end drops the bits of its number.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Self

from fivefold.arena.locality import watch
from fivefold.arena.native import ArenaError, core
from fivefold.arena.segment import Segment
from fivefold.closing import Closing

__all__ = ["Slots"]

_PAGE = 4096
_MOST_HOLDERS = 64


class Slots(Closing):
    """Pieces of a segment with counted holders, as one of up to 64 processes sees them.

    Rings of batches, staging of checkpoints and shared weights are made of slots. What a slot holds, and
    that it is full, is told over whatever the processes talk through; a slot number is enough.
    """

    def __init__(self, segment: Segment, slot_bytes: int, count: int) -> None:
        self.segment = segment
        self.slot_bytes, self.count = slot_bytes, count
        self._table = segment.address
        self._first = _table_bytes(count)
        self.holder = int(core().ff_slots_join(self._table, os.getpid()))
        """this process's number among the holders"""
        if self.holder < 0 and self.drop_the_dead():
            self.holder = int(core().ff_slots_join(self._table, os.getpid()))
        if self.holder < 0:
            raise ArenaError(
                f"{_MOST_HOLDERS} processes hold slots of this arena, which is the most"
            )

    @classmethod
    def create(cls, name: str, slot_bytes: int, count: int) -> Self:
        """New slots. Raises `ArenaError` without memory for all of them."""
        whole = -(-slot_bytes // _PAGE) * _PAGE
        segment = Segment.create(name, _table_bytes(count) + count * whole)
        assert core().ff_slots_set_up(segment.address, count) == 0
        header = ctypes.c_uint64.from_buffer(segment.memory, _table_bytes(count) - 8)
        header.value = whole
        return cls(segment, whole, count)

    @classmethod
    def attach(cls, segment: Segment, count: int) -> Self:
        """Join slots that another process made, and passed as a segment."""
        whole = ctypes.c_uint64.from_buffer(segment.memory, _table_bytes(count) - 8).value
        return cls(segment, int(whole), count)

    def take(self, timeout_s: float) -> int:
        """A free slot, held by this process. Raises `ArenaError` if none becomes free in time."""
        slot = int(core().ff_slot_take(self._table, self.holder, 0.0))
        if slot < 0:
            self.drop_the_dead()
            slot = int(core().ff_slot_take(self._table, self.holder, timeout_s))
        if slot < 0:
            raise ArenaError(
                f"all {self.count} slots were held for {timeout_s:.1f} s, by processes {self.holders()}: "
                "whoever reads them is stuck, or more slots are needed"
            )
        return slot

    def hold(self, slot: int) -> None:
        """Hold a slot that another process holds and has named. Raises `ArenaError` if nobody does."""
        if not core().ff_slot_hold(self._table, slot, self.holder):
            raise ArenaError(f"slot {slot} was dropped by all before this process could hold it")

    def drop(self, slot: int) -> None:
        """Let a slot go; without holders it is free. Dropping twice does no harm."""
        core().ff_slot_drop(self._table, slot, self.holder)

    def view(self, slot: int) -> ctypes.Array[ctypes.c_char]:
        """The bytes of a slot."""
        return self.segment.view(self._first + slot * self.slot_bytes, self.slot_bytes)

    def held(self, slot: int) -> int:
        """How many processes hold a slot."""
        return int(core().ff_slot_holders(self._table, slot)).bit_count()

    def holders(self) -> list[int]:
        """Process ids of all holders."""
        pids = (int(core().ff_slots_holder(self._table, n)) for n in range(_MOST_HOLDERS))
        return [pid for pid in pids if pid]

    def drop_the_dead(self) -> int:
        """Drop what processes held that have ended; how many there were."""
        found = 0
        for number in range(_MOST_HOLDERS):
            pid = int(core().ff_slots_holder(self._table, number))
            if pid and _has_ended(pid):
                core().ff_slots_leave(self._table, number)
                found += 1
        return found

    def close(self) -> None:
        """Drop everything this process holds, and leave."""
        if self.holder >= 0:
            core().ff_slots_leave(self._table, self.holder)
            self.holder = -1
            self.segment.close()


def _table_bytes(count: int) -> int:
    """The table, and behind it the size of a slot, up to a page."""
    return -(-(int(core().ff_slots_bytes(count)) + 8) // _PAGE) * _PAGE


def _has_ended(pid: int) -> bool:
    import select

    with contextlib.suppress(ProcessLookupError):
        end = watch(pid)
        if end < 0:
            return False
        try:
            poll = select.poll()  # select() refuses descriptors from 1024 on
            poll.register(end, select.POLLIN)
            return bool(poll.poll(0))
        finally:
            os.close(end)
    return True
