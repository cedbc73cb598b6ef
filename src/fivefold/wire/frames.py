"""How messages are framed, whatever they are about.

    header (48 bytes)                               fields        payload
    magic kind flags buffer lengths digests check   JSON object   bytes, or nothing

Damaged fields or payload cost their own message only. A damaged header ends the channel: nobody would know
any more where the next message begins. Nothing received is executed or unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from fivefold.errors import FivefoldError

__all__ = [
    "HEADER_BYTES",
    "MOST_FIELDS_BYTES",
    "MOST_PAYLOAD_BYTES",
    "Buffer",
    "Checksum",
    "Frames",
    "Header",
    "LinkClosed",
    "LinkError",
    "Message",
    "fresh",
]

Buffer = bytes | bytearray | memoryview
"""bytes in one piece; a memoryview is flat, of format B"""

MOST_FIELDS_BYTES = 1 << 20
MOST_PAYLOAD_BYTES = 8 << 30
"""what is received into fresh memory, where nobody has made room for a payload"""

_MAGIC = b"5fm2"
_HEADER = struct.Struct("!4sBBHqIQQQ")
_CHECK = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_written = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one each time


class LinkClosed(FivefoldError):
    """The other side is gone, silent for too long, or not to be understood: this channel is over."""


class LinkError(FivefoldError):
    """One message was damaged on the way and dropped; the channel goes on.

    `kind` and `fields` are what is known of the message: None and empty if its head was damaged.
    """

    def __init__(
        self, message: str, kind: int | None = None, fields: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.fields = kind, fields or {}


@dataclass(frozen=True)
class Message:
    """What has come over a channel."""

    kind: int
    fields: dict[str, Any]
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """writable bytes, where the receiver placed them; empty if there are none"""


class Header(NamedTuple):
    """The fixed beginning of a message."""

    kind: int
    fields_bytes: int
    payload_bytes: int
    fields_digest: int
    payload_digest: int = 0
    buffer: int = -1
    """where the payload lies already; -1: it follows"""

    def pack(self) -> bytes:
        """As it travels."""
        head = _HEADER.pack(
            _MAGIC, self.kind, 0, 0, self.buffer, self.fields_bytes, self.payload_bytes,
            self.fields_digest, self.payload_digest,
        )  # fmt: skip
        return head + _CHECK.pack(zlib.crc32(head))

    @staticmethod
    def parse(packed: Buffer) -> Header:
        """From `HEADER_BYTES` bytes. Raises `LinkClosed` unless they are a header with legal lengths."""
        head = memoryview(packed)[: _HEADER.size]
        magic, kind, _, _, buffer, fields, payload, fields_digest, payload_digest = _HEADER.unpack(
            head
        )
        (check,) = _CHECK.unpack_from(packed, _HEADER.size)
        if magic != _MAGIC or check != zlib.crc32(head):
            raise LinkClosed("what came is no message of fivefold, or its head was damaged")
        if fields > MOST_FIELDS_BYTES:
            raise LinkClosed(
                f"a message announces {fields} bytes of text; {MOST_FIELDS_BYTES} is the most"
            )
        return Header(kind, fields, payload, fields_digest, payload_digest, buffer)


class Checksum(Protocol):
    """Of a payload, as its pieces come."""

    def update(self, data: Buffer, /) -> None:
        """The next piece."""

    def intdigest(self) -> int:
        """Of all so far, at most 64 bits."""
        ...


class _Crc32:
    """That of zlib."""

    def __init__(self) -> None:
        self._so_far = 0

    def update(self, data: Buffer, /) -> None:
        self._so_far = zlib.crc32(data, self._so_far)

    def intdigest(self) -> int:
        return self._so_far


def fresh(size_bytes: int) -> memoryview:
    """New memory for a payload. Raises `LinkClosed` where there is none, or it is beyond the limit."""
    if size_bytes > MOST_PAYLOAD_BYTES:
        raise LinkClosed(
            f"a message announces a payload of {size_bytes} bytes; {MOST_PAYLOAD_BYTES} is the most"
        )
    try:
        return memoryview(bytearray(size_bytes))
    except MemoryError:
        raise LinkClosed(f"no memory for a payload of {size_bytes} bytes") from None


@dataclass(frozen=True)
class Frames:
    """What the messages of one protocol are made of."""

    kinds: type[enum.IntEnum]
    """of messages, 0 to 255"""
    checksum: Callable[[], Checksum] = _Crc32
    """of payloads"""
    fresh: Callable[[int], memoryview] = fresh
    """memory for payloads that nobody has made room for"""

    def packed(
        self,
        kind: int,
        fields: Mapping[str, Any],
        parts: Iterable[Buffer] = (),
        *,
        buffer: int = -1,
    ) -> tuple[bytes, int]:
        """Header and text of a message, and the size of its payload in bytes.

        A payload that lies in a buffer already has no digest: it does not travel, and whoever reads it reads
        the memory it was written to.

        Raises:
            LinkError: `fields` is longer than `MOST_FIELDS_BYTES`, or is not made of what JSON knows.
        """
        text = self._encoded(fields, kind)
        payload = list(parts)
        size = sum(map(len, payload))
        header = Header(
            kind=int(kind),
            fields_bytes=len(text),
            payload_bytes=size,
            fields_digest=zlib.crc32(text),
            payload_digest=self._digest(payload) if size and buffer < 0 else 0,
            buffer=buffer,
        )
        return header.pack() + text, size

    def name(self, kind: int) -> str:
        """Of a kind of message, for people."""
        return self.kinds(kind).name

    def _digest(self, parts: Iterable[Buffer]) -> int:
        """Of parts, as if they were one."""
        state = self.checksum()
        for part in parts:
            state.update(part)
        return state.intdigest()

    def parsed(self, header: Header, text: Buffer) -> tuple[int, dict[str, Any]]:
        """Kind and fields of a message. Raises `LinkError` if they were damaged."""
        if zlib.crc32(text) != header.fields_digest:
            raise LinkError("the text of a message was damaged on the way")
        try:
            kind = self.kinds(header.kind)
            fields: object = json.loads(bytes(text))
        except (ValueError, RecursionError) as problem:
            raise LinkError(f"a message is not to be understood: {problem}") from None
        if not isinstance(fields, dict):
            raise LinkError(f"a message {kind.name} tells no JSON object", kind)
        return kind, cast(dict[str, Any], fields)

    def _encoded(self, fields: Mapping[str, Any], kind: int) -> bytes:
        """The fields, as they travel. Raises `LinkError` if they cannot."""
        try:
            text = _written(fields).encode("ascii")
        except (TypeError, ValueError, RecursionError) as problem:
            raise LinkError(
                f"a message {self.name(kind)} cannot be written as JSON: {problem}"
            ) from problem
        if len(text) > MOST_FIELDS_BYTES:
            raise LinkError(
                f"a message {self.name(kind)} has {len(text)} bytes of text; {MOST_FIELDS_BYTES} is the "
                "most: send the rest as payload"
            )
        return text
