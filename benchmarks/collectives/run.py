"""Collectives between processes of one node: Fivefold's backend beside gloo, Open MPI and MPICH.

    python benchmarks/collectives/run.py

measures all parts in rounds in which the contenders take turns, prints the tables, keeps the results and
renews README.md. `--parts` and `--rounds` choose less; results of fewer than 7 rounds are not kept.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import in_c
import report
import steps
from figures import environment

from fivefold.bench import Contender, Measurement, MeasureTask, begun, measure

HERE = Path(__file__).resolve().parent
K, M = 1 << 10, 1 << 20
SIZES = (4, 4 * K, 16 * K, 64 * K, 256 * K, M, 4 * M, 16 * M, 64 * M)
SMALL = (4, 256, 4 * K, 64 * K)
PARTS: dict[str, dict[str, Any]] = {
    "allreduce": {
        "ranks": 2, "sizes": SIZES,
        "contenders": ("fivefold", "fivefold-arena", "gloo", "openmpi", "mpich"),
    },
    "four-ranks": {"ranks": 4, "sizes": SIZES[:-1], "contenders": ("fivefold", "gloo", "openmpi")},
    "others": {"ranks": 2, "sizes": (4 * K, M, 16 * M), "contenders": ("fivefold", "gloo", "openmpi")},
    "in-c": {"ranks": 2, "sizes": SIZES, "contenders": ()},
    "steps": {"ranks": 2, "sizes": (), "contenders": ()},
    "p2p": {"ranks": 2, "sizes": (*SMALL, M), "contenders": ("fivefold", "gloo", "openmpi", "mpich")},
}  # fmt: skip
"""what is measured, by name; "stream" beside allreduce is the limit, and belongs to its first contender"""
OTHERS = ("allgather", "reduce-scatter", "alltoall", "bcast", "reduce")


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender at a size")
    parser.add_argument("--most", type=int, default=64 * M, help="largest size in bytes")
    parser.add_argument("--models", nargs="+", choices=steps.MODELS, default=steps.MODELS)
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    return report.PAGE.publish(
        asked.parts,
        lambda name: measured(name, asked.rounds, asked.most, asked.models),
        asked.results,
    )


def measured(name: str, rounds: int, most: int, models: Sequence[str]) -> dict[str, Any]:
    """One part: seconds by operation, contender, size and round."""
    part = PARTS[name]
    sizes = [size for size in part["sizes"] if size <= most]
    if name in ("in-c", "steps"):
        return apart(name, sizes or list(models), rounds)
    operations = OTHERS if name == "others" else ("p2p",) if name == "p2p" else ("allreduce",)
    before = environment()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fivefold-bench-")))
        running = [
            stack.enter_context(begun(contender, part["ranks"], folder).meet())
            for contender in part["contenders"]
        ]
        seconds = {
            operation: turns(operation, running, sizes, rounds, part["ranks"])
            for operation in operations
        }
        if name == "allreduce":
            seconds["stream"] = turns("stream", running[:1], sizes, rounds, part["ranks"])
    return {
        "part": name, "ranks": part["ranks"], "rounds": rounds, "sizes": sizes, "seconds": seconds,
        "environment": before,
    }  # fmt: skip


def apart(name: str, sizes: Sequence[Any], rounds: int) -> dict[str, Any]:
    """The parts that measure other programs than calls of torch.distributed and mpi4py."""
    before = environment()
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        if name == "in-c":
            seconds = {"allreduce": in_c.measured(Path(folder), 2, sizes, rounds)}
        else:
            seconds = steps.measured(Path(folder), sizes, rounds)
    return {
        "part": name, "ranks": 2, "rounds": rounds, "sizes": list(sizes),
        "seconds": seconds, "environment": before,
    }  # fmt: skip


def turns(
    operation: str, running: Sequence[Contender], sizes: Sequence[int], rounds: int, ranks: int
) -> dict[str, list[list[float]]]:
    """By contender: for every size the seconds of each round."""
    found = measure(MeasureTask(operation, ranks=ranks), running, sizes, rounds, silently)
    for name, measurements in found.items():
        check(operation, name, measurements)
    print(f"{operation}: done", flush=True)
    return {name: [m.rounds_s for m in measurements] for name, measurements in found.items()}


def silently(_size: int, _name: str) -> None:
    """Nothing is shown meanwhile: a drawing of progress would take time from a contender."""


def check(operation: str, name: str, found: Sequence[Measurement]) -> None:
    """A fast wrong result is no result."""
    for m in found:
        if m.error or not m.right:
            raise SystemExit(
                f"{operation} of {m.size_bytes} bytes over {name}: {m.error or 'wrong'}"
            )


if __name__ == "__main__":
    sys.exit(main())
