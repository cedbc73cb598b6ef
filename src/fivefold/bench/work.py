"""What a contender's rank is asked to time: an operation on so many bytes, whose result is checked.

`Torch` asks torch.distributed, `Mpi` asks mpi4py; the same operation on tensors or arrays of the same size.
Sizes are those of one rank's contribution, as in the OSU benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["OPERATIONS", "CommWay", "Mpi", "Torch"]

OPERATIONS = (
    "allreduce",
    "allgather",
    "reduce-scatter",
    "alltoall",
    "bcast",
    "reduce",
    "p2p",
    "barrier",
)
Run = Callable[[], Any]
Check = Callable[[], bool]


class CommWay(Protocol):
    """A way to communicate."""

    rank: int
    size: int

    def prepare(
        self, operation: str, size_bytes: int, dtype: str, *, later: bool
    ) -> tuple[Run, Check]:
        """The operation, and a call of it whose result is looked at.

        `later`: it only starts, and what it returns has `wait`. Raises `ValueError` for what is not offered.
        """
        ...

    def meet(self) -> None:
        """Wait for all ranks."""
        ...

    def close(self) -> None:
        """Leave."""
        ...


@dataclass
class _Buffers:
    """Tensors or arrays: of one rank's size, and of all ranks'. Rank r contributes r + 1 throughout."""

    one: Any
    sent: Any
    got: Any

    def right(self, operation: str, run: Run, rank: int, ranks: int) -> bool:
        """Call once, and see whether the result is what it should be."""
        self.one[:] = rank + 1
        self.sent[:] = rank + 1
        started = run()
        if hasattr(started, "wait"):
            started.wait()
        total = ranks * (ranks + 1) // 2
        expected = {"allreduce": total, "reduce-scatter": total, "bcast": 1}
        if operation == "reduce":
            return rank != 0 or _all(self.one, total)
        if operation in expected:
            return _all(self.one, expected[operation])
        if operation in ("allgather", "alltoall"):
            return all(_all(part, q + 1) for q, part in enumerate(self.got.reshape(ranks, -1)))
        return operation in ("barrier", "stream") or rank > 1 or _all(self.one, 1)


def _all(values: Any, expected: int) -> bool:
    return bool((values == expected).all())


def _chosen(operation: str, runs: Mapping[str, Run], *, later: bool) -> Run:
    if operation not in runs or (later and operation == "p2p"):
        raise ValueError(f"{operation} is not offered here")
    return runs[operation]


class Torch:
    """Through torch.distributed; `in_arena`: tensors that all ranks of the node see."""

    def __init__(self, backend: str, *, in_arena: bool) -> None:
        import torch
        import torch.distributed as dist

        from fivefold.mesh import start
        from fivefold.plan import Plan, Provenance

        torch.set_num_threads(1)
        chosen = {"comm.backend": backend, "comm.timeout_s": 120.0}
        self._mesh = start(Plan().replace(chosen, Provenance("user", "bench")), device="cpu")
        self.rank, self.size, self._in_arena = self._mesh.rank, self._mesh.size, in_arena
        self._torch, self._dist = torch, dist
        self._group: Any = self._mesh.group("data")

    def _tensor(self, count: int, dtype: str) -> Any:
        kind = getattr(self._torch, dtype)
        if self._in_arena:
            return self._group.allocate_tensor(count, dtype=kind).zero_()
        return self._torch.zeros(count, dtype=kind)

    def prepare(
        self, operation: str, size_bytes: int, dtype: str, *, later: bool
    ) -> tuple[Run, Check]:
        """See `CommWay`."""
        dist, group = self._dist, self._group
        count = max(1, size_bytes // getattr(self._torch, dtype).itemsize)
        whole = count * self.size if operation in ("allgather", "reduce-scatter", "alltoall") else 1
        one, sent, got = (self._tensor(n, dtype) for n in (count, whole, whole))
        names = vars(dist)  # torch 2.13 renamed two
        gather: Any = names.get("all_gather_single", names["all_gather_into_tensor"])
        scatter: Any = names.get("reduce_scatter_single", names["reduce_scatter_tensor"])
        run = _chosen(operation, later=later, runs={
            "allreduce": lambda: dist.all_reduce(one, group=group, async_op=later),
            "reduce": lambda: dist.reduce(one, 0, group=group, async_op=later),
            "bcast": lambda: dist.broadcast(one, 0, group=group, async_op=later),
            "allgather": lambda: gather(got, one, group=group, async_op=later),
            "reduce-scatter": lambda: scatter(one, sent, group=group, async_op=later),
            "alltoall": lambda: dist.all_to_all_single(got, sent, group=group, async_op=later),
            "barrier": lambda: dist.barrier(group=group, async_op=later),
            "p2p": lambda: self._ping_pong(one),
            # Not communication but its limit: all ranks read and write as many bytes at once.
            "stream": lambda: one.add_(1),
        })  # fmt: skip
        buffers = _Buffers(one, sent, got)
        return run, lambda: buffers.right(operation, run, self.rank, self.size)

    def _ping_pong(self, one: Any) -> None:
        dist, group = self._dist, self._group
        if self.rank == 0:
            dist.send(one, group=group, group_dst=1)
            dist.recv(one, group=group, group_src=1)
        elif self.rank == 1:
            dist.recv(one, group=group, group_src=0)
            dist.send(one, group=group, group_dst=0)

    def meet(self) -> None:
        """See `CommWay`."""
        self._dist.barrier(group=self._group)

    def close(self) -> None:
        """See `CommWay`."""
        self._mesh.stop()


class Mpi:
    """Through mpi4py, on arrays of numpy."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self._comm.Get_rank(), self._comm.Get_size()

    def prepare(
        self, operation: str, size_bytes: int, dtype: str, *, later: bool
    ) -> tuple[Run, Check]:
        """See `CommWay`."""
        import numpy as np

        if dtype == "bfloat16":
            raise ValueError("MPI has no bfloat16")  # Open MPI adds its bytes, and says nothing
        comm, here = self._comm, self._mpi.IN_PLACE
        count = max(1, size_bytes // np.dtype(dtype).itemsize)
        one = np.zeros(count, dtype)
        sent, got = np.zeros(count * self.size, dtype), np.zeros(count * self.size, dtype)

        def call(name: str, *arguments: Any) -> Any:
            if not later:
                return getattr(comm, name)(*arguments)
            return _Waiting(getattr(comm, f"I{name.lower()}")(*arguments))

        def reduce() -> Any:
            return call("Reduce", here, one) if self.rank == 0 else call("Reduce", one, None)

        run = _chosen(operation, later=later, runs={
            "allreduce": lambda: call("Allreduce", here, one),
            "reduce": reduce,
            "bcast": lambda: call("Bcast", one),
            "allgather": lambda: call("Allgather", one, got),
            "reduce-scatter": lambda: call("Reduce_scatter_block", sent, one),
            "alltoall": lambda: call("Alltoall", sent, got),
            "barrier": lambda: call("Barrier"),
            "p2p": lambda: self._ping_pong(one),
        })  # fmt: skip
        buffers = _Buffers(one, sent, got)
        return run, lambda: buffers.right(operation, run, self.rank, self.size)

    def _ping_pong(self, one: Any) -> None:
        comm = self._comm
        if self.rank == 0:
            comm.Send(one, 1)
            comm.Recv(one, 1)
        elif self.rank == 1:
            comm.Recv(one, 0)
            comm.Send(one, 0)

    def meet(self) -> None:
        """See `CommWay`."""
        self._comm.Barrier()

    def close(self) -> None:
        """See `CommWay`: MPI ends with the process."""


class _Waiting:
    """An MPI request with torch's name for waiting."""

    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()
