"""Memory of all ranks of a device that each of them reads and writes, and how they meet there.

    each rank   copies what it gives into its window, sets a mark behind that, and meets the others' hosts
    all ranks   let the device wait for the marks of all, and read all windows

The hosts meet before anybody waits for a mark, since nobody else knows that it is set. A window has two
halves that take turns: a rank that writes to one again has met the others in between, and they had told
their devices to read it before that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fivefold.comm.device_memory import HANDLE_BYTES, DeviceMemory, NoDeviceMemory
from fivefold.torch_private import StorageWeakRef

__all__ = ["HALF_BYTES", "Asked", "Windows"]

HALF_BYTES = 16 << 20
_OFFSET_BITS = 48


class Asked(NamedTuple):
    """What ranks tell each other when they meet; but for the place it has to be the same."""

    kind: int
    dtype: int
    reduction: int
    root: int
    elements: int
    place: int = -1
    """where the tensor lies in what `Windows.zeros` gave; -1: elsewhere"""


@dataclass
class _Placed:
    every: list[Tensor]
    """by rank, of uint8"""
    used: StorageWeakRef
    """by this rank"""


class Windows:
    """Those of a group's ranks.

    Args:
        gather: fills a tensor (ranks, n) of the host with what each rank gives (n,), once all are there.
    """

    def __init__(
        self, memory: DeviceMemory, rank: int, size: int, gather: Callable[[Tensor, Tensor], None]
    ) -> None:
        self.memory, self.rank, self.size = memory, rank, size
        self._gather = gather
        self._turn = 0
        self._placed: list[_Placed] = []
        self._every = self._opened(2 * HALF_BYTES, self._know_marks())

    def meet(self, asked: Asked) -> list[Asked]:
        """Wait until all ranks are here, and let the device wait for what theirs were told.

        Gives what each asked for. Raises `RuntimeError` if that differs.
        """
        number = self._turn % 2
        self._turn += 1
        self.memory.mark(number)
        own = torch.tensor(asked, device="cpu")
        every = own.new_empty(self.size, own.numel())
        self._gather(own, every)
        self.memory.wait(number)
        told = [Asked(*row) for row in every.tolist()]
        for rank, other in enumerate(told):
            if other[:-1] != asked[:-1]:
                raise RuntimeError(
                    f"rank {self.rank} asked for {asked}, rank {rank} for {other}: all ranks of a group have "
                    "to ask for the same"
                )
        return told

    def show(self, mine: Tensor, asked: Asked, count: int) -> list[Tensor]:
        """What each rank shows: the first `count` elements, of the dtype of `mine`, which is contiguous.

        They stay as they are until this is called the next time but one. Collective.
        """
        begin = self._turn % 2 * HALF_BYTES
        if mine.numel():
            window = self._every[self.rank]
            window[begin : begin + mine.nbytes].view(mine.dtype).copy_(mine)
        self.meet(asked)
        end = begin + count * mine.itemsize
        return [window[begin:end].view(mine.dtype) for window in self._every]

    def zeros(self, count: int, dtype: torch.dtype) -> Tensor:
        """Zeros (count,) in memory that all ranks see. Collective: all ask for as many.

        What nobody uses any more is given again. Raises `NoDeviceMemory`, on all ranks.
        """
        size_bytes = max(1, count) * dtype.itemsize
        free = [
            placed.used.expired() and placed.every[0].nbytes >= size_bytes
            for placed in self._placed
        ]
        free_of = self._tell(bytes(free[:HANDLE_BYTES]))
        both = [n for n, ranks in enumerate(zip(*free_of, strict=True)) if all(ranks)]
        if both:
            placed = self._placed[min(both, key=lambda n: self._placed[n].every[0].nbytes)]
        else:
            every = self._opened(size_bytes, "")
            placed = _Placed(every, StorageWeakRef(every[self.rank].untyped_storage()))
            self._placed.append(placed)
        own = self.memory.again(placed.every[self.rank])
        placed.used = StorageWeakRef(own.untyped_storage())
        return own[: count * dtype.itemsize].view(dtype).zero_()

    def placed(self, flat: Tensor, asked: Asked) -> list[Tensor] | None:
        """The tensors of all ranks, if all lie at one place in what `zeros` gave; else None. Collective."""
        if not self._placed:
            return None
        own = self._place_of(flat)
        if any(other.place != own or own < 0 for other in self.meet(asked._replace(place=own))):
            return None
        number, offset = own >> _OFFSET_BITS, own & (1 << _OFFSET_BITS) - 1
        every = self._placed[number].every
        return [piece[offset : offset + flat.nbytes].view(flat.dtype) for piece in every]

    def _place_of(self, flat: Tensor) -> int:
        for number, placed in enumerate(self._placed):
            piece = placed.every[self.rank]
            offset = flat.data_ptr() - piece.data_ptr()
            if 0 <= offset <= piece.nbytes - flat.nbytes:
                return number << _OFFSET_BITS | offset
        return -1

    def _know_marks(self) -> str:
        """Why the marks of others are not known here, or nothing."""
        if len({*self._tell(self.memory.name.encode()[:HANDLE_BYTES])}) > 1:
            return "not all of them share one"
        why, marks = "", b""
        try:
            marks = self.memory.marks()
        except NoDeviceMemory as problem:
            why = str(problem)
        told = self._tell(marks)
        try:
            if all(told):
                others = [marks for rank, marks in enumerate(told) if rank != self.rank]
                self.memory.open_marks(others)
        except NoDeviceMemory as problem:
            why = str(problem)
        return why

    def _opened(self, size_bytes: int, why_not: str) -> list[Tensor]:
        """New memory of all ranks, by rank. Raises `NoDeviceMemory` on all of them."""
        own, handle, every = torch.empty(0, device="cpu"), b"", list[Tensor]()
        try:
            if not why_not:
                own, handle = self.memory.allocate(size_bytes)
        except NoDeviceMemory as problem:
            why_not = str(problem)
        handles = self._tell(handle)
        try:
            if all(handles):
                every = [
                    own if rank == self.rank else self.memory.open(told, size_bytes)
                    for rank, told in enumerate(handles)
                ]
        except NoDeviceMemory as problem:
            why_not = str(problem)
        without = [
            rank for rank, there in enumerate(self._tell(b"1" if every else b"")) if not there
        ]
        if without:
            raise NoDeviceMemory(why_not or f"rank {without[0]} has none that others see")
        return every

    def _tell(self, told: bytes) -> list[bytes]:
        """What all ranks tell, up to `HANDLE_BYTES`."""
        numbers = [len(told), *told.ljust(HANDLE_BYTES, b"\0")]
        own = torch.tensor(numbers, dtype=torch.uint8, device="cpu")
        every = own.new_empty(self.size, own.numel())
        self._gather(own, every)
        return [bytes(row[1 : 1 + row[0]]) for row in every.tolist()]
