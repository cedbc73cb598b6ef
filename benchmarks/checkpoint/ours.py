"""Fivefold's ways to save: files on each node, protected by the others, flushed or not."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from workload import Training

import fivefold as ff

__all__ = ["OURS", "Levels"]

LIMIT_S = 120.0


class Levels:
    """`ff.Checkpointer` in a script that has nothing else of Fivefold."""

    def __init__(self, run: Training, scheme: str, *, flush: bool) -> None:
        self._flush, self._step = flush, 0
        self._checkpoints = ff.Checkpointer(
            Path(os.environ["SHARED"]) / "run",
            local=os.environ["LOCAL"],
            scheme=scheme,
            flush_every=1 if flush else 0,
            flush_bytes_per_s=0,  # as fast as the shared file system goes
            model=run.net,
            optim=run.optimiser,
        )

    def save(self, step: int) -> None:
        """Capture; all else happens beside the steps that follow."""
        self._step = step
        self._checkpoints.save(step)

    def drain(self) -> None:
        """Wait until it is protected, and flushed if it is to be."""
        self._checkpoints.wait()
        flushed = Path(os.environ["SHARED"]) / f"run/step-{self._step:08d}-epoch-1/manifest.json"
        limit = time.monotonic() + LIMIT_S
        while self._flush and not flushed.exists():
            assert time.monotonic() < limit, f"{flushed} does not come"
            time.sleep(0.005)

    def tidy(self) -> None:
        """Nodes keep two; of those in the shared folder, so do we."""
        if dist.get_rank() == 0:
            flushed = sorted((Path(os.environ["SHARED"]) / "run").glob("step-*"))
            for path in flushed[:-2]:
                shutil.rmtree(path)


OURS: dict[str, Callable[[Training], Levels]] = {
    "single": partial(Levels, scheme="single", flush=False),
    "partner": partial(Levels, scheme="partner", flush=False),
    "xor": partial(Levels, scheme="xor", flush=False),
    "xor-flushed": partial(Levels, scheme="xor", flush=True),
}
