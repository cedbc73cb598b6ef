"""The best candidates: those that fit into memory, the fastest first.

Candidates are looked at in the order of a bound that no schedule beats. First the bound is told without
dividing the net into tiles, then with; once enough are found that are faster than the next one's bound, the
rest need neither plans nor simulations. Of what does not fit, what holds less takes its place, see `smaller`.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field

from fivefold.errors import UsageError
from fivefold.parallel.pipeline.schedule import Schedule
from fivefold.parallel.pipeline.schedules import make
from fivefold.plan import Layout
from fivefold.tune.candidates import Candidate, smaller
from fivefold.tune.predict import Case, Prediction
from fivefold.tune.subject import Subject

__all__ = ["ALIKE", "SearchResult", "search"]

ALIKE = 0.005
"""Part of a step by which predictions may differ without telling anything"""


@dataclass(frozen=True)
class SearchResult:
    """What a search came to."""

    best: tuple[Prediction, ...]
    """the fastest first; of two that are alike, the one whose replicas hold whole parameters"""
    closest: tuple[Candidate, int] | None
    """of those that do not fit, the one that needs least, and its bytes"""
    candidates: int
    impossible: int
    """that the net cannot be divided for"""
    too_large: int
    simulated: int
    norms: bool
    """whether the net has batch norms"""


def search(
    subject: Subject,
    candidates: Iterable[Candidate],
    batch: int,
    memory_bytes: int,
    optimizer: str = "sgd",
    *,
    wanted: int = 5,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> SearchResult:
    """The `wanted` fastest candidates that need at most `memory_bytes` on every rank.

    `progress` is called with the number of candidates that are done, and of all.
    """
    waiting: list[tuple[float, int, bool, Case]] = []
    found = _Finding(memory_bytes, wanted)
    for candidate in candidates:
        found.count += 1
        case = Case(subject, candidate, batch, optimizer, _made)
        with found.possible():
            waiting.append((case.bound_s(), found.count, False, case))
    heapq.heapify(waiting)
    while waiting and waiting[0][0] <= found.slowest_s:
        _, number, exact, case = heapq.heappop(waiting)
        with found.possible():
            if not exact:
                heapq.heappush(waiting, (case.least_s(), number, True, case))
            elif not found.look_at(case):
                bound = case.least_s()  # they do the same, and more
                for other in smaller(case.candidate, memory_bytes):
                    found.count += 1
                    case = Case(subject, other, batch, optimizer, _made)
                    heapq.heappush(waiting, (bound, found.count, True, case))
        progress(found.count - len(waiting), found.count)
    norms = bool(subject.staged(Layout(), 1, 1).work.channels.any())
    return found.result(norms)


@dataclass
class _Finding:
    """A search under way."""

    memory_bytes: int
    wanted: int
    best: list[Prediction] = field(default_factory=list[Prediction])
    closest: tuple[Candidate, int] | None = None
    count: int = 0
    impossible: int = 0
    too_large: int = 0
    simulated: int = 0

    @contextmanager
    def possible(self) -> Generator[None]:
        """Count what cannot be done."""
        try:
            yield
        except UsageError:
            self.impossible += 1

    @property
    def slowest_s(self) -> float:
        """What a candidate has to beat."""
        return _weighed_s(self.best[-1]) if len(self.best) == self.wanted else math.inf

    def look_at(self, case: Case) -> bool:
        """Reject what does not fit, and simulate what does; whether it does."""
        need = case.memory_bytes()
        if need <= self.memory_bytes:
            self.simulated += 1
            found = [*self.best, case.predict()]
            self.best = sorted(found, key=_weighed_s)[: self.wanted]
            return True
        self.too_large += 1
        if self.closest is None or need < self.closest[1]:
            self.closest = case.candidate, need
        return False

    def result(self, norms: bool) -> SearchResult:
        """What came of it."""
        counts = self.count, self.impossible, self.too_large, self.simulated
        return SearchResult(tuple(self.best), self.closest, *counts, norms)


def _weighed_s(told: Prediction) -> float:
    """Seconds; replicas that divide parameters have to gain something, since scripts see the parts."""
    return told.step_s * (1 + ALIKE if told.candidate.parts > 1 else 1.0)


def _made(candidate: Candidate) -> Schedule:
    pipe, each = candidate.layout.pipe, candidate.stages_per_rank
    return _schedule(candidate.schedule or "layer", pipe, candidate.micro_batches, each)


@functools.lru_cache(256)
def _schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    return make(name, ranks, micro_batches, stages_per_rank)
