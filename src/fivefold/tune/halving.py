"""Which of several ways is the fastest, by trials that get longer for those that are worth it.

    round 1, 2, 3     a b c d e f     all in turn, in an order that changes from round to round
    the better half   b d f           again, until one is left, or time is over
    at the end        b, baseline     in turn: what the choice gains, measured apart from what chose it

Source: Jamieson and Talwalkar 2016, successive halving; here what was measured before counts on.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fivefold.errors import FivefoldError

__all__ = ["ROUNDS", "Trial", "compared", "halved", "reason"]

ROUNDS = 3
"""before the slower half is out"""


@dataclass
class Trial:
    """A way that is tried."""

    name: str
    ask: Callable[[], float]
    """measures it for a moment: a rate, more is better; raises `FivefoldError` if it cannot go on"""
    rates: list[float] = field(default_factory=list[float])
    problem: str = ""
    """why it has none, or no more"""

    @property
    def rate(self) -> float:
        """The median of what was measured; 0 without."""
        return statistics.median(self.rates) if self.rates and not self.problem else 0.0

    def measure(self) -> None:
        """One more trial."""
        if not self.problem:
            try:
                self.rates.append(self.ask())
            except FivefoldError as problem:
                self.problem = reason(problem)


def reason(problem: FivefoldError) -> str:
    """The line of it that names an error, which is the last but for where logs are."""
    lines = [line.strip() for line in str(problem).splitlines()] or [""]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])


def halved(
    trials: Sequence[Trial],
    limit_s: float,
    let_go: Callable[[Trial], None] = lambda _: None,
    progress: Callable[[int, Trial], None] = lambda _left, _trial: None,
) -> Trial:
    """The fastest of some trials; the others are let go once they are out. Ends within `limit_s` or so."""
    ends, left, number = time.monotonic() + limit_s, [*trials], 0
    while True:
        for _ in range(ROUNDS):
            turn = left if number % 2 == 0 else left[::-1]
            number += 1
            for trial in turn:
                progress(len(left), trial)
                trial.measure()
        left.sort(key=lambda trial: -trial.rate)
        over = time.monotonic() > ends
        keep = 1 if over else (len(left) + 1) // 2
        for trial in left[keep:]:
            let_go(trial)
        left = left[:keep]
        if len(left) == 1:
            return left[0]


def compared(trial: Trial, baseline: Trial, rounds: int) -> list[float]:
    """Ratios of rates that were measured one after the other, in turn."""
    before = len(trial.rates), len(baseline.rates)
    for number in range(rounds):
        for one in (trial, baseline) if number % 2 == 0 else (baseline, trial):
            one.measure()
    pairs = zip(trial.rates[before[0] :], baseline.rates[before[1] :], strict=False)
    return [rate / other for rate, other in pairs]
