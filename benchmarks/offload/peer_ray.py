"""A consumer of Ray Data: photographs cut by the same Python function as ours, batches over its store."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from peer_photo import cut
from peer_serving import move, options, serve
from photo import BATCH, PIXELS
from PIL import Image

ROWS = 4096
"""of an epoch: more than a block reads. Ray goes on by itself until all of it lies in its store"""


def decoded(rows: dict[str, Any], files: list[Path]) -> dict[str, Any]:
    """Images of a batch of rows."""
    return {"image": np.stack([resized(cut(files[i % len(files)])) for i in rows["id"]])}


def resized(pixels: np.ndarray) -> np.ndarray:
    """PIXELS x PIXELS x 3, uint8."""
    small = Image.fromarray(pixels).resize((PIXELS, PIXELS), Image.Resampling.BILINEAR)
    return np.asarray(small)


def started() -> None:
    """Ray on core 1; this process moves to core 0."""
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = False
    move(0)


def batches(photos: Path) -> Iterator[Any]:
    """Images of the batches of an epoch."""
    files = sorted(photos.glob("*.jpg"))
    rows = ray.data.range(ROWS, override_num_blocks=ROWS // (4 * BATCH))
    images = rows.map_batches(partial(decoded, files=files), batch_size=BATCH)
    for batch in images.iter_batches(batch_size=BATCH, prefetch_batches=2):
        yield batch["image"]


def main() -> None:
    """Serve blocks until the socket closes."""
    asked = options()
    started()
    serve(asked.socket, partial(batches, asked.photos), f"Ray {ray.__version__}", anew=True)


if __name__ == "__main__":
    main()
