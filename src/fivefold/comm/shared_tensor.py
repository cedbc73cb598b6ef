"""Tensors that all ranks of a group see, where its backend has such."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.arena import ArenaError, Gate, Segment, connect
from fivefold.arena.copy_on_write import CopyOnWrite
from fivefold.comm.collectives import broadcast_text
from fivefold.comm.shared_group import SharedGroup

__all__ = ["SharedCopies", "add_in_order", "shared_zeros", "shares_memory"]

_ALIGNED_BYTES = 64
"""a line of the cache, and the longest vector"""
_PASSED_S = 60.0
"""how long a rank may take to pass memory on that it has just announced, or to fetch it"""


def shared_zeros(count: int, like: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Zeros (count,) of the dtype and device of `like`.

    In memory that the ranks of `group` share, if they do: collectives of it then need no copies. Collective:
    all ranks ask for the same count.
    """
    if isinstance(group, SharedGroup):
        return group.shared_zeros(count, like.dtype, like.device)
    return like.new_zeros(count)


def shares_memory(group: dist.ProcessGroup) -> bool:
    """Whether `SharedCopies` can be made in a group: its ranks are on one node, and of backend fivefold."""
    return isinstance(group, SharedGroup) and group.on_one_node


def add_in_order(group: dist.ProcessGroup) -> None:
    """Let sums over ranks that share memory be those of one process that adds one after the other.

    Others have the order of a tree. Collective.
    """
    if shares_memory(group):
        cast(SharedGroup, group).add_in_order()


class SharedCopies:
    """Copies of some tensors of one rank of a node, which lie once in the memory of all its ranks.

    `own[i]` is tensor i as this process sees it: what it writes there, it alone sees. What is written to
    `shared[i]`, all see but those that have written there themselves. Shapes, dtypes and the order in memory
    are those of the tensors given.
    """

    def __init__(
        self, tensors: Sequence[Tensor], group: dist.ProcessGroup, *, source: int = 0
    ) -> None:
        """Copies of what rank `source` gives, none of it empty, for a group that shares memory. Collective.

        Raises `ArenaError` on all ranks if there is no room.
        """
        told = [(str(t.dtype), list(t.shape), list(_dense(t).stride())) for t in tensors]
        text = json.dumps(told) if group.rank() == source else None
        text = broadcast_text(text, group, torch.device("cpu"), source=source)
        places = [_Place(*parts) for parts in json.loads(text)]
        size = sum(_room(place.size_bytes) for place in places)
        self.memory = CopyOnWrite(_passed(size, group, source))
        self.own = _tensors(self.memory.own, places)
        self.shared = _tensors(self.memory.shared, places)
        if group.rank() == source:
            for shared, tensor in zip(self.shared, tensors, strict=True):
                shared.copy_(tensor)
        broadcast_text("filled", group, torch.device("cpu"), source=source)


def _passed(size_bytes: int, group: dist.ProcessGroup, source: int) -> Segment:
    """New memory that rank `source` of the group has made, mapped by all of it."""
    cpu, timeout_s = torch.device("cpu"), _PASSED_S
    if group.rank() != source:
        address, why = json.loads(broadcast_text(None, group, cpu, source=source))
        if why:
            raise ArenaError(why)
        with connect(address, timeout_s) as line:
            _, (fd,) = line.receive()
        return Segment.attach(fd)
    try:
        segment = Segment.create("copies", size_bytes)
    except ArenaError as problem:
        broadcast_text(json.dumps(["", str(problem)]), group, cpu, source=source)
        raise
    with Gate() as gate:
        broadcast_text(json.dumps([gate.address, ""]), group, cpu, source=source)
        for _ in range(group.size() - 1):
            with gate.accept(timeout_s) as line:
                line.send(b"copies", [segment.fd])
    return segment


class _Place:
    def __init__(self, dtype: str, shape: list[int], stride: list[int]) -> None:
        self.dtype = getattr(torch, dtype.removeprefix("torch."))
        self.shape, self.stride = shape, stride
        self.count = torch.Size(shape).numel()
        self.size_bytes = self.count * self.dtype.itemsize


def _tensors(buffer: object, places: Sequence[_Place]) -> list[Tensor]:
    made, offset = list[Tensor](), 0
    for place in places:
        # A storage each: saving one tensor does not save them all.
        raw = torch.frombuffer(buffer, dtype=torch.uint8, count=place.size_bytes, offset=offset)
        made.append(raw.view(place.dtype).as_strided(place.shape, place.stride))
        offset += _room(place.size_bytes)
    return made


def _room(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES


def _dense(tensor: Tensor) -> Tensor:
    """Something of its shape, in its order of dims, without gaps."""
    return torch.empty_like(tensor, device="meta")
