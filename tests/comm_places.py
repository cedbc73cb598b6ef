"""What ranks of the tests of communication do with large tensors, in arenas and elsewhere, and what they are
refused. Each runs within a default group."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import comm_checks
from comm_checks import raw
from fivefold.arena import ArenaError
from fivefold.comm.core import Core
from fivefold.comm.meeting import meet
from fivefold.comm.operations import Operations
from fivefold.errors import UsageError


def _made(number: int, rank: int, count: int) -> Tensor:
    """Cheaper than random numbers, and as uneven."""
    return torch.arange(count, dtype=torch.float32).mul_(0.37 + rank).add_(number).sin_()


class _Places:
    """Operations on tensors of which every rank has some in its arena: `where`, one letter per rank."""

    def __init__(self, count: int, where: str) -> None:
        self.rank, self.size, self.count = dist.get_rank(), dist.get_world_size(), count
        self.last = self.size - 1
        self.in_arena = where[self.rank] == "a"
        self.everyone = range(self.size)

    def tensor(self, values: Tensor) -> Tensor:
        if not self.in_arena:
            return values.clone()
        allocate: Any = dist.group.WORLD
        return allocate.allocate_tensor(values.numel()).copy_(values)

    def broadcast(self) -> list[tuple[Tensor, Tensor]]:
        own = self.tensor(_made(1, self.rank, self.count))
        dist.broadcast(own, self.last)
        return [(own, _made(1, self.last, self.count))]

    def all_gather(self) -> list[tuple[Tensor, Tensor]]:
        """Where the rank's part is a piece of the whole, as fully sharded data parallelism has it."""
        whole = self.tensor(torch.zeros(self.size * self.count))
        own = whole.view(self.size, -1)[self.rank].copy_(_made(2, self.rank, self.count))
        comm_checks._all_gather_single(whole, own)
        return [(whole, torch.cat([_made(2, q, self.count) for q in self.everyone]))]

    def gather(self) -> list[tuple[Tensor, Tensor]]:
        own = self.tensor(_made(3, self.rank, self.count))
        lists = [torch.zeros(self.count) for _ in self.everyone] if self.rank == 1 else None
        dist.gather(own, lists, 1)
        return list(
            zip(lists or [], [_made(3, q, self.count) for q in self.everyone], strict=False)
        )

    def reduce_scatter(self) -> list[tuple[Tensor, Tensor]]:
        whole = self.tensor(_made(4, self.rank, self.size * self.count))
        own = whole.view(self.size, -1)[self.rank]
        comm_checks._reduce_scatter_single(own, whole)
        every = [_made(4, q, self.size * self.count) for q in self.everyone]
        return [(own, comm_checks.reference("sum", every).view(self.size, -1)[self.rank])]

    def reduce(self) -> list[tuple[Tensor, Tensor]]:
        own = self.tensor(_made(5, self.rank, self.count))
        dist.reduce(own, self.last)
        every = [_made(5, q, self.count) for q in self.everyone]
        total = comm_checks.reference("sum", every)
        return [(own, total if self.rank == self.last else every[self.rank])]

    def all_reduce(self) -> list[tuple[Tensor, Tensor]]:
        own = self.tensor(_made(6, self.rank, self.count))
        dist.all_reduce(own)
        every = [_made(6, q, self.count) for q in self.everyone]
        return [(own, comm_checks.reference("sum", every))]

    def all_to_all(self) -> list[tuple[Tensor, Tensor]]:
        """Uneven: rank r sends q + 1 parts to rank q."""
        parts = [q + 1 for q in self.everyone]
        part = self.count // sum(parts)
        own = self.tensor(_made(7, self.rank, part * sum(parts)))
        got = self.tensor(torch.zeros(part * (self.rank + 1) * self.size))
        mine = [part * (self.rank + 1)] * self.size
        dist.all_to_all_single(got, own, mine, [part * n for n in parts])
        begin = part * sum(parts[: self.rank])
        every = [_made(7, q, part * sum(parts)) for q in self.everyone]
        return [(got, torch.cat([t[begin : begin + mine[0]] for t in every]))]

    def messages(self) -> list[tuple[Tensor, Tensor]]:
        """To the right, in the order opposite to that in which they are asked for."""
        own = self.tensor(_made(8, self.rank, self.count))
        left, right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        first, second = self.tensor(torch.zeros(self.count)), torch.zeros(self.count)
        works = [dist.isend(own, right, tag=1), dist.isend(own, right, tag=2)]
        works += [dist.irecv(second, left, tag=2), dist.irecv(first, left, tag=1)]
        for work in works:
            assert work is not None
            work.wait()
        expected = _made(8, left, self.count)
        return [(first, expected), (second, expected)]


OPERATIONS = ("broadcast", "all_gather", "gather", "reduce_scatter", "reduce", "all_reduce", "all_to_all",
              "messages")  # fmt: skip


def every_place(count: int, where: str) -> int:
    """All operations; how many results were right."""
    right = 0
    places = _Places(count, where)
    for name in OPERATIONS:
        for found, expected in getattr(places, name)():
            assert torch.equal(found, expected), f"{name} of {count} on rank {places.rank}"
            right += 1
    return right


# --- what a container forbids ---------------------------------------------------------------------


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte),
                ("value", ctypes.c_uint)]  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction))]


CALLS = {"x86_64": {"memfd_create": 319, "process_vm_readv": 310},
         "aarch64": {"memfd_create": 279, "process_vm_readv": 270}}  # fmt: skip
"""numbers of the system calls that can be forbidden here, by machine"""


def forbid(call: str) -> None:
    """Have the kernel refuse a system call to this process from now on, as a container's profile does."""
    number = CALLS[platform.machine()][call]
    load, equal, answer = 0x20, 0x15, 0x06
    program = (_Instruction * 4)(
        (load, 0, 0, 0), (equal, 0, 1, number), (answer, 0, 0, 0x00050000 | errno.EPERM),
        (answer, 0, 0, 0x7FFF0000),
    )  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_filter, filtered = 38, 22, 2
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    rules = _Program(4, program)
    assert libc.prctl(set_filter, filtered, ctypes.byref(rules)) == 0, ctypes.get_errno()


def forbidden(call: str, count: int) -> tuple[list[str], int]:
    """A new group, in which rank 1 is refused a system call; what is logged, and how many are right."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("fivefold").addHandler(handler)
    if dist.get_rank() == 1:
        forbid(call)
    try:
        group = dist.new_group()
        own = _made(9, dist.get_rank(), count)
        dist.all_reduce(own, group=group)
    finally:
        logging.getLogger("fivefold").removeHandler(handler)
    every = [_made(9, q, count) for q in range(dist.get_world_size())]
    return lines, int(raw(own) == raw(comm_checks.reference("sum", every)))


# --- what a profiler sees -------------------------------------------------------------------------


def profiled() -> list[str]:
    """Names of our ranges in the timeline of torch's profiler; nothing of the sum after it has ended."""
    from fivefold import comm
    from fivefold.trace import Tag

    group = dist.new_group(group_desc="gradients")
    assert isinstance(group, dist.ProcessGroup)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        dist.all_reduce(torch.ones(2), group=group)
        work = dist.broadcast(torch.ones(3), 0, group=group, async_op=True)
        assert work is not None
        work.wait()
        neighbour = dist.get_rank() ^ 1
        sent = dist.isend(torch.ones(4), neighbour)
        dist.recv(torch.ones(4), neighbour)
        assert sent is not None
        sent.wait()
        comm.all_reduce(torch.ones(5), group, Tag.LOSS)
    dist.all_reduce(torch.ones(7))
    events = found.events()
    assert events is not None
    return [event.name for event in events if event.name.startswith("fivefold:")]


def late_with_tag() -> str:
    """What the others are told of a group that says what it is for, when rank 1 does not come."""
    limit = timedelta(seconds=0.5)
    group = dist.new_group(timeout=limit, group_desc="pipeline activations")
    if dist.get_rank() == 1:
        time.sleep(1.5)
    try:
        dist.all_reduce(torch.ones(1000), group=group)
    except RuntimeError as problem:
        return str(problem)
    return ""


# --- who cannot take part, and what cannot be sent --------------------------------------------------


def as_another_user() -> tuple[Sequence[int], float]:
    """Rank 1 runs as somebody else while the ranks meet; nodes by rank, and the sum of 1 and 2 over them."""
    rank, size, limit = dist.get_rank(), dist.get_world_size(), timedelta(seconds=20)
    address: list[Any] = [None]
    if rank == 0:  # files of the pool's store are not for others
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        address = [store.port]
    dist.broadcast_object_list(address, 0)
    if rank > 0:
        store = dist.TCPStore("127.0.0.1", address[0], size, is_master=False)
    own = os.geteuid()
    if rank == 1:
        os.seteuid(65534)
    try:
        met = meet(store, rank, size, limit, "mixed")
    finally:
        os.seteuid(own)
    dist.barrier()
    assert isinstance(met, Core) and met.spread is not None
    tensor = torch.tensor([rank + 1.0])
    operations = Operations(met, 20.0)
    operations.all_reduce(tensor, 0, later=False)
    dist.barrier()
    operations.close()
    return [*met.spread.node_of], float(tensor)


def on_odd_devices() -> list[str]:
    """Tensors that are nowhere, and some here and some nowhere; what each call says."""
    nowhere, here = torch.ones(2, device="meta"), torch.ones(2)
    texts: list[str] = []
    for act in (
        lambda: dist.all_reduce(nowhere),
        lambda: dist.broadcast(nowhere, 0),
        lambda: dist.all_gather([here, nowhere], here),
    ):
        try:
            act()
        except (RuntimeError, ValueError, UsageError) as problem:
            texts.append(str(problem))
    dist.all_reduce(here)
    return [*texts, str(here.tolist())]


def with_little_memory(folder: str) -> str:
    """What a tensor in the arena says in a control group that has no room for it; a small one fits."""
    group: Any = dist.group.WORLD
    Path(folder, "cgroup.procs").write_text(str(os.getpid()))
    try:
        small = group.allocate_tensor(1000).fill_(1.0)
        group.allocate_tensor(64 << 20)
    except ArenaError as problem:
        return f"{small.sum().item():.0f}: {problem}"
    finally:
        Path(folder).parent.joinpath("cgroup.procs").write_text(str(os.getpid()))
    return ""
