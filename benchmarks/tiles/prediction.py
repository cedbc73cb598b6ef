"""Memory predicted without running anything: beside what ranks need, and for an image that fits none."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from contender import Contender
from contenders import HERE, MEMORY
from figures import environment
from throughput import worker_options
from torch import Tensor
from workload import Workload

from fivefold.mesh import Part, attach, owned
from fivefold.parallel.program.memory import predicted
from fivefold.plan import Layout, Plan

SPLIT = ("1x2", "2x2")
LARGE_MODELS = ("edsr", "resnet50")
LARGE_TILES = 8
PLACES = {"corner": 0, "edge": 3, "middle": 27}
"""ranks of 8x8 tiles"""


def measure(asked: argparse.Namespace, models: Sequence[str]) -> dict[str, Any]:
    """Of every model and layout, one after the other: all ranks; then the large image."""
    before = environment()
    size = asked.memory_image
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory(prefix="fivefold-bench-") as folder:
        for model in models:
            found[model] = {}
            for name in SPLIT:
                words = worker_options(model, size, size, None)
                place = Path(folder) / f"{model}-{name}"
                place.mkdir()
                with Contender(
                    MEMORY[name], HERE / "prediction_worker.py", words, place
                ) as running:
                    running.wait_until_ready()
                    found[model][name] = running.ask(1)
                told = found[model][name][0]
                ratio = told["predicted_saved_bytes"] / told["saved_bytes"]
                print(f"{model} {size}x{size} {name}: {ratio:.4f} of what is saved", flush=True)
    return {
        "benchmark": "prediction",
        "image": size,
        "environment": {**before, "torch": torch.__version__},
        "ranks": found,
        "large": {"image": asked.large, "tiles": LARGE_TILES, "ranks": large(asked.large)},
    }


def large(image: int) -> dict[str, dict[str, dict[str, float]]]:
    """What some ranks would need for one image in 64 tiles."""
    plan = Plan(layout=Layout(height=LARGE_TILES, width=LARGE_TILES))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for model in LARGE_MODELS:
        work = Workload(model, image, image)
        found[model] = {}
        for name, rank in PLACES.items():
            begin = time.process_time()
            told = predicted(
                work.net(),
                plan,
                rank,
                inputs=torch.empty(work.shape, device="meta"),
                targets=_target(model, image, rank),
                loss=work.loss(),
            )
            found[model][name] = {
                "saved_bytes": told.saved_bytes,
                "peak_bytes": told.peak_bytes,
                "total_bytes": told.total_bytes,
                "predict_s": round(time.process_time() - begin, 2),
            }
            print(f"{model} {image}x{image} {name}: {told.total_bytes / 2**30:.2f} GiB", flush=True)
    return found


def _target(model: str, image: int, rank: int) -> Tensor:
    """A class; or a rank's tile of a picture, as a loader of windows reads it."""
    if model == "resnet50":
        return torch.empty(1, dtype=torch.int64, device="meta")
    rows, columns = (owned(2 * image, LARGE_TILES, part) for part in divmod(rank, LARGE_TILES))
    tile = torch.empty(1, 3, len(rows), len(columns), device="meta")
    return attach(tile, Part((1, 3, 2 * image, 2 * image), (0, 0, rows.start, columns.start)))
