"""Whether all ranks do the same: one small gather before a step, and who differs in what if they do not."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.errors import FivefoldError, UsageError
from fivefold.mesh import Mesh
from fivefold.plan import AXES
from fivefold.trace import Tag

__all__ = ["Agreement"]

_SHOWN = 160


class Agreement:
    """What all ranks of a mesh have to have in common. Every method is collective; of one rank alone, or of a
    mesh that only predicts, all is agreed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._alone = mesh.size == 1 or mesh.predicts
        self._group: dist.ProcessGroup | None = None if self._alone else mesh.group(*AXES)
        self._mesh = mesh
        self._device = torch.device("cpu")
        if self._group is not None and mesh.device.type != "cpu":
            try:  # processors tell each other, if they can: a GPU need not be waited for
                self._every(torch.zeros(1, dtype=torch.int64))
            except (comm.CommError, RuntimeError):
                self._device = mesh.device

    def same(self, token: int) -> bool:
        """Whether all ranks have the same number, of 63 bits."""
        if self._alone:
            return True
        every = self._every(torch.tensor([token], dtype=torch.int64)).flatten()
        return bool((every == every[0]).all())

    def check_problem(self, problem: FivefoldError | None) -> None:
        """Raise on all ranks what one of them could not do; its own on that rank."""
        if self._alone:
            if problem is not None:
                raise problem
            return
        said = self._texts("" if problem is None else str(problem))
        if problem is not None:
            raise problem
        for text in said:
            if text:
                raise UsageError(text)

    def check(self, lines: Sequence[tuple[str, str]], what: str) -> None:
        """Raise `UsageError` on all ranks unless all have the same lines; the first that differs is told.

        Each line comes with what it is about.
        """
        if self._alone:
            return
        first = self._first_difference([line for line, _ in lines])
        if first is None:
            return
        own, about = lines[first] if first < len(lines) else ("nothing", "")
        said = self._texts(own[:_SHOWN])
        whose = self._texts(about)
        other = next(rank for rank, text in enumerate(said) if text != said[0])
        raise UsageError(
            f"ranks differ in {what}, at {whose[0] or whose[other]}: rank 0 has {said[0]}, rank {other} "
            f"has {said[other]}. All ranks have to be given the same, and to draw the same random "
            "numbers in the net"
        )

    def _first_difference(self, lines: Sequence[str]) -> int | None:
        """The number of the first line that is not the same on all ranks."""
        numbers = torch.tensor([_short(line) for line in lines], dtype=torch.int64)
        counts = self._every(torch.tensor([len(lines)], dtype=torch.int64)).flatten()
        padded = torch.zeros(int(counts.max()), dtype=torch.int64)
        padded[: len(lines)] = numbers
        every = self._every(padded)
        apart = (every != every[0]).any(dim=0).nonzero()
        return int(apart[0]) if len(apart) else None

    def _texts(self, text: str) -> list[str]:
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = self._every(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
        padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._every(padded)
        return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, sizes, strict=True)]

    def _every(self, tensor: Tensor) -> Tensor:
        assert self._group is not None
        return comm.all_gather(tensor.to(self._device), self._group, Tag.CONTROL).cpu()


def _short(line: str) -> int:
    data = line.encode()
    return zlib.crc32(data) << 20 | len(data) & 0xFFFFF
