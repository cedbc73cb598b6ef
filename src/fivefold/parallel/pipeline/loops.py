"""One forward, one backward: 1f1b, its interleaved form, and the zero-bubble form of both.

Every rank lets a few forwards go ahead, then alternates one forward and one backward, and ends with the
backwards that are left. With several stages per rank the micro-batches go in *rounds*: a round passes all
stages of the rank, then the next one follows.

The order is that of torch.distributed.pipelining's Schedule1F1B, ScheduleInterleaved1F1B and
ScheduleInterleavedZeroBubble where those exist; here every number of micro-batches works.
"""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.parallel.pipeline.schedule import Action, Op, Schedule
from fivefold.parallel.pipeline.sums import sum_early

__all__ = ["interleaved", "one_f_one_b", "zero_bubble"]


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """As much idle time as gpipe, but rank r keeps no more than `ranks - r` micro-batches alive.

        rank 0 |F0F1F2........B0--F3B1--..B2--..B3--|
        rank 1 |..F0F1....B0--F2B1--F3B2--..B3--....|
        rank 2 |....F0B0--F1B1--F2B2--F3B3--........|

    Sources: Narayanan et al., PipeDream (SOSP 2019); with a flush per step: Fan et al., DAPPLE (PPoPP 2021).
    """
    rows = [_row(rank, ranks, micro_batches) for rank in range(ranks)]
    return Schedule("1f1b", ranks, ranks, micro_batches, tuple(map(sum_early, rows)))


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """1f1b with several shorter stages per rank: idle time shrinks by their number, messages multiply.

        rank 0 |F0.0F0.1F2.0F2.1........B2.0----....B2.1----B0.0----B0.1----|
        rank 1 |....F1.0F1.1F3.0B3.0----F3.1B3.1----B1.0----B1.1----........|

    Source: Narayanan et al., Efficient large-scale language model training (SC 2021), section 2.2.2.
    """
    rows = [_row(rank, ranks, micro_batches, stages_per_rank, lead=2) for rank in range(ranks)]
    stages = ranks * stages_per_rank
    return Schedule("interleaved", ranks, stages, micro_batches, tuple(map(sum_early, rows)))


def zero_bubble(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """1f1b with backward in two halves: the stage before waits for I only, and W fills idle time.

        rank 0 |F0F1F2....I0W0F3I1W1I2W2I3W3|
        rank 1 |..F0F1..I0F2I1W0F3I2W1I3W2W3|
        rank 2 |....F0I0F1I1F2I2W0F3I3W1W2W3|

    A third of the idle time of 1f1b when F, I and W take equally long; every rank keeps as many micro-batches
    alive as rank 0 does in 1f1b.

    Source: Qi et al., Zero bubble pipeline parallelism (ICLR 2024), ZB-H1.
    """
    rows = [_row(rank, ranks, micro_batches, stages_per_rank, split=True) for rank in range(ranks)]
    stages = ranks * stages_per_rank
    return Schedule("zero-bubble", ranks, stages, micro_batches, tuple(map(sum_early, rows)))


def _row(
    rank: int, ranks: int, micro_batches: int, parts: int = 1, *, lead: int = 1, split: bool = False
) -> Iterator[Action]:
    """One rank's actions; `lead`: how many forwards a rank is ahead of the next rank's."""
    turns = list(_turns(ranks, micro_batches, parts))
    first_round = _rounds(ranks, micro_batches)[0]
    ahead = min((parts - 1) * first_round + lead * (ranks - 1 - rank), len(turns))
    late = (
        rank if split else 0
    )  # rank r puts off r weight gradients: it would wait for so many forwards
    forwards = [Action(0, part * ranks + rank, Op.FORWARD, micro) for part, micro in turns]
    backwards = [
        Action(0, (parts - 1 - part) * ranks + rank, Op.INPUT if split else Op.BACKWARD, micro)
        for part, micro in turns
    ]
    weights = [a.same(Op.WEIGHT, a.stage) for a in backwards] if split else []
    for turn in range(len(turns) + ahead + late):
        yield from forwards[turn : turn + 1]
        if turn >= ahead:
            yield from backwards[turn - ahead : turn - ahead + 1]
        if turn >= ahead + late:
            yield from weights[turn - ahead - late : turn - ahead - late + 1]


def _turns(ranks: int, micro_batches: int, parts: int) -> Iterator[tuple[int, int]]:
    """(which of the rank's stages, micro-batch) in the order of forwards, the same on every rank."""
    start = 0
    for size in _rounds(ranks, micro_batches):
        for part in range(parts):
            yield from ((part, start + i) for i in range(size))
        start += size


def _rounds(ranks: int, micro_batches: int) -> list[int]:
    """Sizes of the rounds: at least `ranks` each, as even as possible, the larger ones first.

    A larger round behind a smaller one would need forwards that were not let ahead: a standstill.
    """
    rounds = max(1, micro_batches // ranks)
    small, larger = divmod(micro_batches, rounds)
    return [small + (i < larger) for i in range(rounds)]
