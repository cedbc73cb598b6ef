"""Pipelines: beside torch's own, in two directions, beside tiles, and what they keep in memory.

    python benchmarks/pipeline/run.py

measures all of it, prints the tables, keeps the results and renews README.md.
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

import parts
import report
from contender import leave_properly
from workload import Workload

PARTS = ("torch", "pairs", "headline", "memory")


@dataclass(frozen=True)
class Size:
    """Of a part's work, where nobody says otherwise."""

    image: int
    samples: int
    micro_batches: int
    steps: int = 1
    """in a block"""


SIZES = {
    "torch": Size(128, 4, 8, steps=2),
    "pairs": Size(192, 2, 16),
    "headline": Size(768, 1, 2),
    "memory": Size(64, 2, 8),
}
CUTS = {
    ("torch", "resnet50"): "layer3.1",
    ("pairs", "resnet50"): "layer2.0, layer3.1, layer4.0",
    ("headline", "resnet50"): "layer2.3",
    ("headline", "amoebanet_d"): "cells.3",
}
"""where the parts take about equally long, as measured at these sizes"""
IMAGES = {("headline", "amoebanet_d"): 960}
"""where a model's is not the part's own: the largest, in steps of 64, that all contenders can keep"""
HEADLINE = {"resnet50": {}, "amoebanet_d": {"layers": 6, "filters": 64}}
"""models and their options"""
CAP_MIB = 1536


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each contender")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder of the figures"
    )
    parser.add_argument("--models", nargs="+", choices=HEADLINE, default=tuple(HEADLINE))
    parser.add_argument("--cap", type=int, default=CAP_MIB, help="MiB of activations per rank")
    small = parser.add_argument_group("sizes", "instead of each part's own")
    small.add_argument("--image", type=int, help="pixels along each side")
    small.add_argument("--samples", type=int, help="images of a micro-batch")
    small.add_argument("--micro-batches", type=int)
    small.add_argument("--steps", type=int, help="timed steps in a block")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    with leave_properly():
        for part in asked.parts:
            for model in asked.models if part == "headline" else [_model(part)]:
                begun = time.monotonic()
                result = measured(asked, part, model)
                print(f"\n{report.section(result)}\n", flush=True)
                report.keep(result, _name(asked, part, model), asked.results)
                print(f"{part} took {time.monotonic() - begun:.0f} s", flush=True)
    return 0


def _model(part: str) -> str:
    return "chain" if part == "memory" else "resnet50"


def measured(asked: argparse.Namespace, part: str, model: str) -> dict[str, Any]:
    """One part, with one model."""
    size = SIZES[part]
    work = Workload(
        model,
        HEADLINE[model] if part == "headline" else {},
        asked.image or IMAGES.get((part, model), size.image),
        asked.samples or size.samples,
        asked.micro_batches or size.micro_batches,
        CUTS.get((part, model), ""),
    )
    steps = asked.steps or size.steps
    match part:
        case "torch":
            return parts.with_torch(work, asked.rounds, steps)
        case "pairs":
            return parts.pairs(work, asked.rounds, steps)
        case "headline":
            return parts.headline(work, asked.rounds, steps, asked.cap << 20)
        case _:
            return parts.memory(work)


def _name(asked: argparse.Namespace, part: str, model: str) -> str:
    """Of the file: the part, and behind it whatever is not the default."""
    own = {"px": asked.image, "samples": asked.samples, "micro-batches": asked.micro_batches}
    other = [f"{number}{unit}" for unit, number in own.items() if number]
    return "-".join([part, *([model] if part == "headline" else []), *other])


if __name__ == "__main__":
    sys.exit(main())
