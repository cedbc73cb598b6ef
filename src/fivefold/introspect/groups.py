"""Groups of ranks: the same one may have another number on every rank."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.introspect.run import TracedRun
from fivefold.trace.schema import NOTHING

__all__ = ["Group", "groups"]


@dataclass(frozen=True)
class Group:
    """Ranks that communicate with each other."""

    name: str
    ranks: tuple[int, ...]
    backend: str = ""
    key: str = ""
    """tells groups of the same ranks apart; the same on all of them"""

    @property
    def size(self) -> int:
        """Ranks in it."""
        return len(self.ranks)


def groups(run: TracedRun) -> dict[tuple[int, int], Group]:
    """By rank and the group's number there. A number without a note means all ranks that have it."""
    found: dict[tuple[int, int], Group] = {}
    for trace in run.ranks:
        for note in trace.notes:
            if note.get("kind") != "group" or not isinstance(note.get("index"), int):
                continue
            found[trace.rank, note["index"]] = _group(note)
    untold: dict[int, list[int]] = defaultdict(list)
    for trace in run.ranks:
        for index in np.unique(trace.sums["group"][trace.sums["kind"] > 0]).tolist():
            if (trace.rank, index) not in found:
                untold[index].append(trace.rank)
    for index, ranks in untold.items():
        group = Group("no group" if index == NOTHING else f"group {index}", tuple(ranks))
        found |= {(rank, index): group for rank in ranks}
    return found


def _group(note: dict[str, Any]) -> Group:
    told = note.get("ranks")
    ranks = tuple(told) if isinstance(told, list) else ()
    if any(not isinstance(rank, int) for rank in ranks[:1]):
        ranks = ()
    name = str(note.get("name") or f"group {note['index']}")
    return Group(name, ranks, str(note.get("backend") or ""), str(note.get("key") or ""))
