"""A TCP port on which the ranks will meet, kept for them until they do."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Generator

from fivefold.errors import UsageError

__all__ = ["reserved_port"]


@contextlib.contextmanager
def reserved_port(wanted: int | None) -> Generator[int]:
    """Hold `wanted`, or a free port, while the block runs. Raises `UsageError` if it is in use.

    The socket is bound but does not listen. The kernel then gives its port to nobody else who asks for
    a free one, while rank 0 may still bind it: both allow reuse, and only one listens.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("", wanted or 0))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                reason = (
                    "is in use; choose another one, or leave --port out and a free one is found"
                )
            else:
                reason = f"cannot be used: {problem.strerror}"
            raise UsageError(f"port {wanted} {reason}") from None
        yield held.getsockname()[1]
