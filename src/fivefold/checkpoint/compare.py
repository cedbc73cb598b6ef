"""What ranks tell each other: first what they were given; at every step something without waiting for it.

step k    numbers sent ─────────────┐ travel while step k + 1 is computed
step k+1  ... the answer is read, and acted upon by all ranks in the same call
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.checkpoint.ranks import PendingComparison, Ranks
from fivefold.checkpoint.settings import Settings
from fivefold.errors import UsageError
from fivefold.mesh.agreement import Line, differences

__all__ = ["Agreed", "Comparing", "check_given", "given"]

_EVERY_S = 0.05
"""A comparison takes about a tenth of a millisecond: where steps are short, not each has one"""
_MOST_CALLS = 64


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after a comparison."""

    signal: int = 0
    """the largest number of a signal that a rank got; 0: none"""
    due: bool = False
    """whether a rank finds that it is time to save"""
    failed: bool = False
    """whether a rank keeps an error for all"""


class Comparing:
    """One comparison after the other; called equally often on all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._pending: PendingComparison | None = None
        self._calls = 0
        self._every = 1
        """calls from one comparison to the next"""
        self._begun = 0.0

    def tell(self, step: int, signal: int, *, due: bool, failed: bool = False) -> Agreed:
        """What was agreed since the last call, if anything; and what this rank tells now. Collective.

        Raises `UsageError` if ranks are not at the same step.
        """
        if self._ranks.size == 1:
            return Agreed(signal, due, failed)
        found = Agreed()
        if self._pending is not None:
            self._calls += 1
            if self._calls < self._every:
                return found
            found = self._read(self._pending)
        self._calls, self._begun = 0, time.monotonic()
        # The largest of both signs: the smallest step, too.
        numbers = [signal, int(due), int(failed), self._wish, step, -step]
        self._pending = self._ranks.start_comparison(numbers)
        return found

    _wish = 1

    def _read(self, pending: PendingComparison) -> Agreed:
        passed_s = (time.monotonic() - self._begun) / max(1, self._calls)
        signal, due, failed, every, most, least = pending.wait()
        self._wish = min(_MOST_CALLS, max(1, math.ceil(_EVERY_S / max(passed_s, 1e-6))))
        self._every = every
        if most != -least:
            raise UsageError(
                f"ranks call maybe_save after different steps, from {-least} to {most}: all ranks have to "
                "call it after each step, with the same number"
            )
        return Agreed(signal, bool(due), bool(failed))

    def close(self) -> None:
        """Wait for what is under way."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


def given(settings: Settings, objects: Iterable[str], **others: bool) -> list[Line]:
    """The arguments that have to be the same on all ranks: nodes have storage and names of their own."""
    plan = {key: value for key, value in asdict(settings.plan).items() if key != "local"}
    names = ", ".join(sorted(objects))
    told = {"directory": settings.directory, "objects": names, **plan, **others}
    return [(str(value), name) for name, value in told.items()]


def check_given(told: Sequence[dict[str, Any]]) -> None:
    """Raise `UsageError` unless all ranks were given the same; `told` is by rank."""
    every = [one["given"] for one in told]
    what = "the arguments of ff.Checkpointer"
    if problem := differences(every, what, "give every rank the same"):
        raise UsageError(problem)
