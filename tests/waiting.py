"""Waiting for what other processes and threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["awaited"]


def awaited(condition: Callable[[], object], what: str, timeout_s: float = 30.0) -> None:
    """Return once `condition` holds; fail with `what` that took too long."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"{what} took more than {timeout_s:g} s"
        time.sleep(0.005)
