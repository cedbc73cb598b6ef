"""The process group of ranks that share a node, as torch.distributed calls it.

torch 2.13 renamed some methods: both spellings are here. Each takes what the methods of torch's own groups
take. Tensors on GPUs are passed on to NCCL, or pass through memory of the host where ranks share a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.comm.device_memory import NoDeviceMemory
from fivefold.comm.direct import Direct
from fivefold.comm.group_log import GroupLog
from fivefold.comm.operations import Operations
from fivefold.comm.own_arena import own_arena
from fivefold.comm.works import Completer, SeveralWorks
from fivefold.errors import UsageError
from fivefold.torch_private import is_known

__all__ = ["SharedGroup"]

Work = dist.Work
_ANYONE = -1
_OLDER = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""methods by their names in torch 2.13 -> in 2.12 and older"""
_NO_TAGS = ("undefined", "default_pg")
"""descriptions that torch gives by itself"""


def _of_cpus(method: Callable[..., Work]) -> Callable[..., Work]:
    """Pass the call on to a group of torch's own if its tensors are on GPUs that each rank has for itself."""

    @functools.wraps(method)
    def here_or_there(self: SharedGroup, first: Any, *rest: Any, **named: Any) -> Work:
        second = rest[0] if rest else None
        if _on_cpus(first) and _on_cpus(second):
            return method(self, first, *rest, **named)
        name = method.__name__
        other = self.elsewhere(_one_device(first, second, name))
        if other is self:
            return method(self, first, *rest, **named)
        known = name if hasattr(other, name) else _OLDER[name]
        return getattr(other, known)(first, *rest, **named)

    return here_or_there


def _on_cpus(tensors: Any) -> bool:
    """Whether nothing of it is elsewhere; it may be a list of lists, or no tensor at all."""
    if isinstance(tensors, Tensor):
        return tensors.is_cpu
    return not isinstance(tensors, list | tuple) or all(
        map(_on_cpus, cast("Sequence[Any]", tensors))
    )


def _one_device(first: Any, second: Any, what: str) -> torch.device:
    """Where the tensors of a call are, which may be in lists of lists."""
    kinds = {device.type: device for device in (*_devices(first), *_devices(second))}
    if len(kinds) > 1:
        raise UsageError(
            f"{what}: its tensors are on {' and '.join(sorted(kinds))}; move all to one device first"
        )
    (device,) = kinds.values()
    return device


def _devices(tensors: Any) -> Iterator[torch.device]:
    if isinstance(tensors, Tensor):
        yield tensors.device
    elif isinstance(tensors, list | tuple):
        for tensor in cast("Sequence[Any]", tensors):
            yield from _devices(tensor)


def _op(opts: Any) -> int:
    """The number of a reduction; the core's are torch's."""
    return 0 if opts is None else int(opts.reduceOp.op)


def _later(opts: Any) -> bool:
    return opts is None or bool(getattr(opts, "asyncOp", True))


class SharedGroup(dist.ProcessGroup):
    """Ranks that share memory: what `init_process_group("fivefold")` gives on one node."""

    def __init__(
        self, operations: Operations, elsewhere: Callable[[torch.device], Any | None], name: str
    ) -> None:
        size = operations.group.size
        super().__init__(operations.group.rank, size)  # pyright: ignore[reportCallIssue]
        self._operations = operations
        self._make_elsewhere = elsewhere
        self._elsewhere: dict[str, Any] = {}
        self._name, self._desc = name, "undefined"
        self._coalesced: list[Work] | None = None
        self._completer = Completer()
        operations.log = GroupLog(_name_of(self), _ranks_of(self), "fivefold")

    # --- about itself --------------------------------------------------------------------------

    def getBackendName(self) -> str:  # noqa: N802
        """As in `dist.get_backend`."""
        return "fivefold"

    def getRank(self) -> int:  # noqa: N802
        """Of this process in the group."""
        return self._operations.group.rank

    def getSize(self) -> int:  # noqa: N802
        """Of the group."""
        return self._operations.group.size

    rank, size, name = getRank, getSize, getBackendName

    # Without the following, DeviceMesh and functional collectives fail: "ProcessGroup name not set".

    def getGroupName(self) -> str:  # noqa: N802
        """As torch set it."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """As torch wants it."""
        self._name = self._operations.group.name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """As torch set it."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """As torch wants it."""
        self._desc = desc
        self._operations.group.tag = told = "" if desc in _NO_TAGS else desc
        self._operations.log.described(told)

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)  # pyright: ignore[reportIncompatibleMethodOverride]
    group_desc = property(getGroupDesc)  # pyright: ignore[reportIncompatibleMethodOverride]

    @property
    def _device_types(self) -> list[torch.device]:
        # While torch 2.15 makes a group that names a device, it attaches its flight recorder to the backend
        # that C++ has for it: here there is none. Whoever asks later has a group that torch knows.
        return [torch.device("cpu")] if is_known(self) else []

    def _get_backend(self, device: torch.device) -> Any:
        where = torch.device(device)
        return self if where.type == "cpu" else self.elsewhere(where)

    def _get_backend_name(self) -> str:
        return "fivefold"

    def _set_sequence_number_for_group(self) -> None:
        """The core counts by itself."""

    def _has_hooks(self) -> bool:
        return False

    def elsewhere(self, device: torch.device) -> Any:
        """The group for devices of a kind, torch's own or this one. Collective when it is asked for first."""
        if device.type not in self._elsewhere:
            self._elsewhere[device.type] = self._make_elsewhere(device) or self
        return self._elsewhere[device.type]

    # --- memory that peers see, and the end -----------------------------------------------------

    def supports_tensor_alloc(self, device: Any = "cpu") -> bool:
        """Whether `allocate_tensor` gives memory that peers see."""
        return torch.device(device).type == "cpu"

    def allocate_tensor(
        self, size: int, *, dtype: torch.dtype = torch.float32, device: Any = "cpu"
    ) -> Tensor:
        """An uninitialised tensor of `size` elements that is summed where it lies, without copies."""
        where = torch.device(device)
        if where.type != "cpu" or not size:
            return torch.empty(size, dtype=dtype, device=where)
        piece = own_arena().allocate(size * dtype.itemsize)
        return torch.frombuffer(piece, dtype=dtype, count=size)

    def add_in_order(self) -> None:
        """Let sums be made one rank after the other, where all are on this node. Collective."""
        self._operations.group.add_in_order()

    def shared_zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros (count,) that are summed where they lie, if their device can do that. Collective.

        All ranks ask for as many.
        """
        if device.type == "cpu":
            return self.allocate_tensor(count, dtype=dtype).zero_()
        other = self.elsewhere(device)
        if other is not self and isinstance(other, SharedGroup):
            return other.shared_zeros(count, dtype, device)
        if isinstance(self._operations, Direct):
            with contextlib.suppress(NoDeviceMemory):  # torch may still hold some that is free
                return self._operations.windows.zeros(count, dtype)
        return torch.zeros(count, dtype=dtype, device=device)

    @property
    def on_one_node(self) -> bool:
        """Whether all ranks share memory, until the group is closed."""
        core = self._operations.group
        return core.spread is None and not core.closed

    def set_timeout(self, timeout: timedelta) -> None:
        """How long operations wait for missing ranks from now on."""
        self._operations.timeout_s = timeout.total_seconds()
        for other in self._of_devices():
            other.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Leave the group."""
        for other in self._of_devices():
            other.shutdown()
        self._operations.close()
        self._completer.close()

    abort = shutdown

    def _of_devices(self) -> Iterator[SharedGroup]:
        """The same ranks, where their tensors are on a device that they share."""
        for other in self._elsewhere.values():
            if other is not self and isinstance(other, SharedGroup):
                yield other

    # --- coalescing: operations stay their own, a block only collects their works ----------------

    def _start_coalescing(self, device: torch.device) -> None:  # noqa: ARG002
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> Work:  # noqa: ARG002
        works, self._coalesced = self._coalesced or [], None
        return self._together(works)

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(self, works: list[Any]) -> Work:
        return SeveralWorks(works, self._completer)

    # --- collectives ---------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:  # noqa: ARG002  # pyright: ignore[reportIncompatibleMethodOverride]
        """Reduce over the ranks, in place."""
        tensor = tensors if isinstance(tensors, Tensor) else tensors[0]
        if not tensor.is_cpu or tensor.is_sparse:
            other = self.elsewhere(tensor.device)
            if other is not self:
                return other.allreduce(tensors, opts)
            if tensor.is_sparse:
                raise UsageError(
                    "all_reduce: ranks that share a GPU cannot add its sparse tensors: move them with .cpu() "
                    "first"
                )
        if (
            type(opts) is not dist.AllreduceOptions
        ):  # dist.all_reduce gives these: the way of small sums
            opts = _all_reduce_options(opts)
        if tensor is not tensors and len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        return self._noted(self._operations.all_reduce(tensor, _op(opts), later=opts.asyncOp))

    @_of_cpus
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Work:
        """Reduce each of the tensors over the ranks, in place."""
        reduction, later = _op(opts), _later(opts)
        works = [self._operations.all_reduce(t, reduction, later=later) for t in tensors]
        return self._noted(self._together(works))

    @_of_cpus
    def reduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce into the tensor of the root rank."""
        opts = opts or dist.ReduceOptions()
        return self._noted(
            self._operations.reduce(
                _one(tensors), _op(opts), int(opts.rootRank), later=_later(opts)
            )
        )

    @_of_cpus
    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:  # noqa: ARG002
        """Overwrite with the tensor of the root rank."""
        root = opts if isinstance(opts, int) else int(opts.rootRank) if opts else 0
        return self._noted(self._operations.broadcast(_one(tensors), root, later=_later(opts)))

    @_of_cpus
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """A list of the ranks' tensors."""
        lists = outputs[0] if isinstance(outputs[0], list) else outputs
        return self._noted(self._operations.all_gather(lists, _one(inputs), later=_later(opts)))

    @_of_cpus
    def allgather_coalesced(
        self, output_lists: Any, inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """For each input, the ranks' tensors: `output_lists[rank][number]`."""
        works = [
            self._operations.all_gather(
                [row[n] for row in output_lists], tensor, later=_later(opts)
            )
            for n, tensor in enumerate(inputs)
        ]
        return self._noted(self._together(works))

    @_of_cpus
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """The ranks' tensors, one after the other."""
        return self._noted(self._operations.all_gather_single(output, input, later=_later(opts)))

    @_of_cpus
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """`all_gather_single` of each pair."""
        works = [
            self._operations.all_gather_single(output, tensor, later=_later(opts))
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._noted(self._together(works))

    @_of_cpus
    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """A list of the ranks' tensors at the root rank."""
        opts = opts or dist.GatherOptions()
        lists = outputs[0] if outputs and isinstance(outputs[0], list) else outputs
        return self._noted(
            self._operations.gather(lists, _one(inputs), int(opts.rootRank), later=_later(opts))
        )

    @_of_cpus
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """This rank's of the tensors that the root rank has."""
        opts = opts or dist.ScatterOptions()
        lists = inputs[0] if inputs and isinstance(inputs[0], list) else inputs
        return self._noted(
            self._operations.scatter(_one(outputs), lists, int(opts.rootRank), later=_later(opts))
        )

    @_of_cpus
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """This rank's of the tensors, reduced over the ranks."""
        lists = inputs[0] if isinstance(inputs[0], list) else inputs
        return self._noted(
            self._operations.reduce_scatter(_one(outputs), lists, _op(opts), later=_later(opts))
        )

    @_of_cpus
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """This rank's part of the tensor, reduced over the ranks."""
        return self._noted(
            self._operations.reduce_scatter_single(output, input, _op(opts), later=_later(opts))
        )

    @_of_cpus
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Work:
        """`reduce_scatter_single` of each pair."""
        works = [
            self._operations.reduce_scatter_single(output, tensor, _op(opts), later=_later(opts))
            for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._noted(self._together(works))

    @_of_cpus
    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_rows: Any, input_rows: Any, opts: Any = None  # noqa: A002
    ) -> Work:  # fmt: skip
        """Part q of `input` to rank q, part q of `output` from it."""
        return self._noted(
            self._operations.all_to_all_single(
                output, input, output_rows, input_rows, later=_later(opts)
            )
        )

    @_of_cpus
    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Work:
        """`inputs[q]` to rank q, `outputs[q]` from it."""
        return self._noted(self._operations.all_to_all(outputs, inputs, later=_later(opts)))

    def barrier(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Work:
        """Wait for all ranks."""
        device = getattr(opts, "device", None)
        if device is not None and device.type != "cpu":
            other = self.elsewhere(device)
            if other is not self:
                return other.barrier(opts)
        limit = timeout or getattr(opts, "timeout", timedelta(milliseconds=-1))
        limit_s = limit.total_seconds() if limit > timedelta(0) else None
        return self._noted(self._operations.barrier(later=_later(opts), timeout_s=limit_s))

    # --- messages ------------------------------------------------------------------------------

    @_of_cpus
    def send(self, tensors: Any, dst_rank: int, tag: int = 0) -> Work:
        """To one rank."""
        return self._noted(self._operations.send(_one(tensors), dst_rank, tag))

    @_of_cpus
    def recv(self, tensors: Any, src_rank: int, tag: int = 0) -> Work:
        """From one rank."""
        return self._noted(self._operations.receive(_one(tensors), src_rank, tag))

    @_of_cpus
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """From whoever sends first."""
        return self._noted(self._operations.receive(_one(tensors), _ANYONE, tag))


for _name, _older in _OLDER.items():
    setattr(SharedGroup, _older, getattr(SharedGroup, _name))


def _all_reduce_options(opts: Any) -> Any:
    """What torch accepts besides options: nothing, or a reduction."""
    if isinstance(opts, dist.AllreduceCoalescedOptions):
        return opts
    full = dist.AllreduceOptions()
    if opts is not None:
        full.reduceOp = opts
    return full


def _name_of(group: SharedGroup) -> Callable[[], str]:
    known = weakref.ref(group)

    def name() -> str:
        alive = known()
        return "" if alive is None else alive.getGroupName()

    return name


def _ranks_of(group: dist.ProcessGroup) -> Callable[[], Sequence[int]]:
    """What asks torch for the ranks of a group, without keeping it."""
    known = weakref.ref(group)

    def ranks() -> Sequence[int]:
        alive = known()
        try:
            return [] if alive is None else dist.get_process_group_ranks(alive)
        except (KeyError, ValueError):  # torch has not noted it yet
            return [] if alive is None else range(alive.size())

    return ranks


def _one(tensors: Any) -> Tensor:
    """The tensor of what torch mostly gives as a list of one."""
    return tensors if isinstance(tensors, Tensor) else tensors[0]
