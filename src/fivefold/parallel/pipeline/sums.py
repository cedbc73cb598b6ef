"""Where a row starts the sums of gradients over replicas.

Ranks that share a sum have to start their sums in the same order. Backward finishes the last stage first,
on every chain, so all ranks sum their stages from the last to the first. A rank in the middle that holds the
same stage of two replicas starts two sums, which are one: it is due with the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fivefold.parallel.pipeline.schedule import Action, Op, Row

__all__ = ["sum_at_the_end", "sum_early"]


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
