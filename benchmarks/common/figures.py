"""From measured rounds to figures: medians, intervals that assume no distribution, and tables."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

HERE = Path(__file__).resolve().parent
CONFIDENCE = 0.95
FEWEST_ROUNDS = 7
"""below this, no result is kept"""
BUSY_PERCENT = 5.0
TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Median:
    """A median and the interval that holds the true one with at least `coverage`."""

    value: float
    low: float
    high: float
    coverage: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Median:
        """The narrowest pair of order statistics that covers 95 %; all values, if they cover less.

        Of n independent values, the k-th smallest and the k-th largest have the median between them
        with probability 1 - 2 P[Binomial(n, 1/2) < k], whatever the distribution.
        """
        ordered, n = sorted(values), len(values)
        k = 1
        while k + 1 <= n // 2 and _coverage(n, k + 1) >= CONFIDENCE:
            k += 1
        return cls(statistics.median(ordered), ordered[k - 1], ordered[n - k], _coverage(n, k))

    def at_least(self, goal: float) -> str:
        """Whether a goal is met: it is when the whole interval meets it, missed when none of it does."""
        return self._judged(self.low >= goal, self.high < goal)

    def at_most(self, goal: float) -> str:
        """The same, for what should be small."""
        return self._judged(self.high <= goal, self.low > goal)

    def _judged(self, met: bool, missed: bool) -> str:
        if self.coverage < CONFIDENCE:
            return "too few rounds to say"
        return "met" if met else "missed" if missed else "open, the interval straddles it"

    def __str__(self) -> str:
        if self.coverage < CONFIDENCE:
            return f"{self.value:.3f} [too few]"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def _coverage(n: int, k: int) -> float:
    return 1.0 - 2.0 * sum(math.comb(n, i) for i in range(k)) / 2.0**n


def ratio(values: Sequence[float], baseline: Sequence[float]) -> Median:
    """Median of the ratios of values that were measured in the same round."""
    return Median.of([v / b for v, b in zip(values, baseline, strict=True)])


def middle_half(values: Sequence[float], digits: int = 0) -> str:
    """The quartiles, as text."""
    if len(values) < 2:
        return "-"
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{low:.{digits}f} to {high:.{digits}f}"


def environment() -> dict[str, Any]:
    """What a reader needs to judge the figures; no names of machines or folders. Takes a second."""
    busy = psutil.cpu_percent(interval=1.0)
    if busy > BUSY_PERCENT:
        print(
            f"note: others keep the cores {busy:.0f} % busy; figures of a machine that is not quiet "
            "mean little",
            file=sys.stderr,
        )
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": re.split(r"[-+]", platform.release())[0],
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "busy_before_percent": busy,
    }


def _cpu() -> str:
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields[key.strip()] = value.strip()
    flags = set(fields.get("flags", "").split())
    telling = [flag for flag in TELLING_FLAGS if flag in flags]
    return f"{fields.get('model name', platform.machine())} ({', '.join(telling)})"


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=HERE, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "../../src", "../*.py")
        return git("rev-parse", "--short=10", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table that also reads well as it is; all columns but the first are figures."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *rest = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return f"| {' | '.join([first, *rest])} |"

    rule = [("-" * w) if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join([line(header), line(rule), *(line(row) for row in rows)])
