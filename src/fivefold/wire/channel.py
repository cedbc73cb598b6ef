"""A channel: messages over a connected socket, TCP or a Unix socket."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from fivefold.closing import Closing
from fivefold.wire.frames import Buffer, Frames, LinkClosed, Message
from fivefold.wire.reader import MessageReader, Place, no_place

__all__ = ["Channel", "set_up_tcp"]

_MOST_PIECES = 64
_LEAST_BYTES = 1 << 19
_PUSH_BYTES = 4 << 20
"""sent in one go where `send` must not wait"""


class Channel(Closing):
    """An ordered connection to one peer. One thread receives; any thread may send.

    Messages come complete, in order, or not at all.

    Args:
        sock: connected, the handshake done; the channel's own from now on.
        peer: its name, for people.
        frames: what messages are made of.
        queues: `send` never waits: what the socket does not take is sent by `receive`. Else `send` returns
            when all is sent. Of two peers at least one has to queue, or both may wait for each other.
        timeout_s: how long the peer may take nothing of what is sent, or be silent on the network.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        frames: Frames,
        *,
        queues: bool,
        timeout_s: float = 60.0,
    ) -> None:
        self.peer = peer
        self._frames = frames
        self._sock, self._queues, self._timeout_s = sock, queues, timeout_s
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            set_up_tcp(sock, timeout_s)
        # Others select on this one descriptor; it is readable as well when there is room to send again.
        self._epoll = select.epoll()
        self._epoll.register(sock, select.EPOLLIN)
        self.place: Place = no_place
        self._reader = MessageReader(frames, self._room_for)
        self._leaving: deque[tuple[memoryview, list[int]]] = deque()
        self._lock = threading.Lock()
        self._left_s = 0.0
        self._least = 1
        self._watching = False  # for room to send
        self._broken = ""
        self._deaf = self._closed = False

    def fileno(self) -> int:
        """Of an epoll set: readable when `receive` has something to do."""
        return -1 if self._closed else self._epoll.fileno()

    @property
    def waiting_bytes(self) -> int:
        """What is queued and not sent."""
        with self._lock:
            return sum(len(piece) for piece, _ in self._leaving)

    def send(self, kind: int, fields: Mapping[str, Any], parts: Sequence[Buffer] = ()) -> None:
        """Send a message, its payload being `parts`, one after the other.

        Args:
            kind: of the message.
            fields: of the message; at most `MOST_FIELDS_BYTES` as JSON.
            parts: must stay as they are until sent: do not write to them again.

        Raises:
            LinkClosed: the peer is gone, or has read nothing for the timeout.
            LinkError: `fields` cannot travel. The channel goes on.
        """
        head, _ = self._frames.packed(kind, fields, parts)
        self._put([head, *parts])

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None if none is complete within `timeout_s` (0: what is there already).

        Raises:
            LinkClosed: the peer is gone, or sent what is no message.
            LinkError: a message was damaged, and dropped. The channel goes on.
        """
        end = time.monotonic() + timeout_s
        while True:
            message = self._take_in()
            if message is not None:
                return message
            self._flush()
            left = end - time.monotonic()
            if timeout_s <= 0 or left <= 0:
                return None
            # What is queued may have been waiting for too long before anything else happens.
            self._epoll.poll(min(left, self._timeout_s) if self._leaving else left, 1)

    def close(self) -> None:
        """Hang up. What was queued and not sent is lost. Calling it again does nothing."""
        if self._closed:
            return
        self._break("the link was closed here")
        with self._lock:
            self._closed = self._deaf = True
            self._epoll.close()
            self._sock.close()
            for _, fds in self._leaving:
                _close_all(fds)
            self._leaving.clear()

    # ---- in

    def _take_in(self) -> Message | None:
        """What has come, up to the end of a message."""
        while True:
            if self._deaf:
                self._check()
            try:
                count = self._read(self._reader.room)
            except (BlockingIOError, InterruptedError):
                self._sleep_for(len(self._reader.room))
                return None
            except OSError as problem:
                raise self._lost(problem.strerror or str(problem)) from problem
            if count == 0:
                self._check()  # what could not be sent is the reason
                cut = ", in the middle of a message" if self._reader.begun else ""
                raise self._lost(f"it hung up{cut}")
            try:
                message = self._reader.took(count)
            except LinkClosed as problem:
                self._deaf = True  # where the next message begins is unknown
                raise self._lost(str(problem)) from None
            if message is not None and (message := self._seen(message)) is not None:
                return message

    def _read(self, room: memoryview) -> int:
        return self._sock.recv_into(room)

    def _sleep_for(self, missing_bytes: int) -> None:
        """Be readable again only when much of what is missing has come.

        Whoever waits then takes a large payload in a few steps, and rarely interrupts who trains: of 8 MiB in
        pieces of 64 KiB, as a network delivers them, about 15 wake it instead of 80.
        """
        least = _LEAST_BYTES if missing_bytes >= _LEAST_BYTES else 1
        if least != self._least and self._sock.family != socket.AF_UNIX:
            self._least = least
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)

    def _seen(self, message: Message) -> Message | None:
        """A chance to deal with a message that is the channel's own business."""
        return message

    def _room_for(self, kind: int, fields: dict[str, Any], size_bytes: int) -> memoryview | None:
        return self.place(kind, fields, size_bytes)

    # ---- out

    def _put(self, pieces: Sequence[Buffer], fds: Sequence[int] = ()) -> None:
        """Send pieces, descriptors going with the first."""
        with self._lock:
            self._check()
            if not self._leaving:
                self._left_s = time.monotonic()
            for number, piece in enumerate(pieces):
                if len(piece):
                    along = [os.dup(fd) for fd in fds] if number == 0 else []
                    self._leaving.append((memoryview(piece), along))
            self._push(_PUSH_BYTES if self._queues else -1)
            if self._leaving and not self._queues:
                self._drain()

    def _flush(self) -> None:
        if self._leaving:
            with self._lock:
                self._push(_PUSH_BYTES)

    def _push(self, most_bytes: int) -> None:
        """Send what the socket takes, up to about so many bytes (-1: all)."""
        sent = 0
        while self._leaving and (most_bytes < 0 or sent < most_bytes):
            pieces, fds = self._next()
            along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            try:
                count = self._sock.sendmsg(pieces, along)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as problem:
                raise self._lost(problem.strerror or str(problem)) from problem
            sent += count
            self._gone(count)
        if sent:
            self._left_s = time.monotonic()
        elif self._leaving and time.monotonic() - self._left_s > self._timeout_s:
            raise self._lost(f"it has read nothing for {self._timeout_s:.0f} s")
        more = bool(self._leaving) and self._queues
        if more != self._watching and not self._closed:
            self._watching = more
            self._epoll.modify(self._sock, select.EPOLLIN | (select.EPOLLOUT if more else 0))

    def _next(self) -> tuple[list[memoryview], list[int]]:
        """What goes out in one call: a piece with its descriptors, or pieces without any."""
        first, fds = self._leaving[0]
        if fds:
            return [first], fds
        pieces: list[memoryview] = []
        for piece, more in islice(self._leaving, _MOST_PIECES):
            if more:
                break
            pieces.append(piece)
        return pieces, []

    def _gone(self, count: int) -> None:
        """So many bytes were sent."""
        while count:
            piece, fds = self._leaving.popleft()
            _close_all(fds)
            if count < len(piece):
                self._leaving.appendleft((piece[count:], []))
                return
            count -= len(piece)

    def _drain(self) -> None:
        """Wait until all is sent. Raises `LinkClosed` if the peer takes nothing for the timeout."""
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        while self._leaving:
            left = self._left_s + self._timeout_s - time.monotonic()
            poll.poll(max(left, 0.0) * 1000)
            self._push(-1)

    # ---- the end

    def _check(self) -> None:
        if self._broken:
            raise LinkClosed(f"{self.peer} is not connected any more: {self._broken}")

    def _lost(self, why: str) -> LinkClosed:
        self._break(why)
        return LinkClosed(f"lost {self.peer}: {why}")

    def _break(self, why: str) -> None:
        """Send no more; what has come can still be received: it may say why.

        The descriptor stays, readable, until `close`.
        """
        if not self._broken:
            self._broken = why
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)


def set_up_tcp(sock: socket.socket, timeout_s: float) -> None:
    """No delay for small messages; a peer whose host is gone is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    pause_s = min(5, max(1, round(timeout_s / 4)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(timeout_s * 1000))


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
