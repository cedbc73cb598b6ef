"""Schedules drawn with letters: one line per rank, time to the right."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from statistics import median

from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.simulate import ScheduleTimes, StageTimes, simulate

__all__ = ["draw"]

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
