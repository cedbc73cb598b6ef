"""All schedules of pipelines, and pipelines with tiles and replicas, against one process: the largest errors.

    python benchmarks/exactness/stages.py

trains small versions of three models, the skips of one of which cross stages, prints a table of each, keeps
it and renews README.md. One process accumulates over the same micro-batches. Ranks are threads of one
process, as in the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from figures import table
from page import brief, circumstances, keep

from fivefold.plan import Layout, Pipeline, Plan, Tiles
from small_models import SMALL, batch_of, judged, loss_of, net_of

MODELS = ("resnet50", "amoebanet_d", "unet")
SCHEDULES = (
    Pipeline("layer", 1), Pipeline("gpipe", 4), Pipeline("1f1b", 4), Pipeline("interleaved", 4, 2),
    Pipeline("zero-bubble", 4), Pipeline("gems", 4), Pipeline("gems-overlap", 4), Pipeline("chimera", 4),
)  # fmt: skip
RANKS = (2, 3, 4)
STEPS = 3
SHOWN = ("outputs", "gradients", "buffers", "weights")
TIMEOUT_S = 400.0
"""of a case; a busy machine is no error"""


@dataclass(frozen=True)
class Case:
    """A layout and what its stages do."""

    layout: Layout
    pipeline: Pipeline

    @property
    def samples(self) -> int:
        """One more than every replica has micro-batches: they do not divide evenly."""
        return 4 * self.layout.data + 1

    @property
    def plan(self) -> Plan:
        """For Fivefold."""
        return Plan(layout=self.layout, pipeline=self.pipeline, tiles=Tiles(strict=True))


CASES = (
    *(Case(Layout(pipe=ranks), pipeline) for pipeline in SCHEDULES for ranks in RANKS),
    *(
        Case(Layout(pipe=2, height=2), Pipeline(schedule, 4))
        for schedule in ("1f1b", "zero-bubble", "gems")
    ),
    *(Case(Layout(data=2, pipe=2), Pipeline(schedule, 4)) for schedule in ("1f1b", "gems")),
    *(
        Case(Layout(data=2, pipe=2, height=2), Pipeline(schedule, 4))
        for schedule in ("1f1b", "gems", "chimera")
    ),
)


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many of each")
    return parser.parse_args()


def main() -> int:
    """Judge what was asked for; 1 if anything is not exact. Only complete tables are kept."""
    asked = options()
    passed = True
    for name in asked.models:
        told, begun = circumstances(), time.monotonic()
        found: list[dict[str, Any]] = []
        for case in CASES[: asked.cases]:
            found.append(stated(name, case, asked.steps))
            print(name, *_row(found[-1]), f"{time.monotonic() - begun:.0f} s", flush=True)
        result = {
            "benchmark": "stages", "model": name, "steps": asked.steps, "environment": told, "rows": found,
        }  # fmt: skip
        print(f"\n{shown(result)}\n", flush=True)
        passed = passed and all(row["passed"] for row in found)
        if (len(found), asked.steps) == (len(CASES), STEPS):
            keep(f"stages-{name}", result, shown(result))
    return 0 if passed else 1


def stated(name: str, case: Case, steps: int) -> dict[str, Any]:
    """The figures of one model under one plan."""
    report = judged(
        net_of(name), case.plan, steps, loss_of(name), lambda: batch_of(name, case.samples),
        timeout_s=TIMEOUT_S,
    )  # fmt: skip
    first = report.worst[0]
    return {
        "image": list(SMALL[name].image),
        "samples": case.samples,
        "layout": str(case.layout),
        "ranks": case.layout.size,
        "schedule": case.pipeline.schedule,
        "micro_batches": case.pipeline.micro_batches,
        "stages": case.layout.pipe * case.pipeline.stages_per_rank,
        "errors": {
            q.name: max((i.error for i in q.worst), default=None) for q in report.quantities
        },
        "nearest": first.name,
        "tolerance": first.tolerance,
        "of_tolerance": first.excess,
        "replicas_apart": report.replicas.difference,
        "passed": report.passed,
        "verdict": report.verdict(),
    }


def shown(result: dict[str, Any]) -> str:
    """The table of errors."""
    header = [
        result["model"], "ranks", "schedule", "stages", "micro-batches", "images", *SHOWN,
        "of the tolerance",
    ]  # fmt: skip
    return table(header, [_row(row) for row in result["rows"]])


def _row(row: dict[str, Any]) -> list[str]:
    images = f"{row['samples']} of {'x'.join(map(str, row['image']))}"
    errors = [row["errors"][name] for name in SHOWN]
    share = f"{brief(row['of_tolerance'])} of {brief(row['tolerance'])}"
    return [
        row["layout"].replace(",", ", "), str(row["ranks"]), row["schedule"], str(row["stages"]),
        str(row["micro_batches"]), images,
        *("-" if error is None else brief(error) for error in errors),
        share if row["passed"] else f"NOT exact: {share}",
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
