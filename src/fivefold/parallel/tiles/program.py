"""A plan for one shape of input: which exchanges and computations a rank makes, in which order.

tape + how the inputs lie ──► place (forward) ──► margins (backward) ──► lower (forward) ──► steps

move      v1 -> v1'   halo of one row, 2 messages
compute   v2 = conv2d(v1')
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fivefold.errors import UsageError
from fivefold.parallel.tiles.costs import Costs, Fuse, Options, flops_of
from fivefold.parallel.tiles.exchange import Exchange
from fivefold.parallel.tiles.margins import with_margins
from fivefold.parallel.tiles.rule import (
    Here,
    Local,
    Operation,
    Rule,
    Wants,
    as_held,
    call,
    everything,
    rule_of,
)
from fivefold.parallel.tiles.spread import Spread
from fivefold.parallel.tiles.tape import Node, Ref, Tape, Value

__all__ = ["Compute", "Move", "Program", "planned"]


@dataclass(frozen=True, eq=False)
class Move:
    """Exchange `source`, so that this rank has what it wants of it as value `target`."""

    source: Ref
    target: int
    exchange: Exchange


@dataclass(frozen=True, eq=False)
class Compute:
    """Compute a node from operands that lie as it wants them."""

    node: Node
    operands: tuple[Ref, ...]
    local: Local


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

    fuse: Fuse = "never"
    """how many layers share an exchange, or how that was decided"""

    def seconds(self, here: Here, costs: Costs) -> float:
        """What `here.rank` needs for a step, by `costs`: the backward pass is taken as twice the forward."""
        total = 0.0
        for step in self.steps:
            if isinstance(step, Compute):
                elements = sum(
                    math.prod(self.spreads[index].local_shape(here.grid, here.rank))
                    for index in step.node.outputs
                )
                total += costs.compute_s(3 * elements * flops_of(step.node))
            elif step.exchange.moves:
                size = step.exchange.elements() * self.tape.element_bytes(step.source)
                total += 2 * costs.exchange_s(step.exchange.messages(), size)
        return total

    def given(self, node: Node) -> tuple[Spread, ...]:
        """How the operands of a node lie; what is no value is whole on every rank."""
        return tuple(
            self.spreads[ref.index] if isinstance(ref, Value) else Spread.whole(shape)
            for ref, shape in zip(node.operands, node.shapes, strict=True)
        )


def planned(
    tape: Tape, inputs: Sequence[Spread], here: Here, options: Options | None = None
) -> Program:
    """Make the plan of `here.rank`. Every tile rank makes its own, from the same tape.

    Raises `UsageError` with `strict` where an operation would have to gather a tiled value.
    """
    options = options or Options()
    placed = Program(tape)
    placed.spreads.update(zip(tape.inputs, inputs, strict=True))
    rules = [_placed(placed, node, here, options.strict) for node in tape.nodes]
    return _lowered(placed, rules, here, options)


def _lowered(
    placed: Program, rules: Sequence[Rule | None], here: Here, options: Options
) -> Program:
    """The plan of one rank, with the margins that `options.fuse` gives."""
    chosen = dict(zip(placed.tape.nodes, rules, strict=True))

    def lower(node: Node, made: Sequence[Spread]) -> Local:
        found = chosen[node]
        if found is None:
            return _on_the_whole(node, made, here)
        return found.lower(Operation(node, placed.given(node), here, tuple(made)))

    margins = with_margins(placed.tape, placed.spreads, lower, here, options)
    program = Program(
        placed.tape, spreads=margins.held, gathered=placed.gathered, fuse=options.fuse
    )
    lowering = _Lowering(program, here, margins.shared)
    for node in placed.tape.nodes:
        lowering.add(node, lower(node, [margins.held[index] for index in node.outputs]))
    lowering.finish()
    return program


def _placed(program: Program, node: Node, here: Here, strict: bool) -> Rule | None:
    """Decide how a node's results lie, and whether its rule applies or all is gathered."""
    given = program.given(node)
    chosen = rule_of(node)
    made = None if chosen is None else chosen.place(Operation(node, given, here))
    if made is not None and not any(cut is not None and cut.empty for s in made for cut in s.cuts):
        program.spreads.update(zip(node.outputs, made, strict=True))
        return chosen
    tiled = [spread for spread in given if not spread.is_whole]
    if tiled and chosen is None:
        _tell_unknown(node, tiled, strict)
        program.gathered.append(node)
    for index, shape in zip(node.outputs, node.output_shapes, strict=True):
        program.spreads[index] = _as_before(tiled, shape) if chosen is None else Spread.whole(shape)
    return None


def _as_before(tiled: Sequence[Spread], shape: tuple[int, ...]) -> Spread:
    """What an unknown operation returns is cut again like its operand where it has the same size."""
    spread = Spread.whole(shape)
    for before in tiled:
        if len(before.shape) == len(shape):
            for dim in before.cut_dims:
                if before.shape[dim] == shape[dim]:
                    spread = spread.with_cut(dim, before.cuts[dim])
            return spread.tight()
    return spread


def _tell_unknown(node: Node, tiled: Sequence[Spread], strict: bool) -> None:
    elements = sum(math.prod(spread.shape) for spread in tiled)
    text = (
        f"{node.where} is not known to Fivefold's tiles: every rank gathers the whole of what it takes "
        f"({elements * node.output_bytes / 2**20:.1f} MiB) and computes all of it"
    )
    if strict:
        raise UsageError(f"{text}; tiles.strict = true in the plan forbids that")
    warnings.warn(f"{text}. The result is exact", stacklevel=2)


class _Lowering:
    def __init__(self, program: Program, here: Here, shared: dict[int, Spread]) -> None:
        self._program, self._here, self._shared = program, here, shared
        self._next = max(program.spreads, default=-1) + 1
        self._moved: dict[tuple[Any, ...], Ref] = {}

    def add(self, node: Node, local: Local) -> None:
        given = self._program.given(node)
        fills = (*local.fills, *(0.0,) * (len(given) - len(local.fills)))
        operands = tuple(
            self._as_wanted(*operand)
            for operand in zip(node.operands, given, local.wants, fills, strict=True)
        )
        self._program.steps.append(Compute(node, operands, local))

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
            self._program.steps.append(Move(ref, target.index, plan))
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
    """Gather the operands and compute everything on every rank; keep one's own part."""
    compute = call(node)
    boxes = [spread.held(here.grid, here.rank) for spread in made]

    def run(moment: Any, operands: Any) -> Any:
        result = compute(moment, operands)
        if len(boxes) == 1 and hasattr(result, "shape"):
            return result[tuple(slice(*r) for r in boxes[0])] if not made[0].is_whole else result
        return result

    return Local(tuple(everything(shape) for shape in node.shapes), run)
