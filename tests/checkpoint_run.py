"""A small run on a mesh that tests stop in the middle: what it ends with must not depend on that.

    python checkpoint_run.py FOLDER [--every N] [--validate]

Prints "step N" after each, "stopped" in a validation that never ends by itself, and a digest at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fivefold as ff


class Images:
    """Samples that are augmented at random."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return image + 0.1 * torch.rand(1), index % 4


def net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def digest(*things: Any) -> str:
    found = hashlib.sha256()
    for thing in things:
        found.update(repr(thing.tolist() if isinstance(thing, Tensor) else thing).encode())
    return found.hexdigest()[:16]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument(
        "--validate", action="store_true", help="after step 6, until a signal comes"
    )
    return parser.parse_args()


def main() -> None:
    told = options()
    mesh = ff.start()
    model = ff.parallelize(net(), mesh, loss=nn.CrossEntropyLoss())
    data = ff.loader(Images(), mesh, batch_size=8, seed=3)
    optim = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optim, 4, 0.5)
    for draw in (torch.manual_seed, np.random.seed, random.seed):
        draw(1000 + mesh.rank)
    where = {"local": told.folder / "local", "every": told.every}
    state = {"model": model, "optim": optim, "schedule": schedule, "data": data}
    with ff.Checkpointer(told.folder / "far", mesh, **where, **state) as ckpt:
        for step, (x, y) in ckpt.resume(data, epochs=3):
            noise = 1e-3 * (random.random() + float(np.random.rand()) + torch.rand(1).item())  # noqa: NPY002
            loss = model.step(x * (1 + noise), y)
            optim.step()
            optim.zero_grad()
            schedule.step()
            ckpt.maybe_save(step)
            print(f"step {step} pid {os.getpid()} {digest(loss, x)}", flush=True)
            time.sleep(told.pause)
            while told.validate and step == 6:
                ckpt.poll()
                time.sleep(0.02)
    weights = [value for _, value in sorted(model.full_state_dict().items())]
    moments = [value for one in optim.state.values() for _, value in sorted(one.items())]
    drawn = random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002
    print(
        f"final {digest(*weights, *moments, schedule.last_epoch, data.state_dict(), drawn)}",
        flush=True,
    )
    mesh.stop()


if __name__ == "__main__":
    main()
