"""One contender: epochs of training and validation, with or without helpers, or a part of them alone.

    without  no validation                          none     validation in the trainer, which waits for it
    da       helpers make batches                   mv       helpers evaluate
    hy       helpers do both                        ...-remote   the same through TCP
    train    training with one batch, alone         augment  making batches, alone
    evaluate evaluating, alone

A number n that comes means n epochs; -n means n milliseconds of a part that is measured alone. A helper runs
this script as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from epoch_work import WORKS, Run
from serving import serve

HELPED = {"da": (True, False), "mv": (False, True), "hy": (True, True)}
"""whether helpers make batches, and whether they evaluate"""


class Worker:
    """Runs what it is told to."""

    def __init__(self, name: str, run: Run) -> None:
        self.run, self._validated = run, name != "without"
        self._units: dict[str, Callable[[], float]] = {
            "train": self._step, "augment": self._batch, "evaluate": self._evaluation,
        }  # fmt: skip
        self._unit = self._units.get(name)
        self._batches = itertools.chain.from_iterable(itertools.repeat(run.train))
        self._kept = next(iter(self._batches)) if name == "train" else None

    def answer(self, number: int) -> dict[str, Any]:
        """Seconds per epoch."""
        if number < 0:
            return self._for(-number / 1e3)
        self.run.epoch(
            validated=self._validated
        )  # and a validation is under way, as it always is later
        begun = time.perf_counter()
        for _ in range(number):
            self.run.epoch(validated=self._validated)
        wall_s = time.perf_counter() - begun
        self.run.finish()
        return {"epoch_s": wall_s / number, "results": self.run.results}

    def _for(self, seconds: float) -> dict[str, Any]:
        assert self._unit is not None
        self._unit()
        parts, begun = 0.0, time.perf_counter()
        while time.perf_counter() - begun < seconds:
            parts += self._unit()
        return {"epoch_s": (time.perf_counter() - begun) / parts}

    def _step(self) -> float:
        assert self._kept is not None
        self.run.step(*self._kept)
        return 1 / len(self.run.train)

    def _batch(self) -> float:
        next(self._batches)
        return 1 / len(self.run.train)

    def _evaluation(self) -> float:
        self.run.keep(self.run.validator.submit(0, 0))
        return 1.0


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender")
    parser.add_argument("--socket", required=True, help="where run.py listens")
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--data", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Build, warm up with an epoch, and serve until the socket closes; a helper serves trainers instead."""
    asked = options()
    torch.set_num_threads(1)
    name = asked.contender.removesuffix("-remote")
    augment, validate = HELPED.get(name, (False, False))
    delay = 1 if validate else 0
    run = Run(WORKS[asked.work], asked.data, augment=augment, validate=validate, delay=delay)
    if name == "evaluate":
        run.validator.submit(0, 0)
    else:
        run.epoch(validated=name != "without")
        run.finish()
    worker = Worker(name, run)
    serve(asked.socket, worker.answer, torch.device("cpu"))
    os._exit(0)  # there is nothing to keep


if __name__ == "__main__":
    main()
