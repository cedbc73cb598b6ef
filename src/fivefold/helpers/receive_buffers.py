"""Memory of the trainer in which helpers lay what they make, and in which users see it.

    take ──> buffer of a lease ──> DONE ──> tensors that view it ──> the last one goes: the buffer is free
              │  lost: let go                  (a slice that the user keeps holds the whole buffer)
              └──────────────────────────────────────────────────> free, once no helper writes any more

A buffer's number is used once. A helper that was given up, and wakes up, writes nothing into a buffer that
has become another's: it holds the slot, then compares the number, and only then writes.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from fivefold.arena.native import ArenaError
from fivefold.arena.segment import Segment
from fivefold.arena.slots import Slots
from fivefold.closing import Closing
from fivefold.errors import OffloadWarning, warn
from fivefold.wire.frames import Buffer

__all__ = ["AttachedPool", "BufferPool", "ReceiveBuffer", "pool_of"]

_HEAD_BYTES = 64
"""before each buffer: the number of whoever has it; a cache line, so that payloads stay aligned"""
_SLOT_BITS, _USE_BITS = 12, 28
_MOST_BUFFERS = 1 << _SLOT_BITS
_ids = itertools.count()


@dataclass(frozen=True)
class ReceiveBuffer:
    """A buffer that was taken. It is free again when neither this, nor a view of its memory, is left."""

    number: int
    """tells it from all buffers that this process ever took"""
    memory: memoryview
    """its bytes, writable, 64-byte aligned"""


class BufferPool(Closing):
    """`count` buffers of `buffer_bytes` bytes, up to 4,096, in one segment of shared memory.

    Args:
        buffer_bytes: of one buffer.
        count: of buffers.
        pin: make them known to CUDA, so that copies to a GPU run by themselves. Such a buffer is free only
            when what the stream that was current, when the last tensor went, had to do by then is done: so
            let go of a tensor under the stream that copies it.

    Raises:
        ArenaError: there is no memory, or no C core.
    """

    def __init__(self, buffer_bytes: int, count: int, *, pin: bool = False) -> None:
        assert 0 < count <= _MOST_BUFFERS, count
        self.id = next(_ids)
        self.buffer_bytes, self.count = buffer_bytes, count
        self._slots = Slots.create("buffers", _HEAD_BYTES + buffer_bytes, count)
        segment = self._slots.segment
        segment.touch(0, segment.size_bytes, "buffers for batches")
        pinned = pin and _pin(segment)
        self._lock = threading.Lock()
        self._uses = 0
        self._taken = 0
        self._returned = _Returned(pinned)
        self._views: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_char]] = (
            weakref.WeakValueDictionary()
        )
        self.closed = False

    @property
    def segment(self) -> Segment:
        """What is passed to a helper of the same node."""
        return self._slots.segment

    @property
    def free(self) -> int:
        """How many buffers are neither lent nor viewed."""
        return self.count - self._taken + len(self._returned.slots)

    def take(self) -> ReceiveBuffer | None:
        """A free buffer, or None; one of its own for every lease."""
        with self._lock:
            if self.closed:
                return None
            self._collect()
            if self._taken == self.count:
                return None
            try:
                slot = self._slots.take(0.0)
            except ArenaError:  # a helper that was given up is still writing
                return None
            self._taken += 1
            self._uses += 1
            number = _number(self.id, self._uses, slot)
            view = self._slots.view(slot)
            _head(view).value = number + 1
            weakref.finalize(view, self._returned, slot).atexit = False
            self._views[number] = view
            return ReceiveBuffer(number, self._flat(view))

    def memory(self, number: int) -> memoryview | None:
        """The bytes of a buffer that is still lent or viewed, else None; holds it."""
        view = self._views.get(number)
        return None if view is None else self._flat(view)

    def _flat(self, view: ctypes.Array[ctypes.c_char]) -> memoryview:
        return memoryview(view).cast("B")[_HEAD_BYTES : _HEAD_BYTES + self.buffer_bytes]

    def _collect(self) -> None:
        """Free what came back. Finalizers run anywhere and any time, so they only make a note."""
        for _ in range(len(self._returned.slots)):
            slot, event = self._returned.slots.popleft()
            if event is not None and not event.query():
                self._returned.slots.append((slot, event))
                continue
            _head(self._slots.view(slot)).value = 0  # from here on nobody begins to write
            self._slots.drop(slot)
            self._taken -= 1

    def close(self) -> None:
        """Lend no more. The memory goes with the last tensor that views it."""
        with self._lock:
            if not self.closed:
                self.closed = True
                self._slots.close()


class AttachedPool(Closing):
    """Buffers of a trainer, as a helper of the same node sees them."""

    def __init__(self, slots: Slots, buffer_bytes: int) -> None:
        self._slots = slots
        self.buffer_bytes = buffer_bytes

    @classmethod
    def attach(cls, fd: int, buffer_bytes: int, count: int) -> Self:
        """Use buffers that were passed as a descriptor, which stays the caller's.

        Raises:
            ArenaError: what was passed are no buffers of this size, or too many processes use them.
        """
        segment = _attached(fd)
        least = mmap.PAGESIZE + count * (_HEAD_BYTES + buffer_bytes)
        try:
            if not 0 < count <= _MOST_BUFFERS or buffer_bytes < 0 or segment.size_bytes < least:
                raise ArenaError("what was passed is too small for the buffers it shall hold")
            slots = Slots.attach(segment, count)
        except (ArenaError, ValueError) as problem:
            segment.close()
            raise ArenaError(str(problem)) from None
        if slots.slot_bytes < _HEAD_BYTES + buffer_bytes:
            slots.close()
            raise ArenaError("what was passed has smaller buffers")
        return cls(slots, buffer_bytes)

    def write(self, number: int, parts: Sequence[Buffer]) -> bool:
        """Lay `parts` into a buffer, one after the other; False if it was taken back meanwhile.

        The parts must fit.
        """
        slot = number & (_MOST_BUFFERS - 1)
        if slot >= self._slots.count:
            return False
        try:
            self._slots.hold(slot)
        except ArenaError:
            return False
        try:
            view = self._slots.view(slot)
            if _head(view).value != number + 1:
                return False
            room, at = memoryview(view).cast("B")[_HEAD_BYTES:], 0
            for part in parts:
                room[at : at + len(part)] = part
                at += len(part)
            return True
        finally:
            self._slots.drop(slot)

    def close(self) -> None:
        """Forget them."""
        self._slots.close()


class _Returned:
    """Slots that nobody views any more, with what a GPU may still have to do with them."""

    def __init__(self, pinned: bool) -> None:
        self.slots: deque[tuple[int, Any]] = deque()
        self._pinned, self._pid = pinned, os.getpid()

    def __call__(self, slot: int) -> None:
        self.slots.append((slot, self._event()))

    def _event(self) -> Any:
        if (
            not self._pinned or self._pid != os.getpid()
        ):  # a forked child has no CUDA, and no buffers
            return None
        import torch

        event = torch.cuda.Event()
        event.record()
        return event


def pool_of(number: int) -> int:
    """`BufferPool.id` of the pool that a number belongs to."""
    return number >> (_SLOT_BITS + _USE_BITS)


def _number(pool: int, use: int, slot: int) -> int:
    return (pool << _USE_BITS | use % (1 << _USE_BITS)) << _SLOT_BITS | slot


def _head(view: ctypes.Array[ctypes.c_char]) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_buffer(view)


def _attached(fd: int) -> Segment:
    own = os.dup(fd)
    try:
        return Segment.attach(own)
    except (ArenaError, OSError, ValueError) as problem:
        os.close(own)
        raise ArenaError(str(problem)) from None


def _pin(segment: Segment) -> bool:
    """Whether CUDA knows this memory from now on; a warning says why not."""
    from fivefold.torch_private import pin

    # Before the last view unmaps it.
    if problem := pin(segment.memory, segment.address, segment.size_bytes):
        warn(
            f"batches of helpers are copied to the GPU step by step: CUDA cannot pin {segment.size_bytes} "
            f"bytes (error {problem}); raise the limit on locked memory (ulimit -l)",
            OffloadWarning,
        )
        return False
    return True
