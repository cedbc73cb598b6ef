"""Every model of the recipes in tiles against one process: the largest errors, in float64.

    python benchmarks/exactness/run.py

trains small versions of all models under all layouts, prints the table, keeps it and renews README.md.
Ranks are threads of one process, as in the tests; the models and the judgement are those of the tests too.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

import torch
from figures import table
from page import brief, circumstances, keep

from fivefold.mesh import Mesh
from fivefold.parallel.program.net import RecordedNet
from fivefold.plan import Layout
from fivefold.recipes import models
from ranks import run_ranks
from small_models import SMALL, net_of, run

FLAT = (
    Layout(height=3), Layout(width=2), Layout(height=2, width=2), Layout(data=2, width=2),
)  # fmt: skip
SOLID = (
    Layout(depth=3), Layout(width=2), Layout(depth=2, height=2), Layout(data=2, depth=2),
)  # fmt: skip
SHOWN = ("outputs", "gradients", "buffers", "weights")


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--models", nargs="+", choices=tuple(SMALL), default=tuple(SMALL))
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


def main() -> int:
    """Judge what was asked for; 1 if anything is not exact. Only a complete table is kept."""
    asked = options()
    begun = time.monotonic()
    found: list[dict[str, Any]] = []
    for name in asked.models:
        for layout in FLAT if models.dims(name) == 2 else SOLID:
            found.append(judged(name, layout, asked.steps))
            print(*_row(found[-1]), f"{time.monotonic() - begun:.0f} s", flush=True)
    result = {
        "benchmark": "exactness", "steps": asked.steps, "environment": circumstances(), "models": found,
    }  # fmt: skip
    print(f"\n{shown(result)}\n")
    if tuple(asked.models) == tuple(SMALL) and asked.steps == options().steps:
        keep("models", result, shown(result))
    return 0 if all(row["passed"] for row in found) else 1


def judged(name: str, layout: Layout, steps: int) -> dict[str, Any]:
    """The figures of one model under one layout."""
    report, small = run(name, layout, steps, strict=False), SMALL[name]
    first = report.worst[0]
    return {
        "model": name,
        "made_small": small.size,
        "parameters": sum(p.numel() for p in net_of(name).parameters()),
        "image": list(small.image),
        "samples": small.samples,
        "layout": str(layout),
        "ranks": layout.size,
        "errors": {
            q.name: max((i.error for i in q.worst), default=None) for q in report.quantities
        },
        "nearest": first.name,
        "tolerance": first.tolerance,
        "of_tolerance": first.excess,
        "replicas_apart": report.replicas.difference,
        "gathered": _gathered(name, layout),
        "passed": report.passed,
        "verdict": report.verdict(),
    }


def _gathered(name: str, layout: Layout) -> int:
    """How many operations of the net Fivefold does not know in tiles."""
    small = SMALL[name]
    example = torch.empty((small.samples, 3, *small.image), device="meta")

    def count(mesh: Mesh) -> int:
        return len(RecordedNet(net_of(name), mesh).plan_for(example, mesh.share).gathered)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return max(run_ranks(layout, count))


def shown(result: dict[str, Any]) -> str:
    """The table of errors, and one of the models."""
    header = ["model", "images", "layout", "ranks", *SHOWN, "of the tolerance", "gathered"]
    errors = table(header, [_row(row) for row in result["models"]])
    every = {row["model"]: row for row in result["models"]}
    sizes = [[name, f"{row['parameters']:,}", row["made_small"]] for name, row in every.items()]
    return f"{errors}\n\n{table(['model', 'parameters', 'options'], sizes)}"


def _row(row: dict[str, Any]) -> list[str]:
    images = f"{row['samples']} of {'x'.join(map(str, row['image']))}"
    errors = [row["errors"][name] for name in SHOWN]
    share = f"{brief(row['of_tolerance'])} of {brief(row['tolerance'])}"
    return [
        row["model"], images, row["layout"].replace(",", ", "), str(row["ranks"]),
        *("-" if error is None else brief(error) for error in errors),
        share if row["passed"] else f"NOT exact: {share}", str(row["gathered"]),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
