"""Pinned memory of the host as the slower memory of a GPU: a stream out, a stream in."""

from __future__ import annotations

import ctypes
import mmap
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.memory.room import PAGE, Room, whole_pages
from fivefold.parallel.memory.spill import Copy, Like, Rates
from fivefold.torch_private import pin

__all__ = ["PinnedStore"]

_APART = 1 << 44
_SEVERAL, _CHUNK = 8, (64 << 20, 1 << 30)
"""A chunk has room for so many tensors like the one it is made for, within these bytes: pinning takes longer
than copying, so each byte is pinned once."""


class _Recorded:
    """A copy that a stream makes: `here` from the host, else to it."""

    def __init__(self, device: torch.device, size_bytes: int, *, here: bool) -> None:
        self._device, self.size_bytes = device, size_bytes
        self._here, self._waited = here, False
        self._began, self._event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def begun(self) -> _Recorded:
        """All of it is in the stream."""
        self._event.record()
        return self

    def seconds(self) -> float | None:
        """What it took; None before its end."""
        return self._began.elapsed_time(self._event) / 1e3 if self._event.query() else None

    def done(self) -> bool:
        # Whatever uses its memory from now on is computed after what waits for it.
        return self._waited or self._event.query()

    def wait(self) -> None:
        """What is computed from now on waits, not the processor; unless memory is to be let go."""
        if self._here:
            torch.cuda.current_stream(self._device).wait_event(self._event)
            self._waited = True
        else:
            self._event.synchronize()

    def cancel(self) -> bool:
        return False


class _Chunk:
    """Memory that CUDA knows, (n,). Raises `OSError` if it is not to be had."""

    def __init__(self, size_bytes: int) -> None:
        memory = mmap.mmap(-1, size_bytes)
        with suppress(OSError):  # kernels may lack them
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = torch.frombuffer(memory, dtype=torch.uint8)
        self.bytes.zero_()  # by several threads; CUDA alone asks for page after page
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if problem := pin(self, address, size_bytes, memory):
            raise OSError(f"CUDA's error {problem}")


class PinnedStore:
    """Memory that the GPU reads and writes itself, in chunks that tensors share.

    Raises `UsageError` when `room_bytes` are full, or the system gives no more pinned memory.
    """

    def __init__(self, device: torch.device, room_bytes: int) -> None:
        self._device, self.room_bytes = device, room_bytes
        self.rates, self.edge_bytes = Rates(), 0
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._chunks: dict[int, _Chunk] = {}
        """by the first address of their room, which are far apart: no tensor is in two"""
        self._room, self._made = Room(), 0
        self._under_way: deque[tuple[int, _Recorded]] = deque()
        """(direction, copy), of which nobody knows yet what it took"""

    def take(self, size_bytes: int) -> int:
        """See `Store`."""
        size = whole_pages(size_bytes)
        slot = self._room.take(size)
        if slot is None:
            self._grow(size)
            slot = self._room.take(size)
            assert slot is not None
        return slot

    def _grow(self, size: int) -> None:
        """By a chunk."""
        least, most = _CHUNK
        chunk = max(size, min(max(_SEVERAL * size, least), most))
        if chunk > self._left_bytes():
            self._in.synchronize()  # what was let go may be read still, see `_Recorded.done`
            for start, one in [*self._chunks.items()]:
                if self._room.withdraw(start, start + len(one.bytes)):
                    del self._chunks[start]
            chunk = max(size, min(chunk, self._left_bytes() // PAGE * PAGE))
        if chunk > self._left_bytes():
            raise UsageError(
                f"{self.room_bytes:,} bytes of memory to spill to are full, and {size:,} more are to be "
                "spilled: set memory.host to allow more, or a larger memory.budget"
            )
        try:
            made = _Chunk(chunk)
        except (OSError, RuntimeError) as problem:
            held = self.room_bytes - self._left_bytes()
            raise UsageError(
                f"cannot pin {chunk:,} bytes of memory to spill to, after {held:,}: "
                f"{str(problem).splitlines()[0]}; raise the limit on locked memory (ulimit -l), set "
                "memory.host, or allow a larger memory.budget"
            ) from None
        self._made += 1
        self._chunks[self._made * _APART] = made
        self._room.give(self._made * _APART, chunk)

    def _left_bytes(self) -> int:
        return self.room_bytes - sum(len(chunk.bytes) for chunk in self._chunks.values())

    def _bytes_at(self, slot: int, size_bytes: int) -> Tensor:
        start = slot // _APART * _APART
        return self._chunks[start].bytes[slot - start :][:size_bytes]

    def give(self, slot: int, size_bytes: int) -> None:
        """See `Store`."""
        self._room.give(slot, whole_pages(size_bytes))

    def out(self, flat: Tensor, slot: int) -> Copy:
        """See `Store`."""
        self._note_rates()
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            copy = _Recorded(self._device, flat.nbytes, here=False)
            self._bytes_at(slot, flat.nbytes).copy_(flat.view(torch.uint8), non_blocking=True)
            self._under_way.append((0, copy.begun()))
        return copy

    def back(self, slot: int, like: Like) -> tuple[Tensor, Copy]:
        """See `Store`."""
        self._note_rates()
        made = like.made()
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # its memory was another's
        with torch.cuda.stream(self._in):
            copy = _Recorded(self._device, made.nbytes, here=True)
            made.view(torch.uint8).copy_(self._bytes_at(slot, made.nbytes), non_blocking=True)
            self._under_way.append((1, copy.begun()))
        return made, copy

    def _note_rates(self) -> None:
        """Of copies that have ended."""
        while self._under_way and (seconds := self._under_way[0][1].seconds()) is not None:
            direction, copy = self._under_way.popleft()
            self.rates.add(direction, copy.size_bytes, seconds)

    def close(self) -> None:
        """See `Store`."""
        torch.cuda.synchronize(self._device)
        self._chunks.clear()
