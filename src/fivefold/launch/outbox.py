"""Output of ranks on its way to the launcher, which may be slow: no rank waits for it."""

from __future__ import annotations

import json
import struct
import tempfile
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

from fivefold.launch.node_messages import WINDOW_BYTES, Kind, weight
from fivefold.wire import Channel

__all__ = ["Outbox"]

_MEMORY_BYTES = 1 << 20
_RECORD = struct.Struct("!BII")

_Item = tuple[Kind, Mapping[str, Any], bytes]


class Outbox:
    """Sends messages in order, output as fast as it is taken; what has to wait lies in a file of this node.

    Where that cannot be written, output is dropped, and how much is told in its place.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._near: deque[_Item] = deque()
        self._near_bytes = 0
        self._far = _Spool()
        self._under_way = 0
        self._dropped = 0

    def put(self, kind: Kind, fields: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a message after all before it. Raises `LinkClosed` if the launcher is gone."""
        item: _Item = (kind, fields, payload)
        if self._far.empty and (self._near_bytes < _MEMORY_BYTES or not payload):
            self._keep(item)
        else:
            self._put_far(item)
        self._push()

    def taken(self, count: int) -> None:
        """The launcher has dealt with so many bytes of output, as `weight` counts them."""
        self._under_way = max(0, self._under_way - count)
        self._push()

    def shorten(self) -> None:
        """Keep the end of what waits: ranks are being ended, and nobody wants to wait for all they wrote."""
        kept: deque[_Item] = deque()
        waiting_bytes = dropped = 0
        while (item := self._near.popleft() if self._near else self._far.pop()) is not None:
            kept.append(item)
            waiting_bytes += len(item[2])
            while waiting_bytes > _MEMORY_BYTES:
                first = next(number for number, one in enumerate(kept) if one[2])
                waiting_bytes -= len(kept[first][2])
                dropped += len(kept[first][2])
                del kept[first]
        if dropped:
            first = next(number for number, one in enumerate(kept) if one[2])
            kind, fields, payload = kept[first]
            told = (
                b"(%d bytes of output are left out: they waited when the ranks were ended)\n"
                % dropped
            )
            kept[first] = (kind, fields, told + payload)
        self._near, self._near_bytes = kept, sum(len(payload) for _, _, payload in kept)
        self._push()

    def close(self) -> None:
        """Give up what has not been sent."""
        self._near.clear()
        self._far.close()

    @property
    def empty(self) -> bool:
        """Whether all has been sent."""
        return not self._near and self._far.empty

    def _keep(self, item: _Item) -> None:
        self._near.append(item)
        self._near_bytes += len(item[2])

    def _put_far(self, item: _Item) -> None:
        kind, fields, payload = item
        told = b""
        if self._dropped and payload:
            told = b"(%d bytes of output are lost: no room for them on this node)\n" % self._dropped
        try:
            self._far.append((kind, fields, told + payload))
        except OSError:
            if payload:
                self._dropped += len(payload)
            else:
                self._keep(item)  # what is no output is small, and must arrive
        else:
            self._dropped = 0 if payload else self._dropped

    def _push(self) -> None:
        while True:
            if not self._near:
                while self._near_bytes < _MEMORY_BYTES and (item := self._far.pop()) is not None:
                    self._keep(item)
            if not self._near or (self._near[0][2] and self._under_way >= WINDOW_BYTES):
                return
            kind, fields, payload = self._near.popleft()
            self._near_bytes -= len(payload)
            self._under_way += weight(payload) if payload else 0
            self._channel.send(kind, fields, [payload] if payload else [])


class _Spool:
    """Messages in a file that has no name: it is gone with this process."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._read = self._written = 0

    @property
    def empty(self) -> bool:
        return self._read == self._written

    def append(self, item: _Item) -> None:
        """Raises `OSError` if there is no room; nothing of it is kept then."""
        kind, fields, payload = item
        text = json.dumps(fields).encode()
        record = _RECORD.pack(kind, len(text), len(payload)) + text + payload
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="fivefold-output-", buffering=0)  # noqa: SIM115
        self._file.seek(self._written)
        done = 0
        while done < len(record):
            done += self._file.write(record[done:])
        self._written += len(record)

    def pop(self) -> _Item | None:
        """The next message; None if there is none."""
        if self.empty:
            return None
        assert self._file is not None
        self._file.seek(self._read)
        kind, text_bytes, payload_bytes = _RECORD.unpack(self._exactly(_RECORD.size))
        text, payload = self._exactly(text_bytes), self._exactly(payload_bytes)
        self._read += _RECORD.size + text_bytes + payload_bytes
        if self.empty:
            self._file.truncate(0)
            self._read = self._written = 0
        return Kind(kind), json.loads(text), payload

    def _exactly(self, count: int) -> bytes:
        assert self._file is not None
        found = bytearray()
        while len(found) < count:
            piece = self._file.read(count - len(found))
            assert piece, "the file of output was cut"
            found += piece
        return bytes(found)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        self._read = self._written = 0
