"""Schedules by name.

`make("1f1b", ranks=4, micro_batches=8)` gives the table of actions; the generators themselves are here
and in `loops` and `directions`. In their pictures time goes to the right, and B takes twice as long as F.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.errors import PlanError, suggest
from fivefold.parallel.pipeline.directions import chimera, gems, gems_overlap
from fivefold.parallel.pipeline.loops import interleaved, one_f_one_b, zero_bubble
from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.sums import sum_early

__all__ = [
    "PAIRED",
    "SCHEDULES",
    "chimera",
    "gems",
    "gems_overlap",
    "gpipe",
    "interleaved",
    "layer",
    "make",
    "one_f_one_b",
    "zero_bubble",
]


def layer(ranks: int) -> Schedule:
    """The whole batch at once: layer parallelism.

    rank 0 |F0............B0--|
    rank 1 |..F0......B0--....|
    rank 2 |....F0B0--........|
    """
    whole = gpipe(ranks, 1)
    return Schedule("layer", ranks, ranks, 1, whole.rows)


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards: simple, and every micro-batch is alive at once.

        rank 0 |F0F1F2F3............B0--B1--B2--B3--|
        rank 1 |..F0F1F2F3......B0--B1--B2--B3--....|
        rank 2 |....F0F1F2F3B0--B1--B2--B3--........|

    Source: Huang et al., GPipe (NeurIPS 2019).
    """
    rows = tuple(
        sum_early(
            Action(0, rank, op, micro)
            for op in (Op.FORWARD, Op.BACKWARD)
            for micro in range(micro_batches)
        )
        for rank in range(ranks)
    )
    return Schedule("gpipe", ranks, ranks, micro_batches, rows)


_ONE_STAGE: dict[str, Callable[[int, int], Schedule]] = {
    "layer": lambda ranks, _: layer(ranks),
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "gems": gems,
    "gems-overlap": gems_overlap,
    "chimera": chimera,
}
_SEVERAL: dict[str, Callable[[int, int, int], Schedule]] = {
    "interleaved": interleaved,
    "zero-bubble": zero_bubble,
}

SCHEDULES = (*_ONE_STAGE, *_SEVERAL)
"""names that `make` knows"""

PAIRED = ("gems", "gems-overlap", "chimera")
"""those that run in two directions: every rank holds two stages, of two replicas of the model"""


def make(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """The schedule of that name. `micro_batches` counts those of the whole step, over both directions.

    Raises `PlanError` when there is no such schedule, or it does not work with these numbers; the message
    lists those that do.
    """
    if name not in SCHEDULES:
        raise PlanError(f"unknown schedule {name!r}{suggest(name, SCHEDULES)}")
    numbers = {"ranks": ranks, "micro_batches": micro_batches, "stages_per_rank": stages_per_rank}
    for what, number in numbers.items():
        if number < 1:
            raise PlanError(f"{what} = {number}: a pipeline needs at least 1")
    if reason := _unfit(name, micro_batches, stages_per_rank):
        fit = [n for n in SCHEDULES if not _unfit(n, micro_batches, stages_per_rank)]
        raise PlanError(
            f"schedule {name!r} {reason}; valid with micro_batches = {micro_batches} and "
            f"stages_per_rank = {stages_per_rank}: {', '.join(fit)}"
        )
    if name in _SEVERAL:
        return _SEVERAL[name](ranks, micro_batches, stages_per_rank)
    return _ONE_STAGE[name](ranks, micro_batches)


def _unfit(name: str, micro_batches: int, stages_per_rank: int) -> str:
    """Why a schedule does not work with these numbers, or nothing."""
    if name in _ONE_STAGE and stages_per_rank > 1:
        return f"has one stage per rank, not {stages_per_rank}"
    if name == "interleaved" and stages_per_rank == 1:
        return "needs at least 2 stages per rank; with 1 it is 1f1b"
    if name == "layer" and micro_batches > 1:
        return f"takes the batch as a whole, not as {micro_batches} micro-batches"
    if name in PAIRED and micro_batches % 2:
        return (
            f"sends micro-batches in two directions by turns: it needs an even number of them, "
            f"not {micro_batches}"
        )
    return ""
