"""A plan as a table that a person can read, and its totals."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fivefold.parallel.graph.refs import Ref, Value
from fivefold.parallel.graph.tape import Node
from fivefold.parallel.program.costs import flops_of
from fivefold.parallel.program.exchange import Exchange
from fivefold.parallel.program.program import Compute, Program, exchange_of
from fivefold.parallel.program.rule import Here
from fivefold.parallel.program.spread import Range, Spread

__all__ = ["Totals", "table", "totals"]


@dataclass(frozen=True)
class Totals:
    """What one rank does in the forward pass; the backward pass sends the same once more."""

    exchanges: int
    """how often it waits for its neighbours' pixels"""
    messages: int
    """messages that it sends for that"""
    sent_bytes: int
    reductions: int
    """collectives for statistics, such as those of batch norm"""
    flops: float
    """floating-point operations of what it owns"""
    extra_flops: float
    """those that it repeats of its neighbours', as a fraction of `flops`"""


def totals(program: Program, here: Here) -> Totals:
    """Add up what `here.rank` does."""
    moves = [moved for step in program.steps if (moved := exchange_of(step)) is not None]
    nodes = [s for s in program.steps if isinstance(s, Compute)]
    own = sum(_flops(program, step.node, here, held=False) for step in nodes)
    held = sum(_flops(program, step.node, here, held=True) for step in nodes)
    return Totals(
        exchanges=len(moves),
        messages=sum(plan.messages() for _, plan in moves),
        sent_bytes=sum(_bytes(program, *moved) for moved in moves),
        reductions=sum(step.local.collective is not None for step in nodes),
        flops=own,
        extra_flops=held / own - 1.0 if own else 0.0,
    )


def table(program: Program, here: Here) -> str:
    """The plan of `here.rank`, a line for every exchange and every operation.

    owned: the range of the result along the dims that are cut; margin: pixels held before and behind it;
    messages and KiB: what this rank sends; extra: what it computes of its neighbours' pixels.
    """
    rows = [("node", "owned", "margin", "messages", "KiB", "extra FLOPs")]
    for step in program.steps:
        if (moved := exchange_of(step)) is not None:
            source, plan = moved
            size = f"{_bytes(program, source, plan) / 1024:.1f}"
            rows.append((f"  exchange {_name(source)}", "", "", str(plan.messages()), size, ""))
        if isinstance(step, Compute):
            rows.append(_row(program, step.node, here))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 3 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, "", _summary(program, here)])


def _row(program: Program, node: Node, here: Here) -> tuple[str, str, str, str, str, str]:
    name = f"{node.name} {node.scope}".rstrip()
    if not node.outputs:
        return (name, "", "", "", "", "")
    spread = program.spreads[node.outputs[0]]
    own = _flops(program, node, here, held=False)
    extra = _flops(program, node, here, held=True) / own - 1.0 if own else 0.0
    told = f"{extra:.1%}" if extra else ""
    return (name, _owned(spread, here), _margin(spread, here), "", "", told)


def _owned(spread: Spread, here: Here) -> str:
    box = spread.owned(here.grid, here.rank)
    ranges = [f"{a}:{b}/{spread.shape[dim]}" for dim, (a, b) in _of(spread, box)]
    return " x ".join(ranges) or "whole"


def _margin(spread: Spread, here: Here) -> str:
    owned, held = spread.owned(here.grid, here.rank), spread.held(here.grid, here.rank)
    sides = [
        f"{owned[dim][0] - a}+{b - owned[dim][1]}"
        for dim, (a, b) in _of(spread, held)
        if (a, b) != owned[dim]
    ]
    return " x ".join(sides)


def _of(spread: Spread, box: tuple[Range, ...]) -> list[tuple[int, Range]]:
    return [(dim, box[dim]) for dim in spread.cut_dims]


def _summary(program: Program, here: Here) -> str:
    t = totals(program, here)
    return (
        f"rank {here.rank} of {here.grid.size}, fuse {program.fuse}: {t.exchanges} exchanges, "
        f"{t.messages} messages, "
        f"{t.sent_bytes / 2**20:.2f} MiB, {t.reductions} reductions of statistics, "
        f"{t.flops / 1e9:.2f} GFLOP and {t.extra_flops:.1%} computed twice (forward)"
    )


def _name(source: Ref) -> str:
    return f"of v{source.index}" if isinstance(source, Value) else "of a parameter"


def _bytes(program: Program, source: Ref, plan: Exchange) -> int:
    return plan.elements() * program.tape.element_bytes(source)


def _flops(program: Program, node: Node, here: Here, *, held: bool) -> float:
    elements = 0
    for index in node.outputs:
        spread = program.spreads[index]
        box = (spread.held if held else spread.owned)(here.grid, here.rank)
        elements += math.prod(b - a for a, b in box)
    return elements * flops_of(node)
