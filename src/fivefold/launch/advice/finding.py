"""What a rule finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from fivefold.launch.situation import Situation

__all__ = ["LaunchFinding", "Rule", "gib"]


@dataclass(frozen=True)
class LaunchFinding:
    """Something that makes a run slow, or makes it fail, and that can be helped."""

    id: str
    """of the rule, for scripts to look for"""
    what: str
    why: str
    """what it does to a run"""
    remedy: str


Rule: TypeAlias = Callable[[Situation], LaunchFinding | None]
"""Silent (None), or what it found."""


def gib(size_bytes: float) -> str:
    """A size for people.

    >>> gib(64 << 20), gib(3 << 30)
    ('64 MiB', '3.0 GiB')
    """
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.0f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"
