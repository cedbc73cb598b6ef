"""Contenders in turn, size by size; least, mean and most over the ranks, as the OSU benchmarks have it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fivefold.bench.contender import Contender
from fivefold.bench.work import messages_under_way

__all__ = ["MeasureTask", "Measurement", "Sweep", "measure", "sizes_between"]

_SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class MeasureTask:
    """What is measured."""

    operation: str
    dtype: str = "float32"
    ranks: int = 2
    overlap: bool = False
    """whether the call goes on while the caller computes"""

    @property
    def in_rates(self) -> bool:
        """Whether bytes per second are told of it, not seconds."""
        return messages_under_way(self.operation, 1, self.ranks) > 0


@dataclass
class Measurement:
    """A contender at one size. Times in seconds; a round's is the mean over its iterations and the ranks."""

    size_bytes: int
    rounds_s: list[float] = field(default_factory=list[float])
    least_s: float = float("inf")
    """mean of the fastest rank in the fastest round"""
    most_s: float = 0.0
    """mean of the slowest rank in the slowest round"""
    right: bool = True
    """whether all results were as expected"""
    error: str = ""
    """why there are no times"""
    compute_s: float = 0.0
    pure_s: float = 0.0
    """overlap only: without computing"""
    moved_bytes: int = 0
    """messages of `bw`, `bibw` and `multi-bw`: what all pairs send in that time, both ways"""

    @property
    def median_s(self) -> float:
        """Over the rounds; with overlap, of the total."""
        return statistics.median(self.rounds_s) if self.rounds_s else float("nan")

    @property
    def overlap_percent(self) -> float:
        """OSU's figure. It says nothing without the total: a slow call hides well."""
        hidden = self.pure_s - (self.median_s - self.compute_s)
        return max(0.0, min(100.0, 100.0 * hidden / self.pure_s)) if self.pure_s else float("nan")


@dataclass
class Sweep:
    """All that was measured: by contender, then by size."""

    request: MeasureTask
    results: dict[str, list[Measurement]]
    environment: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        results = {name: [asdict(m) for m in found] for name, found in self.results.items()}
        return {
            "request": asdict(self.request),
            "environment": self.environment,
            "results": results,
        }


def sizes_between(least: int, most: int, step: int = 4) -> list[int]:
    """Sizes from `least` to `most` in bytes, each `step` times the one before.

    >>> sizes_between(4, 100)
    [4, 16, 64]
    """
    sizes: list[int] = []
    while least <= most:
        sizes.append(least)
        least *= step
    return sizes


def measure(
    request: MeasureTask,
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    rounds: int,
    progress: Callable[[int, str], None],
) -> Mapping[str, list[Measurement]]:
    """Let the contenders take turns at every size, in an order that changes from round to round."""
    results: dict[str, list[Measurement]] = {c.name: [] for c in contenders}
    for size in sizes:
        moved_bytes = size * messages_under_way(request.operation, size, request.ranks)
        at_size = {c.name: Measurement(size, moved_bytes=moved_bytes) for c in contenders}
        for number in range(rounds):
            first = number % len(contenders)
            for contender in [*contenders[first:], *contenders[:first]]:
                found = at_size[contender.name]
                if not found.error:
                    progress(size, contender.name)
                    _one_round(request, contender, found, number)
        for name, found in at_size.items():
            results[name].append(found)
    return results


def iterations_for(size_bytes: int) -> tuple[int, int]:
    """Warm-up and timed calls of a round: as OSU's, fewer for large messages.

    >>> iterations_for(4), iterations_for(64 << 20)
    ((20, 200), (2, 6))
    """
    if size_bytes <= _SMALL_BYTES:
        return 20, 200
    if size_bytes <= 4 << 20:
        return 5, 40
    return 2, 6


def _one_round(request: MeasureTask, contender: Contender, found: Measurement, number: int) -> None:
    warmup, iterations = iterations_for(found.moved_bytes or found.size_bytes)
    answers = contender.ask({
        "operation": request.operation, "dtype": request.dtype, "overlap": request.overlap,
        "size_bytes": found.size_bytes, "warmup": warmup, "iterations": iterations,
    })  # fmt: skip
    problem = next((a["error"] for a in answers if "error" in a), "")
    if problem:
        found.error = problem
        return
    found.right &= all(answer["right"] for answer in answers)
    if request.overlap:
        means = [answer["total_s"] for answer in answers]
        for key in ("compute_s", "pure_s"):
            before = getattr(found, key) * number
            setattr(found, key, (before + statistics.fmean(a[key] for a in answers)) / (number + 1))
    else:
        means = [statistics.fmean(answer["times_s"]) for answer in answers if answer["times_s"]]
    found.rounds_s.append(statistics.fmean(means))
    found.least_s, found.most_s = min(found.least_s, *means), max(found.most_s, *means)
