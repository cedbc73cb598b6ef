"""One contender: builds its run, then trains for so many steps when it is told to, with a save or without.

The number that comes says how many steps; where it is negative, a save follows the first of them, and what it
still does after the last counts as well.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).resolve().parents[1] / "common"))

from ours import OURS
from savers import SAVERS, Saver
from serving import serve
from workload import Training, training

WAYS = {**SAVERS, **OURS}


class Worker:
    """Counts steps over all blocks."""

    def __init__(self, run: Training, saver: Saver) -> None:
        self._run = run
        self._saver = saver
        self._step = 0

    def block(self, number: int) -> dict[str, Any]:
        """Seconds of each step, of the call that saves, and of what is left after the last step."""
        self._train()  # fetches the caches back, and brings the ranks together
        dist.barrier()
        marks, call_s, drain_s = [time.perf_counter()], 0.0, 0.0
        for nth in range(abs(number)):
            self._train()
            if nth == 0 and number < 0:
                begun = time.perf_counter()
                self._saver.save(self._step)
                call_s = time.perf_counter() - begun
            marks.append(time.perf_counter())
        if number < 0:
            self._saver.drain()
            drain_s = time.perf_counter() - marks[-1]
        dist.barrier()
        wall_s = time.perf_counter() - marks[0]
        if number < 0:
            self._saver.tidy()
        self._run.rest()
        dist.barrier()
        step_s = [after - before for before, after in itertools.pairwise(marks)]
        return {
            "rank": dist.get_rank(), "step_s": step_s, "call_s": call_s, "drain_s": drain_s,
            "wall_s": wall_s, "state_bytes": self._run.state_bytes,
        }  # fmt: skip

    def _train(self) -> None:
        self._run.step()
        self._step += 1


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contender", choices=WAYS)
    parser.add_argument("--socket", required=True, help="where run.py listens")
    parser.add_argument("--model", default="mlp")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of each rank")
    parser.add_argument("--division", choices=("replicated", "sharded"), default="replicated")
    return parser.parse_args()


def main() -> None:
    """Build, warm up with two saves, and serve blocks until the socket closes."""
    asked = options()
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run = training(asked.model, asked.layers, asked.batch, asked.division)
    run.step()  # the optimiser has its state from now on
    saver = WAYS[asked.contender](run)
    worker = Worker(run, saver)
    for _ in range(2):
        worker.block(-2)
    serve(asked.socket, worker.block, torch.device("cpu"))
    # Threads of contenders may still hold a group; there is nothing to keep.
    os._exit(0)


if __name__ == "__main__":
    main()
