"""Small files of /proc and /sys, and the lists of numbers in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

__all__ = ["entries", "numa", "number", "numbers", "spans", "text"]


def text(path: Path) -> str | None:
    """What a file holds, without blanks around it; None if it cannot be read.

    Files of /sys exist that cannot be read: the speed of a network interface that is down is one.
    """
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip("\0 \t\r\n")
    except OSError:
        return None


def number(path: Path) -> int | None:
    """A file that holds one whole number, decimal or hexadecimal (0x10de); None if it does not."""
    with contextlib.suppress(ValueError):
        return int(text(path) or "", 0)
    return None


def numa(device: Path) -> int | None:
    """Number of the NUMA node that a device is attached to; None if the firmware does not tell (-1)."""
    node = number(device / "numa_node")
    return node if node is not None and node >= 0 else None


def entries(folder: Path) -> list[Path]:
    """What lies in a folder, by name; nothing if there is no such folder."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def numbers(listed: str) -> tuple[int, ...]:
    """The numbers of a list as the kernel writes it. Raises `ValueError` for anything else.

    >>> numbers("0-3,8"), numbers("")
    ((0, 1, 2, 3, 8), ())
    """
    found: list[int] = []
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def spans(found: Iterable[int]) -> str:
    """Numbers as the kernel lists them.

    >>> spans([0, 1, 2, 3, 8])
    '0-3,8'
    """
    ends: list[list[int]] = []
    for one in sorted(set(found)):
        if ends and one == ends[-1][1] + 1:
            ends[-1][1] = one
        else:
            ends.append([one, one])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
