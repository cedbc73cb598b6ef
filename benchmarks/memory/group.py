"""A control group that limits this process's memory, so that no page cache stands in for a disk."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOTS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
"""of the first version's controller, and of the second version"""


@dataclass(frozen=True)
class MemoryGroup:
    """What this process takes since it has been there can be limited."""

    limit_file: Path | None
    """None without root: then there is no limit"""
    not_counted_bytes: int

    def needed(self, step: Callable[[], Any]) -> tuple[int, int]:
        """Bytes of its own that the process takes at most while `step` is called: more, and in all."""
        for _ in range(3):
            step()
        _free_unused()
        before = _status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is forgotten
        for _ in range(3):
            step()
        most = _status("VmHWM") - _status("RssFile")
        return most - before, most

    @contextmanager
    def limited(self, needed: tuple[int, int], cache_bytes: int) -> Generator[None]:
        """Within the block there is what was needed, and so much for pages of files.

        What the allocator holds and does not use differs from time to time: "more" counts from what it held
        then, so that "in all" is what it must have at least.
        """
        if self.limit_file is None:
            yield
            return
        before = self.limit_file.read_text()
        _free_unused()
        more, in_all = needed
        own = max(_status("RssAnon") + more, in_all) - self.not_counted_bytes
        self.limit_file.write_text(str(own + cache_bytes))
        try:
            yield
        finally:
            self.limit_file.write_text(before)


@contextmanager
def memory_group() -> Generator[MemoryGroup]:
    """Within the block this process is in one."""
    root = next((root for root in ROOTS if (root / "cgroup.procs").exists()), None)
    if root is None or os.geteuid():
        yield MemoryGroup(None, 0)
        return
    before, group = root / _own(root), root / f"fivefold-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        name = "memory.limit_in_bytes" if root == ROOTS[0] else "memory.max"
        yield MemoryGroup(group / name, _status("RssAnon"))  # which does not come along
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _free_unused() -> None:
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
