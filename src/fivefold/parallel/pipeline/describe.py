"""What a cut looks like, for people: the stages, what crosses their bounds, and the schedule drawn."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Iterator
from statistics import median

from torch import nn

from fivefold.parallel.graph.refs import Value
from fivefold.parallel.graph.tape import Node, Tape
from fivefold.parallel.pipeline.cut import Cut, states_of
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.simulate import ScheduleTimes, StageTimes, simulate
from fivefold.parallel.program.costs import flops_of

__all__ = ["described", "draw"]


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


# ---- Schedules drawn with letters: one line per rank, time to the right

_MEANINGS = {
    Op.BACKWARD: "backward",
    Op.INPUT: "gradients of inputs",
    Op.WEIGHT: "gradients of weights",
    Op.REDUCE: "sum over replicas",
}


def draw(schedule: Schedule, timeline: ScheduleTimes | None = None, width: int = 100) -> str:
    """A picture of a schedule, no wider than `width` columns, with a legend at its end.

    Without a timeline all stages are alike, and B takes twice as long as F. Sums of gradients have a line
    of their own below their rank, where they take time. What does not fit is left out in the middle, and
    the legend says how much.

    >>> from fivefold.parallel.pipeline.schedules import make
    >>> print(draw(make("gpipe", ranks=2, micro_batches=3)))
    rank 0 |F0F1F2......B0--B1--B2--|
    rank 1 |..F0F1F2B0--B1--B2--....|
    F0 forward of micro-batch 0, B backward, . idle
    """
    timed = timeline or simulate(schedule, StageTimes.even(schedule.stages))
    scale = _columns_per_s(timed)
    lines = list(_lines(timed, scale))
    margin = max(len(title) for title, _ in lines)
    room = max(width - margin - len(" ||"), 3)
    legend = _legend(schedule, sums=len(lines) > schedule.ranks)
    if (columns := len(lines[0][1])) > room:
        legend += f", ~ {columns - room + 1} columns left out"
    if timeline is not None:
        legend += f", a column is {1 / scale:.3g} s"
    drawn = [f"{title:<{margin}} |{_fit(line, room)}|" for title, line in lines]
    return "\n".join([*drawn, *textwrap.wrap(legend, width)])


def _lines(timeline: ScheduleTimes, scale: float) -> Iterator[tuple[str, str]]:
    """Titles and full lines: one per rank, and one more where its sums take time."""
    for rank, row in enumerate(timeline.schedule.rows):
        computed = [action for action in row if action.op is not Op.REDUCE]
        yield f"rank {rank}", _paint(timeline, computed, scale)
        summed = [a for a in row if a.op is Op.REDUCE and _takes_s(timeline, a)]
        if summed:
            yield "sums", _paint(timeline, summed, scale)


def _takes_s(timeline: ScheduleTimes, action: Action) -> float:
    start, end = timeline.spans[action]
    return end - start


def _label(schedule: Schedule, action: Action) -> str:
    """`F5`, or `F2.5` where a rank holds several stages."""
    if action.op is Op.REDUCE or schedule.stages > schedule.ranks:
        return str(action)
    return f"{str(action)[0]}{action.micro}"


def _columns_per_s(timeline: ScheduleTimes) -> float:
    """A typical action of the shortest kind has room for the longest label."""
    kinds: dict[Op, list[float]] = {}
    for action in timeline.spans:
        if seconds := _takes_s(timeline, action):
            kinds.setdefault(action.op, []).append(seconds)
    shortest = min((median(taken) for taken in kinds.values()), default=1.0)
    return max(len(_label(timeline.schedule, action)) for action in timeline.spans) / shortest


def _paint(timeline: ScheduleTimes, actions: Iterable[Action], scale: float) -> str:
    line = "." * round(timeline.makespan_s * scale)
    for action in actions:
        start, end = (round(seconds * scale) for seconds in timeline.spans[action])
        text = _label(timeline.schedule, action).ljust(end - start, "-")[: end - start]
        line = line[:start] + text + line[end:]
    return line


def _fit(line: str, room: int) -> str:
    if len(line) <= room:
        return line
    tail = (room - 1) // 2
    return line[: room - 1 - tail] + "~" + line[len(line) - tail :]


def _legend(schedule: Schedule, *, sums: bool) -> str:
    of = "stage 0, micro-batch 0" if schedule.stages > schedule.ranks else "micro-batch 0"
    told = {
        action.op for row in schedule.rows for action in row if sums or action.op is not Op.REDUCE
    }
    parts = [f"{_label(schedule, Action(0, 0, Op.FORWARD, 0))} forward of {of}"]
    parts += [f"{op} {meaning}" for op, meaning in _MEANINGS.items() if op in told]
    parts += ["lower case: the second chain"] if schedule.chains > 1 else []
    return ", ".join([*parts, ". idle"])
