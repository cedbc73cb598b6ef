"""What autograd saves in one run of a program, and what of it is spilled.

with saving.hooks():
    saving.at(4)              node 4 is computed: what is saved now, and is no value, is its own
    saving.made(7, tensor)    it made value 7

Each memory is spilled once, whoever saves it, and as whichever view.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fivefold.parallel.memory.choice import Key
from fivefold.parallel.memory.spill import Pool, Spilled, flat_of, spillable
from fivefold.torch_private import StorageWeakRef, memory_of, version_of

__all__ = ["LEAST_BYTES", "Saving", "View", "Watch"]

LEAST_BYTES = 1 << 16
"""less is kept: a copy would take longer to begin than to make"""


class Watch:
    """Is told what happens in a run, as it happens. Nodes are those of the program's tape, by number."""

    def computes(self, node: int) -> None:
        """A node is about to be computed."""

    def makes(self, index: int, key: Key) -> None:
        """A value has been made, in the memory `key`."""

    def holds(self, key: Key, storage: int, size_bytes: int, node: int) -> None:
        """Autograd saves what is in a memory, for the backward of a node."""

    def lets_go(self, key: Key, storage: int, size_bytes: int) -> None:
        """What was saved is not needed any more."""

    def needs(self, node: int) -> None:
        """The backward of a node asks for what it saved."""

    def paused(self) -> AbstractContextManager[None]:
        """Within the block the run may wait for copies."""
        return nullcontext()


class Watched:
    """A tensor that autograd saves, of which somebody wants to know."""

    def __init__(self, tensor: Tensor, watch: Watch, key: Key, node: int) -> None:
        self.tensor, self.node, self._watch = tensor, node, watch
        self._told = key, memory_of(tensor), tensor.untyped_storage().nbytes()
        watch.holds(*self._told, node)

    def __del__(self) -> None:
        self._watch.lets_go(*self._told)


@dataclass(frozen=True)
class View:
    """What a saved tensor was of a spilled memory."""

    item: Spilled
    node: int
    """which saved it"""
    number: int
    """how many the run had spilled before"""
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Memory:
    """A memory that is alive, by its storage."""

    storage: StorageWeakRef
    key: Key
    item: weakref.ref[Spilled] | None = None
    version: int = 0
    number: int = 0


class Saving:
    """One run.

    Args:
        pool: where what is spilled goes.
        spilled: keys that are.
        mine: tensors that are here anyway: parameters, buffers, inputs.
        watch: is told what happens.
    """

    def __init__(
        self,
        pool: Pool | None,
        spilled: frozenset[Key],
        mine: Iterable[Tensor],
        watch: Watch | None = None,
    ) -> None:
        self._pool, self._spilled, self._watch = pool, spilled, watch
        self._known: dict[int, _Memory] = {}
        self._mine = {memory_of(tensor) for tensor in mine}
        self._node, self._within = 0, 0
        self._order: list[weakref.ref[Spilled]] = []
        """what was spilled; backward needs the last one first"""

    def hooks(self) -> saved_tensors_hooks:
        """Within the block autograd saves so."""
        return saved_tensors_hooks(self.pack, self.unpack)

    def at(self, node: int) -> None:
        """A node is about to be computed."""
        self._node, self._within = node, 0
        if self._watch is not None:
            self._watch.computes(node)

    def made(self, index: int, tensor: Tensor) -> None:
        """A value has been made; a view of another has that one's memory."""
        if tensor.layout is not torch.strided:
            return
        memory = self._find(tensor) or self._learn(tensor, ("value", index, 0))
        if self._watch is not None:
            self._watch.makes(index, memory.key)

    def spills(self, tensor: Tensor) -> bool:
        """Whether a tensor's memory is going to be spilled."""
        found = self._find(tensor)
        return found is not None and found.key in self._spilled

    def _find(self, tensor: Tensor) -> _Memory | None:
        found = self._known.get(memory_of(tensor))
        return None if found is None or found.storage.expired() else found

    def _learn(self, tensor: Tensor, key: Key) -> _Memory:
        # A weak reference keeps the number of a storage from being used again.
        found = _Memory(StorageWeakRef(tensor.untyped_storage()), key)
        self._known[memory_of(tensor)] = found
        return found

    def pack(self, tensor: Tensor) -> Any:
        """What is held in place of a tensor that autograd saves."""
        if not spillable(tensor, LEAST_BYTES) or memory_of(tensor) in self._mine:
            return tensor
        memory = self._find(tensor)
        if memory is None:
            memory = self._learn(tensor, ("within", self._node, self._within))
            self._within += 1
        if memory.key not in self._spilled:
            watch = self._watch
            return tensor if watch is None else Watched(tensor, watch, memory.key, self._node)
        assert self._pool is not None
        version = version_of(tensor)
        item = None if memory.item is None else memory.item()
        if item is None or memory.version != version or not item.fits(tensor):
            with self._paused():
                item = self._pool.put(flat_of(tensor))
            memory.item, memory.version, memory.number = (
                weakref.ref(item),
                version,
                len(self._order),
            )
            self._order.append(memory.item)
        first = int(tensor.storage_offset())
        return View(item, self._node, memory.number, tensor.shape, tensor.stride(), first)

    def _paused(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watch is None else self._watch.paused()

    def unpack(self, packed: Any) -> Tensor:
        """What was held in place of a tensor -> the tensor; what is needed next is fetched meanwhile."""
        if isinstance(packed, View | Watched) and self._watch is not None:
            self._watch.needs(packed.node)
        if isinstance(packed, Watched):
            return packed.tensor
        if not isinstance(packed, View):
            return packed
        assert self._pool is not None
        with self._paused():
            found = packed.item.get()
            before = (self._order[number]() for number in reversed(range(packed.number)))
            self._pool.ahead(item for item in before if item is not None)
        first = int(found.storage_offset())
        return found.as_strided(packed.shape, packed.stride, first + packed.offset)
