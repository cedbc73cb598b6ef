"""How much memory there is to share: what the machine has, and what the control group grants."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fivefold.arena.native import ArenaError

__all__ = ["available_bytes", "check", "limit_bytes"]

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""version 1 writes a number near 2**63 where there is no limit"""


def limit_bytes(root: Path = _ROOT, groups: Path = Path("/proc/self/cgroup")) -> int:
    """The smallest memory limit of the control groups that this process is in; 2**60 if there is none."""
    return min((limit for limit, _ in _limits(root, groups)), default=_NO_LIMIT)


def available_bytes(
    root: Path = _ROOT,
    groups: Path = Path("/proc/self/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> int:
    """What may still be touched before the system or a control group ends a process."""
    free = [limit - used for limit, used in _limits(root, groups)]
    lines = (line.split() for line in _lines(meminfo))
    free.extend(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    return max(0, min(free, default=_NO_LIMIT))


def check(size_bytes: int, what: str) -> None:
    """Raise `ArenaError` if `size_bytes` are not to be had; afterwards the system would kill a process."""
    available = available_bytes()
    if size_bytes > available:
        raise ArenaError(
            f"{what} needs {_told(size_bytes)} of shared memory, but {_told(available)} are left "
            f"(limit of the control group: {_told(limit_bytes())}): ask for more memory, or start fewer "
            "ranks per node"
        )


def _limits(root: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group with a limit, from that of this process upwards."""
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            most, now = _number(place / limit), _number(place / used)
            if most is not None and now is not None and most < _NO_LIMIT:
                yield most, max(0, now - _counted(place / "memory.stat", cached))
            if place == base:
                break


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _counted(path: Path, key: str) -> int:
    """A counter of memory.stat: cached files are given up before anything is killed."""
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _told(size_bytes: int) -> str:
    if size_bytes >= _NO_LIMIT:
        return "none"
    return f"{size_bytes / (1 << 20):,.0f} MiB"
