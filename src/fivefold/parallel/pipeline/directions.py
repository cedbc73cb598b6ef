"""Two directions at once: gems, gems-overlap and chimera.

Every rank holds an early stage of one replica of the model and a late stage of the other. Micro-batches
take turns: even ones go from rank 0 to the last one (chain 0), odd ones come from there to rank 0 (chain 1,
in lower case). An odd number of ranks works as well: the middle one holds the same stage of both replicas.
"""

from __future__ import annotations

from collections.abc import Iterable

from fivefold.parallel.pipeline.schedule import Action, Op, Row, Schedule
from fivefold.parallel.pipeline.sums import sum_at_the_end, sum_early

__all__ = ["chimera", "gems", "gems_overlap"]


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
