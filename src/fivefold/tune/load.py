"""A process that trains a small net until its input ends: `python -m fivefold.tune.load`.

It keeps a core, and its part of what cores share, as busy as a rank does.
"""

from __future__ import annotations

import os
import select
import sys

import torch
from torch import nn

from fivefold.mesh.heap import keep_memory

__all__ = ["main"]


def main() -> None:
    """Say that it is ready, and compute until whoever began it is gone."""
    torch.set_num_threads(1)
    keep_memory()
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    )  # fmt: skip
    x = torch.rand(2, 3, 96, 96)
    net(x).sum().backward()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        net(x).sum().backward()
    os._exit(0)  # at once: nobody waits for what torch would tidy up


if __name__ == "__main__":
    main()
