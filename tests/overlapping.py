"""What ranks of test_overlap.py run."""

from __future__ import annotations

import fcntl
import logging
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from fivefold.mesh.overlap import slowdown, warn_of_turns

__all__ = ["told"]

KERNEL_S = 0.2
TIMEOUT = timedelta(seconds=30)


def told(folder: str, locked: bool) -> tuple[float, list[str]]:
    """The slowdown of sleeps, each with a lock held where asked for, and what is said of it."""
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
    found = slowdown(dist.PrefixStore("slowdown", store), rank, size, kernel, TIMEOUT)
    warn_of_turns(dist.PrefixStore("warn", store), rank, size, kernel, TIMEOUT)
    log.removeHandler(handler)
    return found, lines
