"""A process that trains a net until its input ends: `python -m fivefold.tune.load`.

It keeps a core, and its part of what cores share, as busy as a rank does. The net, and the shape of a batch
of it, come first on its input, pickled by the process that has begun it.
"""

from __future__ import annotations

import os
import pickle
import select
import sys

import torch

from fivefold.mesh.heap import keep_memory
from fivefold.torch_private import pytree

__all__ = ["main"]


def main() -> None:
    """Say that it is ready, and compute until whoever began it is gone."""
    torch.set_num_threads(1)
    keep_memory()
    net, shape, dtype = pickle.load(sys.stdin.buffer)  # noqa: S301 - of the process that began this one
    x = torch.rand(shape).to(dtype)  # whole numbers are 0: a token that every net knows
    _train(net, x)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while not select.select([sys.stdin], [], [], 0)[0]:
        _train(net, x)
    os._exit(0)  # at once: nobody waits for what torch would tidy up


def _train(net: torch.nn.Module, x: torch.Tensor) -> None:
    made = net(x)
    flat, _ = pytree.tree_flatten(made)
    total = [leaf.sum() for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if total:
        torch.stack(total).sum().backward()


if __name__ == "__main__":
    main()
