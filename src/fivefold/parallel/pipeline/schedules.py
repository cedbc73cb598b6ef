"""Schedules by name.

`make("1f1b", ranks=4, micro_batches=8)` gives the table of actions. In pictures of the
generators time goes to the right, and B takes twice as long as F.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from fivefold.errors import PlanError, suggest
from fivefold.parallel.pipeline.schedule import Action, Op, Row, Schedule

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

# ---- Two directions at once: gems, gems-overlap and chimera
#
# Every rank holds an early stage of one replica of the model and a late stage of the other. Micro-batches
# take turns: even ones go from rank 0 to the last one (chain 0), odd ones come from there to rank 0 (chain 1,
# in lower case). An odd number of ranks works as well: the middle one holds the same stage of both replicas.


def gems(ranks: int, micro_batches: int) -> Schedule:
    """One micro-batch in flight; the other direction starts where backward leaves ranks free.

        rank 0 |F0............B0--f1b1--F2................B2--f3b3--........|
        rank 1 |..F0......B0--f1........b1--F2........B2--f3........b3--....|
        rank 2 |....F0B0--f1................b1--F2B2--f3................b3--|

    A forward follows the backward that came towards it, so that every micro-batch but the first takes
    Sb + f instead of S(f + b), for S ranks, an F of f and a B of b >= f. Memory of activations as with
    `layer`, of parameters twice. The sums of all stages wait for the end.

    Source: Jain et al., GEMS (SC 2020).
    """
    return _both("gems", micro_batches, map(sum_at_the_end, _in_turn(ranks, micro_batches)))


def gems_overlap(ranks: int, micro_batches: int) -> Schedule:
    """As gems, but a stage is summed while other stages still compute.

        rank 0 |F0............B0--f1b1--............|
        sums   |........................r2--....R0--|
        rank 1 |..F0......B0--f1........b1--........|
        sums   |............................r1--....|
        rank 2 |....F0B0--f1................b1--....|
        sums   |........................R2--....r0--|

    Source: Jain et al., GEMS (SC 2020), where it is part of MASTER.
    """
    return _both("gems-overlap", micro_batches, map(sum_early, _in_turn(ranks, micro_batches)))


def chimera(ranks: int, micro_batches: int) -> Schedule:
    """1f1b in both directions, for many micro-batches: one fills the idle time of the other.

        rank 0 |F0F2..f1b1--F4f3b3--F6B0--f5b5--..B2--f7b7--B4--....B6--|
        rank 1 |..F0f1F2f3..b1--F4B0--f5b3--F6B2--f7b5--B4--b7--B6--....|
        rank 2 |..f1F0f3F2..B0--f5b1--F4B2--f7b3--F6B4--b5--B6--b7--....|
        rank 3 |f1f3..F0B0--f5F2B2--f7b1--F4B4--..b3--F6B6--b5--....b7--|

    Time goes in blocks of one F and one B. A micro-batch moves by one rank per block, forward and then
    backward, and each chain takes a new one every second block; the parity of blocks keeps the two apart:

        block of F   s + 2k                 s: stage, S: ranks, k: number of the micro-batch on its chain,
        block of B   2S - 1 - s + 2k        one later on chain 1 when S is odd

    Within a block B comes first: what it frees, F uses. With at least S micro-batches and b >= f a rank is
    idle for (S - 2)b when S is even, (S - 1)b when it is odd; with 1f1b for (S - 1)(f + b). Nowhere are
    more than S micro-batches alive.

    Source: Li and Hoefler, Chimera (SC 2021), section 3.1. With S micro-batches idle time and memory are
    those of the paper. More of them the paper runs in units of S, and where b > f ranks idle between two
    units; blocks go on without a gap.
    """
    rows = (_blocks(rank, ranks, micro_batches) for rank in range(ranks))
    return _both("chimera", micro_batches, map(sum_early, rows))


def _both(name: str, micro_batches: int, rows: Iterable[Row]) -> Schedule:
    table = tuple(rows)
    return Schedule(name, len(table), len(table), micro_batches, table, chains=2)


def _stage(chain: int, rank: int, ranks: int) -> int:
    return ranks - 1 - rank if chain else rank


def _in_turn(ranks: int, micro_batches: int) -> Iterable[Row]:
    for rank in range(ranks):
        micros = [
            (micro % 2, _stage(micro % 2, rank, ranks), micro) for micro in range(micro_batches)
        ]
        yield tuple(
            Action(chain, stage, op, micro)
            for chain, stage, micro in micros
            for op in (Op.FORWARD, Op.BACKWARD)
        )


def _blocks(rank: int, ranks: int, micro_batches: int) -> Row:
    placed: list[tuple[int, bool, Action]] = []
    for micro in range(micro_batches):
        chain = micro % 2
        stage = _stage(chain, rank, ranks)
        start = 2 * (micro // 2) + chain * (ranks % 2)
        forward = Action(chain, stage, Op.FORWARD, micro)
        placed.append((start + stage, True, forward))
        placed.append((start + 2 * ranks - 1 - stage, False, forward.same(Op.BACKWARD, stage)))
    return tuple(action for *_, action in sorted(placed, key=lambda item: item[:2]))


# ----

# ---- One forward, one backward: 1f1b, its interleaved form, and the zero-bubble form of both
#
# Every rank lets a few forwards go ahead, then alternates one forward and one backward, and ends with the
# backwards that are left. With several stages per rank the micro-batches go in *rounds*: a round passes all
# stages of the rank, then the next one follows.
#
# The order is that of torch.distributed.pipelining's Schedule1F1B, ScheduleInterleaved1F1B and
# ScheduleInterleavedZeroBubble where those exist; here every number of micro-batches works.


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


# ----


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


# ---- Where a row starts the sums of gradients over replicas
#
# Ranks that share a sum have to start their sums in the same order. Backward finishes the last stage first,
# on every chain, so all ranks sum their stages from the last to the first. A rank in the middle that holds
# the same stage of two replicas starts two sums, which are one: it is due with the second.


def sum_early(actions: Iterable[Action]) -> Row:
    """A row whose sums start as soon as their stage, and those with later stages, have all gradients."""
    row = tuple(actions)
    behind: defaultdict[int, list[Action]] = defaultdict(list)
    place = 0
    for last, action in _finished(row):
        place = max(place, last)
        behind[place].append(action)
    return tuple(a for place, action in enumerate(row) for a in (action, *behind[place]))


def sum_at_the_end(actions: Iterable[Action]) -> Row:
    """A row whose sums start when all gradients of the rank are there."""
    row = tuple(actions)
    return (*row, *(action for _, action in _finished(row)))


def _finished(row: Row) -> list[tuple[int, Action]]:
    """The sums of a row, from the last stage to the first, and the place of the last gradient of each."""
    last = {
        Action(a.chain, a.stage, Op.REDUCE): place
        for place, a in enumerate(row)
        if a.op in (Op.BACKWARD, Op.WEIGHT)
    }
    return sorted(((p, a) for a, p in last.items()), key=lambda item: (-item[1].stage, item[0]))
