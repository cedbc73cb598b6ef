"""Passing segments between processes of one node, over sockets that only their user may use."""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

from fivefold.arena.native import ArenaError
from fivefold.closing import Closing

__all__ = ["Connection", "Gate", "connect"]

_MOST_BYTES = 1 << 16
_MOST_FDS = 250  # Linux takes 253 at a time


@dataclass
class Connection(Closing):
    """A line to another process. Messages keep their borders, and carry segments."""

    line: socket.socket
    pid: int
    """of the other process, as the kernel says"""

    def send(self, message: bytes, fds: list[int] | None = None) -> None:
        """Send up to 64 KiB, with up to 250 file descriptors. Raises `ArenaError` when the line is cut."""
        try:
            socket.send_fds(self.line, [message], fds or [])
        except OSError as problem:
            raise _cut(self.pid, problem) from problem

    def receive(self) -> tuple[bytes, list[int]]:
        """The next message, and its file descriptors, which are now ours to close."""
        try:
            message, fds, _, _ = socket.recv_fds(self.line, _MOST_BYTES, _MOST_FDS)
        except OSError as problem:
            raise _cut(self.pid, problem) from problem
        if not message:
            raise _cut(self.pid, None)
        for fd in fds:
            os.set_inheritable(fd, False)
        return message, fds

    def close(self) -> None:
        """Hang up."""
        self.line.close()


class Gate(Closing):
    """Where other processes of the same user and network namespace ask for segments.

    The address is a random name in the abstract namespace: nothing in the file system that would remain
    when the process is killed. The kernel tells who calls (SO_PEERCRED); other users are turned away.
    """

    def __init__(self) -> None:
        self.address = f"fivefold-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.address}")
        self._socket.listen(256)

    def accept(self, timeout_s: float) -> Connection:
        """The next caller. Raises `ArenaError` when nobody calls in time."""
        end = time.monotonic() + timeout_s
        while True:
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                line, _ = self._socket.accept()
            except OSError as problem:
                raise ArenaError(f"nobody called within {timeout_s:.0f} s") from problem
            pid, user = _peer(line)
            if user == os.geteuid():
                line.settimeout(timeout_s)
                return Connection(line, pid)
            line.close()

    def close(self) -> None:
        """Take no more calls."""
        self._socket.close()


def connect(address: str, timeout_s: float) -> Connection:
    """Call the gate at `address`. Raises `ArenaError` if it is not there, or another user's."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.settimeout(timeout_s)
    try:
        line.connect(f"\0{address}")
    except OSError as problem:
        line.close()
        raise ArenaError(f"the process that offers {address} is gone: {problem}") from problem
    pid, user = _peer(line)
    if user != os.geteuid():
        line.close()
        raise ArenaError(
            f"{address} belongs to user {user}, we are user {os.geteuid()}: run all ranks as one user"
        )
    return Connection(line, pid)


def _peer(line: socket.socket) -> tuple[int, int]:
    """Process and user of the other end."""
    told = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", told)
    return pid, user


def _cut(pid: int, problem: OSError | None) -> ArenaError:
    return ArenaError(f"lost the line to process {pid}: {problem or 'it hung up'}")
