"""Pinned memory of the host as the slower memory of a GPU: a stream out, a stream in."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict

import torch
from torch import Tensor

from fivefold.errors import UsageError
from fivefold.parallel.memory.spill import Copy, Like, Rates

__all__ = ["PinnedStore"]


class _Recorded:
    """A copy that a stream makes: `here` from the host, else to it."""

    def __init__(self, store: PinnedStore, size_bytes: int, *, here: bool) -> None:
        self._store, self._size_bytes, self._here = store, size_bytes, here
        self._began, self._event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._began.record()

    def begun(self) -> _Recorded:
        """All of it is in the stream."""
        self._event.record()
        return self

    def done(self) -> bool:
        if not self._event.query():
            return False
        if self._size_bytes:
            seconds = self._began.elapsed_time(self._event) / 1e3
            self._store.rates.add(int(self._here), self._size_bytes, seconds)
            self._size_bytes = 0
        return True

    def wait(self) -> None:
        """What is computed from now on waits, not the processor; unless memory is to be let go."""
        if self._here:
            torch.cuda.current_stream().wait_event(self._event)
        else:
            self._event.synchronize()

    def cancel(self) -> bool:
        return False


class PinnedStore:
    """Memory that the GPU reads and writes itself, used again by size.

    Raises `UsageError` when `limit_bytes` are full, or the system gives no more pinned memory.
    """

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device, self._limit_bytes, self._bytes = device, limit_bytes, 0
        self.rates, self.edge_bytes = Rates(), 0
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._slots: dict[int, Tensor] = {}
        self._free: dict[int, list[int]] = defaultdict(list)
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def take(self, size_bytes: int) -> int:
        """See `Store`."""
        with self._lock:
            if self._free[size_bytes]:
                return self._free[size_bytes].pop()
            self._bytes += size_bytes
        if self._limit_bytes is not None and self._bytes > self._limit_bytes:
            raise UsageError(
                f"memory.host = {self._limit_bytes:,} bytes is full, and {size_bytes:,} more are to be "
                "spilled: allow more, or a larger memory.budget"
            )
        try:
            made = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as problem:
            raise UsageError(
                f"cannot pin {size_bytes:,} bytes of memory to spill to, after {self._bytes:,}: "
                f"{str(problem).splitlines()[0]}; raise the limit on locked memory (ulimit -l), set "
                "memory.host, or allow a larger memory.budget"
            ) from None
        slot = next(self._numbers)
        self._slots[slot] = made
        return slot

    def give(self, slot: int, size_bytes: int) -> None:
        """See `Store`."""
        with self._lock:
            self._free[size_bytes].append(slot)

    def out(self, flat: Tensor, slot: int) -> Copy:
        """See `Store`."""
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._out):
            copy = _Recorded(self, flat.nbytes, here=False)
            self._slots[slot].copy_(flat.view(torch.uint8), non_blocking=True)
            return copy.begun()

    def back(self, slot: int, like: Like) -> tuple[Tensor, Copy]:
        """See `Store`."""
        made = like.made()
        self._in.wait_stream(torch.cuda.current_stream(self._device))  # its memory was another's
        with torch.cuda.stream(self._in):
            copy = _Recorded(self, made.nbytes, here=True)
            made.view(torch.uint8).copy_(self._slots[slot], non_blocking=True)
            made.record_stream(self._in)
            return made, copy.begun()

    def close(self) -> None:
        """See `Store`."""
        self._slots.clear()
        self._free.clear()
