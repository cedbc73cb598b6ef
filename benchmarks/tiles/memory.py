"""Memory of every rank in one training step. Counts are exact, so one step suffices."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contender import Contender
from contenders import HERE, MEMORY
from figures import environment
from throughput import worker_options


def measure(asked: argparse.Namespace, models: Sequence[str]) -> dict[str, Any]:
    """Of every model and kind, one after the other: the most of any rank."""
    before = environment()
    size = asked.memory_image
    found: dict[str, dict[str, dict[str, int]]] = {}
    torch = ""
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        for model in models:
            found[model] = {}
            for name, kind in MEMORY.items():
                words = worker_options(model, size, size, None)
                place = Path(folder) / f"{model}-{name}"
                place.mkdir()
                with Contender(kind, HERE / "memory_worker.py", words, place) as running:
                    running.wait_until_ready()
                    ranks = running.ask(1)
                    torch = running.greeting["torch"]
                found[model][name] = {key: max(rank[key] for rank in ranks) for key in ranks[0]}
                mib = found[model][name]["saved_bytes"] / 2**20
                print(f"{model} {size}x{size} {name}: {mib:.0f} MiB saved", flush=True)
    return {
        "benchmark": "memory",
        "image": size,
        "environment": {**before, "torch": torch},
        "bytes": found,
    }
