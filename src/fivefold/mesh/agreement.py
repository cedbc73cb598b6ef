"""Whether all ranks do the same: one small gather before a step, and who differs in what if they do not."""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.errors import FivefoldError, UsageError
from fivefold.plan import AXES
from fivefold.trace import Tag
from fivefold.trace.standstill import listed

if TYPE_CHECKING:
    from fivefold.mesh.mesh import Mesh

__all__ = ["Agreement", "Line", "Position", "differences", "note_position", "position_of"]

Line = tuple[str, str]
"""a value in words, and what it is of"""

_SHOWN = 160
_MOST_LINES = 3
_MOST_VALUES = 4
_NOTE = "_fivefold_position"


@dataclass(frozen=True)
class Position:
    """Which batch of which loader a tensor is of. Noted on it, as a step sees nothing else."""

    made: tuple[Line, ...]
    """what the loader was made with"""
    batch: str
    epoch: int

    @property
    def token(self) -> int:
        """A number, never 0, that other batches do not have."""
        return _token([*self.made, (self.batch, "")]) | 1


def note_position(tensor: Tensor, position: Position) -> Tensor:
    """Note on `tensor` which batch it is of, and return it. Operations give new tensors without the note."""
    setattr(tensor, _NOTE, position)
    return tensor


def position_of(tensors: Sequence[Tensor]) -> Position | None:
    """The first position that one of these tensors carries."""
    return next((found for t in tensors if (found := getattr(t, _NOTE, None)) is not None), None)


class Agreement:
    """What all ranks of a mesh have to have in common. Every method is collective; of one rank alone, or of a
    mesh that only predicts, all is agreed.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._alone = mesh.size == 1 or mesh.predicts
        self._group: dist.ProcessGroup | None = None if self._alone else mesh.group(*AXES)
        self._device = torch.device("cpu")
        self.position: Position | None = None
        """which batch is computed next; None if this rank does not know"""
        if self._group is not None and mesh.device.type != "cpu":
            try:  # processors tell each other, if they can: a GPU need not be waited for
                self._every(torch.zeros(1, dtype=torch.int64))
            except (comm.CommError, RuntimeError):
                self._device = mesh.device

    def same(self, token: int) -> bool:
        """Whether all ranks have the same number, of 63 bits.

        Raises `UsageError` on all ranks if they are about to compute different batches: their positions go
        along with the number.
        """
        if self._alone:
            return True
        own = 0 if self.position is None else self.position.token
        tokens, positions = self._every(torch.tensor([token, own])).unbind(1)
        _check_known(tokens, range(len(tokens)))
        known = positions[positions != 0]
        if len(known) and bool((known != known[0]).any()):
            self._tell_positions()
        return bool((tokens == tokens[0]).all())

    def rows(self, own: int, group: dist.ProcessGroup, *, known: bool) -> list[int]:
        """How many samples each rank of `group` has of a batch, given one's own number.

        A rank whose tensors say so itself (`known`) goes on to `same` if these are the ranks of the mesh.
        Raises `UsageError` on all of them then, as here, if others do not know.
        """
        if group.size() == 1:
            return [own]
        mine = torch.tensor([own if known else _UNKNOWN - own, 0], device=self._device)
        found = comm.all_gather(mine, group, Tag.CONTROL)[:, 0].cpu()
        _check_known(found, dist.get_process_group_ranks(group))
        return (found if known else _UNKNOWN - found).tolist()

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

    def check(
        self,
        lines: Sequence[Line],
        what: str,
        remedy: str = "give every rank the same",
        most: int = _MOST_LINES,
    ) -> None:
        """Raise `UsageError` on all ranks unless all have the same lines; `most` that differ are told.

        A rank without any lines has nothing to say.
        """
        if self._alone:
            return
        mine = _token(lines) if lines else 0
        tokens = self._every(torch.tensor([mine])).flatten()
        tokens = tokens[tokens != 0]
        if not len(tokens) or bool((tokens == tokens[0]).all()):
            return
        apart = self._apart(lines)[:most]
        own = [(lines[i][0][:_SHOWN], lines[i][1]) if i < len(lines) else _NOTHING for i in apart]
        every = [json.loads(text) for text in self._texts(json.dumps(own if lines else []))]
        raise UsageError(differences(every, what, remedy))

    def _tell_positions(self) -> None:
        own = self.position
        self.check([] if own is None else own.made, "the arguments of ff.loader")
        self.check(
            [] if own is None else [(own.batch, "the one")],
            "the batches that they compute together",
            "let every rank take all batches of a loader, in their order",
        )

    def _apart(self, lines: Sequence[Line]) -> list[int]:
        """The numbers of the lines that are not the same on all ranks."""
        counts = self._every(torch.tensor([len(lines)])).flatten()
        padded = torch.zeros(int(counts.max()), dtype=torch.int64)
        padded[: len(lines)] = torch.tensor([_short(line) for line, _ in lines], dtype=torch.int64)
        every = self._every(padded)[counts > 0]
        return (every != every[0]).any(dim=0).nonzero().flatten().tolist()

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


_UNKNOWN = -2
"""from here down, a number tells how many samples a rank has that does not know which"""


def _check_known(tokens: Tensor, ranks: Sequence[int]) -> None:
    without = [
        rank for rank, token in zip(ranks, tokens.tolist(), strict=True) if token <= _UNKNOWN
    ]
    if 0 < len(without) < len(tokens):
        raise UsageError(
            f"the batch of {listed(without)} does not say which samples of the whole one it has, as that of "
            "other ranks does: tensors know that as fivefold.loader and model.shard give them, and results "
            "such as x * 2 do not. Do the same with it on all ranks, or do it in the dataset"
        )


_NOTHING: Line = ("nothing", "")


def differences(every: Sequence[Sequence[Line]], what: str, remedy: str) -> str:
    """Who differs in which of the lines that ranks have, by rank; empty if nobody does.

    >>> differences([[("0", "seed")], [("1", "seed")], []], "the arguments", "give every rank the same")
    'ranks differ in the arguments: seed is 0 on rank 0, 1 on rank 1; give every rank the same'
    """
    ranks = [rank for rank, lines in enumerate(every) if lines]
    parts, told_of = list[str](), set[str]()
    for column in itertools.zip_longest(*(every[rank] for rank in ranks), fillvalue=_NOTHING):
        names = {name for _, name in column if name}
        if parts and (len(names) > 1 or names & told_of):
            break  # of a rank that has one line more, all that follow are shifted
        values: dict[str, list[int]] = {}
        for rank, (value, name) in zip(ranks, column, strict=True):
            values.setdefault(f"{name} ({value})" if len(names) > 1 else value, []).append(rank)
        if len(values) > 1:
            told_of |= names
            lead = "" if len(names) > 1 else f"{names.pop()} is "
            told = [f"{value} on {listed(who)}" for value, who in values.items()]
            rest = f" and {len(told) - _MOST_VALUES} more" if len(told) > _MOST_VALUES else ""
            parts.append(lead + ", ".join(told[:_MOST_VALUES]) + rest)
    return f"ranks differ in {what}: {'; '.join(parts)}; {remedy}" if parts else ""


def _short(line: str) -> int:
    data = line.encode()
    return zlib.crc32(data) << 20 | len(data) & 0xFFFFF


def _token(lines: Sequence[Line]) -> int:
    text = "\n".join(value for value, _ in lines).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 2
