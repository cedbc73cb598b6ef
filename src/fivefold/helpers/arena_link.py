"""A link between processes of one node: payloads are written into the trainer's trays, and not sent at all.

    trainer ── TRAYS, descriptor of the segment ──> helper        maps it
            ── LEASE, tray 7 ─────────────────────>               makes the batch, writes it into tray 7
            <───────────────────── DONE, tray 7 ──                the trainer reads tray 7

A payload that lies in a tray has no checksum: it is not carried anywhere, the trainer reads the very memory
that the helper wrote.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from fivefold.arena.native import ArenaError
from fivefold.errors import OffloadWarning, warn
from fivefold.helpers.arrival import Arrival
from fivefold.helpers.messages import Buffer, Header, Kind, LinkError, Message, packed
from fivefold.helpers.stream_link import StreamLink
from fivefold.helpers.trays import Borrowed, Trays, set_of

__all__ = ["ArenaLink"]

_ROOM_FOR_FDS = socket.CMSG_SPACE(4)


class ArenaLink(StreamLink):
    """Messages over a Unix socket, payloads through trays. See `fivefold.helpers.link.Link`."""

    passes_memory = True

    def __init__(
        self, line: socket.socket, peer: str, *, queues: bool, timeout_s: float = 60.0
    ) -> None:
        super().__init__(line, peer, queues=queues, timeout_s=timeout_s)
        self._arrival = Arrival(self._room_for, self._lying)
        self._lent: dict[int, Trays] = {}
        self._borrowed: dict[int, Borrowed] = {}
        self._fds: list[int] = []

    def peer_pid(self) -> int:
        """Number of the process at the other end, as the kernel of this one counts; 0 if it is not seen."""
        told = self._line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        return int(struct.unpack("3i", told)[0])

    def share(self, trays: Trays) -> None:
        """See `Link.share`."""
        if self.passes_memory and trays.id not in self._lent:
            self._lent[trays.id] = trays
            told = {"set": trays.id, "tray_bytes": trays.tray_bytes, "count": trays.count}
            head, _ = packed(Kind.TRAYS, told)
            self._put([head], [trays.segment.fd])

    def send(
        self, kind: Kind, told: Mapping[str, Any], parts: Sequence[Buffer] = (), *, tray: int = -1
    ) -> None:
        """See `Link.send`."""
        self._take_back()
        borrowed = self._borrowed.get(set_of(tray)) if tray >= 0 else None
        if borrowed is None or sum(map(len, parts)) > borrowed.tray_bytes:
            super().send(kind, told, parts)
            return
        # If the tray was taken back, the trainer sees that from its number.
        borrowed.write(tray, parts)
        head, _ = packed(kind, told, parts, tray=tray)
        self._put([head])

    def close(self) -> None:
        """See `Link.close`."""
        super().close()
        for borrowed in self._borrowed.values():
            borrowed.close()
        self._borrowed.clear()
        self._lent.clear()
        self._drop_fds()

    def _take_back(self) -> None:
        """Tell the peer to forget trays that were closed, so that their memory is free."""
        for number in [number for number, trays in self._lent.items() if trays.closed]:
            del self._lent[number]
            super().send(Kind.TRAYS, {"set": number, "tray_bytes": 0, "count": 0})

    def _lying(self, kind: Kind, told: dict[str, Any], header: Header) -> memoryview:
        """The payload of a message that says it lies in a tray."""
        trays = self._lent.get(set_of(header.tray))
        memory = None if trays is None else trays.memory(header.tray)
        if memory is None:
            raise LinkError(
                f"{self.peer} filled a tray that was taken back: it came too late", kind, told
            )
        if header.payload_bytes > len(memory):
            raise LinkError(f"{self.peer} filled more than a tray", kind, told)
        return memory[: header.payload_bytes]

    def _read(self, room: memoryview) -> int:
        """Descriptors come with the header of a message."""
        if not self._arrival.at_head:
            return self._line.recv_into(room)
        count, along, _, _ = self._line.recvmsg_into([room], _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        return count

    def _seen(self, message: Message) -> Message | None:
        fds, self._fds = self._fds, []
        try:
            if message.kind is not Kind.TRAYS:
                return message
            self._borrow(message.told, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _borrow(self, told: dict[str, Any], fds: list[int]) -> None:
        """The peer has passed trays, or wants them forgotten."""
        number, size, count = (told.get(name) for name in ("set", "tray_bytes", "count"))
        if not isinstance(number, int) or not isinstance(size, int) or not isinstance(count, int):
            raise LinkError("trays without a size", Kind.TRAYS, told)
        known = self._borrowed.pop(number, None)
        if known is not None:
            known.close()
        if not count or not fds:
            return
        try:
            self._borrowed[number] = Borrowed.attach(fds[0], size, count)
        except ArenaError as problem:
            warn(
                f"memory of {self.peer} cannot be used here, so batches are sent through a socket, which "
                f"costs a copy: {problem}",
                OffloadWarning,
            )

    def _drop_fds(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds.clear()
