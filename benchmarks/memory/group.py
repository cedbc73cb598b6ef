"""A control group that limits this process's memory, so that no page cache stands in for a disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

import psutil

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""of the first version's controller, and of the second version"""
SPARE_BYTES = 64 << 20
"""for pages of files"""


@contextlib.contextmanager
def limited() -> Generator[str]:
    """Within the block the process may have little more than it has now; yields how that is told.

    It has to have had its most before. Takes root; without, the words say that there is no limit.
    """
    found = next((root for root in ROOTS if (root / "cgroup.procs").exists()), None)
    most = psutil.Process().memory_info().rss + SPARE_BYTES
    if found is None or os.geteuid():
        yield "no limit on memory: the page cache stands in for the disk"
        return
    group = found / f"fivefold-benchmark-{os.getpid()}"
    name = "memory.limit_in_bytes" if found == ROOTS[0] else "memory.max"
    before = found / _own(found)
    group.mkdir()
    try:
        (group / name).write_text(str(most))
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield f"memory limited to {most / 2**20:.0f} MiB, {SPARE_BYTES >> 20} MiB more than the process has"
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own(root: Path) -> str:
    """The group that the process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == ("memory" if root == ROOTS[0] else ""):
            return path.lstrip("/")
    return ""
