"""Where this host can be reached by other nodes."""

from __future__ import annotations

import contextlib
import os
import socket

__all__ = ["own_address"]


def own_address() -> str:
    """The address of this host that the other nodes reach it by: the interface toward rank 0, if known."""
    toward = os.environ.get("MASTER_ADDR", "")
    if toward in ("localhost", "127.0.0.1", "::1"):
        return "127.0.0.1"
    # Connecting a datagram socket sends nothing; it only chooses the interface.
    for target in filter(None, (toward, "192.0.2.1")):  # the second is reserved (RFC 5737)
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outwards,
        ):
            outwards.connect((target, 9))
            return str(outwards.getsockname()[0])
    with contextlib.suppress(OSError):
        return socket.gethostbyname(socket.gethostname())
    return "127.0.0.1"
