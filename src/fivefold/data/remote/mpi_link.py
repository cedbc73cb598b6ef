"""A link between two ranks of an MPI job. Bytes are sent and received as they are, never pickled.

    header and told   one MPI message
    payload           one MPI message per part, received where the payload shall lie
    nothing           an empty MPI message: the other side has closed the link

All have one tag, so they arrive in order. MPI itself ends the whole job when one of its processes dies.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.closing import Closing
from fivefold.data.remote.arrival import Arrival, Place, no_place
from fivefold.data.remote.hello import introduced
from fivefold.data.remote.messages import (
    HEADER_BYTES,
    MOST_TOLD_BYTES,
    Buffer,
    Kind,
    LinkClosed,
    Message,
    packed,
)
from fivefold.errors import UsageError

if TYPE_CHECKING:
    from fivefold.data.remote.trays import Trays

__all__ = ["MpiLink", "meet"]

_TAG = 5005
_PIECE_BYTES = 1 << 30  # an MPI before version 4 counts with 31 bits
_PAUSE_S = 50e-6

_unsent: list[Any] = []
"""buffers of links that were given up: MPI may still read them"""


def meet(
    communicator: Any,
    rank: int,
    *,
    name: str = "",
    queues: bool,
    about: Mapping[str, Any],
    timeout_s: float = 60.0,
) -> MpiLink:
    """The link to another rank of `communicator`, which calls this too. See `MpiLink` for the arguments.

    Raises `Unreachable` if it does not call this in time, `Stranger` if it cannot be worked with.
    """
    link = MpiLink(communicator, rank, name or f"rank {rank}", queues=queues, timeout_s=timeout_s)
    return introduced(link, about, time.monotonic() + timeout_s)


class MpiLink(Closing):
    """Messages between two ranks. See `fivefold.data.remote.link.Link`.

    Args:
        communicator: of mpi4py; nothing else may use tag 5005 between these ranks.
        rank: of the peer, in the communicator.
        peer: its name, for people.
        queues: `send` never waits, `receive` goes on with it; else `send` returns when all is sent.
        timeout_s: how long the peer may take nothing of what is sent.

    Raises:
        UsageError: MPI was started so that only one thread may use it.
    """

    passes_memory = False

    def __init__(
        self, communicator: Any, rank: int, peer: str, *, queues: bool, timeout_s: float = 60.0
    ) -> None:
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise UsageError(
                "this MPI lets one thread only use it, and links to helpers have one of their own: start it "
                "with MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level), or use helpers over TCP"
            )
        self.peer = peer
        self.hello: dict[str, Any] = {}
        self._mpi, self._communicator, self._rank = MPI, communicator, rank
        self._queues, self._timeout_s = queues, timeout_s
        self.place: Place = no_place
        self._arrival = Arrival(self._room_for)
        self._coming: tuple[Any, int, memoryview | None] | None = None
        self._leaving: deque[tuple[Any, Buffer]] = deque()
        self._left_s = 0.0
        self._lock = threading.Lock()
        self._broken = ""

    def fileno(self) -> int:
        """-1: MPI has to be asked."""
        return -1

    def share(self, trays: Trays) -> None:
        """Memory is not shared."""

    def send(
        self, kind: Kind, told: Mapping[str, Any], parts: Sequence[Buffer] = (), *, tray: int = -1
    ) -> None:
        """See `Link.send`."""
        del tray
        head, _ = packed(kind, told, parts)
        with self._lock:
            self._check()
            if not self._leaving:
                self._left_s = time.monotonic()
            self._begin(head)
            for part in parts:
                for start in range(0, len(part), _PIECE_BYTES):
                    self._begin(memoryview(part)[start : start + _PIECE_BYTES])
            self._flush()
            while self._leaving and not self._queues:
                time.sleep(_PAUSE_S)
                self._flush()

    def receive(self, timeout_s: float) -> Message | None:
        """See `Link.receive`."""
        end = time.monotonic() + timeout_s
        while True:
            message = self._take_in()
            if message is not None:
                return message
            if self._leaving:
                with self._lock:
                    self._flush()
            if timeout_s <= 0 or time.monotonic() >= end:
                return None
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """See `Link.close`. What was queued and not sent may be lost."""
        with self._lock:
            if not self._broken:
                self._begin(b"")
                self._broken = "the link was closed here"
                self._flush_quietly()
            _unsent.extend(self._leaving)
            self._leaving.clear()
            if self._coming is not None:
                _unsent.append(self._coming)
                self._coming = None

    # ---- in

    def _take_in(self) -> Message | None:
        """What has come, up to the end of a message."""
        while True:
            self._check()
            if self._coming is None and not self._probe():
                return None
            assert self._coming is not None
            request, count, scratch = self._coming
            if not request.Test():
                return None
            self._coming = None
            try:
                message = self._arrival.took(count) if scratch is None else self._feed(scratch)
            except LinkClosed as problem:
                raise self._lost(str(problem)) from None
            if message is not None:
                return message

    def _probe(self) -> bool:
        """Begin to receive the next MPI message, if there is one: in place if it is a payload."""
        status = self._mpi.Status()
        found = self._communicator.Improbe(self._rank, _TAG, status)  # codespell:ignore
        if found is None:
            return False
        count = int(status.Get_count(self._mpi.BYTE))
        if count == 0:
            found.Recv([bytearray(0), self._mpi.BYTE])
            raise self._lost("it hung up")
        room = self._arrival.room
        in_place = count <= len(room) and not self._arrival.at_head
        if not in_place and count > max(HEADER_BYTES + MOST_TOLD_BYTES, _PIECE_BYTES):
            raise self._lost(f"what came is no message of fivefold: {count} bytes")
        into = room[:count] if in_place else memoryview(bytearray(count))
        request = found.Irecv([into, self._mpi.BYTE])
        self._coming = (request, count, None if in_place else into)
        return True

    def _feed(self, data: memoryview) -> Message | None:
        """Header and text, or the payload of a damaged message."""
        while data:
            count = min(len(self._arrival.room), len(data))
            self._arrival.room[:count] = data[:count]
            data = data[count:]
            message = self._arrival.took(count)
            if message is not None:
                if data:
                    raise LinkClosed("what came is longer than it says")
                return message
        return None

    def _room_for(self, kind: Kind, told: dict[str, Any], size_bytes: int) -> memoryview | None:
        return self.place(kind, told, size_bytes)

    # ---- out

    def _begin(self, piece: Buffer) -> None:
        request = self._communicator.Isend([piece, self._mpi.BYTE], self._rank, _TAG)
        self._leaving.append((request, piece))

    def _flush(self) -> None:
        """Forget what was sent. Raises `LinkClosed` if nothing is sent any more."""
        left = deque(piece for piece in self._leaving if not piece[0].Test())
        if len(left) < len(self._leaving):
            self._leaving = left
            self._left_s = time.monotonic()
        elif self._leaving and time.monotonic() - self._left_s > self._timeout_s:
            raise self._lost(f"it has taken nothing for {self._timeout_s:.0f} s")

    def _flush_quietly(self) -> None:
        """Let MPI move on what is out, for a moment."""
        end = time.monotonic() + 1.0
        while self._leaving and time.monotonic() < end:
            self._leaving = deque(piece for piece in self._leaving if not piece[0].Test())
            time.sleep(_PAUSE_S)

    # ---- the end

    def _check(self) -> None:
        if self._broken:
            raise LinkClosed(f"{self.peer} is not connected any more: {self._broken}")

    def _lost(self, why: str) -> LinkClosed:
        self._broken = self._broken or why
        return LinkClosed(f"lost {self.peer}: {why}")
