"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

__all__ = ["alive", "awaited"]


def alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def awaited(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return once `condition` holds; fail with `what` that took too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {timeout_s:g} s"
        time.sleep(0.005)
