"""One rank of a plan: trains on random images, and writes how long a step took and what it held."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "tiles"))

from live import Live  # pyright: ignore[reportMissingImports] - that of benchmarks/tiles

import fivefold as ff
from fivefold.recipes.models import build


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--image", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--results", type=Path, required=True)
    return parser.parse_args()


def main() -> None:
    """Two steps whose memory is counted, then those that are timed."""
    asked = options()
    torch.manual_seed(0)
    net = build(asked.model, 10)
    with ff.start(device="cpu") as mesh:
        example = torch.empty(asked.batch, 3, asked.image, asked.image, device="meta")
        model = ff.parallelize(net, mesh, example=example, loss=nn.CrossEntropyLoss())
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        x, y = model.shard(torch.rand(example.shape), torch.randint(0, 10, (asked.batch,)))

        def step() -> None:
            model.step(x, y)
            optim.step()
            optim.zero_grad()

        held = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
        first = Live()
        with first:
            step()
        standing = first.bytes + _bytes([*held, x])  # the optimiser's numbers, buckets of gradients
        again = Live()
        with again:
            step()
        taken: list[float] = []
        for _ in range(asked.steps):
            begin = time.perf_counter()
            step()
            taken.append(time.perf_counter() - begin)
    told = {"step_s": taken, "memory_bytes": standing + again.peak_bytes}
    (asked.results / f"{os.environ['RANK']}.json").write_text(json.dumps(told), encoding="utf-8")


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


if __name__ == "__main__":
    main()
