"""A small training run that fault tests interrupt: what it ends with must not depend on that.

    python fault_run.py --steps 24 --every 3 --scheme xor

Prints a line per step (its samples), where it went on from, and at its end a digest of everything that
training depends on: parameters, buffers, optimiser, scheduler, generators, position in the data.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fivefold.checkpoint.checkpointer import Checkpointer
from fivefold.errors import CheckpointWarning

SAMPLES, BATCH, WIDTH = 64, 2, 48


class Samples:
    """An endless stream of batches, shuffled anew in every epoch, that goes on after `load_state_dict`."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._drawn = 0
        self.latest: list[int] = []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            per_step = BATCH * self._size
            epoch, at = divmod(self._drawn, SAMPLES // per_step)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            begin = at * per_step + self._rank * BATCH
            chosen = order[begin : begin + BATCH]
            self._drawn += 1
            self.latest = chosen.tolist()
            draw = torch.Generator().manual_seed(int(chosen.sum()))
            yield torch.randn(BATCH, WIDTH, generator=draw), chosen % 4

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._drawn = state["drawn"]


def net(size: int) -> nn.Module:
    """Layers with parameters, buffers and random masks; `size` adds bulk."""
    return nn.Sequential(
        nn.Linear(WIDTH, size), nn.BatchNorm1d(size), nn.ReLU(), nn.Dropout(0.25),
        nn.Linear(size, 4),
    )  # fmt: skip


def digest(*things: Any) -> str:
    """Of all bytes in nested state."""
    found = hashlib.sha256()

    def add(thing: Any) -> None:
        if isinstance(thing, Tensor):
            found.update(thing.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, Mapping):
            for key in sorted(thing, key=str):
                found.update(str(key).encode())
                add(thing[key])
        elif isinstance(thing, list | tuple):
            for part in cast(list[Any], thing):
                add(part)
        else:
            found.update(repr(thing).encode())

    for thing in things:
        add(thing)
    return found.hexdigest()[:16]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--scheme", default="xor")
    parser.add_argument("--set-size", type=int, default=8)
    parser.add_argument("--flush-every", type=int, default=0)
    parser.add_argument("--size", type=int, default=256, help="of the net: 600 bytes each")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of a step")
    parser.add_argument("--begin-again", action="store_true")
    parser.add_argument("--lockstep", action="store_true", help="wait for every save")
    return parser.parse_args()


def main() -> None:
    asked = options()
    warnings.simplefilter("always", CheckpointWarning)
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    # Otherwise its buckets change after the first step of every start, and so does the order of its sums.
    model = DistributedDataParallel(net(asked.size), find_unused_parameters=True)
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(1000 + rank)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 7, 0.5)
    data = Samples(rank, size)
    told = f"{os.environ['SHARED']}/run"
    settings: dict[str, Any] = {
        "scheme": asked.scheme, "set_size": asked.set_size, "begin_again": asked.begin_again,
    }  # fmt: skip
    with Checkpointer(
        told, local=os.environ["LOCAL"], every=asked.every, flush_every=asked.flush_every,
        node=os.environ.get("FAULT_NODE"), model=model, optim=optim, schedule=schedule, data=data, **settings,
    ) as checkpoints:  # fmt: skip

        def state() -> str:
            return digest(model.module.state_dict(), optim.state_dict(), schedule.state_dict())

        begun = False
        for step, (x, y) in checkpoints.resume(data):
            if not begun:
                print(f"from {step - 1} {state()}", flush=True)
                begun = True
            optim.zero_grad()
            noise = 1e-3 * (float(np.random.rand()) + random.random())  # noqa: NPY002
            nn.functional.cross_entropy(model(x * (1 + noise)), y).backward()
            optim.step()
            schedule.step()
            print(f"step {step} {data.latest} {state()}", flush=True)
            saved = checkpoints.maybe_save(step)
            if saved:
                print(f"saving {step}", flush=True)
                if asked.lockstep:
                    checkpoints.wait()
                    print(f"saved {step}", flush=True)
            if step >= asked.steps:
                break
            time.sleep(asked.pause)
        rng = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
        print(f"final {state()} {digest(data.state_dict(), *rng)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
