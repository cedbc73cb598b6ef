"""Cores that this process may really use: what the scheduler granted, not what the node has."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["granted_cores"]


def granted_cores(root: Path = Path("/")) -> int:
    """Number of cores granted to this process, at least 1.

    The smaller of the affinity mask (taskset, Slurm, cpusets) and the CPU quota of its control groups
    (containers), versions 1 and 2; a quota of one core and a half counts as 1. `root` is where /proc
    and /sys are found.
    """
    quotas = [quota for folder in _control_groups(root) if (quota := _quota(folder)) is not None]
    return max(1, int(min([*quotas, float(len(os.sched_getaffinity(0)))])))


def _control_groups(root: Path) -> list[Path]:
    """The CPU control groups of this process and all groups around them: each may set a limit."""
    folders: list[Path] = []
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = ["cpu", "cpu,cpuacct"] if controllers else ["", "unified"]
        inner = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        # In a container the path may be the host's, of which only the mounted part is visible.
        folders += [root / "sys/fs/cgroup" / mount / part for mount in mounts for part in inner]
    return folders


def _quota(folder: Path) -> float | None:
    """Cores that a group may use, None without a limit."""
    try:
        if (
            folder / "cpu.max"
        ).exists():  # version 2: "150000 100000" or "max 100000", microseconds
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None
