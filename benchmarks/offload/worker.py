"""One contender: trains on one core with batches from somewhere, or does one half of that alone.

    none     ff.loader in the trainer            torch    DataLoader(num_workers=1), its worker on core 1
    local    helper on core 1, shared memory     remote   helper on core 1, through TCP
    pair, two, shared   one of two trainers on core 0: without helper, with one each, with one for both
    train    with one batch, again and again     augment  makes batches only, on core 1

The number that comes says how many milliseconds to go on. A helper runs this script as well.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from places import enter
from serving import serve
from workload import WORKS, Training, Work, dataset

import fivefold as ff

UNTIMED = 0.25
"""of a block's length, before it: what was made before is used up, or the queue filled"""
WARM = 3
"""steps before the first block"""


def batches(name: str, work: Work, asked: argparse.Namespace) -> Iterator[Any]:
    """Batches without end."""
    data: Any = dataset(work, asked.photos)
    if name == "torch":
        loader: Any = torch.utils.data.DataLoader(
            data, work.batch, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True,
            worker_init_fn=lambda _: enter(1, asked.group),
        )  # fmt: skip
    else:
        mesh = ff.start(ff.Plan())
        loader = ff.loader(data, mesh, batch_size=work.batch, drop_last=True, workers=0)
    while True:
        yield from loader


class Worker:
    """Goes on for so many milliseconds."""

    def __init__(self, name: str, work: Work, made: Iterator[Any]) -> None:
        self._made = made
        self._work = work
        self._training = Training(work) if name != "augment" else None
        self._kept = next(made) if name == "train" else None
        self._load_s = 0.0

    def step(self) -> None:
        """A batch."""
        begun = time.perf_counter()
        batch = self._kept or next(self._made)
        self._load_s += time.perf_counter() - begun
        if self._training is not None:
            self._training.step(*batch)

    def block(self, milliseconds: int) -> dict[str, Any]:
        """Samples and seconds, of them in the loader; all samples are those before the clock ran as well."""
        seconds = milliseconds / 1e3
        before = _until(UNTIMED * seconds, self.step)
        self._load_s = 0.0
        begun = time.perf_counter()
        steps = _until(seconds, self.step)
        wall_s = time.perf_counter() - begun
        samples = steps * self._work.batch
        return {
            "samples": samples, "wall_s": wall_s, "load_s": self._load_s,
            "all_samples": samples + before * self._work.batch,
        }  # fmt: skip


def _until(seconds: float, step: Callable[[], None]) -> int:
    steps, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        step()
        steps += 1
    return steps


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--socket", required=True, help="where run.py listens")
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--photos", type=Path, required=True, help="folder of JPEG files")
    parser.add_argument(
        "--group", type=Path, help="control group of everything that runs on core 1"
    )
    return parser.parse_args()


def main() -> None:
    """Build, warm up, and serve blocks until the socket closes; a helper serves trainers instead."""
    asked = options()
    torch.set_num_threads(1)
    work = WORKS[asked.work]
    worker = Worker(asked.contender, work, batches(asked.contender, work, asked))
    for _ in range(WARM):
        worker.step()
    serve(asked.socket, worker.block, torch.device("cpu"))
    os._exit(0)  # threads of loaders may still hold something; there is nothing to keep


if __name__ == "__main__":
    main()
