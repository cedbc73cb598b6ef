"""Taking calls: each is answered in a thread of its own, so that nobody holds up the others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import cast

from fivefold.closing import Closing
from fivefold.wire.callers import Callers
from fivefold.wire.handshake import OtherKey, Protocol

__all__ = ["Listener"]

_HANDSHAKE_S = 10.0
_RETRY_S = 0.05


class Listener(Closing):
    """Takes calls at a socket, and passes on those of who knows the key.

    Args:
        door: a socket that listens. It is closed with this.
        protocol: that is spoken there.
        key: of the job.
        serve: called in the caller's thread with its line, within which it is at home: it closes it. What it
            raises ends the line.
        most, of_one: callers, in all and of one address, who have not proved yet that they know the key.
    """

    def __init__(
        self,
        door: socket.socket,
        protocol: Protocol,
        key: bytes,
        serve: Callable[[socket.socket], None],
        *,
        most: int,
        of_one: int,
    ) -> None:
        self.refused = 0
        """callers that knew another key, or did not speak as callers do"""
        self._door, self._protocol, self._key, self._serve = door, protocol, key, serve
        self._callers = Callers(most, of_one)
        self._closed = False
        self._thread = threading.Thread(target=self._listen, name="fivefold-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more calls, and hang up on who is not known yet. Others stay."""
        self._closed = True
        self._callers.close()
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._thread.join()
        self._door.close()
        self._callers.close()  # who called meanwhile

    def _listen(self) -> None:
        while not self._closed:
            try:
                line, address = self._door.accept()
            except OSError:  # out of file descriptors, a caller that is gone already, or the end
                if not self._closed:
                    time.sleep(_RETRY_S)
                continue
            number = self._callers.add(_host(address), partial(line.shutdown, socket.SHUT_RDWR))
            try:
                threading.Thread(target=self._talk, args=(line, number), daemon=True).start()
            except RuntimeError:  # no more threads
                self._callers.left(number)
                line.close()

    def _talk(self, line: socket.socket, number: int) -> None:
        """One caller; whatever comes, it ends at most its own line."""
        try:
            if line.family != socket.AF_UNIX:
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._protocol.answer(line, self._key, time.monotonic() + _HANDSHAKE_S)
        except (OSError, OtherKey):  # silent, slow, gone, or a stranger
            line.close()
            self.refused += 1
            return
        finally:
            self._callers.left(number)
        self._serve(line)


def _host(address: object) -> str:
    """Of whoever calls; empty at a Unix socket."""
    return str(cast("tuple[object, ...]", address)[0]) if isinstance(address, tuple) else ""
