"""A control group that limits this process's memory, so that no page cache stands in for a disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""of the first version's controller, and of the second version"""
SPARE_BYTES = 128 << 20
"""for pages of files"""


class MemoryGroup:
    """A context manager: what this process takes from then on can be limited.

    It takes root; without, `told` says that there is no limit.
    """

    def __init__(self) -> None:
        self._root = next((root for root in ROOTS if (root / "cgroup.procs").exists()), None)
        if os.geteuid():
            self._root = None
        self._group = self._before = Path()
        self._not_counted = 0
        self.told = "no limit on memory: the page cache stands in for the disk"

    def __enter__(self) -> Self:
        if self._root is not None:
            self._before = self._root / _own(self._root)
            self._group = self._root / f"fivefold-benchmark-{os.getpid()}"
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(os.getpid()))
            self._not_counted = _status("RssAnon")  # what is there already does not come along
            self.told = f"{SPARE_BYTES >> 20} MiB of page cache for the hooks"
        return self

    def needed(self, step: Callable[[], Any]) -> int:
        """Bytes of memory of its own that the process takes at most, while `step` is called."""
        for _ in range(3):
            step()
        free_unused()
        before = _status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
        for _ in range(3):
            step()
        return _status("VmHWM") - _status("RssFile") - before

    def limit(self, needed_bytes: int) -> None:
        """Leave so much more than there is now and a little more, or, for 0, no limit."""
        if self._root is None:
            return
        name = "memory.limit_in_bytes" if self._root == ROOTS[0] else "memory.max"
        free = "-1" if self._root == ROOTS[0] else "max"
        free_unused()
        most = _status("RssAnon") - self._not_counted + needed_bytes + SPARE_BYTES
        (self._group / name).write_text(str(most) if needed_bytes else free)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._root is not None:
            (self._before / "cgroup.procs").write_text(str(os.getpid()))
            self._group.rmdir()


def free_unused() -> None:
    """Give back to the system what the allocator keeps."""
    ctypes.CDLL(None).malloc_trim(0)


def _status(name: str) -> int:
    """Bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise OSError(f"/proc/self/status has no {name}")


def _own(root: Path) -> str:
    """The group that the process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == ("memory" if root == ROOTS[0] else ""):
            return path.lstrip("/")
    return ""
