"""What a contender's rank is asked to time: an operation on so many bytes, whose result is checked.

`Torch` asks torch.distributed, `Mpi` asks mpi4py; the same operation on tensors or arrays of the same size.
Sizes are those of one rank's contribution, or of one message, as in the OSU benchmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fivefold.sections import ALWAYS_DIRECT

__all__ = ["MESSAGES", "OPERATIONS", "CommWay", "Mpi", "Torch", "messages_under_way", "partner_of"]

MESSAGES = ("p2p", "bw", "bibw", "multi-p2p", "multi-bw")
"""Messages between the first and the last rank, or, of several pairs, between the first half and the second:
there and back (latency), many under way in one direction, or in both"""
OPERATIONS = (
    "allreduce",
    "allgather",
    "reduce-scatter",
    "alltoall",
    "bcast",
    "reduce",
    "gather",
    "scatter",
    *MESSAGES,
    "barrier",
)
_WINDOW, _WINDOW_BYTES = 64, 64 << 20
_WHOLE = ("allgather", "reduce-scatter", "alltoall", "gather", "scatter")
"""operations for which ranks hold room for what all contribute"""
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


@dataclass(frozen=True)
class _Sending:
    """How a contender sends and receives: all take a buffer and a rank; those that begin return a request."""

    send: Callable[[Any, int], Any]
    receive: Callable[[Any, int], Any]
    begin_send: Callable[[Any, int], Any]
    begin_receive: Callable[[Any, int], Any]


class _Prepared:
    """One of `OPERATIONS`, and its tensors or arrays; rank r contributes r + 1 throughout."""

    def __init__(
        self, name: str, way: CommWay, size_bytes: int, count: int, make: Callable[[int], Any]
    ) -> None:
        whole = count * way.size if name in _WHOLE else 1
        self._name, self._rank, self._ranks, self._size_bytes = name, way.rank, way.size, size_bytes
        self.one, self.sent = make(count), make(whole)
        self.got = make(count if name in MESSAGES else whole)

    def prepared(
        self, runs: Mapping[str, Run], lines: _Sending, *, later: bool
    ) -> tuple[Run, Check]:
        """What `CommWay.prepare` returns, of collectives by name and what carries messages."""
        messages = self._name in MESSAGES
        if later if messages else self._name not in runs:
            raise ValueError(f"{self._name} is not offered here")
        run = self._messages(lines) if messages else runs[self._name]
        return run, lambda: self._right(run)

    def _right(self, run: Run) -> bool:
        """Call once, and see whether the result is what it should be."""
        name, rank, ranks = self._name, self._rank, self._ranks
        self.one[:] = rank + 1
        self.sent[:] = rank + 1
        self.got[:] = 0
        started = run()
        if hasattr(started, "wait"):
            started.wait()
        total = ranks * (ranks + 1) // 2
        if name in MESSAGES:
            partner = partner_of(name, rank, ranks)
            if partner is None or (name in {"bw", "multi-bw"} and rank < partner):
                return True  # to whom nothing comes, but for an answer
            return _all(self.got, partner + 1)
        if name in ("reduce", "gather") and rank != 0:
            return True
        if name in ("allreduce", "reduce-scatter", "reduce"):
            return _all(self.one, total)
        if name in ("bcast", "scatter"):
            return _all(self.one, 1)
        if name in ("allgather", "alltoall", "gather"):
            return all(_all(part, q + 1) for q, part in enumerate(self.got.reshape(ranks, -1)))
        return name in ("barrier", "stream")

    def _messages(self, lines: _Sending) -> Run:
        """What this rank does in one measurement of messages."""
        partner = partner_of(self._name, self._rank, self._ranks)
        if partner is None:
            return lambda: None
        first, both = self._rank < partner, self._name == "bibw"
        window, answer = _window(self._size_bytes), self.sent

        def there_and_back() -> None:
            if first:
                lines.send(self.one, partner)
            lines.receive(self.got, partner)
            if not first:
                lines.send(self.one, partner)

        def many() -> None:
            begun: list[Any] = []
            for _ in range(window):
                if both or not first:
                    begun.append(lines.begin_receive(self.got, partner))
                if both or first:
                    begun.append(lines.begin_send(self.one, partner))
            for request in begun:
                request.wait()
            (lines.receive if first else lines.send)(answer, partner)

        return many if self._name.endswith("bw") else there_and_back


def _all(values: Any, expected: int) -> bool:
    return bool((values == expected).all())


def partner_of(operation: str, rank: int, ranks: int) -> int | None:
    """Whom a rank exchanges messages with, if it does.

    >>> [partner_of("multi-bw", rank, 5) for rank in range(5)]
    [2, 3, 0, 1, None]
    """
    if not operation.startswith("multi-"):
        return {0: ranks - 1, ranks - 1: 0}.get(rank)
    half = ranks // 2
    return None if rank >= 2 * half else (rank + half) % (2 * half)


def messages_under_way(operation: str, size_bytes: int, ranks: int) -> int:
    """How many messages all pairs together send between two answers; 0 for what measures latency.

    >>> messages_under_way("bw", 4, 2), messages_under_way("multi-bw", 4 << 20, 8)
    (64, 64)
    """
    if not operation.endswith("bw"):
        return 0
    pairs = ranks // 2 if operation.startswith("multi-") else 1
    ways = 2 if operation == "bibw" else 1
    return pairs * ways * _window(size_bytes)


def _window(size_bytes: int) -> int:
    return max(1, min(_WINDOW, _WINDOW_BYTES // size_bytes))


_DIRECT_BYTES = {"direct": ALWAYS_DIRECT, "doubling": 0}


class Torch:
    """Through torch.distributed.

    `how`: "arena", for tensors that all ranks of the node see, or how small sums of several nodes are made,
    "direct" or "doubling", or an MPI, which carries what goes between nodes; empty: nothing is asked for.
    """

    def __init__(self, backend: str, how: str) -> None:
        import torch
        import torch.distributed as dist

        from fivefold.mesh import start
        from fivefold.plan import Plan, Provenance

        torch.set_num_threads(1)
        chosen: dict[str, object] = {"comm.backend": backend, "comm.timeout_s": 120.0}
        if how in _DIRECT_BYTES:
            chosen["comm.direct_bytes"] = _DIRECT_BYTES[how]
        if how in ("openmpi", "mpich"):
            chosen["comm.transport"] = "mpi"
        self._mesh = start(Plan().replace(chosen, Provenance("user", "bench")), device="cpu")
        self.rank, self.size, self._in_arena = self._mesh.rank, self._mesh.size, how == "arena"
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
        asked = _Prepared(operation, self, size_bytes, count, lambda n: self._tensor(n, dtype))
        one, sent, got, root = asked.one, asked.sent, asked.got, self.rank == 0
        names = vars(dist)  # torch 2.13 renamed two
        gather: Any = names.get("all_gather_single", names["all_gather_into_tensor"])
        scatter: Any = names.get("reduce_scatter_single", names["reduce_scatter_tensor"])
        runs: dict[str, Run] = {
            "allreduce": lambda: dist.all_reduce(one, group=group, async_op=later),
            "reduce": lambda: dist.reduce(one, 0, group=group, async_op=later),
            "bcast": lambda: dist.broadcast(one, 0, group=group, async_op=later),
            "allgather": lambda: gather(got, one, group=group, async_op=later),
            "reduce-scatter": lambda: scatter(one, sent, group=group, async_op=later),
            "alltoall": lambda: dist.all_to_all_single(got, sent, group=group, async_op=later),
            "barrier": lambda: dist.barrier(group=group, async_op=later),
            "gather": lambda: dist.gather(
                one, [*got.chunk(self.size)] if root else None, 0, group=group, async_op=later
            ),
            "scatter": lambda: dist.scatter(
                one, [*sent.chunk(self.size)] if root else None, 0, group=group, async_op=later
            ),
            # Not communication but its limit: all ranks read and write as many bytes at once.
            "stream": lambda: one.add_(1),
        }  # fmt: skip
        lines = _Sending(
            lambda tensor, rank: dist.send(tensor, group=group, group_dst=rank),
            lambda tensor, rank: dist.recv(tensor, group=group, group_src=rank),
            lambda tensor, rank: dist.isend(tensor, group=group, group_dst=rank),
            lambda tensor, rank: dist.irecv(tensor, group=group, group_src=rank),
        )
        return asked.prepared(runs, lines, later=later)

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
        asked = _Prepared(operation, self, size_bytes, count, lambda n: np.zeros(n, dtype))
        one, sent, got, root = asked.one, asked.sent, asked.got, self.rank == 0

        def call(name: str, *arguments: Any) -> Any:
            if not later:
                return getattr(comm, name)(*arguments)
            return _Waiting(getattr(comm, f"I{name.lower()}")(*arguments))

        def reduce() -> Any:
            return call("Reduce", here, one) if self.rank == 0 else call("Reduce", one, None)

        runs: dict[str, Run] = {
            "allreduce": lambda: call("Allreduce", here, one),
            "reduce": reduce,
            "bcast": lambda: call("Bcast", one),
            "allgather": lambda: call("Allgather", one, got),
            "reduce-scatter": lambda: call("Reduce_scatter_block", sent, one),
            "alltoall": lambda: call("Alltoall", sent, got),
            "barrier": lambda: call("Barrier"),
            "gather": lambda: call("Gather", one, got if root else None),
            "scatter": lambda: call("Scatter", sent if root else None, one),
        }  # fmt: skip
        lines = _Sending(
            comm.Send,
            comm.Recv,
            lambda array, rank: _Waiting(comm.Isend(array, rank)),
            lambda array, rank: _Waiting(comm.Irecv(array, rank)),
        )
        return asked.prepared(runs, lines, later=later)

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
