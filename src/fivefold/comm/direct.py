"""Collectives of ranks that share a device: they read each other's memory there, see `Windows`.

Sums have the bits that the C core gives: those of a tree over the ranks, or of one rank after the other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.device_memory import DeviceMemory, NoDeviceMemory
from fivefold.comm.events import event
from fivefold.comm.group_log import KIND_NUMBERS
from fivefold.comm.operations import Operations, Request, reducible
from fivefold.comm.windows import HALF_BYTES, Asked, Windows
from fivefold.comm.works import Finished
from fivefold.trace.current import current

__all__ = ["Direct", "direct"]

_SMALL_BYTES = 64 << 10
"""up to here every rank adds up all of it, which spares a meeting"""
_SUM, _MEAN = 0, 1
_ACTS: dict[int, Callable[[Tensor, Tensor], Tensor]] = {
    _SUM: torch.add, _MEAN: torch.add, 2: torch.mul, 3: torch.minimum, 4: torch.maximum,
    5: torch.bitwise_and, 6: torch.bitwise_or, 7: torch.bitwise_xor,
}  # fmt: skip
"""by torch's numbers of reductions"""
_BITWISE = (5, 6, 7)
_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_FLOATS = (torch.float64, torch.float32, *_WIDE)
_ADDED = (*_FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_log = logging.getLogger(__name__)


def direct(operations: Operations, memory: DeviceMemory) -> Direct | None:
    """The same by memory of the device that all ranks share; None where they cannot. Collective.

    Rank 0 says why not, in one line.
    """
    try:
        return Direct(operations, memory)
    except NoDeviceMemory as problem:
        if operations.group.rank == 0:
            _log.warning("ranks that share a GPU talk through memory of the host: %s", problem)
        return None


class Direct(Operations):
    """What can be asked of a group, of tensors on a device that its ranks share. Made by all of them.

    Operations that are not here, and dtypes that torch does not add up, pass through memory of the host.
    Works have ended when they are given: the device has been told all of it.
    """

    def __init__(self, operations: Operations, memory: DeviceMemory) -> None:
        super().__init__(operations.group, operations.timeout_s)
        self.windows = Windows(memory, self.group.rank, self.group.size, self._gather_on_hosts)

    def all_reduce(self, tensor: Tensor, reduction: int, *, later: bool) -> dist.Work:
        """See `Operations.all_reduce`."""
        if not self._adds(tensor, reduction):
            return super().all_reduce(tensor, reduction, later=later)
        with self._recorded("all_reduce", tensor), _flat(reducible(tensor, reduction)) as flat:
            asked = _asked("all_reduce", flat, reduction=reduction)
            every = self.windows.placed(flat, asked)
            if every is not None:
                self._sum_where_it_lies(every, asked)
            else:
                self._sum_through_windows(flat, asked)
        return Finished([tensor])

    def broadcast(self, tensor: Tensor, root: int, *, later: bool) -> dist.Work:
        """See `Operations.broadcast`."""
        if not self._takes(tensor):
            return super().broadcast(tensor, root, later=later)
        gives = root == self.group.rank
        with self._recorded("broadcast", tensor, root), _flat(tensor) as flat:
            whole = flat.view(torch.uint8)
            asked = _asked("broadcast", whole, root=root)
            for piece in whole.split(HALF_BYTES):
                shown = self.windows.show(piece if gives else piece[:0], asked, piece.numel())
                if not gives:
                    piece.copy_(shown[root])
        return Finished([tensor])

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, later: bool) -> dist.Work:
        """See `Operations.all_gather`."""
        if not self._takes(tensor):
            return super().all_gather(outputs, tensor, later=later)
        self._one_per_rank(outputs, tensor, "all_gather")
        with self._recorded("all_gather", tensor):
            self._gather(outputs, tensor, _asked("all_gather", tensor))
        return Finished(outputs)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *, later: bool) -> dist.Work:
        """See `Operations.all_gather_single`."""
        if not self._takes(tensor):
            return super().all_gather_single(output, tensor, later=later)
        self._fits(output, tensor, "all_gather")
        with self._recorded("all_gather", tensor), _flat(output) as flat:
            parts = flat.view(self.group.size, tensor.numel()).unbind()
            self._gather(parts, tensor, _asked("all_gather", tensor))
        return Finished([output])

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, *, later: bool
    ) -> dist.Work:
        """See `Operations.gather`."""
        if not self._takes(tensor):
            return super().gather(outputs, tensor, root, later=later)
        here = root == self.group.rank
        if here:
            self._one_per_rank(outputs, tensor, "gather")
        with self._recorded("gather", tensor, root):
            self._gather(outputs if here else [], tensor, _asked("gather", tensor, root=root))
        return Finished(outputs if here else [tensor])

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: int, *, later: bool
    ) -> dist.Work:
        """See `Operations.reduce_scatter`."""
        self._one_per_rank(inputs, output, "reduce_scatter")
        whole = torch.cat([part.detach().reshape(-1) for part in inputs])
        return self.reduce_scatter_single(output, whole, reduction, later=later)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, reduction: int, *, later: bool
    ) -> dist.Work:
        """See `Operations.reduce_scatter_single`."""
        if not self._adds(tensor, reduction):
            return super().reduce_scatter_single(output, tensor, reduction, later=later)
        self._fits(tensor, output, "reduce_scatter")
        size, rank = self.group.size, self.group.rank
        with self._recorded("reduce_scatter", tensor), _flat(reducible(output, reduction)) as flat:
            given = reducible(_whole(tensor), reduction).view(size, flat.numel())
            asked = _asked("reduce_scatter", flat, reduction=reduction)
            most = HALF_BYTES // (size * flat.itemsize)
            for piece, gives in zip(flat.split(most), given.split(most, 1), strict=True):
                shown = self.windows.show(gives.reshape(-1), asked, gives.numel())
                own = slice(rank * piece.numel(), (rank + 1) * piece.numel())
                piece.copy_(self._sum([one[own] for one in shown], reduction))
        return Finished([output])

    def close(self) -> None:
        """End what is under way. The group is that of other operations, which leave it."""
        if not self.group.closed:
            self.end_works()

    # --- how ------------------------------------------------------------------------------------

    def _takes(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.windows.memory.kind

    def _adds(self, tensor: Tensor, reduction: int) -> bool:
        if tensor.is_complex():
            suits = reduction in (_SUM, _MEAN)
        elif tensor.dtype in _FLOATS:
            suits = reduction in _ACTS and reduction not in _BITWISE
        else:
            suits = tensor.dtype in _ADDED and reduction in _ACTS and reduction != _MEAN
        return suits and self._takes(tensor)

    def _gather(self, outputs: Sequence[Tensor], tensor: Tensor, asked: Asked) -> None:
        """Each rank's tensor into the outputs, which may be none."""
        begin = 0
        for piece in _whole(tensor).view(-1).view(torch.uint8).split(HALF_BYTES):
            shown = self.windows.show(piece, asked, piece.numel())
            for output, one in zip(outputs, shown, strict=bool(outputs)):
                with _flat(output) as flat:
                    flat.view(torch.uint8)[begin : begin + piece.numel()].copy_(one)
            begin += piece.numel()

    def _sum_through_windows(self, flat: Tensor, asked: Asked) -> None:
        small = flat.nbytes <= _SMALL_BYTES
        for piece in flat.split(HALF_BYTES // flat.itemsize):
            shown = self.windows.show(piece, asked, piece.numel())
            if small:
                piece.copy_(self._sum(shown, asked.reduction))
                continue
            slices = _slices(piece.numel(), self.group.size)
            own = slices[self.group.rank]
            added = self._sum([one[own] for one in shown], asked.reduction)
            shown = self.windows.show(added, asked, slices[0].stop)
            for part, one in zip(slices, shown, strict=True):
                piece[part].copy_(one[: part.stop - part.start])

    def _sum_where_it_lies(self, every: Sequence[Tensor], asked: Asked) -> None:
        """Each rank adds up its slice of tensors that all ranks see, and writes the sum to all of them."""
        own = _slices(asked.elements, self.group.size)[self.group.rank]
        added = self._sum([one[own] for one in every], asked.reduction)
        for one in every:
            one[own].copy_(added)
        self.windows.meet(asked)

    def _sum(self, parts: Sequence[Tensor], reduction: int) -> Tensor:
        """A new tensor; 16-bit floats are added in float32."""
        dtype, act = parts[0].dtype, _ACTS[reduction]
        wide = [part.to(_WIDE.get(dtype, dtype)) for part in parts]
        if self.group.in_order and reduction in (_SUM, _MEAN):
            total = wide[0]
            for number, part in enumerate(wide[1:], 2):
                total = act(total, part)
                if number < len(wide):  # the last one is rounded below
                    total = total.to(dtype).to(total.dtype)
        else:
            total = _tree(wide, act)
        if reduction == _MEAN:
            total = total / len(parts)
        return total.to(dtype, copy=len(parts) == 1)

    def _gather_on_hosts(self, own: Tensor, every: Tensor) -> None:
        call, _ = Request("all_gather", own, own, every).call()
        call.timeout_s = self.timeout_s
        self.group.run(call)

    @contextmanager
    def _recorded(self, kind: str, tensor: Tensor, peer: int = -1) -> Generator[None]:
        trace = current.trace
        with event(kind, tensor.nbytes, self.group.tag), torch.no_grad():
            if trace is None:
                self.log.skip()
                yield
            else:
                issued = self.log.issue(
                    trace, KIND_NUMBERS[kind], tensor.nbytes, tensor.dtype, peer
                )
                yield
                trace.ended(issued)


def _asked(kind: str, flat: Tensor, *, reduction: int = -1, root: int = -1) -> Asked:
    dtype = _ADDED.index(flat.dtype) if flat.dtype in _ADDED else -1
    return Asked(KIND_NUMBERS[kind], dtype, reduction, root, flat.numel())


def _tree(leaves: Sequence[Tensor], act: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sum of the largest power of two of them, or of half of them, and the sum of the others."""
    if len(leaves) == 1:
        return leaves[0]
    middle = 1 << (len(leaves) - 1).bit_length() - 1
    return act(_tree(leaves[:middle], act), _tree(leaves[middle:], act))


@contextmanager
def _flat(tensor: Tensor) -> Generator[Tensor]:
    """It in one dim and in one piece: if that is a copy, it is copied back."""
    whole = _whole(tensor)
    yield whole.view(-1)
    if whole is not tensor:
        tensor.copy_(whole)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


def _slices(count: int, parts: int) -> list[slice]:
    each = -(-count // parts)
    return [slice(min(n * each, count), min((n + 1) * each, count)) for n in range(parts)]
