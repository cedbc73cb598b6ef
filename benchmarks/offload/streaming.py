"""A trainer that reads batches and hashes them; helpers of it run the same script.

    streaming.py OUT --batches 60 --seed 3 [--pace 0.002]

writes one line of JSON to OUT: the hash of the stream, and the longest that a batch kept the loop waiting. It
writes OUT.began once the first batch is there, so that faults begin then.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fivefold as ff
from fivefold.data.transforms import Compose, Normalise, RandomCrop, RandomFlip, ToFloat
from fivefold.helpers.dispatcher import Dispatcher

PIXELS, BATCH = 48, 32


class Drawn(Dataset[tuple[Tensor, int]]):
    """Images that are drawn at random, which takes as long as a light augmentation of real ones."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.transform = Compose(
            RandomCrop(PIXELS - 8), RandomFlip(), ToFloat(), Normalise((0.5,) * 3, (0.25,) * 3)
        )

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.random.randint(0, 256, (3, PIXELS, PIXELS), np.uint8)  # noqa: NPY002
        return self.transform(torch.from_numpy(pixels)), index


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.02, help="seconds that a step takes")
    return parser.parse_args()


def main() -> None:
    """Read one epoch."""
    asked = options()
    torch.set_num_threads(1)
    mesh = ff.start(ff.Plan())
    data: Any = Drawn(asked.batches * BATCH)
    loader = ff.loader(data, mesh, batch_size=BATCH, seed=asked.seed, workers=0)
    digest, longest_s, seen = hashlib.sha256(), 0.0, 0
    begun = time.perf_counter()
    for images, labels in loader:
        waited_s = time.perf_counter() - begun
        for leaf in (images, labels):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(leaf.contiguous().numpy().tobytes())
        if seen:
            longest_s = max(longest_s, waited_s)
        else:
            asked.out.with_suffix(".began").touch()
        seen += 1
        time.sleep(asked.pace)
        begun = time.perf_counter()
    dispatcher = Dispatcher.of(mesh)
    made = sum(helper.leases for helper in dispatcher.helpers()) if dispatcher is not None else 0
    told = {
        "hash": digest.hexdigest(), "batches": seen, "longest_s": longest_s, "by_helpers": made,
    }  # fmt: skip
    asked.out.write_text(json.dumps(told))
    loader.close()


if __name__ == "__main__":
    main()
