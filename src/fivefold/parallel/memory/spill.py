"""A pool of slower memory, to which tensors are copied while a net computes, and from which they come back.

    forward     put ──► copied out, in order ──► its memory is let go
    backward    get ◄── fetched ahead, last put first

Of what is on its way out at most `window_bytes` are still held, and so many are fetched ahead at most; copies
of what is larger are waited for. So what a pool adds to a step does not depend on how fast copies are.

Whoever changes a tensor in place while it is copied out makes its copy worthless: the version that autograd
counts tells, and `get` raises.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fivefold.torch_private import version_of

__all__ = [
    "Copy",
    "Like",
    "Pool",
    "Rates",
    "Spilled",
    "Store",
    "WeightlessStore",
    "flat_of",
    "spillable",
]


class Like(NamedTuple):
    """A tensor (n,) as it is to be made."""

    elements: int
    dtype: torch.dtype
    device: torch.device

    def made(self) -> Tensor:
        """One, of any numbers."""
        return torch.empty(self.elements, dtype=self.dtype, device=self.device)


class Copy(Protocol):
    """A copy under way."""

    def done(self) -> bool:
        """Whether it has ended."""
        ...

    def wait(self) -> None:
        """Until it has ended; raises what went wrong."""
        ...

    def cancel(self) -> bool:
        """Whether it has not begun, and never will."""
        ...


class Rates:
    """What copies took, in both directions."""

    def __init__(self) -> None:
        self.bytes = [0, 0]
        self.seconds = [0.0, 0.0]

    def add(self, direction: int, size_bytes: int, seconds: float) -> None:
        """Note a copy: 0 is out, 1 is back."""
        self.bytes[direction] += size_bytes
        self.seconds[direction] += seconds

    def of(self, direction: int) -> float | None:
        """Bytes per second; None before the first copy."""
        return self.bytes[direction] / self.seconds[direction] if self.seconds[direction] else None


class Store(Protocol):
    """Where spilled bytes are. Slots are numbers that only the store understands."""

    rates: Rates
    edge_bytes: int
    """what a tensor that is fetched takes beside its own bytes"""
    room_bytes: int
    """how much there was room for at first"""

    def take(self, size_bytes: int) -> int:
        """Room for so many bytes. Raises `UsageError` if there is none."""
        ...

    def give(self, slot: int, size_bytes: int) -> None:
        """Let room go, once nothing is copied to or from it."""
        ...

    def out(self, flat: Tensor, slot: int) -> Copy:
        """Begin to copy a tensor (n,) that is contiguous."""
        ...

    def back(self, slot: int, like: Like) -> tuple[Tensor, Copy]:
        """Begin to fetch what was such a tensor as `like` says."""
        ...

    def close(self) -> None:
        """Let all of it go."""
        ...


class Spilled:
    """A tensor (n,) of which a copy is in a pool. Once it is back it stays; its room is let go with it."""

    def __init__(self, pool: Pool, source: Tensor, slot: int, copy: Copy) -> None:
        self.size_bytes = source.nbytes
        self._pool, self._slot = pool, slot
        self._source: Tensor | None = source
        self._like = Like(len(source), source.dtype, source.device)
        self._version = version_of(source)
        self._copy: Copy | None = copy
        self._fetched: tuple[Tensor, Copy] | None = None
        self._changed = False

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor can be a view of it."""
        return tensor.dtype == self._like.dtype

    def settle(self) -> None:
        """Wait until the copy is out, and let the tensor go."""
        if self._copy is not None:
            self._copy.wait()
            assert self._source is not None
            self._changed = version_of(self._source) != self._version
            self._copy = self._source = None

    @property
    def is_out(self) -> bool:
        """Whether its copy has ended."""
        return self._copy is None or self._copy.done()

    @property
    def is_back(self) -> bool:
        """Whether it has been fetched."""
        return self._fetched is not None and self._fetched[1].done()

    @property
    def is_here(self) -> bool:
        """Whether it takes memory: it is not out yet, or is coming back."""
        return self._source is not None or self._fetched is not None

    def fetch(self) -> None:
        """Begin to bring it back."""
        if not self.is_here:
            self._fetched = self._pool.store.back(self._slot, self._like)

    def release(self) -> None:
        """Let what has been fetched go again; its copy stays."""
        self._fetched = None

    def get(self) -> Tensor:
        """The tensor. Raises `RuntimeError` if it was changed since, as autograd does."""
        if self._source is not None and version_of(self._source) != self._version:
            self._changed = True
        if self._changed:
            raise RuntimeError(
                "a tensor that backward needs was changed in place while it was spilled: compute the change "
                "out of place, or set memory.budget to keep it"
            )
        if self._source is not None:
            # A copy under way would hold it for as long as it likes once nobody else does.
            if self._copy is not None and not self._copy.cancel():
                self._copy.wait()
            self._copy = None
            return self._source
        self.fetch()
        assert self._fetched is not None
        found, copy = self._fetched
        copy.wait()
        return found

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # it was not made whole
            copy = self._copy if self._fetched is None else self._fetched[1]
            tensors = self._source, self._fetched
            self._pool.drop(_Dropped(self._slot, self.size_bytes, copy, tensors))


class _Dropped(NamedTuple):
    """What is left of a tensor that nobody needs."""

    slot: int
    size_bytes: int
    copy: Copy | None
    tensors: Any
    """which live until the copy has ended"""


class Pool:
    """The tensors of a net that are in slower memory.

    Args:
        store: where.
        window_bytes: how much may be on its way out, and as much on its way back. Copies of what is larger
            are waited for.
    """

    def __init__(self, store: Store, window_bytes: int = 0) -> None:
        self.store, self.window_bytes = store, window_bytes
        self._leaving: deque[weakref.ref[Spilled]] = deque()
        self._dropped: deque[_Dropped] = deque()
        """what nobody needs any more, with a copy that may be under way"""

    def put(self, flat: Tensor) -> Spilled:
        """Begin to copy a tensor (n,) out, and wait while too much of earlier ones is still here."""
        self._reap()
        while self._leaving and self._under_way_bytes() + flat.nbytes > self.window_bytes:
            _settle(self._leaving.popleft())
        slot = self.store.take(flat.nbytes)
        made = Spilled(self, flat, slot, self.store.out(flat, slot))
        if flat.nbytes > self.window_bytes:
            made.settle()
        else:
            self._leaving.append(weakref.ref(made))
        return made

    def ahead(self, following: Iterable[Spilled]) -> None:
        """Fetch what will be needed next, as far as the window reaches."""
        self._reap()
        room = self.window_bytes - sum(one.size_bytes for one in self._dropped)
        for item in following:
            room -= item.size_bytes
            if room < 0:
                return
            item.fetch()

    def drop(self, dropped: _Dropped) -> None:
        """Let go what is not needed any more, now or once its copy has ended; from any thread."""
        copy = dropped.copy
        if copy is None or copy.done() or copy.cancel():
            self.store.give(dropped.slot, dropped.size_bytes)
        else:
            self._dropped.append(dropped)

    def _under_way_bytes(self) -> int:
        leaving = (item for one in self._leaving if (item := one()) is not None)
        return sum(one.size_bytes for one in (*leaving, *self._dropped))

    def _reap(self) -> None:
        """Let go what has arrived, or is not needed any more."""
        while self._leaving and ((item := self._leaving[0]()) is None or item.is_out):
            _settle(self._leaving.popleft())
        for _ in range(len(self._dropped)):
            self.drop(self._dropped.popleft())

    def settle(self) -> None:
        """Wait for all copies, and let go what is not needed any more."""
        while self._leaving:
            _settle(self._leaving.popleft())
        while self._dropped:
            dropped = self._dropped.popleft()
            if dropped.copy is not None:
                dropped.copy.wait()
            self.store.give(dropped.slot, dropped.size_bytes)

    def close(self) -> None:
        """Let the slower memory go."""
        self._leaving.clear()
        self.store.close()


def _settle(item: weakref.ref[Spilled]) -> None:
    if (found := item()) is not None:
        found.settle()


class _Queue:
    """Copies that are made one after the other."""

    begun = ended = 0


class _Latest:
    """A copy that ends as late as any real one: when it, or a later one, is waited for."""

    def __init__(self, queue: _Queue) -> None:
        queue.begun += 1
        self._queue, self._number = queue, queue.begun

    def done(self) -> bool:
        return self._number <= self._queue.ended

    def wait(self) -> None:
        self._queue.ended = max(self._queue.ended, self._number)

    def cancel(self) -> bool:
        """The first has begun."""
        return self._number > self._queue.ended + 1


class WeightlessStore:
    """For tensors that have a shape and no memory: copies take as long as they can."""

    def __init__(self, edge_bytes: int = 0) -> None:
        self.rates, self.edge_bytes, self.room_bytes = Rates(), edge_bytes, 0
        self._queue = _Queue()

    def take(self, size_bytes: int) -> int:  # noqa: ARG002
        """See `Store`."""
        return 0

    def give(self, slot: int, size_bytes: int) -> None:
        """See `Store`."""

    def out(self, flat: Tensor, slot: int) -> Copy:  # noqa: ARG002
        """See `Store`."""
        return _Latest(self._queue)

    def back(self, slot: int, like: Like) -> tuple[Tensor, Copy]:  # noqa: ARG002
        """See `Store`."""
        edge = -(-self.edge_bytes // like.dtype.itemsize)
        made = like._replace(elements=like.elements + edge).made()
        return made[: like.elements], _Latest(_Queue())

    def close(self) -> None:
        """See `Store`."""


def flat_of(tensor: Tensor) -> Tensor:
    """All of the memory that a tensor is a view of, (n,); it shares the count of versions."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)


def spillable(tensor: Tensor, least_bytes: int) -> bool:
    """Whether it is a plain tensor of some size."""
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return plain and not tensor.is_quantized and tensor.untyped_storage().nbytes() >= least_bytes
