"""What ranks of test_overlap.py run."""

from __future__ import annotations

import fcntl
import logging
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fivefold.mesh.overlap import warn_of_turns

__all__ = ["told"]

KERNEL_S = 0.3
TIMEOUT = timedelta(seconds=30)


def told(folder: str, locked: bool) -> list[str]:
    """What is said of sleeps in the place of kernels, each with a lock held where asked for."""
    rank, size = dist.get_rank(), dist.get_world_size()
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    def kernel() -> None:
        with Path(folder, "lock").open("w") as lock:
            if locked:
                fcntl.flock(lock, fcntl.LOCK_EX)
            time.sleep(KERNEL_S)

    store = dist.FileStore(str(Path(folder, "store")), size)
    log, handler = logging.getLogger("fivefold.mesh.overlap"), Kept()
    log.addHandler(handler)
    warn_of_turns(store, rank, size, kernel, TIMEOUT)
    log.removeHandler(handler)
    return lines
