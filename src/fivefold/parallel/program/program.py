"""A plan for one shape of input: which exchanges and computations a rank makes, in which order.

tape + how the inputs lie ──► place (forward) ──► margins (backward) ──► lower (forward) ──► steps

move      v1 -> v1'   halo of one row, 2 messages
compute   v2 = conv2d(v1')
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from fivefold.parallel.graph.fingerprint import Fingerprint
from fivefold.parallel.graph.names import is_users
from fivefold.parallel.graph.refs import Ref, Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.intercept import draws_mask, quietly
from fivefold.parallel.program.border import Border
from fivefold.parallel.program.costs import Costs, Fuse, Options, flops_of
from fivefold.parallel.program.exchange import Exchange
from fivefold.parallel.program.in_place import may_change
from fivefold.parallel.program.margins import Margins, with_margins
from fivefold.parallel.program.placing import ValuePlacement, place
from fivefold.parallel.program.rule import (
    Here,
    Local,
    Moment,
    Operation,
    Wants,
    as_held,
    call,
    everything,
)
from fivefold.parallel.program.spread import Spread
from fivefold.parallel.program.sums import complete_gradient, shared_gradient
from fivefold.parallel.trees import map_tensors

__all__ = ["Compute", "Move", "Program", "cheapest_thinnest", "exchange_of", "planned"]


@dataclass(frozen=True, eq=False)
class Move:
    """Exchange `source`, so that this rank has what it wants of it as value `target`."""

    source: Ref
    target: int
    exchange: Exchange
    wants: Wants


@dataclass(frozen=True, eq=False)
class Compute:
    """Compute a node from operands that lie as it wants them."""

    node: Node
    operands: tuple[Ref, ...]
    local: Local
    border: Border | None = None
    """computed in two parts: the first operand lies as it is owned, and is exchanged meanwhile"""
    in_place: bool = False
    """may be computed as the net did, in its first operand: nobody else reads that, see `in_place`"""


def exchange_of(step: Move | Compute) -> tuple[Ref, Exchange] | None:
    """What a step sends and receives, if it moves anything between ranks."""
    if isinstance(step, Move):
        return (step.source, step.exchange) if step.exchange.moves else None
    if step.border is None or not step.border.exchange.moves:
        return None
    return (step.operands[0], step.border.exchange)


@dataclass
class Program:
    """What one rank does."""

    tape: Tape
    steps: list[Move | Compute] = field(default_factory=list[Move | Compute])
    spreads: dict[int, Spread] = field(default_factory=dict[int, Spread])
    """how every value lies"""
    last_use: dict[int, int] = field(default_factory=dict[int, int])
    """value -> the step after which nobody reads it"""
    gathered: list[Node] = field(default_factory=list[Node])
    """nodes whose operands had to be gathered because nobody knows how to cut them"""

    here: Here | None = None
    """whose plan it is"""
    fuse: Fuse = "never"
    """how many layers share an exchange, or how that was decided"""
    mark: Fingerprint | None = None
    """of the tape"""
    meeting: dict[bool, str] = field(default_factory=dict[bool, str])
    """where samples of different replicas meet, empty if nowhere; by whether norms join replicas"""
    masks: dict[tuple[str, int], bool | None] = field(
        default_factory=dict[tuple[str, int], bool | None]
    )
    """where they do not, by scope and number of the random call: as `Share.masks`"""
    divisions: dict[tuple[Any, frozenset[int], range], list[Any]] = field(
        default_factory=dict[tuple[Any, frozenset[int], range], list[Any]]
    )
    """into segments that are computed again: by their number or a choice, what they keep, and the steps"""

    compiled: dict[Any, list[Any]] = field(default_factory=dict[Any, list[Any]])
    """steps that are compiled, see `compiled_span`"""
    found: dict[Any, Any] = field(default_factory=dict[Any, Any])
    """what those who carry it out by turns have found out about it"""
    lowered: Callable[[Here], Program] | None = None
    """makes the plan of another rank"""
    others: dict[int, Program] = field(default_factory=dict[int, "Program"])

    def of_rank(self, rank: int) -> Program:
        """The plan of another rank, made once."""
        assert self.here is not None
        assert self.lowered is not None
        if rank == self.here.rank:
            return self
        if rank not in self.others:
            made = self.others[rank] = self.lowered(replace(self.here, rank=rank))
            made.mark = self.mark
        return self.others[rank]

    def marked(self) -> Fingerprint:
        """Its mark, which programs that a net runs have."""
        assert self.mark is not None
        return self.mark

    @functools.cached_property
    def drawn(self) -> Node | None:
        """The first random call whose numbers follow the samples, in a step."""
        nodes = self.tape.nodes
        return next((n for n in nodes if draws_mask(n.function, n.args, n.kwargs)), None)

    @functools.cached_property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that are one node."""
        found = [n.function for n in self.tape.nodes if isinstance(n.function, nn.Module)]
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def _order(self) -> dict[int, int]:
        return {id(node): number for number, node in enumerate(self.tape.nodes)}

    def number_of(self, node: Node) -> int:
        """Which node of the tape it is."""
        return self._order[id(node)]

    @functools.cached_property
    def node_numbers(self) -> list[int]:
        """By step: the number of the node that it computes, or moves something for."""
        found, following = [0] * len(self.steps), max(len(self.tape.nodes) - 1, 0)
        for number, step in reversed([*enumerate(self.steps)]):
            if isinstance(step, Compute):
                following = self.number_of(step.node)
            found[number] = following
        return found

    @functools.cached_property
    def dying(self) -> list[list[int]]:
        """By step: the values that nobody reads after it."""
        found: list[list[int]] = [[] for _ in self.steps]
        for index, number in self.last_use.items():
            found[number].append(index)
        return found

    def seconds(self, here: Here, costs: Costs) -> float:
        """What `here.rank` needs for a step, by `costs`: the backward pass is taken as twice the forward."""
        total = 0.0
        for step in self.steps:
            compute_s = 0.0
            if isinstance(step, Compute):
                elements = sum(
                    math.prod(self.spreads[index].local_shape(here.grid, here.rank))
                    for index in step.node.outputs
                )
                compute_s = costs.compute_s(elements * flops_of(step.node))
            total += 3 * compute_s + self._moving_s(step, compute_s, costs)
        return total

    def _moving_s(self, step: Move | Compute, compute_s: float, costs: Costs) -> float:
        moved = exchange_of(step)
        if moved is None:
            return 0.0
        source, plan = moved
        each, messages = self.tape.element_bytes(source), plan.messages()
        if isinstance(step, Compute):
            return costs.apart_s(messages, plan.elements() * each, compute_s)
        return costs.together_s(messages, plan.elements() * each, math.prod(plan.result) * each)

    def given(self, node: Node) -> tuple[Spread, ...]:
        """How the operands of a node lie; what is no value is whole on every rank."""
        return tuple(
            self.spreads[ref.index] if isinstance(ref, Value) else Spread.whole(shape)
            for ref, shape in zip(node.operands, node.shapes, strict=True)
        )


_THINNEST = (1, 2, 4, 8, 16)
"""pixels of which a tile has at least as many, or is turned into samples"""


def planned(
    tape: Tape,
    inputs: Sequence[Spread],
    here: Here,
    options: Options | None = None,
    thinnest: int | None = None,
) -> Program:
    """Make the plan of `here.rank`. Every tile rank makes its own, from the same tape.

    Tiles of fewer than `thinnest` pixels turn into samples; without it, where that costs least. Raises
    `UsageError` with `strict` where an operation would have to gather a tiled value.
    """
    options = options or Options()
    if thinnest is None:
        thinnest = cheapest_thinnest(tape, inputs, here, options)
    placed = place(tape, inputs, here, strict=options.strict, thinnest=thinnest)
    return _lowered(tape, placed, here, options)


def cheapest_thinnest(tape: Tape, inputs: Sequence[Spread], here: Here, options: Options) -> int:
    """Below which size tiles are best turned into samples.

    All ranks have to choose alike, so all of them judge by the plan of the rank in the middle.
    """
    if here.grid.tiles == 1 or here.fewest < here.grid.tiles:
        return 1
    middle, never = replace(here, rank=here.grid.tiles // 2), replace(options, fuse="never")
    tried: list[tuple[float, int]] = []
    for thinnest in _THINNEST:
        with quietly():  # the plan that is taken will tell
            placed = place(tape, inputs, here, thinnest=thinnest)
        seconds = _lowered(tape, placed, middle, never).seconds(middle, options.costs)
        tried.append((seconds, thinnest))
    return min(tried)[1]


def _lowered(
    tape: Tape,
    placed: ValuePlacement,
    here: Here,
    options: Options,
    margins: Margins | None = None,
) -> Program:
    """The plan of one rank, with the margins that `options.fuse` gives unless they are known."""

    def lower(node: Node, made: Sequence[Spread]) -> Local:
        rule = placed.rules[node]
        if rule is None:
            return _on_the_whole(node, made, here)
        return rule.lower(Operation(node, placed.given[node], here, tuple(made)))

    margins = margins or with_margins(tape, placed.spreads, lower, here, options)
    program = Program(
        tape, spreads=dict(margins.held), gathered=placed.gathered, here=here, fuse=options.fuse
    )
    program.lowered = lambda other: _lowered(tape, placed, other, options, margins)
    lowering = _Lowering(program, here, margins.shared, bordered=options.bordered)
    for node in tape.nodes:
        lowering.add(node, lower(node, [margins.held[index] for index in node.outputs]))
    lowering.finish()
    return program


class _Lowering:
    def __init__(
        self, program: Program, here: Here, shared: dict[int, Spread], *, bordered: bool
    ) -> None:
        self._program, self._here, self._shared = program, here, shared
        self._bordered = bordered
        self._next = max(program.spreads, default=-1) + 1
        self._moved: dict[tuple[Any, ...], Ref] = {}
        self._makers: dict[int, Node] = {}

    def add(self, node: Node, local: Local) -> None:
        given = self._program.given(node)
        fills = (*local.fills, *(0.0,) * (len(given) - len(local.fills)))
        border = self._border(node, given, local)
        operands = tuple(
            operand[0] if border is not None and number == 0 else self._as_wanted(*operand)
            for number, operand in enumerate(
                zip(node.operands, given, local.wants, fills, strict=True)
            )
        )
        in_place = border is None and self._in_place(node, local, operands)
        self._program.steps.append(Compute(node, operands, local, border, in_place))
        self._makers |= dict.fromkeys(node.outputs, node)

    def _in_place(self, node: Node, local: Local, operands: tuple[Ref, ...]) -> bool:
        if not local.in_place or operands[0] != node.operands[0]:
            return False
        if not isinstance(operands[0], Value):
            return False  # the net's own: it is changed when the forward is over
        return may_change(self._program.tape, node, self._makers.get(operands[0].index))

    def _border(self, node: Node, given: Sequence[Spread], local: Local) -> Border | None:
        """How to compute in two parts, unless several readers share the exchange."""
        if local.bordered is None or not isinstance(node.operands[0], Value):
            return None
        if not self._bordered:
            return None
        plan = Exchange.of(given[0], local.wants[0], self._here.grid, self._here.rank)
        if plan.is_identity or (plan.moves and node.operands[0].index in self._shared):
            return None
        return local.bordered(plan)

    def _as_wanted(self, ref: Ref, spread: Spread, wants: Wants, fill: float) -> Ref:
        here = self._here
        plan = Exchange.of(spread, wants, here.grid, here.rank, fill)
        if plan.is_identity:
            return ref
        union = self._shared.get(ref.index) if isinstance(ref, Value) else None
        if plan.moves and union is not None:
            there = self._moved_to(ref, spread, as_held(union), 0.0)
            cropped = Exchange.of(union, wants, here.grid, here.rank, fill)
            if not cropped.moves:
                return there if cropped.is_identity else self._moved_to(there, union, wants, fill)
        return self._moved_to(ref, spread, wants, fill)

    def _moved_to(self, ref: Ref, spread: Spread, wants: Wants, fill: float) -> Ref:
        key = (ref, wants, fill)
        if key not in self._moved:
            plan = Exchange.of(spread, wants, self._here.grid, self._here.rank, fill)
            target = Value(self._next)
            self._next += 1
            self._program.steps.append(Move(ref, target.index, plan, wants))
            self._moved[key] = target
        return self._moved[key]

    def finish(self) -> None:
        program = self._program
        for number, step in enumerate(program.steps):
            read = (step.source,) if isinstance(step, Move) else step.operands
            for ref in read:
                if isinstance(ref, Value):
                    program.last_use[ref.index] = number


def _on_the_whole(node: Node, made: Sequence[Spread], here: Here) -> Local:
    """Gather the operands and compute everything on every rank; keep one's own part.

    A function of the user's is given the complete gradient as well, on every rank: its backward need not be
    linear.
    """
    compute = call(node)
    boxes = [tuple(slice(*r) for r in spread.held(here.grid, here.rank)) for spread in made]
    axes, wants = tuple(range(len(here.grid.axes))), tuple(map(everything, node.shapes))

    def run(moment: Moment, operands: Sequence[Tensor]) -> Any:
        mine = iter(boxes)
        return map_tensors(lambda whole: whole[next(mine)], compute(moment, operands))

    def run_joint(moment: Moment, operands: Sequence[Tensor]) -> Any:
        everyone, mine = moment.groups(axes, False), iter(boxes)
        made = compute(moment, [shared_gradient(x, everyone) for x in operands])
        return map_tensors(lambda whole: complete_gradient(whole, everyone)[next(mine)], made)

    if is_users(node.function) and node.grad and here.grid.size > 1:
        return Local(wants, run_joint, collective="gradients for a function")
    return Local(wants, run)
