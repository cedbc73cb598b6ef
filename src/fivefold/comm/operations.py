"""Collectives and messages of CPU tensors between ranks that share memory.

Every method starts an operation and gives a work: it has ended unless `later` says that it may go on while
the caller computes. Tensors need not be contiguous; results are then copied into them at the end.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.arena.native import DTYPES, KINDS, Call, CallReport, core
from fivefold.comm.core import Core, explain
from fivefold.comm.events import event
from fivefold.comm.group_log import KIND_NUMBERS, GroupLog
from fivefold.comm.tensors import (
    CODES,
    MARKS,
    addresses,
    code_of,
    counts,
    is_reached,
    reads,
    writes,
)
from fivefold.comm.works import Completer, Finished, MessageWork, OpWork
from fivefold.errors import UsageError
from fivefold.trace.current import current
from fivefold.trace.trace import Trace

__all__ = ["Operations", "Request", "reducible"]

_KIND = {name: code for code, name in enumerate(KINDS)}
_ALL_REDUCE, _SEND, _RECEIVE = (KIND_NUMBERS[name] for name in ("all_reduce", "send", "receive"))
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_MANY = 64
_DONE = Finished()
_GRACE_S = 0.1
"""what is under way when a group is destroyed may take so long before it is broken off, on all ranks"""


@dataclass(slots=True)  # made for every collective: freezing takes three times as long
class Request:
    """A collective as one rank asks for it."""

    kind: str
    block: Tensor
    """what one rank contributes or receives"""
    reads: Tensor | list[Tensor] | None
    """what is read: a tensor, or one per rank"""
    writes: Tensor | list[Tensor] | None
    """what is written to, likewise"""
    reduction: int = 0
    root: int = 0
    sizes: tuple[Sequence[int], Sequence[int]] | None = None
    """elements to and from every rank, where they differ"""
    timeout_s: float | None = None
    """None: that of the group"""

    def call(self) -> tuple[Call, list[ctypes.Array[Any]]]:
        """For the core, with what it points to besides tensors."""
        dtype, parts = code_of(self.block)
        reads, writes = self.reads, self.writes
        call = Call(
            _KIND[self.kind], dtype, self.reduction, self.root,
            0 if self.sizes else self.block.numel() * parts,
            0 if reads is None or isinstance(reads, list) else reads.data_ptr(),
            0 if writes is None or isinstance(writes, list) else writes.data_ptr(),
        )  # fmt: skip
        arrays: list[ctypes.Array[Any]] = []
        if isinstance(reads, list):
            arrays.append(addresses(reads))
            call.inputs = ctypes.addressof(arrays[-1])
        if isinstance(writes, list):
            arrays.append(addresses(writes))
            call.outputs = ctypes.addressof(arrays[-1])
        if self.sizes is not None:
            for name, numbers in zip(("input_counts", "output_counts"), self.sizes, strict=True):
                arrays.append(counts([n * parts for n in numbers]))
                setattr(call, name, ctypes.addressof(arrays[-1]))
        return call, arrays


class Operations:
    """What can be asked of a group."""

    def __init__(self, group: Core, timeout_s: float) -> None:
        self.group = group
        self.timeout_s = timeout_s
        """how long an operation may wait for a rank that does not come"""
        self.log = GroupLog(lambda: group.name, lambda: range(group.size), "fivefold")
        """gives operations their numbers, for the trace of the process"""
        self._completer, self._message_completer = Completer(), Completer()
        self._collectives: dict[OpWork, None] = {}
        """under way, the oldest first"""
        self._messages: dict[MessageWork, None] = {}
        """likewise"""
        self._many = _MANY
        self._gone: int = core().ff_gone()
        self._all_reduce_now = core().ff_all_reduce
        self._all_reduce_noted = core().ff_all_reduce_noted
        self._nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._report = CallReport()
        self._report_at = ctypes.byref(self._report)

    def all_reduce(self, tensor: Tensor, reduction: int, *, later: bool) -> dist.Work:
        """Reduce `tensor` over the ranks, in place."""
        if not later and is_reached(tensor):
            code = CODES.get(tensor.dtype)
            if code is not None:
                return self._all_reduce_at_once(tensor, code, reduction)
        real = reducible(tensor, reduction)
        targets, after = writes([real])
        if after is not None:
            targets[0].copy_(real)
        own = targets[0]
        asked = Request("all_reduce", own, own, own, reduction=reduction)
        return self._start(asked, [tensor], after, later=later)

    def reduce(self, tensor: Tensor, reduction: int, root: int, *, later: bool) -> dist.Work:
        """Reduce into the tensor of rank `root`; the others' stay as they are."""
        real = reducible(tensor, reduction)
        targets, after = writes([real] if root == self.group.rank else [])
        source, result = reads(real), targets[0] if targets else None
        asked = Request("reduce", source, source, result, reduction=reduction, root=root)
        return self._start(asked, [tensor], after, later=later)

    def broadcast(self, tensor: Tensor, root: int, *, later: bool) -> dist.Work:
        """Overwrite `tensor` with that of rank `root`."""
        if root == self.group.rank:
            source = reads(tensor)
            asked = Request("broadcast", source, source, None, root=root)
            return self._start(asked, [tensor], later=later)
        targets, after = writes([tensor])
        asked = Request("broadcast", targets[0], None, targets[0], root=root)
        return self._start(asked, [tensor], after, later=later)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, *, later: bool) -> dist.Work:
        """Fill `outputs`, one per rank, with the ranks' tensors."""
        self._one_per_rank(outputs, tensor, "all_gather")
        targets, after = writes(outputs)
        source = reads(tensor)
        asked = Request("all_gather", source, source, targets)
        return self._start(asked, outputs, after, later=later)

    def all_gather_single(self, output: Tensor, tensor: Tensor, *, later: bool) -> dist.Work:
        """Fill `output` with the ranks' tensors, one after the other."""
        self._fits(output, tensor, "all_gather")
        targets, after = writes([output])
        source = reads(tensor)
        asked = Request("all_gather", source, source, targets[0])
        return self._start(asked, [output], after, later=later)

    def gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, root: int, *, later: bool
    ) -> dist.Work:
        """Fill `outputs` of rank `root`, one per rank, with the ranks' tensors."""
        here = root == self.group.rank
        if here:
            self._one_per_rank(outputs, tensor, "gather")
        targets, after = writes(outputs if here else [])
        source = reads(tensor)
        asked = Request("gather", source, source, targets if here else None, root=root)
        return self._start(asked, outputs if here else [tensor], after, later=later)

    def scatter(
        self, tensor: Tensor, inputs: Sequence[Tensor], root: int, *, later: bool
    ) -> dist.Work:
        """Fill `tensor` with this rank's of `inputs`, of which rank `root` has one per rank."""
        here = root == self.group.rank
        if here:
            self._one_per_rank(inputs, tensor, "scatter")
        targets, after = writes([tensor])
        sources = [*map(reads, inputs)] if here else None
        asked = Request("scatter", targets[0], sources, targets[0], root=root)
        return self._start(asked, [tensor], after, later=later)

    def reduce_scatter(
        self, output: Tensor, inputs: Sequence[Tensor], reduction: int, *, later: bool
    ) -> dist.Work:
        """Reduce `inputs`, one per rank, over the ranks; `output` is this rank's."""
        self._one_per_rank(inputs, output, "reduce_scatter")
        targets, after = writes([reducible(output, reduction)])
        sources = [reads(reducible(tensor, reduction)) for tensor in inputs]
        asked = Request("reduce_scatter", targets[0], sources, targets[0], reduction=reduction)
        return self._start(asked, [output], after, later=later)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, reduction: int, *, later: bool
    ) -> dist.Work:
        """Reduce `tensor`, which holds a part per rank, over the ranks; `output` is this rank's part."""
        self._fits(tensor, output, "reduce_scatter")
        targets, after = writes([reducible(output, reduction)])
        source = reads(reducible(tensor, reduction))
        asked = Request("reduce_scatter", targets[0], source, targets[0], reduction=reduction)
        return self._start(asked, [output], after, later=later)

    def all_to_all(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], *, later: bool
    ) -> dist.Work:
        """Send `inputs[q]` to rank q, receive `outputs[q]` from it; sizes may differ."""
        for tensors in (outputs, inputs):
            self._as_many_as_ranks(tensors, "all_to_all")
        targets, after = writes(outputs)
        sources = [*map(reads, inputs)]
        sizes = [t.numel() for t in sources], [t.numel() for t in targets]
        asked = Request("all_to_all_v", sources[0], sources, targets, sizes=sizes)
        return self._start(asked, outputs, after, later=later)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], *,
        later: bool,
    ) -> dist.Work:  # fmt: skip
        """Send part q of `tensor` to rank q, receive part q of `output` from it.

        Parts are so many rows, or equal where no rows are given.
        """
        sizes = self._parts(tensor, input_rows, "input"), self._parts(output, output_rows, "output")
        targets, after = writes([output])
        source = reads(tensor)
        asked = Request("all_to_all_v", source, source, targets[0], sizes=sizes)
        return self._start(asked, [output], after, later=later)

    def barrier(self, *, later: bool, timeout_s: float | None = None) -> dist.Work:
        """Wait for all ranks."""
        asked = Request("barrier", self._nothing, None, None, timeout_s=timeout_s)
        return self._start(asked, [], later=later)

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Send to rank `peer`."""
        source = reads(tensor)
        return self._message(source, peer, tag, None, sends=True)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Receive from rank `peer`, or from anyone (-1). The tensor has the size of what comes."""
        targets, after = writes([tensor])
        return self._message(targets[0], peer, tag, after, sends=False)

    def close(self) -> None:
        """End what is under way, with errors, and leave the group."""
        if not self.group.closed:
            self.end_works()
            self.group.close()

    def end_works(self) -> None:
        """End what is under way, with errors."""
        works = [*self._collectives, *self._messages]
        until = time.monotonic() + _GRACE_S
        while not (done := sum(work.is_completed() for work in works) == len(works)):
            if time.monotonic() > until:
                break
            time.sleep(0.001)
        if not done:
            core().ff_group_break(self.group.pointer)
        for work in works:
            try:
                work.wait()
            except RuntimeError:
                continue
        self._completer.close()
        self._message_completer.close()

    def _all_reduce_at_once(self, tensor: Tensor, dtype: int, reduction: int) -> dist.Work:
        """The shortest way: most of the time of a small sum would else be spent on this side."""
        group, timeout_s, report = self.group, self.timeout_s, self._report_at
        count, data = tensor.numel(), tensor.data_ptr()
        trace = current.trace
        with event("all_reduce", tensor.nbytes, group.tag):
            if trace is None:
                self.log.skip()
                failed = self._all_reduce_now(
                    group.pointer, dtype, reduction, count, data, timeout_s, report
                )
            else:
                note = self.log.reserve(trace, _ALL_REDUCE, tensor.dtype)
                failed = self._all_reduce_noted(
                    group.pointer, dtype, reduction, count, data, timeout_s, report, *note
                )
        if failed:
            call = Call(kind=_KIND["all_reduce"], dtype=dtype, reduction=reduction, count=count)
            raise explain(group, self._report, call)
        return _DONE

    def _start(
        self, asked: Request, results: Sequence[Tensor], after: Callable[[], None] | None = None, *,
        later: bool,
    ) -> dist.Work:  # fmt: skip
        kind, block = asked.kind, asked.block
        call, kept = asked.call()
        call.timeout_s = self.timeout_s if asked.timeout_s is None else asked.timeout_s
        sizes = asked.sizes
        size_bytes = block.nbytes if sizes is None else sum(sizes[0]) * block.element_size()
        if self._collectives:
            self._forget()
        trace, issued = current.trace, 0
        if trace is None:
            self.log.skip()
        else:
            issued = self._noted(trace, call, kind, block, size_bytes, later=later)
        if not later:
            with event(kind, size_bytes, self.group.tag):
                self.group.run(call)
            if after is not None:
                after()
            return Finished(results)
        work = OpWork(self.group, call, size_bytes, completer=self._completer, results=results,
                      kept=(kept, asked), after=after, under_way=self._collectives)  # fmt: skip
        if trace is not None:
            work.recorded(trace, issued)
        return work

    def _forget(self) -> None:
        """Let go of works that have ended, which tells the trace of those that nobody waits for."""
        for work in [*self._collectives]:  # at once: other threads find works ended too
            if not work.is_completed():
                return
            self._collectives.pop(work, None)

    def _noted(
        self, trace: Trace, call: Call, kind: str, block: Tensor, size_bytes: int, *, later: bool
    ) -> int:  # fmt: skip
        """What `Trace.ended` wants; nothing does where the core notes the call, which it does as it runs."""
        dtype = None if kind == "barrier" else block.dtype
        root = int(call.root)
        if kind == "reduce_scatter" or (kind == "scatter" and root == self.group.rank):
            size_bytes *= self.group.size  # of what it gives, a block is for one rank
        number, peer = KIND_NUMBERS[kind], root if kind in _ROOTED else -1
        if later:
            return self.log.issue(trace, number, size_bytes, dtype, peer)
        note = self.log.reserve(trace, number, dtype, peer)
        call.row, call.seq, call.number, call.step, call.what = note
        call.size_bytes = size_bytes
        return 0

    def _message(
        self, tensor: Tensor, peer: int, tag: int, after: Callable[[], None] | None, *, sends: bool
    ) -> dist.Work:
        trace, kind = current.trace, _SEND if sends else _RECEIVE
        issued, group = 0, self.group
        if trace is None:
            self.log.skip_message(kind, peer)
        else:
            issued = self.log.issue(trace, kind, tensor.nbytes, tensor.dtype, peer)
        start = group.library.ff_send if sends else group.library.ff_receive
        with event("start send" if sends else "start receive", tensor.nbytes, group.tag):
            handle = start(group.pointer, peer, tag, MARKS[tensor.dtype], tensor.data_ptr(), tensor.nbytes,
                           self.timeout_s)  # fmt: skip
        if handle == self._gone:
            if trace is not None:
                trace.ended(issued, 0, 0)
            return _DONE
        if len(self._messages) >= self._many:
            for work in [*self._messages]:
                work.is_completed()  # nobody may wait for it
            self._many = max(_MANY, 2 * len(self._messages))
        work = MessageWork(group, handle, tensor, peer=peer, tag=tag, sends=sends, after=after,
                           completer=self._message_completer, under_way=self._messages)  # fmt: skip
        if trace is not None:
            work.recorded(trace, issued)
        return work

    def _parts(self, tensor: Tensor, rows: Sequence[int], which: str) -> list[int]:
        size, dim = self.group.size, tensor.shape[0] if tensor.dim() else 1
        if not rows:
            if dim % size:
                raise UsageError(
                    f"all_to_all: {dim} rows of {which} for {size} ranks: give split sizes"
                )
            return [tensor.numel() // size] * size
        if len(rows) != size or sum(rows) != dim:
            raise UsageError(
                f"all_to_all: {which} split sizes {list(rows)} for {dim} rows and {size} ranks: one per "
                "rank is needed, and they have to sum to the rows"
            )
        row = tensor.numel() // dim if dim else 0
        return [n * row for n in rows]

    def _one_per_rank(self, tensors: Sequence[Tensor], like: Tensor, what: str) -> None:
        self._as_many_as_ranks(tensors, what)
        for tensor in tensors:
            if tensor.numel() != like.numel() or tensor.dtype != like.dtype:
                raise UsageError(
                    f"{what}: tensors of {tensor.numel()} {tensor.dtype} and {like.numel()} {like.dtype}; "
                    "all need one size and dtype"
                )

    def _as_many_as_ranks(self, tensors: Sequence[Tensor], what: str) -> None:
        if len(tensors) != self.group.size:
            raise UsageError(f"{what}: {len(tensors)} tensors for {self.group.size} ranks")

    def _fits(self, whole: Tensor, part: Tensor, what: str) -> None:
        if whole.numel() != part.numel() * self.group.size or whole.dtype != part.dtype:
            raise UsageError(
                f"{what}: {whole.numel()} {whole.dtype} for {self.group.size} ranks with {part.numel()} "
                f"{part.dtype} each"
            )


def reducible(tensor: Tensor, reduction: int) -> Tensor:
    """The tensor, complex numbers as pairs: they can be added. Raises `UsageError` for what cannot."""
    if tensor.is_complex() and reduction <= 1:
        return torch.view_as_real(tensor)
    if tensor.dtype not in CODES:
        raise UsageError(f"{tensor.dtype} cannot be reduced so; dtypes: {', '.join(DTYPES)}")
    return tensor
