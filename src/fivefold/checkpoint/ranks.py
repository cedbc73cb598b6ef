"""The ranks of a checkpoint talking: short texts, bytes, and numbers compared while training goes on.

Plain bytes over gloo, no pickle. A process alone has no group, and talks to itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.checkpoint.problems import described
from fivefold.comm.collectives import named
from fivefold.errors import CheckpointError, UsageError
from fivefold.trace import Tag

__all__ = ["PendingComparison", "Ranks"]


_ROUND_S = 2.0
_T = TypeVar("_T")


class Ranks:
    """The ranks of a group, for use by one thread."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()

    def gather(self, told: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every rank tells, by rank; JSON values. Collective."""
        return [cast("dict[str, Any]", json.loads(text)) for text in self._gather(json.dumps(told))]

    def agree(self, what: str, do: Callable[[], Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Do something on every rank and gather what it tells. Collective.

        Raises `CheckpointError` on every rank if it raised on one, with the reasons; `UsageError` if
        it was one.
        """
        problem: Exception | None = None
        told: Mapping[str, Any] = {}
        try:
            told = do()
        except Exception as failed:  # noqa: BLE001 - told to all
            problem = failed
        every = self.gather(
            {"problem": described(problem), "usage": isinstance(problem, UsageError)}
            if problem
            else {"told": told}
        )
        if misuse := next((one["problem"] for one in every if one.get("usage")), None):
            raise UsageError(misuse) from problem
        reasons = [
            f"rank {rank}: {one['problem']}" for rank, one in enumerate(every) if "problem" in one
        ]
        if reasons:
            raise CheckpointError(f"{what} failed on {_listed(reasons)}") from problem
        return [one["told"] for one in every]

    def agree_later(
        self,
        what: str,
        begin: Callable[[], Future[_T] | None],
        tired: Callable[[], str] = str,
    ) -> _T | None:
        """As `agree`, for what may take longer than ranks wait for one another; the own part's result.

        Ranks whose part is done, or that have none, tell the others again and again that they are there.
        All give up, with `CheckpointError`, once `tired` gives a reason on a rank whose part is not done.
        """
        own: list[Future[_T] | None] = []

        def start() -> dict[str, Any]:
            own.append(begin())
            return {}

        self.agree(what, start)
        mine, results = own[0], list[_T]()
        while True:
            if mine is not None:
                wait([mine], _ROUND_S)
            busy = mine is not None and not mine.done()
            told = self.gather({"busy": busy, "tired": tired() if busy else ""})
            if not any(one["busy"] for one in told):
                break
            given_up = [
                f"rank {rank}: {one['tired']}" for rank, one in enumerate(told) if one["tired"]
            ]
            if given_up:
                raise CheckpointError(f"{what} was given up on {_listed(given_up)}")

        def end() -> dict[str, Any]:
            if mine is not None:
                results.append(mine.result())
            return {}

        self.agree(what, end)
        return results[0] if results else None

    def from_first(self, data: bytes | None) -> bytes:
        """The first rank's bytes. Collective."""
        if self.group is None or self.size == 1:
            assert data is not None
            return data
        length = torch.tensor([len(data or b"")], dtype=torch.int64)
        with named("broadcast", self.group, Tag.CHECKPOINT):
            dist.broadcast(length, group=self.group, group_src=0)
            buffer = torch.empty(int(length.item()), dtype=torch.uint8)
            if data is not None and self.rank == 0:
                buffer = _tensor(data)
            if len(buffer):
                dist.broadcast(buffer, group=self.group, group_src=0)
        return buffer.numpy().tobytes()

    def _gather(self, text: str) -> list[str]:
        if self.group is None or self.size == 1:
            return [text]
        mine = _tensor(text.encode())
        lengths = comm.all_gather(torch.tensor([len(mine)]), self.group, Tag.CHECKPOINT)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(mine)] = mine
        every = comm.all_gather(padded, self.group, Tag.CHECKPOINT)
        return [
            row[: int(length)].numpy().tobytes().decode()
            for row, length in zip(every, lengths.flatten(), strict=True)
        ]

    def start_comparison(self, numbers: Sequence[int]) -> PendingComparison:
        """Begin to find the largest of each number over all ranks. Collective, in the same order."""
        values = torch.tensor(list(numbers), dtype=torch.int64)
        if self.group is None or self.size == 1:
            return PendingComparison(values, None, None)
        with named("all_reduce", self.group, Tag.CONTROL):
            work = dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group, async_op=True)
        return PendingComparison(values, work, self.group)


class PendingComparison:
    """A comparison under way."""

    def __init__(
        self, values: Tensor, work: dist.Work | None, group: dist.ProcessGroup | None
    ) -> None:
        self._values, self._work, self._group = values, work, group

    def wait(self) -> list[int]:
        """The largest of each number over all ranks."""
        if self._work is not None and self._group is not None:
            with named("all_reduce", self._group, Tag.CONTROL):
                self._work.wait()
            self._work = None
        return [int(value) for value in self._values.tolist()]


def _tensor(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


def _listed(reasons: Sequence[str]) -> str:
    shown = "; ".join(reasons[:3])
    return shown if len(reasons) <= 3 else f"{shown}; and {len(reasons) - 3} more"
