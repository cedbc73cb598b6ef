"""Where a rank's main thread was seen more often than those of others."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from fivefold.introspect.run import TracedRun
from fivefold.trace.reader import RankTrace

__all__ = ["Place", "place_of"]

_MORE = 0.1
"""of a rank's sightings in a phase, more than others have there"""
_LEAST = 2
_WAITING = re.compile(
    r"\b(sleep|wait|acquire|recv|read|readinto|join|select|poll|get|flock|result)\b"
)


@dataclass(frozen=True)
class Place:
    """File, line and function, and the call there."""

    text: str
    share: float
    """of the sightings in the phase"""

    @property
    def waits(self) -> bool:
        """Whether the call is one that waits, by its name."""
        return _WAITING.search(self.text.partition("(")[2]) is not None


def place_of(run: TracedRun, rank: int, phase: str) -> Place | None:
    """Where `rank` was seen in `phase` clearly more often than the median of the others; None: nowhere."""
    found = {trace.rank: _shares(trace, phase) for trace in run.ranks}
    own = found.pop(rank, {})
    total = max(1, _sightings(run, rank, phase))
    best: Place | None = None
    surplus = _MORE
    for text, share in own.items():
        usual = float(np.median([o.get(text, 0.0) for o in found.values()])) if found else 0.0
        by_chance = 2 * np.sqrt(usual * total + 1) / total
        if share - usual > max(surplus, by_chance):
            best, surplus = Place(text, share), share - usual
    return best


def _sightings(run: TracedRun, rank: int, phase: str) -> int:
    places = next((t.stacks.get(phase, []) for t in run.ranks if t.rank == rank), [])
    return sum(count for _, count in places)


def _shares(trace: RankTrace, phase: str) -> dict[str, float]:
    """Sightings in a phase, over all sightings of the rank there."""
    places = trace.stacks.get(phase) or []
    total = sum(count for _, count in places)
    return {text: count / total for text, count in places} if total >= _LEAST else {}
