"""Waiting for what other processes and threads do."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable

import psutil

__all__ = ["alive", "awaited", "launcher"]


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


def launcher(process: subprocess.Popen[str], timeout_s: float = 60.0) -> psutil.Process:
    """`fivefold run`, of the processes that a command has started or become."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(process.pid)
            for found in (top, *top.children(recursive=True)):
                if "fivefold" in found.cmdline() and "python" in found.name():
                    return found
        time.sleep(0.01)
    raise AssertionError("no launcher")
