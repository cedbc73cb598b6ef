"""One training step, or one forward pass, of tiles that one process computes by turns.

    forward    segment by segment: each turn computes it and deposits what the head of the next one asks
    loss       each turn computes the last segment and its share of the loss, and goes backward at once
    backward   segment by segment in reverse: deposits get their gradients, and each turn goes on backward

Between segments autograd's graph is cut. Of a segment only what crosses its ends is kept, and what its head was
answered: what else backward needs is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fivefold.parallel.program.asked import Parked, Turn
from fivefold.parallel.program.net import Outputs, Prepared, RecordedNet
from fivefold.parallel.program.run import carry_out, returned, run_steps
from fivefold.parallel.trees import map_tensors
from fivefold.parallel.turns.segments import Segment
from fivefold.trace import Phase, span

__all__ = ["Step", "TurnUnderWay"]

_T = TypeVar("_T")


@dataclass
class TurnUnderWay:
    """One tile in one step."""

    turn: Turn
    net: RecordedNet
    ready: Prepared
    segments: list[Segment]
    state: Mapping[str, Tensor]
    updates: bool
    """whether it is the turn that updates running statistics"""
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """what is read later on, each cut out of the graph in which it was made"""
    made: list[list[tuple[Tensor, Tensor]]] = field(
        default_factory=list[list[tuple[Tensor, Tensor]]]
    )
    """the inputs, and by segment: what takes part in autograd, within its graph and as it is read later on"""

    def __post_init__(self) -> None:
        inputs = zip(self.ready.program.tape.inputs, self.ready.inputs, strict=True)
        self._keep(dict(inputs))

    def _keep(self, made: Mapping[int, Tensor]) -> None:
        """Cut what a segment has made out of its graph."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for index, tensor in made.items():
            self.values[index] = leaf = tensor.detach().requires_grad_(tensor.requires_grad)
            if tensor.requires_grad:
                pairs.append((tensor, leaf))
        self.made.append(pairs)

    def _moment(self, *, again: bool) -> Any:
        moment = self.ready.moment
        return replace(moment, updates=moment.updates and self.updates and not again)

    def compute(self, number: int, answers: Sequence[Tensor]) -> None:
        """Compute a segment, whose head has been answered, and keep what is read later on."""
        segment, runs = self.segments[number], 0
        takes, gives = segment.span.takes, segment.span.gives

        def body(*taken: Tensor) -> tuple[Tensor, ...]:
            nonlocal runs
            runs += 1
            self.turn.begin(answers)
            made = run_steps(
                self.ready.program, dict(zip(takes, taken, strict=True)), segment.steps, set(gives),
                self.state, self._moment(again=runs > 1),
            )  # fmt: skip
            return tuple(made[index] for index in gives)

        made = _recomputed(body, [self.values[index] for index in takes])
        for index in segment.dies:
            self.values.pop(index, None)
        self._keep(dict(zip(gives, made, strict=True)))

    def ask(self, number: int, answers: Sequence[Tensor]) -> Parked | None:
        """What the head of a segment asks next; None if it does not."""
        segment, asked = self.segments[number], list[Parked]()
        takes = segment.span.takes

        def body(*taken: Tensor) -> tuple[Tensor, ...]:
            self.turn.begin(answers)
            try:
                run_steps(
                    self.ready.program, dict(zip(takes, taken, strict=True)), segment.head, set(),
                    self.state, self._moment(again=True),
                )  # fmt: skip
            except Parked as parked:
                deposit = parked.deposit
                if not asked:
                    asked.append(parked.with_traceback(None))  # which has all that the head has made
                return (deposit,)
            return ()

        made = _recomputed(body, [self.values[index] for index in takes])
        if not made:
            return None
        (asked[0].deposit,) = made
        return asked[0]

    def last(self, answers: Sequence[Tensor], *, again: bool = False) -> dict[int, Tensor]:
        """What the last segment makes of what the net returns, within the graph."""
        segment, program = self.segments[-1], self.ready.program
        self.turn.begin(answers)
        return carry_out(
            program, dict(self.values), segment.steps, returned(program),
            state=self.state, moment=self._moment(again=again),
        )  # fmt: skip

    def outputs(self, values: Mapping[int, Tensor] | None = None) -> Outputs:
        """What the net returns, of this tile."""
        return self.net.finish(self.ready, self.values if values is None else values)

    def back(self) -> None:
        """Go backward through the graph of the segment that was computed last, of those that are left."""
        pairs = [(tensor, leaf.grad) for tensor, leaf in self.made.pop() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])


def _recomputed(body: Callable[..., tuple[Tensor, ...]], taken: list[Tensor]) -> tuple[Tensor, ...]:
    if not torch.is_grad_enabled():
        return body(*taken)
    return cast(
        "tuple[Tensor, ...]",
        checkpoint(body, *taken, use_reentrant=False, preserve_rng_state=False),
    )


@dataclass
class Meeting:
    """A question of all turns."""

    asked: list[Parked]
    """by turn"""
    answers: list[Tensor] = field(default_factory=list[Tensor])
    """by turn; cut out of the graph"""

    def __post_init__(self) -> None:
        made: dict[int, Tensor] = {}
        for line in self._lines():
            first = self.asked[line[0]]
            makers = first.question.meet(
                [self.asked[n].question for n in line],
                [self.asked[n].deposit for n in line],
                first.group.processes,
            )
            for number, make in zip(line, makers, strict=True):
                made[number] = make().detach().requires_grad_(self.asked[number].trains)
        self.answers = [made[number] for number in range(len(self.asked))]

    def _lines(self) -> list[list[int]]:
        """The numbers of turns that ask each other, in order."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, parked in enumerate(self.asked):
            found.setdefault(parked.group.line, []).append((parked.group.number, number))
        return [[number for _, number in sorted(line)] for _, line in sorted(found.items())]

    def back(self) -> None:
        """Let deposits have their gradients, and go backward from there. Collective over processes."""
        for line in self._lines() if self.asked[0].trains else ():
            first = self.asked[line[0]]
            grads = first.question.back(
                [self.asked[n].question for n in line],
                [_gradient(self.answers[n]) for n in line],
                first.group.processes,
            )
            for number, grad in zip(line, grads, strict=True):
                if (deposit := self.asked[number].deposit).requires_grad:
                    torch.autograd.backward(deposit, grad)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class Step:
    """One step.

    Args:
        turns: of this process, in order.
        asks: how many questions heads ask, by program and segment, as far as it is known: it is noted there.
        device: of the mesh.
    """

    def __init__(
        self,
        turns: Sequence[TurnUnderWay],
        asks: dict[tuple[Any, ...], int],
        device: torch.device,
    ) -> None:
        self._turns, self._asks, self._device = turns, asks, device.type
        self.ready = turns[0].ready
        self._last = len(turns[0].segments) - 1
        self._meetings: list[list[Meeting]] = [[] for _ in range(self._last + 2)]
        """by segment that asks, and those of the loss"""

    def _answers(self, number: int, turn: int) -> list[Tensor]:
        return [meeting.answers[turn] for meeting in self._meetings[number]]

    # ---- forward

    def _forward(self, stop: int) -> None:
        """Compute segments up to number `stop`."""
        for number in range(stop):
            self._meet(number)
            for turn, one in enumerate(self._turns):
                one.compute(number, self._answers(number, turn))

    def _meet(self, number: int) -> None:
        """Answer all that the head of a segment asks."""
        meetings, key = self._meetings[number], (id(self.ready.program), number)
        while self._turns[0].segments[number].head and len(meetings) != self._asks.get(key):
            asked = list[Parked]()
            for turn, one in enumerate(self._turns):
                parked = one.ask(number, self._answers(number, turn))
                if parked is None:
                    assert not asked, "turns ask as each other"
                    self._asks[key] = len(meetings)
                    return
                asked.append(parked)
            meetings.append(Meeting(asked))

    def _in_the_end(
        self, work: Callable[[int, TurnUnderWay], _T], meetings: list[Meeting]
    ) -> list[_T]:
        """What `work` gives for each turn, which may ask: it begins anew then, when that is answered."""
        while True:
            done, asked = list[_T](), list[Parked]()
            for turn, one in enumerate(self._turns):
                one.turn.begin([meeting.answers[turn] for meeting in meetings])
                try:
                    done.append(work(turn, one))
                except Parked as parked:
                    asked.append(parked.with_traceback(None))
            if not asked:
                return done
            meetings.append(Meeting(asked))

    def outputs(self) -> list[Outputs]:
        """What the net returns, by turn: tiles of images, of all samples. Without gradients. Collective."""
        self._forward(self._last + 1)
        return self._settled([one.outputs() for one in self._turns])

    def _settled(self, outputs: Sequence[Outputs]) -> list[Outputs]:
        if not outputs:
            return []
        return self._in_the_end(lambda turn, one: one.net.settled(outputs[turn], pieces=False), [])

    # ---- training

    def train(
        self,
        share: Callable[[int, Outputs], Tensor],
        scaled: Callable[[Tensor], Tensor],
        kind: Any,
        *,
        keep: bool,
    ) -> tuple[Tensor, list[Outputs]]:
        """Forward and backward, from `scaled` of what is each turn's share of the loss.

        `kind` is equal where `share` asks alike. Returns the sum of the shares; and with `keep` what the net
        returns, detached, as `outputs` gives it.
        """
        with span(Phase.FORWARD):
            self._forward(self._last)
            self._meet(self._last)
            last, apart = self._last, self._is_apart(share, kind)
            if apart:
                for turn, one in enumerate(self._turns):
                    one.compute(last, self._answers(last, turn))

        def end(turn: int, one: TurnUnderWay) -> tuple[Tensor, Outputs | None]:
            with span(Phase.FORWARD):
                answers = self._answers(last + 1, turn)
                values = one.values if apart else one.last(self._answers(last, turn))
                one.turn.begin(answers)
                outputs = one.outputs(values)
                own = share(turn, outputs)
            with self._backwards():
                scaled(own).backward()
            parts = map_tensors(Tensor.detach, outputs.parts) if keep else None
            return own.detach().reshape(()), replace(outputs, parts=parts) if keep else None

        found = self._in_the_end(end, self._meetings[last + 1])
        with self._backwards():
            self._back(last + apart)
        outputs = [one for _, one in found if one is not None]
        with torch.no_grad():
            return torch.stack([own for own, _ in found]).sum(), self._settled(outputs)

    def _is_apart(self, share: Callable[[int, Outputs], Tensor], kind: Any) -> bool:
        """Whether the loss asks something, so that the last segment has to be cut off before."""
        key = (id(self.ready.program), kind)
        if key not in self._asks:
            one = self._turns[0]
            with torch.no_grad():
                values = one.last(self._answers(self._last, 0), again=True)
                one.turn.begin(())
                try:
                    share(0, one.outputs(values))
                    self._asks[key] = 0
                except Parked:
                    self._asks[key] = 1
        return bool(self._asks[key])

    def _back(self, number: int) -> None:
        """Go backward from what segment `number` has read."""
        for segment in range(number, -1, -1):
            for meeting in reversed(self._meetings[segment]):
                meeting.back()
            self._meetings[segment].clear()
            for one in self._turns:
                one.back()

    @contextmanager
    def _backwards(self) -> Generator[None]:
        """The block is backward, which autocast is not meant for."""
        with span(Phase.BACKWARD), torch.autocast(self._device, enabled=False):
            yield
