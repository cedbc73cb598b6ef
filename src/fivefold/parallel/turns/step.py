"""One training step, or one forward pass, of tiles that one process computes by turns.

    forward    segment by segment: each turn computes it and deposits what the head of the next one asks
    loss       each turn computes the last segment and its share of the loss, and goes backward at once
    backward   segment by segment in reverse: deposits get their gradients, and each turn goes on backward

Between segments autograd's graph is cut. Of a segment only what crosses its ends is kept, and what its head
was answered: what else backward needs is computed again, unless a budget has room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from fivefold.parallel.asked import Parked, Turn
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Outputs, Prepared
from fivefold.parallel.program.rule import Moment
from fivefold.parallel.program.run import carry_out, returned, run_steps
from fivefold.parallel.program.weightless import Count
from fivefold.parallel.trees import map_tensors
from fivefold.parallel.turns.segments import HELD, Segment
from fivefold.parallel.turns.shelf import Shelf
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
    shelf: Shelf
    updates: bool
    """whether it is the turn that updates running statistics"""
    whole: frozenset[int] = frozenset()
    """segments of which all is kept that backward needs"""
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    """what is read later on, each cut out of the graph in which it was made"""
    made: list[list[tuple[GradientEdge | None, Tensor]]] = field(
        default_factory=list[list["tuple[GradientEdge | None, Tensor]"]]
    )
    """the inputs, and by segment what it has made: where in its graph, and as it is read later on"""
    taken: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    """by segment: what it has read"""
    heads: dict[int, list[Tensor]] = field(default_factory=dict[int, list[Tensor]])
    """by segment: likewise, while its head asked"""

    def __post_init__(self) -> None:
        inputs = zip(self.ready.program.tape.inputs, self.ready.inputs, strict=True)
        self._keep(dict(inputs))

    def _keep(self, made: Mapping[int, Tensor]) -> None:
        """Cut what a segment has made out of its graph."""
        pairs: list[tuple[GradientEdge | None, Tensor]] = []
        outputs = returned(self.ready.program)
        for index, tensor in made.items():
            if index in outputs:  # those of all turns are put together in the end
                self.shelf.stays(tensor)
            trains = tensor.requires_grad
            self.values[index] = leaf = self.shelf.keep(tensor).requires_grad_(trains)
            pairs.append((get_gradient_edge(tensor) if trains else None, leaf))
        if torch.is_grad_enabled():
            self.made.append(pairs)

    def _moment(self, *, again: bool) -> Moment:
        moment = self.ready.moment
        return replace(moment, updates=moment.updates and self.updates and not again)

    def reads(self, number: int) -> list[Tensor]:
        """What a segment takes of earlier ones."""
        return [self.values[index] for index in self.segments[number].span.takes]

    def compute(self, number: int, answers: Sequence[Tensor]) -> None:
        """Compute a segment, whose head has been answered, and keep what is read later on."""
        if not torch.is_grad_enabled():
            self._pass(self.segments[number], answers)
            return
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

        taken = self.reads(number)
        made = self._held(number, body, taken) if number in self.whole else _recomputed(body, taken)
        self.taken.append(taken)
        for index in segment.dies:
            self.values.pop(index, None)
        self._keep(dict(zip(gives, made, strict=True)))

    def _held(
        self, number: int, body: Callable[..., tuple[Tensor, ...]], taken: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Compute a segment and keep what backward needs, which is measured the first time."""
        found, key = self.ready.program.found, (HELD, number)
        if key in found or not taken:
            return body(*taken)
        with Count([*taken, *self.state.values()], taken[0].device.type) as count:
            made = body(*taken)
            found[key] = count.now()
        return made

    def _pass(self, segment: Segment, answers: Sequence[Tensor]) -> None:
        """The same without gradients: what nobody reads any more is let go meanwhile."""
        program = self.ready.program
        values = {index: self.values[index] for index in segment.span.takes}
        self.shelf.drop([self.values.pop(index) for index in segment.dies if index in self.values])
        self.turn.begin(answers)
        made = carry_out(
            program, values, segment.steps, set(segment.span.gives),
            state=self.state, moment=self._moment(again=False),
        )  # fmt: skip
        self.turn.begin(())
        self._keep({index: made[index] for index in segment.span.gives})

    def ask(self, number: int, answers: Sequence[Tensor]) -> Parked | None:
        """What the head of a segment asks next; None if it does not."""
        segment, asked = self.segments[number], list[Parked]()
        takes, reads = segment.span.takes, self.reads(number)
        if torch.is_grad_enabled():
            self.heads[number] = reads

        def body(*taken: Tensor) -> tuple[Tensor, ...]:
            self.turn.begin(answers)
            try:
                run_steps(
                    self.ready.program, dict(zip(takes, taken, strict=True)), segment.head, set(),
                    self.state, self._moment(again=True),
                )  # fmt: skip
            except Parked as parked:
                deposit = parked.deposit
                if not asked:  # without its traceback, which has all that the head has made
                    asked.append(parked.with_traceback(None))
                return (deposit,)
            return ()

        made = _recomputed(body, reads)
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

    def back_from(self, deposit: Callable[[], None] | None, number: int) -> None:
        """Go backward from a deposit to what segment `number` reads, whose head asked."""
        with self._reached(self.heads[number]):
            if deposit is not None:
                deposit()

    def back(self, deposit: Callable[[], None] | None, number: int) -> None:
        """Go backward through the segment before `number`, from what that one deposited first."""
        pairs = self.made.pop()
        leaves, taken = [leaf for _, leaf in pairs], self.taken.pop() if self.taken else []
        with self._reached([*self.heads.pop(number, []), *leaves, *taken]):
            if deposit is not None:
                deposit()
            trained = [
                (edge, leaf.grad)
                for edge, leaf in pairs
                if edge is not None and leaf.grad is not None
            ]
            if trained:
                torch.autograd.backward([e for e, _ in trained], [grad for _, grad in trained])
        over = {*map(id, leaves)}  # what the last segment reads dies in none
        self.values = {index: one for index, one in self.values.items() if id(one) not in over}
        self.shelf.drop([*leaves, *(grad for _, grad in trained)])

    @contextmanager
    def _reached(self, leaves: Sequence[Tensor]) -> Generator[None]:
        """Within the block leaves are here, with their gradients, which change."""
        before = [leaf.grad for leaf in leaves if leaf.grad is not None]
        self.shelf.take([*leaves, *before])
        yield
        self.keep_gradients(leaves, before)

    def keep_gradients(self, leaves: Sequence[Tensor], before: Sequence[Tensor]) -> None:
        """Keep the gradients of leaves, of which there were some before."""
        self.shelf.changed(before)
        known = {id(grad) for grad in before}
        found = {id(one.grad): one.grad for one in leaves if one.grad is not None}
        self.shelf.put(grad for key, grad in found.items() if key not in known)


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
            answers = first.question.meet(
                [self.asked[n].question for n in line],
                [self.asked[n].deposit for n in line],
                first.group.processes,
            )
            for number, answer in zip(line, answers, strict=True):
                made[number] = answer.detach().requires_grad_(self.asked[number].trains)
        self.answers = [made[number] for number in range(len(self.asked))]

    def _lines(self) -> list[list[int]]:
        """The numbers of turns that ask each other, in order."""
        found: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for number, parked in enumerate(self.asked):
            found.setdefault(parked.group.line, []).append((parked.group.number, number))
        return [[number for _, number in sorted(line)] for _, line in sorted(found.items())]

    def back(self) -> dict[int, Callable[[], None]]:
        """By turn: goes backward from what it deposited. Collective over processes."""
        found: dict[int, Callable[[], None]] = {}
        for line in self._lines() if self.asked[0].trains else ():
            first = self.asked[line[0]]
            grads = first.question.back(
                [self.asked[n].question for n in line],
                [_gradient(self.answers[n]) for n in line],
                first.group.processes,
            )
            for number, grad in zip(line, grads, strict=True):
                if (deposit := self.asked[number].deposit).requires_grad:
                    found[number] = partial(torch.autograd.backward, deposit, grad)
        return found


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


class Step:
    """One step.

    Args:
        turns: of this process, in order.
        shelf: what turns hold between visits.
        device: of the mesh.
    """

    def __init__(
        self,
        turns: Sequence[TurnUnderWay],
        shelf: Shelf,
        device: torch.device,
    ) -> None:
        self._turns, self._shelf, self._device = turns, shelf, device.type
        self.ready = turns[0].ready
        self._asks: dict[Any, int] = self.ready.program.found
        """how many questions heads ask, by segment, and whether the loss does, as far as it is known"""
        self._last = len(turns[0].segments) - 1
        self._meetings: list[list[Meeting]] = [[] for _ in range(self._last + 2)]
        """by segment that asks, and those of the loss"""

        state = turns[0].state.values()
        self._kind = torch.is_grad_enabled(), tuple(tensor.requires_grad for tensor in state)
        """what heads ask may differ by"""

    def cut(self, turn: int) -> list[Tensor]:
        """Where the graph of what a turn computes last begins, beside parameters."""
        answers = [meeting.answers[turn] for every in self._meetings for meeting in every]
        return [*self._turns[turn].values.values(), *answers]

    def _answers(self, number: int, turn: int) -> list[Tensor]:
        return [meeting.answers[turn] for meeting in self._meetings[number]]

    # ---- forward

    def _forward(self, stop: int) -> None:
        """Compute segments up to number `stop`."""
        for number in range(stop):
            self._meet(number)
            order = self._order(number)
            for at, (turn, one) in enumerate(order):
                self._shelf.take(one.reads(number))
                for _, following in order[at + 1 : at + 2]:
                    self._shelf.ahead(following.reads(number))
                one.compute(number, self._answers(number, turn))
                self._shelf.put_away()
            if not torch.is_grad_enabled():
                self._meetings[number].clear()

    def _order(self, number: int) -> list[tuple[int, TurnUnderWay]]:
        """Turns as they compute a segment: who stopped last goes on first, while its values are here."""
        turns = list(enumerate(self._turns))
        return turns[::-1] if number % 2 else turns

    def _meet(self, number: int) -> None:
        """Answer all that the head of a segment asks."""
        meetings, key = self._meetings[number], (number, self._kind)
        while self._turns[0].segments[number].head and len(meetings) != self._asks.get(key):
            asked: dict[int, Parked] = {}
            for turn, one in enumerate(self._turns):
                self._shelf.take(one.reads(number))
                parked = one.ask(number, self._answers(number, turn))
                if parked is None:
                    assert not asked, "turns ask as each other"
                    self._asks[key] = len(meetings)
                    return
                asked[turn] = parked
                self._shelf.put_away()
            meetings.append(self._met([asked[turn] for turn in range(len(asked))]))

    def _met(self, asked: list[Parked]) -> Meeting:
        meeting = Meeting(asked)
        for answer in meeting.answers:
            self._shelf.stays(answer)
        return meeting

    def _in_the_end(
        self, work: Callable[[int, TurnUnderWay], _T], meetings: list[Meeting]
    ) -> list[_T]:
        """What `work` gives for each turn, which may ask: it begins anew then, when that is answered."""
        while True:
            done, asked = list[_T](), list[Parked]()
            for turn, one in enumerate(self._turns):
                one.turn.begin([meeting.answers[turn] for meeting in meetings])
                self._shelf.take(one.values.values())
                try:
                    done.append(work(turn, one))
                except Parked as parked:
                    asked.append(parked.with_traceback(None))
                self._shelf.put_away()
            if not asked:
                return done
            meetings.append(self._met(asked))

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
                    self._shelf.take(one.reads(last))
                    one.compute(last, self._answers(last, turn))
                    one.heads[last + 1] = [*one.values.values()]
                    self._shelf.put_away()

        def end(turn: int, one: TurnUnderWay) -> tuple[Tensor, Outputs | None]:
            with span(Phase.FORWARD):
                answers = self._answers(last + 1, turn)
                values = one.values if apart else one.last(self._answers(last, turn))
                one.turn.begin(answers)
                outputs = one.outputs(values)
                own = share(turn, outputs)
            with self._backwards():
                scaled(own).backward()
            one.keep_gradients([*one.values.values()], [])
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
        key = ("loss", self._kind, kind)
        if key not in self._asks:
            one = self._turns[0]
            self._shelf.take(one.values.values())
            with torch.no_grad():
                values = one.last(self._answers(self._last, 0), again=True)
                one.turn.begin(())
                try:
                    share(0, one.outputs(values))
                    self._asks[key] = 0
                except Parked:
                    self._asks[key] = 1
            self._shelf.put_away()
        return bool(self._asks[key])

    def _back(self, number: int) -> None:
        """Go backward from what segment `number` has read."""
        for segment in range(number, -1, -1):
            first: dict[int, Callable[[], None]] = {}
            while meetings := self._meetings[segment]:
                # Each is let go with its turn: its graph holds what the head has read, and gradients of that.
                first = meetings.pop().back()
                for turn, one in enumerate(self._turns) if meetings else ():
                    one.back_from(first.pop(turn, None), segment)
                    self._shelf.put_away()
            order = self._order(segment - 1)[::-1]
            for at, (turn, one) in enumerate(order):
                for _, following in order[at + 1 : at + 2]:
                    self._shelf.ahead(following.taken[-1] if following.taken else ())
                one.back(first.pop(turn, None), segment)
                self._shelf.put_away()

    @contextmanager
    def _backwards(self) -> Generator[None]:
        """The block is backward, which autocast is not meant for."""
        with span(Phase.BACKWARD), torch.autocast(self._device, enabled=False):
            yield
