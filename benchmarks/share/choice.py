"""Whether `fivefold tune instances` chooses what is fastest: its choice, beside all choices measured anew.

    python benchmarks/share/choice.py

For each net, size of images and kind of batch statistics it lets the tuner choose, as the command does in a
minute, then starts everything it chose from once more, in alternating blocks. `--parts` takes some.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from cpus import BATCH, HERE, SETTINGS, page
from figures import environment

from fivefold.plan import Plan, Provenance
from fivefold.tune.halving import Trial
from fivefold.tune.instances import Running, choices, tried


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=SETTINGS, choices=SETTINGS, metavar="PART")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=1.0, help="that the tuner has")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--tiny", action="store_true", help="small batches, to see that it runs")
    return parser.parse_args()


def measured(asked: argparse.Namespace, setting: str) -> dict[str, Any]:
    """What the tuner chose for a setting, and the rates of all choices, by round."""
    net, pixels, norm = setting.rsplit("-", 2)
    batch = 4 if asked.tiny else BATCH[int(pixels)]
    values: dict[str, object] = {"train.batch_size": batch, "parallel.batch_norm": norm}
    plan = Plan().replace(values, Provenance("user", "benchmark"))
    edge = int(pixels)
    spec = {"model": net, "shape": [3, edge, edge], "classes": 10, "integers": 0}
    cores = environment()["cores"]
    every = list(choices(cores, batch))
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        found = tried(
            plan,
            spec,
            every,
            workers=[0],
            allowed=[],
            seconds=60 * asked.minutes,
            folder=Path(folder),
        )
    took_s = time.monotonic() - began
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder, ExitStack() as stack:
        trials: list[Trial] = Running(plan, spec, Path(folder), stack, lambda _: None).begun(every)
        for number in range(asked.rounds):
            first = number // 2 % len(trials)
            turned = [*trials[first:], *trials[:first]]
            for trial in turned if number % 2 == 0 else turned[::-1]:
                trial.measure()
    return {
        "batch": batch, "chosen": str(found.best), "predicted": found.predicted,
        "checked": statistics.median(found.checked), "took_s": round(took_s, 1),
        "rates": {trial.name: [round(rate, 2) for rate in trial.rates] for trial in trials},
    }  # fmt: skip


def main() -> int:
    """Measure what was asked for, and keep it beside what is kept; the exit code."""
    asked = options()
    path = asked.results / "choice.json"
    for setting in asked.parts:
        before = json.loads(path.read_text())["settings"] if path.exists() else {}
        told = {**environment(), "torch": version("torch"), "disturbed_rounds": 0}
        result = {
            "part": "choice", "rounds": asked.rounds, "environment": told,
            "settings": before | {setting: measured(asked, setting)},
        }  # fmt: skip
        page().publish(["choice"], lambda _, result=result: result, asked.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
