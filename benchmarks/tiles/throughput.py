"""Seconds per image, in alternating blocks."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contender import Contender
from contenders import HERE, RANKS, SPEED
from figures import environment
from rounds import alternate


def measure(asked: argparse.Namespace, model: str, features: int | None) -> dict[str, Any]:
    """Rounds of one block per contender; all exist at once, one computes."""
    before = environment()

    def told_as(done: int, blocks: Mapping[str, Sequence[Sequence[float]]]) -> str:
        shown = "  ".join(f"{name} {statistics.mean(own[-1]):.2f}" for name, own in blocks.items())
        return f"{model} {done}/{asked.rounds} s/image: {shown}"

    with (
        tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder,
        contextlib.ExitStack() as stack,
    ):
        running: list[Contender] = []
        for name in asked.contenders:
            width = asked.image // RANKS if name in ("half", "halves") else asked.image
            words = worker_options(model, asked.image, width, features)
            contender = Contender(SPEED[name], HERE / "worker.py", words, Path(folder))
            running.append(stack.enter_context(contender))
            contender.wait_until_ready()  # one after the other: never do two compute at once
        blocks, others = alternate(running, asked.rounds, asked.steps, told_as)
        told = running[-1].greeting
    return {
        "benchmark": "throughput",
        "model": model,
        "features": features,
        "image": asked.image,
        "ranks": RANKS,
        "steps_per_block": asked.steps,
        "rounds": asked.rounds,
        "environment": {**before, "torch": told["torch"], **others.told()},
        "threads": {c.kind.name: c.greeting["threads"] for c in running},
        "step_s": {
            name: [round(statistics.mean(step_s), 5) for step_s in own]
            for name, own in blocks.items()
        },
    }


def worker_options(model: str, height: int, width: int, features: int | None) -> list[str]:
    """The command line of a contender's processes."""
    told = {"model": model, "height": height, "width": width, "features": features or 0}
    return [word for key, value in told.items() for word in (f"--{key}", str(value))]
