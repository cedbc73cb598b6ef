"""Bytes that have to come by a certain time, however slowly they come."""

from __future__ import annotations

import socket
import time

__all__ = ["received"]


def received(line: socket.socket, length: int, end: float) -> bytes:
    """The next `length` bytes of a line; `end` is a time of `time.monotonic`.

    The line is left with a timeout. Raises `OSError` if it ends, or they have not come by then.
    """
    room = bytearray(length)
    left = memoryview(room)
    while left:
        line.settimeout(max(end - time.monotonic(), 0.001))
        count = line.recv_into(left)
        if count == 0:
            raise ConnectionError("the connection ended")
        left = left[count:]
    return bytes(room)
