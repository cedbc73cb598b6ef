"""What the planner predicts beside what plans really take: candidates of a few local ranks are run.

    python benchmarks/planner/run.py

predicts and runs all parts, prints the tables, keeps the results and renews README.md. Candidates run one
after the other, in an order that is shuffled; nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import report
import torch
from figures import environment

from fivefold.parallel.pipeline.cut import MEASURED
from fivefold.plan import Plan, Provenance
from fivefold.recipes.models import build, names
from fivefold.tune.candidates import Candidate, candidates
from fivefold.tune.machine import this_machine
from fivefold.tune.measure import measuring
from fivefold.tune.predict import Case, Prediction
from fivefold.tune.subject import Subject

HERE = Path(__file__).resolve().parent
BACKEND = "gloo"
"""what ranks talk over, predicted and run"""


@dataclass(frozen=True)
class Part:
    """One model on a few ranks."""

    model: str
    image: int
    ranks: int
    most: int
    """candidates that are run"""
    batch: int = 4


PARTS = {
    "resnet20-2": Part("resnet20", 96, 2, 16),
    "resnet50-2": Part("resnet50", 256, 2, 8),
    "amoebanet_d-2": Part("amoebanet_d", 128, 2, 8),
    "resnet20-4": Part("resnet20", 96, 4, 16),
}


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each candidate")
    parser.add_argument("--results", type=Path, default=report.RESULTS, help="folder of figures")
    other = parser.add_argument_group("sizes", "instead of each part's own")
    other.add_argument("--model", choices=names("classes"))
    other.add_argument("--image", type=int, help="pixels along each side")
    other.add_argument("--batch", type=int)
    other.add_argument("--ranks", type=int)
    other.add_argument("--most", type=int, help="candidates that are run")
    return parser.parse_args()


def predictions(part: Part) -> list[Prediction]:
    """Of every candidate, the fastest first, as `fivefold plan --measure` predicts them."""
    net, sample = build(part.model, 10), (3, part.image, part.image)
    cluster = this_machine(part.ranks)
    with measuring(net, sample, part.ranks, fuse="auto", backend=BACKEND) as measured:
        subject = Subject(net, sample, cluster, measured=measured)
        every = candidates(part.ranks, subject.pixels, part.batch, subject.most_stages)
        taken = _some(list(every), part)
        found = [Case(subject, candidate, part.batch, "sgd").predict() for candidate in taken]
    return sorted(found, key=lambda told: told.step_s)


def _some(every: list[Candidate], part: Part) -> list[Candidate]:
    """As many as are run, of all kinds of layouts and schedules in turn; the same in every run."""
    shuffled = random.Random(0).sample(every, len(every))
    seen: dict[tuple[object, ...], int] = {}

    def turn(candidate: Candidate) -> int:
        layout = candidate.layout
        kind = (layout.data, layout.pipe, candidate.schedule, bool(candidate.recompute))
        seen[kind] = seen.get(kind, -1) + 1
        return seen[kind]

    turns = {candidate: turn(candidate) for candidate in shuffled}
    # What computes again is seldom chosen.
    shuffled.sort(key=lambda candidate: (turns[candidate], bool(candidate.recompute)))
    return shuffled[: part.most]


def run(part: Part, candidate: Candidate, steps: int) -> dict[str, Any]:
    """Seconds of steps and bytes of the largest rank, measured. Raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory(prefix="fivefold-planner-") as name:
        folder = Path(name)
        values = {**candidate.values(), "comm.backend": BACKEND}
        if candidate.schedule:
            values["pipeline.cut"] = MEASURED
        plan = Plan().replace(values, Provenance("tuned", "benchmark"))
        plan.save(folder / "plan.toml")
        words = [
            sys.executable, "-m", "fivefold", "run", "-n", str(part.ranks), "--plan",
            str(folder / "plan.toml"), "--log-dir", str(folder / "logs"), str(HERE / "worker.py"),
            "--model", part.model, "--image", str(part.image), "--batch", str(part.batch),
            "--steps", str(steps), "--results", name,
        ]  # fmt: skip
        subprocess.run(
            words,
            check=True,
            capture_output=True,
            timeout=600,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        ranks = [json.loads((folder / f"{r}.json").read_text()) for r in range(part.ranks)]
    return {
        "step_s": [max(each) for each in zip(*(rank["step_s"] for rank in ranks), strict=True)],
        "memory_bytes": max(rank["memory_bytes"] for rank in ranks),
    }


def compared(part: Part, steps: int) -> dict[str, Any]:
    """What a part comes to."""
    told = predictions(part)
    measured: dict[Candidate, dict[str, Any]] = {}
    failed: list[str] = []
    for number, one in enumerate(random.Random(0).sample(told, len(told)), 1):
        try:
            found = measured[one.candidate] = run(part, one.candidate, steps)
        except subprocess.CalledProcessError as problem:
            last = problem.stderr.decode().strip().splitlines()[-1:]
            failed.append(f"{one.candidate}: {' '.join(last)}")
            print(f"{number}/{len(told)} {failed[-1]}", flush=True)
            continue
        print(
            f"{number}/{len(told)} {one.candidate}: {statistics.median(found['step_s']):.3f} s, predicted "
            f"{one.step_s:.3f}; {found['memory_bytes'] / 2**20:.0f} MiB, predicted "
            f"{one.memory_bytes / 2**20:.0f}",
            flush=True,
        )
    rows = [
        {
            "candidate": str(one.candidate),
            "predicted": {"step_s": one.step_s, "memory_bytes": one.memory_bytes},
            "parts": dataclasses.asdict(one.parts),
            "measured": measured[one.candidate],
        }
        for one in told
        if one.candidate in measured
    ]
    return {"part": dataclasses.asdict(part), "steps": steps, "rows": rows, "failed": failed}


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    own = ("model", "image", "batch", "ranks", "most")
    sizes = {name: getattr(asked, name) for name in own if getattr(asked, name) is not None}
    for name in asked.parts:
        before, begun = environment(), time.monotonic()
        result = compared(dataclasses.replace(PARTS[name], **sizes), asked.steps)
        result["environment"] = {**before, "torch": torch.__version__}
        if not result["rows"]:
            return 1
        print(f"\n{report.section(result)}\n\n{time.monotonic() - begun:.0f} s\n", flush=True)
        report.keep(result, name, asked.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
