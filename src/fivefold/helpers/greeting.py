"""How a trainer and a helper meet: after the handshake both say HELLO, with versions, machine and process."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold import wire
from fivefold.closing import Closing
from fivefold.errors import FivefoldError, OffloadWarning, UsageError, warn
from fivefold.helpers.address import Address, dial, opened
from fivefold.helpers.arena_link import ArenaLink
from fivefold.helpers.hello import (
    Stranger,
    Unreachable,
    about_helper,
    about_trainer,
    called,
    introduced,
)
from fivefold.helpers.stream_link import StreamLink
from fivefold.helpers.versions import differences, versions
from fivefold.wire import KEY_BYTES, OtherKey, OtherProtocol, OtherVersion, Protocol

__all__ = [
    "Listener",
    "Stranger",
    "Unreachable",
    "connect",
    "differences",
    "listen",
    "parse_key",
    "versions",
]

_PROTOCOL = Protocol("fivefold help", "002")
_HELLO_S = 10.0
_MOST_CALLERS, _OF_ONE = 256, 64
"""who have not proved yet that they know the key"""


def parse_key(text: str) -> bytes:
    """The job's key from 64 hexadecimal digits. Raises `UsageError` if they are not."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise UsageError(
            f"the key of helpers has {2 * KEY_BYTES} hexadecimal digits, the same for all processes of a "
            "job; `openssl rand -hex 32` makes one"
        )
    return key


def connect(
    address: str,
    key: bytes,
    *,
    name: str = "",
    timeout_s: float = 5.0,
    about: Mapping[str, Any] | None = None,
    silent_s: float = 60.0,
) -> StreamLink:
    """A link to the helper at `address`, for a trainer: its `send` never waits.

    Args:
        address: `unix:/path` or `host:port`.
        key: of the job.
        name: of the helper, for people.
        timeout_s: how long all of this may take.
        about: what to say of oneself; rank and host by default.
        silent_s: how long the helper's host may be silent, or the helper read nothing, until it counts as
            lost. A helper at work reads nothing, but little that is sent does not fit on the way.

    Raises:
        Unreachable: nobody answers in time.
        Stranger: who answers knows another key, speaks another protocol, or is no helper.
        UsageError: the address is none.
    """
    place, end = Address.parse(address), time.monotonic() + timeout_s
    name = name or f"the helper at {place}"
    try:
        line = dial(place, timeout_s)
    except OSError as problem:
        raise Unreachable(f"{name} does not answer: {problem}") from None
    try:
        _prove(line, key, name, end)
        link = _link(line, name, queues=True, silent_s=silent_s)
    except OSError as problem:
        line.close()
        raise Unreachable(f"{name} does not answer: {problem}") from None
    except BaseException:
        line.close()
        raise
    link = introduced(link, about or about_trainer(), end)
    if not _alike(link):
        warn(
            f"{name} lives in another PID namespace (a container?), where it could not be told whether it "
            "still writes: batches are sent through the socket, which costs a copy",
            OffloadWarning,
        )
    return link


def listen(address: str, key: bytes, *, about: Mapping[str, Any] | None = None) -> Listener:
    """Take calls of trainers at `address` (`unix:/path`, or `host:port`, port 0 for a free one).

    Raises:
        UsageError: the address is none, is in use, or none of this host.
    """
    return Listener(Address.parse(address), key, about or about_helper())


class Listener(Closing):
    """Where trainers call a helper. Made by `listen`.

    They are greeted by threads, so that a helper at work does not let them wait, and one that is silent
    does not hold up the others.
    """

    def __init__(self, address: Address, key: bytes, about: Mapping[str, Any]) -> None:
        self._about = about
        door, self._address = opened(address)
        self.address = str(self._address)
        """where it listens; a port 0 has become a free one"""
        self._inode = os.stat(address.path).st_ino if address.path else 0  # noqa: PTH116
        self._ready = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC | os.EFD_SEMAPHORE)
        self._links: deque[StreamLink] = deque()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = wire.Listener(
            door, _PROTOCOL, key, self._greet, most=_MOST_CALLERS, of_one=_OF_ONE
        )

    def fileno(self) -> int:
        """Readable when a trainer has been greeted."""
        return self._ready

    def accept(self, timeout_s: float) -> StreamLink | None:
        """The next trainer's link; None if there is none in time. Its `send` waits until all is sent."""
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        if not poll.poll(max(timeout_s, 0.0) * 1000):
            return None
        with self._lock:
            try:
                os.eventfd_read(self._ready)
            except BlockingIOError:
                return None
            return self._links.popleft()

    def close(self) -> None:
        """Take no more calls. Links that were accepted stay."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._listener.close()
        self._unlink()
        with self._lock:
            for link in self._links:
                link.close()
            self._links.clear()
            os.close(self._ready)

    def _unlink(self) -> None:
        path = Path(self._address.path)
        with contextlib.suppress(FileNotFoundError):
            if self._address.path and path.stat().st_ino == self._inode:
                path.unlink()

    def _greet(self, line: socket.socket) -> None:
        try:
            link = _link(line, "a trainer", queues=False)
            link = introduced(link, self._about, time.monotonic() + _HELLO_S)
        except (OSError, FivefoldError):  # a silent or broken caller; others go on
            line.close()
            return
        link.peer = called(link.hello) or link.peer
        with self._lock:
            if not self._closed:
                self._links.append(link)
                os.eventfd_write(self._ready, 1)
                return
        link.close()


def _prove(line: socket.socket, key: bytes, name: str, end: float) -> None:
    """The trainer's part of the handshake, in words."""
    try:
        _PROTOCOL.call(line, key, end)
    except OtherVersion as problem:
        raise Stranger(
            f"{name} speaks protocol {problem}, this process {_PROTOCOL.version}: install the same version "
            "of Fivefold on both"
        ) from None
    except OtherProtocol:
        raise Stranger(
            f"who answers as {name} is no helper of fivefold: check address and port"
        ) from None
    except OtherKey:
        raise Stranger(
            f"{name} knows another key: it belongs to another job, or FIVEFOLD_HELPER_KEY differs"
        ) from None


def _link(line: socket.socket, peer: str, *, queues: bool, silent_s: float = 60.0) -> StreamLink:
    kind = ArenaLink if line.family == socket.AF_UNIX else StreamLink
    return kind(line, peer, queues=queues, timeout_s=silent_s)


def _alike(link: StreamLink) -> bool:
    """Whether both count processes alike, so that one can tell whether the other still writes."""
    if isinstance(link, ArenaLink) and link.hello.get("pid") != link.peer_pid():
        link.passes_memory = False
        return False
    return True
