"""What the planner predicts beside what plans really take: every candidate of a few local ranks is run.

    python benchmarks/planner/run.py --model resnet20 --image 96 --batch 4 --ranks 2

Candidates run one after the other, in an order that is shuffled; nothing else should run meanwhile.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from figures import environment

from fivefold.plan import Plan, Provenance
from fivefold.recipes.models import build, names
from fivefold.tune import (
    Candidate,
    Case,
    Prediction,
    Subject,
    candidates,
    measured_factors,
    this_machine,
)

HERE = Path(__file__).resolve().parent
WANTED_TIME, WANTED_MEMORY, WANTED_BEST = 0.15, 0.10, 0.05
"""largest median errors, and how much slower than the best the choice may be"""


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--model", choices=names("classes"), default="resnet20")
    parser.add_argument("--image", type=int, default=96, help="pixels along each side")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each candidate")
    parser.add_argument("--most", type=int, default=0, help="candidates that are run; 0: all")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    return parser.parse_args()


def predictions(asked: argparse.Namespace) -> list[Prediction]:
    """Of every candidate, the fastest first, with operations timed here."""
    net, sample = build(asked.model, 10), (3, asked.image, asked.image)
    cluster = this_machine(asked.ranks)
    plain = Subject(net, sample, cluster)
    factors = measured_factors(net, plain.tape(1), cluster.device)
    subject = Subject(net, sample, cluster, fuse="auto", factors=factors)
    every = candidates(asked.ranks, subject.pixels, asked.batch, subject.most_stages)
    found = [Case(subject, candidate, asked.batch, "sgd").predict() for candidate in every]
    return sorted(found, key=lambda told: told.step_s)


def run(asked: argparse.Namespace, candidate: Candidate) -> dict[str, float]:
    """Seconds of a step and bytes of the largest rank, measured. Raises `CalledProcessError`."""
    with tempfile.TemporaryDirectory(prefix="fivefold-planner-") as name:
        folder = Path(name)
        plan = Plan().replace(candidate.values(), Provenance("tuned", "benchmark"))
        plan.save(folder / "plan.toml")
        words = [
            sys.executable, "-m", "fivefold", "run", "-n", str(asked.ranks), "--plan",
            str(folder / "plan.toml"), "--log-dir", str(folder / "logs"), str(HERE / "worker.py"),
            "--model", asked.model, "--image", str(asked.image), "--batch", str(asked.batch),
            "--steps", str(asked.steps), "--results", name,
        ]  # fmt: skip
        subprocess.run(
            words,
            check=True,
            capture_output=True,
            timeout=900,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        told = [json.loads((folder / f"{r}.json").read_text()) for r in range(asked.ranks)]
    return {key: max(rank[key] for rank in told) for key in ("step_s", "memory_bytes")}


def compared(asked: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every candidate that was run."""
    told = predictions(asked)
    chosen = told[: asked.most] if asked.most else told
    measured: dict[Candidate, dict[str, float]] = {}
    for number, one in enumerate(random.Random(0).sample(chosen, len(chosen)), 1):
        try:
            measured[one.candidate] = run(asked, one.candidate)
        except subprocess.CalledProcessError as problem:
            last = problem.stderr.decode().strip().splitlines()[-1:]
            print(f"{one.candidate} failed: {' '.join(last)}", flush=True)
            continue
        found = measured[one.candidate]
        print(
            f"{number}/{len(chosen)} {one.candidate}: {found['step_s']:.3f} s, predicted {one.step_s:.3f}; "
            f"{found['memory_bytes'] / 2**20:.0f} MiB, predicted {one.memory_bytes / 2**20:.0f}",
            flush=True,
        )
    return [
        {
            "candidate": str(one.candidate),
            "predicted": {"step_s": one.step_s, "memory_bytes": one.memory_bytes},
            "parts": dataclasses.asdict(one.parts),
            "measured": measured[one.candidate],
        }
        for one in chosen
        if one.candidate in measured
    ]


def errors(rows: Sequence[dict[str, Any]], key: str) -> list[float]:
    """How far predictions are from what was measured, as fractions of it."""
    return [abs(row["predicted"][key] / row["measured"][key] - 1) for row in rows]


def main() -> int:
    """Measure, print the figures, and keep them; the exit code."""
    asked = options()
    rows = compared(asked)
    if not rows:
        return 1
    best = min(row["measured"]["step_s"] for row in rows)
    figures = {
        "time": statistics.median(errors(rows, "step_s")),
        "memory": statistics.median(errors(rows, "memory_bytes")),
        "choice": rows[0]["measured"]["step_s"] / best - 1,
    }
    wanted = {"time": WANTED_TIME, "memory": WANTED_MEMORY, "choice": WANTED_BEST}
    for name, value in figures.items():
        met = "met" if value <= wanted[name] else "missed"
        print(f"{name}: {value:.1%}, at most {wanted[name]:.0%} wanted: {met}")
    asked.results.mkdir(parents=True, exist_ok=True)
    told = {"asked": {k: str(v) for k, v in vars(asked).items()}, "figures": figures, "rows": rows}
    told["environment"] = environment()
    path = asked.results / f"{asked.model}-{asked.image}px-{asked.batch}-{asked.ranks}.json"
    path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
