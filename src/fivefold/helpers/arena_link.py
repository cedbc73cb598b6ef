"""A link between processes of one node: payloads are written into the trainer's buffers, and not sent.

    trainer ── POOL, descriptor of the segment ──> helper        maps it
            ── LEASE, buffer 7 ──────────────────>               makes the batch, writes it into buffer 7
            <────────────────── DONE, buffer 7 ──                the trainer reads buffer 7

A payload that lies in a buffer has no checksum: it is not carried anywhere, the trainer reads the very
memory that the helper wrote.
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
from fivefold.helpers.messages import FRAMES, Kind
from fivefold.helpers.receive_buffers import AttachedPool, BufferPool, pool_of
from fivefold.helpers.stream_link import StreamLink
from fivefold.wire.frames import Buffer, Header, LinkError, Message
from fivefold.wire.reader import MessageReader

__all__ = ["ArenaLink"]

_ROOM_FOR_FDS = socket.CMSG_SPACE(4)


class ArenaLink(StreamLink):
    """Messages over a Unix socket, payloads through buffers. See `fivefold.helpers.link.Link`."""

    passes_memory = True

    def __init__(
        self, sock: socket.socket, peer: str, *, queues: bool, timeout_s: float = 60.0
    ) -> None:
        super().__init__(sock, peer, queues=queues, timeout_s=timeout_s)
        self._reader = MessageReader(FRAMES, self._room_for, self._payload_in_buffer)
        self._lent: dict[int, BufferPool] = {}
        self._attached_pools: dict[int, AttachedPool] = {}
        self._fds: list[int] = []

    def peer_pid(self) -> int:
        """Number of the process at the other end, as the kernel of this one counts; 0 if it is not seen."""
        credentials = self._sock.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
        )
        return int(struct.unpack("3i", credentials)[0])

    def share(self, pool: BufferPool) -> None:
        """See `Link.share`."""
        if self.passes_memory and pool.id not in self._lent:
            self._lent[pool.id] = pool
            fields = {"pool": pool.id, "buffer_bytes": pool.buffer_bytes, "count": pool.count}
            head, _ = FRAMES.packed(Kind.POOL, fields)
            self._put([head], [pool.segment.fd])

    def send(
        self,
        kind: int,
        fields: Mapping[str, Any],
        parts: Sequence[Buffer] = (),
        *,
        buffer: int = -1,
    ) -> None:
        """See `Link.send`."""
        self._take_back()
        attached = self._attached_pools.get(pool_of(buffer)) if buffer >= 0 else None
        if attached is None or sum(map(len, parts)) > attached.buffer_bytes:
            super().send(kind, fields, parts)
            return
        # If the buffer was taken back, the trainer sees that from its number.
        attached.write(buffer, parts)
        head, _ = FRAMES.packed(kind, fields, parts, buffer=buffer)
        self._put([head])

    def close(self) -> None:
        """See `Link.close`."""
        super().close()
        for attached in self._attached_pools.values():
            attached.close()
        self._attached_pools.clear()
        self._lent.clear()
        self._drop_fds()

    def _take_back(self) -> None:
        """Tell the peer to forget buffers that were closed, so that their memory is free."""
        for number in [number for number, pool in self._lent.items() if pool.closed]:
            del self._lent[number]
            super().send(Kind.POOL, {"pool": number, "buffer_bytes": 0, "count": 0})

    def _payload_in_buffer(self, kind: int, fields: dict[str, Any], header: Header) -> memoryview:
        """The payload of a message that says it lies in a buffer."""
        pool = self._lent.get(pool_of(header.buffer))
        memory = None if pool is None else pool.memory(header.buffer)
        if memory is None:
            raise LinkError(
                f"{self.peer} filled a buffer that was taken back: it came too late", kind, fields
            )
        if header.payload_bytes > len(memory):
            raise LinkError(f"{self.peer} filled more than a buffer", kind, fields)
        return memory[: header.payload_bytes]

    def _read(self, room: memoryview) -> int:
        """Descriptors come with the header of a message."""
        if not self._reader.at_head:
            return self._sock.recv_into(room)
        count, along, _, _ = self._sock.recvmsg_into([room], _ROOM_FOR_FDS, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in along:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self._fds.extend(fds)
        return count

    def _seen(self, message: Message) -> Message | None:
        fds, self._fds = self._fds, []
        try:
            if message.kind is not Kind.POOL:
                return message
            self._attach(message.fields, fds)
        finally:
            for fd in fds:
                os.close(fd)
        return None

    def _attach(self, fields: dict[str, Any], fds: list[int]) -> None:
        """The peer has passed buffers, or wants them forgotten."""
        number, size, count = (fields.get(name) for name in ("pool", "buffer_bytes", "count"))
        if not isinstance(number, int) or not isinstance(size, int) or not isinstance(count, int):
            raise LinkError("a pool of buffers without a size", Kind.POOL, fields)
        known = self._attached_pools.pop(number, None)
        if known is not None:
            known.close()
        if not count or not fds:
            return
        try:
            self._attached_pools[number] = AttachedPool.attach(fds[0], size, count)
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
