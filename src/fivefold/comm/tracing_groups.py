"""Has torch make groups that are traced: those of its own backends; ours tell the trace by themselves."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # noqa: TID251 - groups are put into its books

from fivefold.comm.group_log import KIND_NUMBERS
from fivefold.comm.traced_group import TracedGroup, gpu_times
from fivefold.comm.traced_works import TracedWork
from fivefold.torch_private import (
    backend_of_device,
    default_group,
    device_types,
    put_in_place,
    world,
)
from fivefold.trace.current import current

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
