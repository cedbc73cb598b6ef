"""Memory of a node, its shared part, and the limits of this process."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from fivefold.cluster import reading
from fivefold.cluster.cores import control_groups

__all__ = ["Limits", "Memory", "limits", "memory"]


@dataclass(frozen=True)
class Memory:
    """Main memory, in bytes."""

    total_bytes: int
    """of the node"""
    available_bytes: int
    """that programs could still get without swapping"""
    limit_bytes: int | None
    """that the control groups of this process grant; None without a limit"""
    swap_bytes: int
    swap_used_bytes: int
    shm_bytes: int
    """size of /dev/shm; 0 if there is none"""
    shm_free_bytes: int


@dataclass(frozen=True)
class Limits:
    """Soft and hard limits of this process; None: unlimited."""

    open_files: int | None
    open_files_hard: int | None
    locked_bytes: int | None


def memory(root: Path = Path("/")) -> Memory:
    """Read /proc/meminfo, the limits of control groups, and the size of /dev/shm."""
    told = _meminfo(reading.text(root / "proc/meminfo") or "")
    total = told.get("MemTotal", 0)
    swap = told.get("SwapTotal", 0)
    granted = [
        limit
        for folder in control_groups("memory", root)
        for name in ("memory.max", "memory.limit_in_bytes")
        # Version 1 writes a number beyond all memory where there is no limit.
        if (limit := reading.number(folder / name)) is not None and limit < total
    ]
    size, free = _shm(root / "dev/shm")
    return Memory(
        total_bytes=total,
        available_bytes=told.get("MemAvailable", 0),
        limit_bytes=min(granted, default=None),
        swap_bytes=swap,
        swap_used_bytes=swap - told.get("SwapFree", swap),
        shm_bytes=size,
        shm_free_bytes=free,
    )


def limits(root: Path = Path("/")) -> Limits:
    """Read /proc/self/limits."""
    told: dict[str, list[str]] = {}
    for line in (reading.text(root / "proc/self/limits") or "").splitlines():
        told[line[:26].strip()] = line[26:].split()
    soft, hard, *_ = [*told.get("Max open files", []), "", ""]
    return Limits(_count(soft), _count(hard), _count([*told.get("Max locked memory", []), ""][0]))


def _count(told: str) -> int | None:
    return int(told) if told.isdecimal() else None


def _meminfo(told: str) -> dict[str, int]:
    """Bytes by name, from lines such as `MemTotal:  24684096 kB`."""
    found: dict[str, int] = {}
    for line in told.splitlines():
        name, _, value = line.partition(":")
        size, *unit = value.split()
        found[name] = int(size) << (10 if unit == ["kB"] else 0)
    return found


def _shm(folder: Path) -> tuple[int, int]:
    with contextlib.suppress(OSError):
        told = os.statvfs(folder)
        return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize
    return 0, 0
