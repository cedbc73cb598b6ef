"""Callers of a server that never prove who they are."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

__all__ = ["crowd", "is_hung_up_while_it_dribbles"]


@contextlib.contextmanager
def crowd(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Silent connections, for as long as the block lasts."""
    with contextlib.ExitStack() as held:
        yield [held.enter_context(socket.create_connection(address, 10)) for _ in range(count)]


def is_hung_up_while_it_dribbles(address: tuple[str, int], pieces: int, pause_s: float) -> bool:
    """Whether the server hangs up on a caller that sends a byte now and then, before it has sent all."""
    with socket.create_connection(address, 10) as line:
        for _ in range(pieces):
            try:
                line.sendall(b"x")
                time.sleep(pause_s)
                line.setblocking(False)
                while line.recv(1000):
                    pass
            except BlockingIOError:
                line.setblocking(True)
            except OSError:
                return True
            else:
                return True
    return False
