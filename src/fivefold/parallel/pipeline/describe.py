"""What a cut looks like, for people: the stages, what crosses their bounds, and the schedule drawn."""

from __future__ import annotations

import itertools
import math

from torch import nn

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.pipeline.cut import Cut, states_of
from fivefold.parallel.pipeline.picture import draw
from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.program.costs import flops_of

__all__ = ["described"]


def described(net: nn.Module, tape: Tape, cut: Cut, schedule: Schedule) -> str:
    """A table of the stages of a recorded net, and the schedule as a picture.

    GFLOP: forward, of the micro-batch that `tape` was recorded for. MiB: what is handed to the next stage, of
    which what passes over it is in parentheses.
    """
    bounds = cut.bounds(tape)
    spans = list(itertools.pairwise(bounds))
    flops = [sum(_flops(node) for node in tape.nodes[first:stop]) for first, stop in spans]
    rows = [("stage", "rank", "begins with", "parameters", "GFLOP", "share", "hands on, MiB")]
    for stage, (first, stop) in enumerate(spans):
        nodes = tape.nodes[first:stop]
        ranks = ", ".join(str(rank) for rank in sorted(schedule.ranks_of(stage)))
        handed, passing = _handed(tape, bounds, stage)
        over = f" ({passing / 2**20:.2f})" if passing else ""
        rows.append(
            (
                str(stage), ranks, nodes[0].where, f"{_parameters(net, nodes):,}",
                f"{flops[stage] / 1e9:.2f}", f"{flops[stage] / (sum(flops) or 1):.0%}",
                f"{handed / 2**20:.2f}{over}" if stage + 1 < len(spans) else "",
            )
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = [
        "  ".join(
            cell.ljust(w) if column < 3 else cell.rjust(w)
            for column, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([*table, "", draw(schedule)])


def _flops(node: Node) -> float:
    return flops_of(node) * sum(math.prod(shape) for shape in node.output_shapes)


def _parameters(net: nn.Module, nodes: list[Node]) -> int:
    names = {name for node in nodes for name in states_of(node)}
    return sum(p.numel() for name, p in net.named_parameters() if name in names)


def _handed(tape: Tape, bounds: list[int], stage: int) -> tuple[int, int]:
    """Bytes that cross the end of a stage, and those of them that the next stage does not read."""
    bound, following = bounds[stage + 1], bounds[min(stage + 2, len(bounds) - 1)]
    made = {*tape.inputs, *(i for node in tape.nodes[:bound] for i in node.outputs)}
    read = {i: n for n, node in enumerate(tape.nodes) for i in _read(node)}
    next_reads = {i for node in tape.nodes[bound:following] for i in _read(node)}
    crossing = {i for i in made if read.get(i, -1) >= bound}
    sizes = {i: math.prod(tape.shapes[i]) * tape.dtypes[i].itemsize for i in crossing}
    return sum(sizes.values()), sum(size for i, size in sizes.items() if i not in next_reads)


def _read(node: Node) -> list[int]:
    return [ref.index for ref in node.operands if isinstance(ref, Value)]
