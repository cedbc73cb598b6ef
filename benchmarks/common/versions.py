"""Steps of this version of Fivefold beside those of another one, in alternating blocks.

    git worktree add ../before 3e698da
    make -C ../before .venv/.develop
    python benchmarks/common/versions.py ../before

Both train the same models under the same layouts; the ratio of their times per step, round by round, is
printed with its 95 % interval. Goal: at most 1.01.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from contender import Contender, Kind, leave_properly
from figures import environment, ratio, table
from rounds import alternate

BENCHMARKS = Path(__file__).resolve().parents[1]
GOAL = 1.01


@dataclass(frozen=True)
class Work:
    """What both versions do."""

    worker: Path
    contender: str
    """as the worker knows it"""
    options: tuple[str, ...]
    steps: int
    """timed in a block"""


_SMALL = ("--model", "resnet20", "--batch", "128", "--image", "32", "--variant", "fp32")
_LARGE = ("--model", "resnet50", "--height", "512", "--width", "512", "--features", "0")
WORKS = {
    "data=2, exact": Work(BENCHMARKS / "data-parallel/worker.py", "exact", _SMALL, 6),
    "data=2, replica": Work(BENCHMARKS / "data-parallel/worker.py", "replica", _SMALL, 6),
    "width=2": Work(BENCHMARKS / "tiles/worker.py", "tiles", _LARGE, 2),
}


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], formatter_class=shown)
    parser.add_argument("before", type=Path, help="a checkout of the other version, with its .venv")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=tuple(WORKS))
    parser.add_argument("--rounds", type=int, default=17, help="blocks of each version")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; 1 if this version is slower than the goal."""
    asked = options()
    pythons = {"now": sys.executable, "before": str(asked.before.resolve() / ".venv/bin/python")}
    where, lines, missed = environment(), list[list[str]](), False
    with leave_properly():
        for name in asked.works:
            now, before = measured(WORKS[name], pythons, asked.rounds)
            found = ratio(now, before)
            missed |= found.low > GOAL
            times = [f"{statistics.median(each) * 1e3:.1f}" for each in (before, now)]
            lines.append([name, *times, str(found), found.at_most(GOAL)])
    print(
        table(["steps of", "before, ms", "now, ms", "now / before [95 %]", "at most 1.01"], lines)
    )
    print(where)
    return 1 if missed else 0


def measured(
    work: Work, pythons: Mapping[str, str], rounds: int
) -> tuple[Sequence[float], Sequence[float]]:
    """Seconds per step of this version and of the other one, by round."""
    launcher = ("-m", "fivefold", "run", "-n", "2", "--log-dir", "{logs}")
    kind = Kind("", "", launcher, 2, 1, way=work.contender)

    def told_as(done: int, blocks: Mapping[str, Sequence[Sequence[float]]]) -> str:
        shown = "  ".join(
            f"{name} {statistics.mean(own[-1]) * 1e3:.1f}" for name, own in blocks.items()
        )
        return f"{work.contender} {done}/{rounds} ms/step: {shown}"

    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[Contender] = []
        for name, python in pythons.items():
            this = replace(kind, name=name, python=python)
            contender = Contender(this, work.worker, work.options, Path(folder))
            running.append(stack.enter_context(contender))
            contender.wait_until_ready()  # one after the other: never do two compute at once
        blocks, _ = alternate(running, rounds, work.steps, told_as)
    now, before = ([statistics.mean(block) for block in blocks[name]] for name in pythons)
    return now, before


if __name__ == "__main__":
    sys.exit(main())
