"""A checkpoint at the end of every epoch: rank 0 writes and all wait, or Fivefold with every tenth flushed.

    python benchmarks/checkpoint/epochs.py

ResNet-50 and EDSR on two nodes. Epochs are shortened, the same number of steps for every contender; they take
turns, and 100 epochs are projected from what was measured. An epoch carries the work of one checkpoint: the
save after its first step, which stands for the end of the epoch before, and all that goes on beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

import report
from contender import Contender
from contenders import HERE, kinds
from figures import environment
from rounds import take_turns

NODES = 2
CONTENDERS = ("none", "rank0", "xor", "xor-flushed")


@dataclass(frozen=True)
class Epoch:
    """What an epoch is here."""

    batch: int
    """samples of each rank"""
    steps: int


EPOCHS = {"resnet50": Epoch(8, 28), "edsr": Epoch(2, 48)}


def options() -> argparse.Namespace:
    """The command line."""
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shown)
    parser.add_argument("--models", nargs="+", choices=EPOCHS, default=tuple(EPOCHS))
    parser.add_argument("--rounds", type=int, default=7, help="epochs of each contender")
    parser.add_argument("--steps", type=int, help="of an epoch, instead of what its model has")
    parser.add_argument("--throttle", type=float, default=200e6, help="of what is shared, bytes/s")
    parser.add_argument("--disk-mib", type=int, default=2048, help="of each node's disk")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of figures")
    return parser.parse_args()


def main() -> int:
    """Measure what was asked for; the exit code."""
    asked = options()
    return report.PAGE.publish(asked.models, lambda model: measured(asked, model), asked.results)


def measured(asked: argparse.Namespace, model: str) -> dict[str, Any]:
    """Seconds of every epoch of a model, by contender."""
    batch, steps = EPOCHS[model].batch, asked.steps or EPOCHS[model].steps
    before = environment()
    told = ["--model", model, "--batch", str(batch)]
    known = kinds(NODES, asked.disk_mib, asked.throttle)
    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[Contender] = []
        for name in CONTENDERS:
            contender = Contender(known[name], HERE / "worker.py", told, Path(folder))
            running.append(stack.enter_context(contender))
            contender.wait_until_ready()

        def epoch(contender: Contender) -> dict[str, Any]:
            return one_epoch(contender, steps)

        epochs, others = take_turns(running, asked.rounds, epoch, latest)
        greeting = running[-1].greeting
    return {
        "part": model, "nodes": NODES, "batch": batch, "steps": steps, "rounds": asked.rounds,
        "state_bytes": epochs["none"][0]["state_bytes"], "throttle_bytes_per_s": asked.throttle,
        "environment": {**before, "torch": greeting["torch"], **others.told()},
        "epochs": epochs,
    }  # fmt: skip


def one_epoch(contender: Contender, steps: int) -> dict[str, Any]:
    """Seconds of the slowest rank, and processor time of all processes."""
    before = contender.used_s()
    answers = contender.ask(steps if contender.kind.name == "none" else -steps)
    return {
        "wall_s": max(a["wall_s"] for a in answers), "cpu_s": contender.used_s() - before,
        "drain_s": max(a["drain_s"] for a in answers), "state_bytes": answers[0]["state_bytes"],
    }  # fmt: skip


def latest(done: int, epochs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A line after each round."""
    took = "  ".join(f"{name} {found[-1]['wall_s']:.2f} s" for name, found in epochs.items())
    return f"epoch {done}: {took}"


if __name__ == "__main__":
    sys.exit(main())
