"""Cores that this process may really use: what the scheduler granted, not what the node has."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fivefold.cluster import reading

__all__ = ["affinity", "granted_cores", "physical", "quota"]


def granted_cores(root: Path = Path("/")) -> int:
    """Number of cores granted to this process, at least 1.

    The smaller of the affinity mask (taskset, Slurm, cpusets) and the CPU quota of its control groups
    (containers), versions 1 and 2; a quota of one core and a half counts as 1. `root` is where /proc
    and /sys are found.
    """
    cores, limit = float(len(affinity(root))), quota(root)
    return max(1, int(cores if limit is None else min(limit, cores)))


def affinity(root: Path = Path("/")) -> tuple[int, ...]:
    """The affinity mask of this process: numbers of the logical cores on which it may run."""
    for line in (reading.text(root / "proc/self/status") or "").splitlines():
        name, _, listed = line.partition(":")
        if name == "Cpus_allowed_list" and listed.strip():
            return reading.numbers(listed)
    return tuple(sorted(os.sched_getaffinity(0)))


def physical(cores: Iterable[int], root: Path = Path("/")) -> list[tuple[int, ...]]:
    """Logical cores that share a physical one, together; in the order of their first."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for core in cores:
        path = root / f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"
        try:
            siblings = reading.numbers(reading.text(path) or "")
        except ValueError:
            siblings = ()
        groups.setdefault(siblings or (core,), []).append(core)
    return [tuple(group) for group in groups.values()]


def quota(root: Path = Path("/")) -> float | None:
    """How many cores' time the control groups of this process grant; None without a limit."""
    limits = [limit for folder in control_groups("cpu", root) if (limit := _limit(folder))]
    return min(limits, default=None)


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The control groups of this process and all groups around them: each may set a limit."""
    folders: list[Path] = []
    for line in (reading.text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = [controller, controllers] if controllers else ["", "unified"]
        inner = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
        # In a container the path may be the host's, of which only the mounted part is visible.
        folders += [root / "sys/fs/cgroup" / mount / part for mount in mounts for part in inner]
    return folders


def _limit(folder: Path) -> float | None:
    """Cores that a group may use, None without a limit."""
    # Version 2: "150000 100000" or "max 100000", microseconds.
    both = reading.text(folder / "cpu.max")
    if both is None:
        given = (reading.text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        both = " ".join(part or "" for part in given)
    try:
        granted, period = map(int, both.split())
        return granted / period if granted > 0 else None
    except (ValueError, ZeroDivisionError):
        return None
