"""The same small network in four columns, with halos handled in several ways: errors against one process.

    python benchmarks/exactness/compare.py

prints the table, keeps it and renews README.md.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from figures import table
from halos import Case, Made, alone, dtensor, emulated, fivefold
from page import brief, circumstances, keep
from torch import Tensor

SIZES = (32, 64)
SEEDS = range(5)
NAMES = {
    "dtensor": "DTensor, `Shard(3)`",
    "none": "no halos (emulated)",
    "detached": "halos without an adjoint (emulated)",
    "followed": "halos inside autograd (emulated)",
    "fivefold": "Fivefold, `width=4`",
}
COLUMNS = ("outputs", "first layer", "all parameters")


def main() -> int:
    """Compare, and keep what comes of it; 1 if Fivefold is not exact."""
    cases = {(size, seed): Case.of(seed, size) for size in SIZES for seed in SEEDS}
    truths = [alone(case) for case in cases.values()]
    made: dict[str, list[Made]] = {
        "dtensor": dtensor(list(cases.values())),
        "none": [emulated(case, "none") for case in cases.values()],
        "detached": [emulated(case, "detached") for case in cases.values()],
        "followed": [emulated(case, "followed") for case in cases.values()],
        "fivefold": [fivefold(case) for case in cases.values()],
    }
    rows: list[dict[str, Any]] = [
        {"size": size, "seed": seed, "contender": name, "errors": errors(own, truth)}
        for name, every in made.items()
        for (size, seed), own, truth in zip(cases, every, truths, strict=True)
    ]
    problems = sorted({own.problem for own in made["dtensor"] if own.problem})
    result = {
        "benchmark": "halos", "environment": circumstances(), "problems": problems, "rows": rows,
    }  # fmt: skip
    print(shown(result))
    print(*problems, sep="\n")
    keep("compare", result, shown(result))
    ours = [e for row in rows if row["contender"] == "fivefold" for e in row["errors"].values()]
    return 0 if max(ours) < 1e-10 else 1


def errors(own: Made, truth: Made) -> dict[str, float | None]:
    """Relative to the norm of what is right; None where there is nothing."""
    assert truth.gradients is not None
    found: dict[str, float | None] = dict.fromkeys(COLUMNS)
    found["outputs"] = _apart([own.outputs], [truth.outputs])
    if own.gradients is not None:
        found["first layer"] = _apart(own.gradients[:2], truth.gradients[:2])
        found["all parameters"] = _apart(own.gradients, truth.gradients)
    return found


def _apart(own: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    def flat(tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    return float((flat(own) - flat(truth)).norm() / flat(truth).norm())


def shown(result: dict[str, Any]) -> str:
    """A table per size: the median of the seeds, and in brackets the smallest and the largest."""
    header = ["", *(f"{size}x{size}: {name}" for size in SIZES for name in COLUMNS)]
    rows: list[list[str]] = []
    for contender, title in NAMES.items():
        cells = [
            _cell([row["errors"][name] for row in result["rows"]
                   if row["size"] == size and row["contender"] == contender])
            for size in SIZES
            for name in COLUMNS
        ]  # fmt: skip
        rows.append([title, *cells])
    return table(header, rows)


def _cell(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "fails"
    median, least, most = statistics.median(known), min(known), max(known)
    if most < 1e-6:
        return brief(median)
    return f"{median:.1%} [{least:.1%}, {most:.1%}]"


if __name__ == "__main__":
    sys.exit(main())
