"""Carrying out a schedule: forward and backward of stages, and what travels between them.

F   take what arrives ── steps of the stage ── send what crosses its end      (last stage: the loss)
B   take gradients of what was sent ── autograd ── send those of what was taken
I   as B, but gradients of weights are left for W
R   start to sum the stage's gradients over the ranks that hold it
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold import comm
from fivefold.parallel.pipeline.gradients import StageGradients
from fivefold.parallel.pipeline.schedule import Action, Op, Row, Schedule
from fivefold.parallel.pipeline.stages import Crossing, Stage
from fivefold.parallel.pipeline.statistics import Notes
from fivefold.parallel.pipeline.wires import Arriving, Wire
from fivefold.parallel.program.net import RecordedNet
from fivefold.parallel.program.prepared import Prepared
from fivefold.parallel.program.program import Compute
from fivefold.parallel.program.run import carry_out, returned
from fivefold.parallel.reduce import without_effect
from fivefold.torch_private import base_of
from fivefold.trace import Phase, span

__all__ = ["Feed", "Step"]

_AHEAD = 2
"""messages that are expected before they are needed: they arrive while something else is computed"""


@dataclass
class _Flight:
    """A micro-batch between the forward and the backward of a stage."""

    taken: dict[int, Tensor]
    given: list[Tensor]
    loss: Tensor | None
    deferred: Deferred | None


@dataclass(frozen=True)
class _Leaving:
    """A message that was sent."""

    messages: comm.Messages
    peer: int
    read: int
    """number of the action in the peer's row that reads it"""


@dataclass(frozen=True)
class Feed:
    """What one micro-batch is computed from on this rank."""

    ready: Prepared
    stages: list[Stage]


@dataclass
class Step:
    """One training step of a rank, or one forward pass."""

    schedule: Schedule
    rank: int
    net: RecordedNet
    wires: Mapping[tuple[int, bool], Wire]
    """by chain, and whether it leads back"""
    feed: Callable[[int], Feed]
    """a micro-batch by number"""
    loss: Callable[[int, Prepared, Mapping[int, Tensor]], Tensor]
    """a micro-batch's share, from the values that the net returns"""
    scaled: Callable[[Tensor], Tensor]
    gradients: Mapping[int, StageGradients]
    """by stage"""
    notes: Mapping[int, Notes] = field(default_factory=dict[int, Notes])
    """by stage; empty where one rank sees all micro-batches, which updates statistics at once"""
    total: Tensor | None = None
    """sum of the shares of the loss that this rank computed"""
    _flights: dict[tuple[int, int, int], _Flight] = field(
        default_factory=dict[tuple[int, int, int], _Flight]
    )
    _arriving: dict[Action, Arriving] = field(default_factory=dict[Action, Arriving])
    _leaving: list[_Leaving] = field(default_factory=list["_Leaving"])
    _sums: dict[int, int] = field(default_factory=dict[int, int])

    def __post_init__(self) -> None:
        row = self.schedule.rows[self.rank]
        self._actions = frozenset(row)
        self._numbers = [{a: n for n, a in enumerate(row)} for row in self.schedule.rows]
        # The last backward of every stage, which completes its gradients if nothing is left to W.
        self._last = {a.stage: a for a in row if a.op in (Op.BACKWARD, Op.WEIGHT)}.values()

    def run(self) -> None:
        """Carry out this rank's row. Collective over the pipe axis, and over what its stages need."""
        row = self.schedule.rows[self.rank]
        for number, action in enumerate(row):
            self._expect(row[number:])
            match action.op:
                case Op.FORWARD:
                    self._forward(action)
                case Op.BACKWARD | Op.INPUT:
                    self._backward(action)
                case Op.WEIGHT:
                    flight = self._flights.pop(_key(action))
                    assert flight.deferred is not None
                    with self._backwards():
                        flight.deferred.finish(counted=self._counts(action))
                case Op.REDUCE:
                    self._reduce(action)
        for leaving in self._leaving:
            leaving.messages.wait()

    # ---- messages

    def _expect(self, row: Row) -> None:
        """Get ready for the next messages, in the order in which they are needed."""
        due = [a for a in row if self._source(a) is not None][:_AHEAD]
        for action in due:
            if action in self._arriving:
                continue
            values, peer = self._incoming(action)
            if values:
                wire = self.wires[action.chain, action.op is not Op.FORWARD]
                self._arriving[action] = wire.expect(values, peer, gaps=self._gaps(action))

    def _source(self, action: Action) -> int | None:
        """The stage whose message an action waits for."""
        match action.op:
            case Op.FORWARD:
                return action.stage - 1 if action.stage else None
            case Op.BACKWARD | Op.INPUT:
                return action.stage + 1 if action.stage + 1 < self.schedule.stages else None
            case _:
                return None

    def _incoming(self, action: Action) -> tuple[Sequence[Crossing], int]:
        source = self._source(action)
        assert source is not None
        stage = self.feed(action.micro).stages[action.stage]
        values = stage.takes if action.op is Op.FORWARD else _trained(stage.gives)
        return values, self.schedule.rank_of(action.chain, source)

    def _gaps(self, action: Action) -> bool:
        """Whether the loss or the net may leave out something, whose gradient is None then and not zero."""
        if action.op is Op.FORWARD:
            return False
        program = self.feed(action.micro).ready.program
        return len(returned(program)) > 1 or program.tape.stops

    def _send(
        self,
        action: Action,
        stage: int,
        values: Sequence[Crossing],
        tensors: Sequence[Tensor | None],
    ) -> None:
        if values:
            peer = self.schedule.rank_of(action.chain, stage)
            wire = self.wires[action.chain, action.op is not Op.FORWARD]
            messages = wire.send(values, tensors, peer, gaps=self._gaps(action))
            self._leaving.append(_Leaving(messages, peer, self._number(peer, action, stage)))

    def _arrived(self, action: Action) -> list[Tensor | None]:
        """What an action waits for. It proves that what its sender has read before has left.

        Backends do not tell whether a message has left unless one waits for it, and till then it is alive.
        """
        arriving, source = self._arriving.pop(action, None), self._source(action)
        if arriving is None or source is None:
            return []
        tensors = arriving.with_gaps()
        peer = self.schedule.rank_of(action.chain, source)
        sent = self._number(peer, action, source)
        for leaving in self._leaving:
            if leaving.peer == peer and leaving.read < sent:
                leaving.messages.wait()
        self._leaving = [one for one in self._leaving if one.peer != peer or one.read >= sent]
        return tensors

    def _number(self, rank: int, action: Action, stage: int) -> int:
        """Where in its row a rank does for `stage` what is done here in `action`."""
        if action.op is Op.FORWARD:
            return self._numbers[rank][action.same(Op.FORWARD, stage)]
        backward = action.same(Op.BACKWARD, stage)
        numbers = self._numbers[rank]
        return numbers[backward if backward in numbers else action.same(Op.INPUT, stage)]

    # ---- actions

    def _forward(self, action: Action) -> None:
        feed = self.feed(action.micro)
        ready, stage = feed.ready, feed.stages[action.stage]
        if action.stage:
            tensors = [tensor for tensor in self._arrived(action) if tensor is not None]
        else:
            by_index = dict(zip(ready.program.tape.inputs, ready.inputs, strict=True))
            tensors = [by_index[value.index].detach() for value in stage.takes]
        taken = {
            value.index: tensor.requires_grad_(value.trained and torch.is_grad_enabled())
            for value, tensor in zip(stage.takes, tensors, strict=True)
        }
        notes = self.notes.get(action.stage)
        moment = ready.moment
        if notes is not None:
            notes.begin(action.micro)
            moment = replace(moment, note=notes)
        deferred = Deferred() if action.same(Op.INPUT, action.stage) in self._actions else None
        with span(Phase.FORWARD):
            keep = {value.index for value in stage.gives} | stage.leaves
            made = carry_out(
                ready.program, taken | stage.carried_now(), stage.span, keep,
                state=self.net.state(ready), moment=moment, defer=deferred,
            )  # fmt: skip
            self.net.leave(ready, {i: made[i] for i in stage.leaves}, stages=True)
        given = [made[value.index] for value in stage.gives]
        loss = None
        if action.stage + 1 == self.schedule.stages:
            loss = self.loss(action.micro, ready, made)
            self.total = loss.detach() + (0 if self.total is None else self.total)
        else:
            self._send(action, action.stage + 1, stage.gives, given)
        if notes is not None:
            notes.end()
        if torch.is_grad_enabled():
            self._flights[_key(action)] = _Flight(taken, given, loss, deferred)

    def _backward(self, action: Action) -> None:
        feed = self.feed(action.micro)
        stage = feed.stages[action.stage]
        flight = self._flights.pop(_key(action))
        states = () if self._counts(action) else self.net.state(feed.ready).values()
        last = self.gradients[action.stage].last() if action in self._last else nullcontext()
        with self._backwards(), without_effect(states), last:
            if flight.loss is not None:
                self.scaled(flight.loss).backward()
            else:
                self._differentiate(stage, flight, self._arrived(action))
        if action.stage:
            values = _trained(stage.takes)
            leaves = [flight.taken[value.index] for value in values]
            self._send(action, action.stage - 1, values, [leaf.grad for leaf in leaves])
        if action.op is Op.INPUT:
            self._flights[_key(action)] = _Flight({}, [], None, flight.deferred)

    @contextmanager
    def _backwards(self) -> Generator[None]:
        """The block is backward, which autocast is not meant for."""
        device = next(iter(self.wires.values())).device.type
        with span(Phase.BACKWARD), torch.autocast(device, enabled=False):
            yield

    def _differentiate(
        self, stage: Stage, flight: _Flight, arrived: Sequence[Tensor | None]
    ) -> None:
        """Backward from the gradients of what the stage gave."""
        indices = (value.index for value in _trained(stage.gives))
        grads = dict(zip(indices, arrived, strict=True))
        given = zip(stage.gives, flight.given, strict=True)
        roots = {
            v.index: tensor for v, tensor in given
            if v.trained and tensor.requires_grad and grads[v.index] is not None
        }  # fmt: skip
        if roots:
            torch.autograd.backward([*roots.values()], [grads[index] for index in roots])

    def _counts(self, action: Action) -> bool:
        """Whether a micro-batch has samples here; else a stand-in is computed, which adds nothing."""
        return self.feed(action.micro).ready.samples.rows > 0

    def _reduce(self, action: Action) -> None:
        self._sums[action.stage] = self._sums.get(action.stage, 0) + 1
        held = [s for _, s in self.schedule.held(self.rank) if s == action.stage]
        # A stage that a rank holds for both chains is complete at its second sum.
        if self._sums[action.stage] == len(held):
            self.gradients[action.stage].launch()


def _key(action: Action) -> tuple[int, int, int]:
    return (action.chain, action.stage, action.micro)


def _trained(values: Sequence[Crossing]) -> list[Crossing]:
    return [value for value in values if value.trained]


# ---- Gradients of weights that are computed later than those of inputs
#
# In a zero-bubble schedule, I computes what the stage before waits for, and W the rest. Convolutions and
# linear layers, where the time goes, are therefore recorded on their own: backward asks them for the gradient
# of their input and leaves that of the weights to a list.
#
#     forward   y = conv(x, w)                with its own small graph
#     I         dx = d<y, dy>/dx              and (graph, dy) is put aside
#     W         dw = d<y, dy>/dw
#
# Nothing is communicated in W: exchanges lie on the way to x, not to w.

_DEFERRED = ("conv", "linear")


class Deferred:
    """What W has to do for one stage and micro-batch."""

    def __init__(self) -> None:
        self._todo: list[tuple[GradientEdge, Tensor, list[nn.Parameter], list[Tensor]]] = []

    def __call__(
        self, step: Compute, run: Callable[[Sequence[Tensor]], Any], operands: Sequence[Tensor]
    ) -> Any:
        """Compute a step; a `Defer` for `carry_out`."""
        if not (operands and step.node.name.startswith(_DEFERRED)):
            return run(operands)
        trained = [t for t in operands[1:] if t.requires_grad]
        weights = [t for t in trained if isinstance(t, nn.Parameter)]
        waits = operands[0].requires_grad and not isinstance(operands[0], nn.Parameter)
        # A weight that is computed has a graph of its own, which backward has to go on into.
        if not (weights and waits and len(weights) == len(trained)):
            return run(operands)
        return _InputOnly.apply(operands[0], self, run, operands, weights)

    def put(
        self, y: GradientEdge, dy: Tensor, weights: list[nn.Parameter], own: list[Tensor]
    ) -> None:
        """Leave the gradients of `weights`, which stand as `own` in the graph of `y`, for later."""
        self._todo.append((y, dy, weights, own))

    def finish(self, *, counted: bool) -> None:
        """Compute what was left, and add it to the gradients of the parameters; zeros unless `counted`."""
        while self._todo:
            y, dy, weights, leaves = self._todo.pop()
            grads = torch.autograd.grad(y, leaves, dy)
            for parameter, found in zip(weights, grads, strict=True):
                # A view that is made here nobody else could change in place.
                own = found if base_of(found) is None else found.clone()
                grad = own if counted else torch.zeros_like(own)
                parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)


class _InputOnly(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positions only
        ctx: Any,
        x: Tensor,
        deferred: Deferred,
        run: Callable[[Sequence[Tensor]], Tensor],
        operands: Sequence[Tensor],
        weights: list[nn.Parameter],
    ) -> Tensor:
        own_x = x.detach().requires_grad_()
        own = {id(w): w.detach().requires_grad_() for w in weights}
        with torch.enable_grad():
            y = run([own_x, *(own.get(id(t), t) for t in operands[1:])])
        # Of y only its graph: the numbers may go when nobody else wants them.
        ctx.kept = deferred, own_x, get_gradient_edge(y), weights, [own[id(w)] for w in weights]
        return y.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator renames
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        deferred, x, y, weights, own = ctx.kept
        ctx.kept = None
        (dx,) = torch.autograd.grad(y, x, grads[0], retain_graph=True)
        deferred.put(y, grads[0], weights, own)
        return dx, *(None,) * 4
