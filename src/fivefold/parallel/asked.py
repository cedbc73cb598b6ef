"""What the tiles that one process computes by turns ask each other, in place of messages.

A turn runs until it asks what only all turns together can tell. It is parked there: the exception carries
what it deposits. When all have deposited, the question is answered, and each goes on from the step that
asked.

    turn 0   steps ... asks |                  | answered ... steps ... asks |
    turn 1                  | steps ... asks   |                             | answered ...

Deposits and answers are cut out of autograd's graph: a question also says which gradients deposits get, given
those of the answers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold import comm
from fivefold.trace import Tag

__all__ = [
    "Extreme", "Parked", "Processes", "Question", "Shared", "Sum", "Turn", "TurnGroup",
    "added",
]  # fmt: skip


class Question(Protocol):
    """One turn's side of a question; `everyone` are those of all turns that ask each other, in order."""

    def meet(
        self, everyone: Sequence[Any], deposits: Sequence[Tensor], processes: Processes
    ) -> Sequence[Tensor]:
        """The answer of each turn. Collective."""
        ...

    def back(
        self, everyone: Sequence[Any], grads: Sequence[Tensor], processes: Processes
    ) -> Sequence[Tensor]:
        """The gradient of each deposit, from those of the answers: the adjoint. Collective."""
        ...


class Parked(Exception):
    """A turn cannot go on."""

    def __init__(self, question: Question, group: TurnGroup, deposit: Tensor, trains: bool) -> None:
        super().__init__("a turn asked what nobody collects")
        self.question, self.group, self.deposit = question, group, deposit
        self.trains = trains
        """whether the answer takes part in autograd"""


class Turn:
    """Where one of the tiles is."""

    def __init__(self) -> None:
        self._answers: Sequence[Tensor] = ()
        self._asked = 0

    def begin(self, answers: Sequence[Tensor]) -> None:
        """Run on from a step whose first questions have been answered."""
        self._answers, self._asked = answers, 0

    def ask(
        self, question: Question, group: TurnGroup, deposit: Callable[[], Tensor], *, trains: bool
    ) -> Tensor:
        """The answer, or raise `Parked`."""
        number, self._asked = self._asked, self._asked + 1
        if number >= len(self._answers):
            raise Parked(question, group, deposit(), trains)
        answer = self._answers[number]
        return answer if trains else answer.clone()  # a rule may change it in place


@dataclass(frozen=True)
class Processes:
    """Who asks each other: along some axes, `sizes` processes, and `turns` of each."""

    sizes: tuple[int, ...]
    turns: tuple[int, ...]
    group: dist.ProcessGroup | None
    """of these processes, row-major; None where there is one"""

    @property
    def size(self) -> int:
        """All turns of all processes."""
        return math.prod(self.sizes) * math.prod(self.turns)

    def home(self, number: int) -> int:
        """The process, by number, whose turn `number` is, both row-major."""
        place, stride = 0, 1
        for size, turns in zip(reversed(self.sizes), reversed(self.turns), strict=True):
            number, here = divmod(number, size * turns)
            place, stride = place + here // turns * stride, stride * size
        return place

    def swap(
        self,
        boxes: Mapping[tuple[int, int], Tensor],
        wanted: Mapping[tuple[int, int], int],
        like: Tensor,
    ) -> dict[tuple[int, int], Tensor]:
        """What turns of other processes have for those of this one, by (from, to).

        Args:
            boxes: what turns of this process have for others.
            wanted: what they want, with its number of elements.
            like: of the dtype of all of it, and on its device.
        """
        if self.group is None:
            return {}
        me, sent, due = self.group.rank(), dict[int, list[Tensor]](), dict[int, list[Any]]()
        for (source, target), box in sorted(boxes.items(), key=lambda one: one[0]):
            if (peer := self.home(target)) != me:
                sent.setdefault(peer, []).append(box.reshape(-1))
            assert self.home(source) == me
        for key in sorted(wanted):
            if (peer := self.home(key[0])) != me:
                due.setdefault(peer, []).append(key)
        messages = comm.start_messages(
            {peer: torch.cat(own) for peer, own in sent.items()},
            {peer: like.new_empty(sum(wanted[k] for k in keys)) for peer, keys in due.items()},
            self.group, Tag.HALO,
        )  # fmt: skip
        found = messages.wait()
        return {
            key: part
            for peer, keys in due.items()
            for key, part in zip(keys, found[peer].split([wanted[k] for k in keys]), strict=True)
        }


class TurnGroup(dist.ProcessGroup):
    """In place of a process group, for one turn. Its collectives are the questions of rules."""

    def __init__(
        self,
        turn: Turn,
        number: int,
        line: tuple[int, ...],
        processes: Processes,
    ) -> None:
        super().__init__(number, processes.size)  # pyright: ignore[reportCallIssue]
        self.turn, self.number, self.processes = turn, number, processes
        self.line = line
        """equal for the turns of this process that ask each other"""

    def ask(self, question: Question, deposit: Callable[[], Tensor], *, trains: bool) -> Tensor:
        """See `Turn.ask`. Who asks nobody but itself has what it deposits."""
        if self.size() == 1:
            return deposit()
        return self.turn.ask(question, self, deposit, trains=trains and torch.is_grad_enabled())


def _added(tensors: Sequence[Tensor], processes: Processes) -> Sequence[Tensor]:
    total = tensors[0].detach().clone(memory_format=torch.contiguous_format)
    for tensor in tensors[1:]:
        total += tensor.detach()
    if processes.group is not None:
        real = torch.view_as_real(total) if total.is_complex() else total
        comm.all_reduce(real, processes.group, Tag.HALO)
    return [total] * len(tensors)


class Sum:
    """Of all deposits; its adjoint is the same once more."""

    def meet(
        self,
        everyone: Sequence[Any],  # noqa: ARG002 - see `Question`
        deposits: Sequence[Tensor],
        processes: Processes,
    ) -> Sequence[Tensor]:
        """See `Question`."""
        return _added(deposits, processes)

    def back(
        self,
        everyone: Sequence[Any],  # noqa: ARG002 - see `Question`
        grads: Sequence[Tensor],
        processes: Processes,
    ) -> Sequence[Tensor]:
        """See `Question`."""
        return _added(grads, processes)


def added(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all of `group` have, without gradients; `own` may be changed."""
    if isinstance(group, TurnGroup):
        return group.ask(Sum(), lambda: own, trains=False)
    return comm.all_reduce(own, group, Tag.BATCH_NORM)


class Shared(Sum):
    """What all turns have alike; each of its gradients is a part of that of one process."""

    def meet(
        self,
        everyone: Sequence[Any],  # noqa: ARG002 - see `Question`
        deposits: Sequence[Tensor],
        processes: Processes,  # noqa: ARG002 - likewise
    ) -> Sequence[Tensor]:
        """See `Question`."""
        return [deposit.detach() for deposit in deposits]


@dataclass(frozen=True)
class Extreme(Sum):
    """The largest or smallest of all deposits, element by element; it takes no part in autograd."""

    largest: bool

    def meet(
        self,
        everyone: Sequence[Any],  # noqa: ARG002 - see `Question`
        deposits: Sequence[Tensor],
        processes: Processes,
    ) -> Sequence[Tensor]:
        """See `Question`."""
        own = torch.stack([deposit.detach() for deposit in deposits])
        found = own.amax(0) if self.largest else own.amin(0)
        if processes.group is not None:
            every = comm.all_gather(found, processes.group, Tag.HALO)
            found = every.amax(0) if self.largest else every.amin(0)
        return [found] * len(deposits)
