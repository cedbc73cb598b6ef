"""A limit on how fast background work moves bytes, so that training does not feel it."""

from __future__ import annotations

import threading
import time

from fivefold.errors import CheckpointError, UsageError

__all__ = ["Rate"]

_BURST_S = 0.05
_LOOK_S = 0.25


class Rate:
    """Lets `bytes_per_s` through, over all threads that share it; None lets everything through.

    Args:
        bytes_per_s: over a second or so; whoever sets it to None later lifts the limit.
        stop: when it is set, whoever takes gets a `CheckpointError`, at once.

    Raises:
        UsageError: the rate is not positive.
    """

    def __init__(
        self, bytes_per_s: float | None = None, stop: threading.Event | None = None
    ) -> None:
        if bytes_per_s is not None and not bytes_per_s > 0:
            raise UsageError(
                f"a rate of {bytes_per_s:g} bytes per second moves nothing; leave it out"
            )
        self.bytes_per_s = bytes_per_s
        self.taken_bytes = 0
        """let through so far"""
        self.waited_s = 0.0
        """for that"""
        self._stop = stop or threading.Event()
        self._due = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until another `count` bytes may be moved."""
        wait_s = 0.0
        with self._lock:
            self.taken_bytes += count
            if self.bytes_per_s is not None:
                # Time that nobody used is lost, but for a moment: bursts stay short.
                now = time.monotonic()
                begin = max(self._due, now - _BURST_S)
                self._due = begin + count / self.bytes_per_s
                wait_s = max(0.0, begin - now)
        begun = time.monotonic()
        end = begun + wait_s
        # In short waits: the limit may be lifted meanwhile.
        while self.bytes_per_s is not None and (left := end - time.monotonic()) > 0:
            if self._stop.wait(min(left, _LOOK_S)):
                break
        self.waited_s += time.monotonic() - begun
        if self._stop.is_set():
            raise CheckpointError("it was stopped: the run ends")
