"""A consumer of Fivefold's loader, or of torch's; helpers of the former run this script as well."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peer_photo import cut
from peer_serving import options, serve
from photo import BATCH, PIXELS
from places import HELPERS, enter
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset
from workload import LENGTH

import fivefold as ff


class Photos(Dataset[Tensor]):
    """Parts of photographs, resized: 3 x PIXELS x PIXELS, uint8."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*.jpg"))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        pixels = torch.from_numpy(cut(self.files[index % len(self.files)]))
        image = pixels.permute(2, 0, 1)[None]
        return interpolate(image, (PIXELS, PIXELS), mode="bilinear", antialias=True)[0]


def batches(name: str, photos: Path) -> Iterator[Any]:
    """Images of batches without end, uint8."""
    data = Photos(photos)
    if name == "torch":
        loader: Any = torch.utils.data.DataLoader(
            data, BATCH, shuffle=True, num_workers=1, persistent_workers=True,
            worker_init_fn=lambda _: enter(HELPERS),
        )  # fmt: skip
    else:
        loader = ff.loader(data, ff.start(ff.Plan()), batch_size=BATCH, workers=0)
    while True:
        yield from loader


def main() -> None:
    """Serve blocks until the socket closes; a helper serves trainers instead."""
    asked = options()
    torch.set_num_threads(1)
    begin = partial(batches, asked.contender, asked.photos)
    serve(asked.socket, begin, f"torch {torch.__version__}")
    os._exit(0)


if __name__ == "__main__":
    main()
