"""What turns hold between their visits, of which the oldest goes to slower memory when it is too much.

    keep, put   what a turn has made stays here, as long as there is room
    take        what it reads is here
    drop        nobody needs it any more

Tensors stay the same ones, with their place in autograd's graph: it is their memory that comes and goes. On
CPUs that of values is mapped for each of them, so that the system has it again at once: the C library would
keep it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fivefold.mesh.heap import give_back, resident_bytes, return_blocks
from fivefold.mesh.unread import Unread
from fivefold.parallel.memory.spill import Pool, Spilled, flat_of, spillable
from fivefold.torch_private import memory_of

__all__ = ["Shelf"]

_LEAST_BYTES = 1 << 16
"""less is kept: a copy would take longer to begin than to make"""


class _Reading:
    """In place of a copy of what can be read again."""

    is_out = True

    def __init__(self, tensor: Unread) -> None:
        self._tensor = tensor

    def get(self) -> Tensor:
        """All of it, (n,)."""
        return self._tensor.fresh().reshape(-1)

    def release(self) -> None:
        """It will be read again."""

    def settle(self) -> None:
        """There is nothing to wait for."""


@dataclass(eq=False)
class _Item:
    """One memory."""

    flat: Tensor
    """all of it, (n,)"""
    size_bytes: int
    region: mmap.mmap | None = None
    """that it is mapped in; else it is torch's own"""
    users: int = 0
    copy: Spilled | _Reading | None = None
    here: bool = True

    def let_go(self) -> None:
        """Its memory, not what is in it elsewhere."""
        if self.region is not None:
            self.region.madvise(mmap.MADV_DONTNEED)
        else:
            self.flat.untyped_storage().resize_(0)

    def make_room(self) -> None:
        """Before it is filled again."""
        if self.region is None:
            self.flat.untyped_storage().resize_(self.size_bytes)


class Shelf:
    """Of one step.

    Args:
        limit_bytes: the most that is kept between visits; None: all of it.
        pool: where the rest goes; needed with a limit.
        mine: tensors that stay, whoever puts them here: parameters, inputs.
        growth_bytes: by how much a step may let the process grow before the C library gives back what it
            keeps: between values that stay, it keeps a multiple of them.
    """

    def __init__(
        self,
        limit_bytes: int | None = None,
        pool: Pool | None = None,
        mine: Iterable[Tensor] = (),
        growth_bytes: int = 0,
    ) -> None:
        self._limit, self._pool = limit_bytes, pool
        self._mine = {memory_of(tensor) for tensor in mine if not isinstance(tensor, Unread)}
        self._items: dict[int, _Item] = {}
        """by memory, the oldest first"""
        self._leaving: list[_Item] = []
        """of which a copy is being made"""
        self._here_bytes = 0
        self._resident_bytes = 0
        """the most that the process may take before it gives back what it does not use; 0: any"""
        if growth_bytes:
            return_blocks()
            give_back()
            self._resident_bytes = resident_bytes() + growth_bytes

    def keep(self, tensor: Tensor) -> Tensor:
        """The same numbers without a graph, put here; in memory of their own if they may be put away."""
        if isinstance(tensor, Unread):
            if self._limit is not None and tensor.device.type == "cpu" and tensor.numel():
                return self._unread(tensor)
            tensor = tensor.fresh()
        plain = tensor.device.type != "cpu" or not spillable(tensor, _LEAST_BYTES)
        if self._limit is None or plain or memory_of(tensor) in self._mine:
            made = tensor.detach()
            self.put([made])
            return made
        like = torch.empty_like(tensor, device="meta")  # of its memory order, without gaps
        made, _ = self._mapped(like)
        made.copy_(tensor.detach())
        self._here_bytes += tensor.nbytes
        return made

    def _mapped(self, like: Tensor) -> tuple[Tensor, _Item]:
        """Memory for a tensor of that shape, which takes none before it is filled."""
        # Private: pages that are shared would stay with the system when the mapping lets them go.
        region = mmap.mmap(-1, like.nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        flat = torch.frombuffer(region, dtype=like.dtype)
        made = flat.as_strided(like.shape, like.stride())
        item = self._items[memory_of(made)] = _Item(flat, like.nbytes, region, users=1)
        return made, item

    def _unread(self, tensor: Unread) -> Tensor:
        """In memory of its own, into which it is read when it is taken."""
        made, item = self._mapped(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        item.copy, item.here = _Reading(tensor), False
        return made

    def stays(self, tensor: Tensor) -> None:
        """From now on the memory of a tensor is never put away."""
        self._mine.add(memory_of(tensor))

    def put(self, tensors: Iterable[Tensor]) -> None:
        """Keep tensors that have been made, or changed, until they are dropped as often as they were put."""
        if self._limit is None:
            return
        for tensor in tensors:
            if memory_of(tensor) in self._mine or not spillable(tensor, _LEAST_BYTES):
                continue
            item = self._items.get(memory_of(tensor))
            if item is None:
                flat = flat_of(tensor)
                item = self._items[memory_of(tensor)] = _Item(flat, flat.nbytes)
                self._here_bytes += item.size_bytes
            item.users += 1

    def changed(self, tensors: Iterable[Tensor]) -> None:
        """Forget copies of tensors that are here, and other ones than before."""
        for item in self._found(tensors):
            item.copy = None
            if item in self._leaving:
                self._leaving.remove(item)

    def take(self, tensors: Iterable[Tensor]) -> None:
        """Have tensors here, until `put_away`."""
        needed = self._found(tensors)
        for item in needed:
            if not item.here:
                self._bring_back(item)
        self._trim({id(item) for item in needed})

    def drop(self, tensors: Iterable[Tensor]) -> None:
        """Let go of tensors that have been put here."""
        for tensor in tensors if self._limit is not None else ():
            item = self._items.get(memory_of(tensor))
            if item is None:
                continue
            item.users -= 1
            if not item.users:
                del self._items[memory_of(tensor)]
                self._here_bytes -= item.size_bytes if item.here else 0
                item.copy = None

    def put_away(self) -> None:
        """A turn stops: nothing has to be here."""
        self._trim(set())
        if 0 < self._resident_bytes < resident_bytes():
            give_back()

    def ahead(self, tensors: Iterable[Tensor]) -> None:
        """Begin to bring back what will be taken next."""
        if self._pool is not None:
            copies = (item.copy for item in self._found(tensors) if not item.here)
            self._pool.ahead(copy for copy in copies if isinstance(copy, Spilled))

    def _found(self, tensors: Iterable[Tensor]) -> list[_Item]:
        if self._limit is None:
            return []
        found = (self._items.get(memory_of(tensor)) for tensor in tensors)
        return [item for item in found if item is not None]

    def _trim(self, needed: set[int]) -> None:
        """Put away the oldest until the rest fits, but for what is needed."""
        if self._limit is None:
            return
        for item in self._items.values():
            if self._here_bytes <= self._limit:
                break
            if item.here and id(item) not in needed:
                self.put_away_item(item)
        for item in [one for one in self._leaving if one.copy is None or one.copy.is_out]:
            self._leave(item)

    def put_away_item(self, item: _Item) -> None:
        """Make a copy of a memory, unless there is one, and let it go then."""
        assert self._pool is not None
        item.here = False
        self._here_bytes -= item.size_bytes
        if item.copy is not None and item not in self._leaving:
            item.let_go()
            return
        if item.copy is None:
            item.copy = self._pool.put(item.flat)
            self._leaving.append(item)

    def _leave(self, item: _Item) -> None:
        """There is a copy of it now; it may be wanted again, or needed no more."""
        self._leaving.remove(item)
        if item.copy is not None:
            item.copy.settle()
            if not item.here:
                item.let_go()

    def _bring_back(self, item: _Item) -> None:
        assert item.copy is not None
        item.here = True
        self._here_bytes += item.size_bytes
        if item in self._leaving:
            return  # it has not left yet
        found = item.copy.get()
        item.make_room()
        # Another tensor of the same memory, whose count of changes is its own: autograd compares that of what
        # it has saved.
        there = torch.empty(0, dtype=item.flat.dtype, device=item.flat.device)
        there.set_(item.flat.untyped_storage(), 0, item.flat.shape, (1,)).copy_(found)
        item.copy.release()
