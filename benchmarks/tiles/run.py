"""Images in tiles: speed beside plain torch and beside layer parallelism, memory of a rank, and messages.

    python benchmarks/tiles/run.py

measures all of it, prints the tables, keeps the results and renews README.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import memory
import report
import throughput
from contender import leave_properly
from contenders import SPEED

from fivefold.recipes.models import names

PARTS = ("throughput", "memory", "prediction", "plans")
AT_ONCE = ("single", "halves", "layers", "tiles", "tiles-shared", "tiles-never", "tiles-4")
"""contenders by default: all exist at the same time, with their freed memory; 24 GB hold no more"""
MEMORY_MODELS = ("edsr", "vgg16_bn", "resnet50")
NARROW = 16
"""features of EDSR where nobody says otherwise: the paper's 64 would take a minute and 17 GB per step"""


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each contender")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder of the figures"
    )
    speed = parser.add_argument_group("throughput")
    speed.add_argument("--model", nargs="+", choices=names(), default=("resnet50", "edsr_small"))
    speed.add_argument("--contenders", nargs="+", choices=SPEED, default=AT_ONCE)
    speed.add_argument("--image", type=int, default=1024, help="pixels along each side")
    speed.add_argument(
        "--features", type=int, default=NARROW, help="of EDSR; 0 for the model's own"
    )
    speed.add_argument("--steps", type=int, default=1, help="timed steps in a block")
    room = parser.add_argument_group("memory, prediction")
    room.add_argument("--memory-model", nargs="+", choices=names(), default=MEMORY_MODELS)
    room.add_argument("--memory-image", type=int, default=512, help="pixels along each side")
    plan = parser.add_argument_group("plans, prediction")
    plan.add_argument("--tile", type=int, default=512, help="pixels along each side of a tile")
    plan.add_argument("--large", type=int, default=16384, help="pixels of the image in 64 tiles")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    begun = time.monotonic()
    with leave_properly():
        if "throughput" in asked.parts:
            for model in asked.model:
                features = asked.features or None if model.startswith("edsr") else None
                result = throughput.measure(asked, model, features)
                _tell(result, report.throughput, _name(asked, model, features), asked.results)
        if "memory" in asked.parts:
            result = memory.measure(asked, asked.memory_model)
            _tell(result, report.memory, _memory_name(asked), asked.results)
        if "prediction" in asked.parts:
            import prediction  # with torch, which the contenders' parent has no use for

            result = prediction.measure(asked, asked.memory_model)
            _tell(result, report.prediction, _prediction_name(asked), asked.results)
        if "plans" in asked.parts:
            import plans

            _tell(plans.measure(asked), report.plans, _plans_name(asked), asked.results)
    print(f"all of it took {time.monotonic() - begun:.0f} s")
    return 0


def _tell(
    result: dict[str, Any], text: Callable[[dict[str, Any]], str], name: str, folder: Path
) -> None:
    print(f"\n{text(result)}\n", flush=True)
    report.keep(result, name, folder)


def _name(asked: argparse.Namespace, model: str, features: int | None) -> str:
    """Of the file: the model, and behind it whatever is not the default."""
    wide = "" if features in (None, NARROW) else f"{features}-features"
    return "-".join(filter(None, [model, wide, "" if asked.image == 1024 else f"{asked.image}px"]))


def _memory_name(asked: argparse.Namespace, what: str = "memory") -> str:
    usual = tuple(asked.memory_model) == MEMORY_MODELS
    size = "" if asked.memory_image == 512 else f"{asked.memory_image}px"
    return "-".join(filter(None, [what, *(() if usual else asked.memory_model), size]))


def _prediction_name(asked: argparse.Namespace) -> str:
    name = _memory_name(asked, "prediction")
    return name if asked.large == 16384 else f"{name}-{asked.large}px"


def _plans_name(asked: argparse.Namespace) -> str:
    usual = asked.tile == 512 and asked.large == 16384
    return "plans" if usual else f"plans-{asked.tile}px-{asked.large}px"


if __name__ == "__main__":
    sys.exit(main())
