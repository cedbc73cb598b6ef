"""Has torch make groups that are traced: those of its own backends; ours tell the trace by themselves."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # noqa: TID251 - groups are put into its books
from torch import Tensor

from fivefold.comm.gpu_times import GpuTimes
from fivefold.comm.group_log import KIND_NUMBERS, GroupLog
from fivefold.comm.traced_works import TracedWork
from fivefold.torch_private import (
    backend_of_device,
    default_group,
    device_types,
    put_in_place,
    values_of,
    world,
)
from fivefold.trace.current import current
from fivefold.trace.trace import Trace

__all__ = ["trace_groups"]

_SEND, _RECEIVE = KIND_NUMBERS["send"], KIND_NUMBERS["receive"]
_log = logging.getLogger(__name__)
_MAKER = "_new_process_group_helper"
_BY_GROUP = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")


@functools.cache
def trace_groups() -> None:
    """From now on, groups that torch makes are traced. Calling it again does nothing."""
    make = getattr(c10d, _MAKER, None)
    if make is None:
        _log.warning("this torch makes groups in another way: only the backend fivefold is traced")
        return

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Any:
        group, store = make(*args, **named)
        ranks = args[2] if len(args) > 2 else named.get("global_ranks_in_group", ())
        if type(group) is not dist.ProcessGroup or _is_fake(group):
            return group, store
        traced = TracedGroup(group, _backend_of(group), ranks or range(group.size()))
        _put(group, traced)
        return traced, store

    setattr(c10d, _MAKER, made)
    batch = c10d.batch_isend_irecv
    replaced = functools.wraps(batch)(functools.partial(_batched, batch))
    c10d.batch_isend_irecv = dist.batch_isend_irecv = replaced


def _is_fake(group: dist.ProcessGroup) -> bool:
    return _backend_of(group) == "fake"


def _backend_of(group: dist.ProcessGroup) -> str:
    names = [str(backend_of_device(group, device).name()) for device in device_types(group)]
    return ", ".join(dict.fromkeys(names))


def _put(group: dist.ProcessGroup, traced: TracedGroup) -> None:
    """In torch's books, in the place of the group."""
    books = world()
    for name in _BY_GROUP:
        book = getattr(books, name)
        if group in book:
            book[traced] = book.pop(group)
    for groups in books.tags_to_pg.values():
        groups[:] = [traced if known is group else known for known in groups]
    put_in_place(traced.getGroupName(), traced)


def _batched(batch: Any, operations: Sequence[Any]) -> Any:
    """Messages that start together: NCCL's have to, and torch looks at the type of the group to know."""
    group = operations[0].group if operations else None
    trace = current.trace
    if not isinstance(group, TracedGroup):
        default = default_group() if group is None and operations else None
        group = default if isinstance(default, TracedGroup) else None
    if group is None:
        return batch(operations)
    device = operations[0].tensor.device
    if not backend_of_device(group.inner, device).supports_coalescing:
        return batch(operations)
    within = [
        dist.P2POp(op.op, op.tensor, group=group.inner, tag=op.tag, group_peer=op.group_peer)
        for op in operations
    ]
    if trace is None:
        return batch(within)
    events = [
        group.note(
            trace, _SEND if op.op in (dist.isend, dist.send) else _RECEIVE, op.tensor, op.group_peer
        )[0]
        for op in operations
    ]  # fmt: skip
    works = batch(within)
    gpu = gpu_times(trace) if device.type == "cuda" else None
    return [TracedWork(work, trace, events, gpu) for work in works[:1]] + works[1:]


# ---- Torch's own process groups as they are, with every operation told to the trace
#
# torch ──► TracedGroup ──► the group that torch made ──► gloo, nccl, mpi
#               │                                            │
#               └── issue ──► trace ◄── wait, future ◄── TracedWork, where the caller goes on meanwhile
#
# DistributedDataParallel, functional collectives and the like call a group's methods from C++, which finds
# ours: to patch `torch.distributed.all_reduce` would miss most of what a training step sends.

_GIVEN = {
    "allreduce": ("all_reduce", 0), "allreduce_coalesced": ("all_reduce", 0),
    "reduce": ("reduce", 0), "broadcast": ("broadcast", 0),
    "allgather": ("all_gather", 1), "allgather_coalesced": ("all_gather", 1),
    "_allgather_base": ("all_gather", 1), "all_gather_single": ("all_gather", 1),
    "all_gather_single_coalesced": ("all_gather", 1), "allgather_into_tensor_coalesced": ("all_gather", 1),
    "gather": ("gather", 1), "scatter": ("scatter", 1),
    "reduce_scatter": ("reduce_scatter", 1), "_reduce_scatter_base": ("reduce_scatter", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1), "alltoall_base": ("all_to_all", 1), "all_to_all_single": ("all_to_all", 1),
    "barrier": ("barrier", -1), "monitored_barrier": ("barrier", -1),
    "send": ("send", 0), "recv": ("receive", 0), "recv_anysource": ("receive", 0),
}  # fmt: skip
"""methods of a group: the operation, and which argument holds the tensors that this rank gives"""
_ROOTED = ("broadcast", "reduce", "gather", "scatter")
_PASSED_ON = (
    "_enable_collectives_timing", "_get_sequence_number_for_group", "_has_hooks",
    "_register_on_completion_hook",
    "_set_sequence_number_for_group", "_wait_for_pending_works", "get_group_store", "merge_remote_group",
    "set_timeout", "_set_default_timeout", "split_group", "_backend_id", "_id",
)  # fmt: skip
_BACKENDS = {kind.name.lower(): kind for kind in dist.ProcessGroup.BackendType.__members__.values()}
_END_S = 1.0
"""how long callbacks of futures may take to come when a group ends"""


@dataclass(frozen=True, slots=True)
class _Method:
    """Of a group. What can be known of it before it is called, since every microsecond of a call counts."""

    name: str
    kind: int
    which: int
    """argument that holds the tensors that this rank gives, or -1"""
    is_message: bool
    has_root: bool
    is_scatter: bool

    @classmethod
    def of(cls, name: str, kind: str, which: int) -> _Method:
        """A method that is the operation `kind`."""
        messages = kind in ("send", "receive")
        return cls(name, KIND_NUMBERS[kind], which, messages, kind in _ROOTED, kind == "scatter")

    def given(self, args: tuple[Any, ...]) -> Any:
        """The tensors that this rank gives."""
        given = args[self.which] if 0 <= self.which < len(args) else None
        return args[0] if self.is_scatter and not given else given

    def peer(self, args: tuple[Any, ...], options: Any) -> int:
        """The other side of a message, the root of what has one, or -1."""
        if self.is_message:
            return int(args[1]) if len(args) > 2 else -1  # else (tensors, tag): from anyone
        return int(getattr(options, "rootRank", -1)) if self.has_root else -1


class TracedGroup(dist.ProcessGroup):
    """A group of torch's. `inner` does the work, this one notes it."""

    def __init__(self, inner: dist.ProcessGroup, backend: str, ranks: Sequence[int]) -> None:
        super().__init__(inner.rank(), inner.size())  # pyright: ignore[reportCallIssue]
        self.inner = inner
        # DistributedDataParallel's logger asks for the backend from C++, past our methods.
        for device in self._device_types:
            own = backend_of_device(inner, device)
            kind = _BACKENDS.get(str(own.name()), dist.ProcessGroup.BackendType.CUSTOM)
            self._register_backend(device, kind, own)
            self._set_default_backend(kind)
        name = str(inner.group_name)
        self.log = GroupLog(lambda: name, lambda: ranks, backend)
        self._coalesced: list[int] | None = None
        self._futures: list[Any] = []
        desc = str(inner.group_desc)
        self.log.described("" if desc in ("undefined", "default_pg") else desc)

    # --- about itself --------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """Of the group within."""
        return str(self.inner.name())

    def getRank(self) -> int:  # noqa: N802
        """Of this process in the group."""
        return self.inner.rank()

    def getSize(self) -> int:  # noqa: N802
        """Of the group."""
        return self.inner.size()

    rank, size, name, _get_backend_name = getRank, getSize, getBackendName, getBackendName

    def getGroupName(self) -> str:  # noqa: N802
        """As torch set it."""
        return str(self.inner.group_name)

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """As torch wants it."""
        self.inner._set_group_name(cast(Any, name))  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def getGroupDesc(self) -> str:  # noqa: N802
        """As torch set it."""
        return str(self.inner.group_desc)

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """As torch wants it."""
        self.inner._set_group_desc(desc)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self.log.described("" if desc in ("undefined", "default_pg") else desc)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)  # pyright: ignore[reportIncompatibleMethodOverride]
    group_desc = property(getGroupDesc)  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def _device_types(self) -> list[torch.device]:
        return device_types(self.inner)

    @property
    def bound_device_id(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The device that torch bound the group to."""
        return self.inner.bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.inner.bound_device_id = device

    def shutdown(self) -> None:
        """As the group within. Callbacks end before: they need the interpreter, which it may hold."""
        self._settle()
        self.inner.shutdown()

    def abort(self) -> None:
        """As the group within."""
        self.inner.abort()

    def _settle(self) -> None:
        if not self._futures:
            return
        until = time.monotonic() + _END_S
        while not all(future.done() for future in self._futures) and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.01)  # for callbacks of futures that have just been set
        self._futures.clear()

    # --- coalescing ----------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self.inner._start_coalescing(device)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Any:
        events, self._coalesced = self._coalesced or [], None
        work: Any = self.inner._end_coalescing(device)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        trace = current.trace
        if trace is None or not events or work is None:
            return work
        gpu = gpu_times(trace) if device.type == "cuda" else None
        return TracedWork(work, trace, events, gpu, self._futures)

    # --- operations ----------------------------------------------------------------------------

    def note(self, trace: Trace, kind: int, given: Any, peer: int) -> tuple[int, bool]:
        """Tell the trace of an operation with the tensors `given`: its number there, whether on a GPU."""
        size, dtype, on_gpu = _told(given)
        return self.log.issue(trace, kind, size, dtype, peer), on_gpu

    def run(self, method: _Method, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Call `method` of the group within, and tell the trace."""
        call = getattr(self.inner, method.name)
        trace = current.trace
        options = named.get("opts", args[-1] if args else None)
        if trace is None:
            if method.is_message:
                self.log.skip_message(method.kind, method.peer(args, options))
            else:
                self.log.skip()
            return call(*args, **named)
        peer = method.peer(args, options)
        event, on_gpu = self.note(trace, method.kind, method.given(args), peer)
        gpu = gpu_times(trace) if on_gpu else None
        mark = None if gpu is None else gpu.mark()
        work = call(*args, **named)
        if self._coalesced is not None:
            self._coalesced.append(event)
        elif work is None or method.name == "monitored_barrier":
            if gpu is not None and mark is not None:
                gpu.waited([event], mark)
            else:
                trace.ended(event)
        elif gpu is None and not (method.is_message or getattr(options, "asyncOp", True)):
            # The caller would do so next, and needs no work of ours, which takes as long as all the rest.
            try:
                work.wait()
            finally:
                trace.ended(event)
        else:
            return TracedWork(work, trace, [event], gpu, self._futures)
        return work


def _told(given: Any) -> tuple[int, torch.dtype | None, bool]:
    """Bytes of tensors, in lists of lists perhaps; element type of the first, and whether it is on a GPU."""
    only = given[0] if type(given) is list and len(given) == 1 else given
    if isinstance(only, Tensor):
        return _bytes(only), only.dtype, only.is_cuda
    size, first = 0, None
    for tensor in _tensors(given):
        size += _bytes(tensor)
        first = tensor if first is None else first
    return (size, None, False) if first is None else (size, first.dtype, first.is_cuda)


def _tensors(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for part in cast("Sequence[Any]", given):
            yield from _tensors(part)


def _bytes(tensor: Tensor) -> int:
    if tensor.layout is torch.strided:
        return tensor.nbytes
    return values_of(tensor).nbytes if tensor.is_sparse else 0


_gpus: dict[int, GpuTimes] = {}


def gpu_times(trace: Trace) -> GpuTimes:
    """What times operations on a GPU."""
    found = _gpus.get(id(trace))
    if found is None:
        _gpus.clear()
        found = _gpus[id(trace)] = GpuTimes(trace)
    return found


def _noted(name: str, kind: str, which: int) -> Callable[..., Any]:
    method = _Method.of(name, kind, which)

    def call(self: TracedGroup, *args: Any, **named: Any) -> Any:
        return self.run(method, args, named)

    call.__name__ = name
    call.__doc__ = f"Torch's own `{name}`, noted."
    return call


def _passed_on(method: str) -> Callable[..., Any]:
    def call(self: TracedGroup, *args: Any, **named: Any) -> Any:
        return getattr(self.inner, method)(*args, **named)

    call.__name__ = method
    return call


for _name, (_kind, _which) in _GIVEN.items():
    if hasattr(dist.ProcessGroup, _name):
        setattr(TracedGroup, _name, _noted(_name, _kind, _which))
for _name in _PASSED_ON:
    if hasattr(dist.ProcessGroup, _name):
        setattr(TracedGroup, _name, _passed_on(_name))
