"""Data parallelism: images per second of Fivefold beside torch's own, in alternating blocks.

    python benchmarks/data-parallel/run.py

measures every variant and the start-up, prints the tables, keeps the results and renews README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import report
import startup
from contender import Contender, leave_properly
from contenders import HERE, KINDS, RANKS
from figures import environment
from rounds import alternate

VARIANTS = ("fp32", "fp32-channels_last", "bf16-channels_last")


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--contenders", nargs="+", choices=KINDS, default=tuple(KINDS))
    parser.add_argument("--rounds", type=int, default=17, help="blocks of each contender")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in a block")
    parser.add_argument(
        "--model", default="resnet20", help="a name that fivefold.recipes.models has"
    )
    parser.add_argument("--batch", type=int, default=128, help="images in a batch of all ranks")
    parser.add_argument("--per-rank", action="store_true", help="the batch is each rank's instead")
    parser.add_argument("--image", type=int, default=32, help="pixels along each side")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--heap", choices=("kept", "returned"), default="kept", help="see README.md"
    )
    parser.add_argument("--startup", type=int, default=15, help="rounds of start-up; 0 for none")
    parser.add_argument(
        "--results", type=Path, default=report.RESULTS, help="folder of the figures"
    )
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    begun = time.monotonic()
    with leave_properly():
        for variant in asked.variants:
            result = measure(asked, variant)
            print(f"\n{report.throughput(result)}\n", flush=True)
            report.keep(result, _name(asked, variant), asked.results)
        if asked.startup:
            result = startup.measure(asked.startup)
            print(f"\n{report.startup(result)}\n", flush=True)
            report.keep(result, "startup", asked.results)
    print(f"all of it took {time.monotonic() - begun:.0f} s")
    return 0


def measure(asked: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Rounds of one block per contender, in an order that changes from round to round."""
    before = environment()
    batch = asked.batch * (RANKS if asked.per_rank else 1)

    def told_as(done: int, blocks: Mapping[str, Sequence[Sequence[float]]]) -> str:
        rates = {name: _images_per_s(name, batch, own[-1:])[0] for name, own in blocks.items()}
        shown = "  ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        return f"{variant} {done}/{asked.rounds} images/s: {shown}"

    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[Contender] = []
        for name in asked.contenders:
            share = batch // RANKS if name == "alone" else batch
            words = _worker_options(asked, variant, share)
            contender = Contender(KINDS[name], HERE / "worker.py", words, Path(folder))
            running.append(stack.enter_context(contender))
            contender.wait_until_ready()  # one after the other: never do two compute at once
        blocks, others = alternate(running, asked.rounds, asked.steps, told_as)
        rates = {name: _images_per_s(name, batch, own) for name, own in blocks.items()}
        told = running[-1].greeting
    return {
        "benchmark": "data-parallel",
        "variant": variant,
        "model": asked.model,
        "batch": batch,
        "image": asked.image,
        "ranks": RANKS,
        "steps_per_block": asked.steps,
        "rounds": asked.rounds,
        "environment": {
            **before,
            "torch": told["torch"],
            "device": told["device"],
            **others.told(),
        },
        "threads": {c.kind.name: c.greeting["threads"] for c in running},
        "images_per_s": rates,
        "median_step_s": {
            name: round(statistics.median(s for block in own for s in block), 5)
            for name, own in blocks.items()
        },
    }


def _images_per_s(name: str, batch: int, blocks: Sequence[Sequence[float]]) -> list[float]:
    images = batch // RANKS if name == "alone" else batch
    return [round(images / statistics.mean(step_s), 1) for step_s in blocks]


def _worker_options(asked: argparse.Namespace, variant: str, batch: int) -> list[str]:
    told = {
        "model": asked.model,
        "batch": batch,
        "image": asked.image,
        "device": asked.device,
        "variant": variant,
    }
    return [word for key, value in told.items() for word in (f"--{key}", str(value))]


def _name(asked: argparse.Namespace, variant: str) -> str:
    """Of the file: the variant, and before it whatever is not the default."""
    size = f"{asked.batch}-per-rank" if asked.per_rank else str(asked.batch)
    parts = [
        "" if asked.device == "cpu" else asked.device,
        "" if asked.model == "resnet20" else asked.model,
        "" if asked.image == 32 else f"{asked.image}px",
        "" if size == "128" else size,
        variant,
    ]
    return "-".join(filter(None, parts))


if __name__ == "__main__":
    sys.exit(main())
