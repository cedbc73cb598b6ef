"""Messages between trainers and helpers, and how they are framed.

    header (48 bytes)                             told          payload
    magic kind flags tray lengths digests check   JSON object   bytes, or nothing

A damaged told or payload costs its own message only. A damaged header ends the link: nobody would know any
more where the next message begins. Nothing received is executed or unpickled.
"""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import xxhash

from fivefold.errors import FivefoldError

__all__ = [
    "HEADER_BYTES",
    "MOST_PAYLOAD_BYTES",
    "MOST_TOLD_BYTES",
    "Buffer",
    "Header",
    "Kind",
    "LinkClosed",
    "LinkError",
    "Message",
    "digest",
    "packed",
    "text_of",
    "told_in",
]

Buffer = bytes | bytearray | memoryview
"""bytes in one piece; a memoryview is flat, of format B"""

MOST_TOLD_BYTES = 1 << 20
MOST_PAYLOAD_BYTES = 8 << 30
"""what is received into fresh memory, where nobody has made room for a payload"""

_MAGIC = b"5fm1"
_HEADER = struct.Struct("!4sBBHqIQQQ")
_CHECK = struct.Struct("!I")
HEADER_BYTES = _HEADER.size + _CHECK.size
_written = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one each time


class Kind(enum.IntEnum):
    """What a message is for. T: a trainer sends it, H: a helper."""

    HELLO = 1
    """both, after they proved that they know the key: versions, machine, process"""
    TRAYS = 2
    """T: memory that payloads may be written into; links that share memory deal with it themselves"""
    OPEN = 3
    """T: `service`, `number`, `identity`, `axes`: what leases will be about"""
    READY = 4
    """H: `service`, `number`: it can be served"""
    REFUSED = 5
    """H: `service`, `number`, `why`: it cannot"""
    LEASE = 6
    """T: `service`, `number`, `lease`, and what to make"""
    DONE = 7
    """H: `service`, `number`, `lease`, `busy_s`, `waited_s`, and what was made"""
    FAILED = 8
    """H: `service`, `number`, `lease`, `kind` (of error), `message`, `traceback`"""
    CANCEL = 9
    """T: `service`, `number`, `lease`: not needed any more, unless begun"""
    WEIGHTS = 10
    """T: `service`, `number`, `version`; payload: a snapshot of the model"""
    SAMPLES = 11
    """T: samples of a lease that the helper could not read"""
    BYE = 12
    """both: `why`"""


class LinkClosed(FivefoldError):
    """The other side is gone, silent for too long, or not to be understood: this link is over."""


class LinkError(FivefoldError):
    """One message was damaged on the way and dropped; the link goes on.

    `kind` and `told` are what is known of the message: None and empty if its head was damaged.
    """

    def __init__(
        self, message: str, kind: Kind | None = None, told: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.told = kind, told or {}


@dataclass(frozen=True)
class Message:
    """What has come over a link."""

    kind: Kind
    told: dict[str, Any]
    payload: memoryview = field(default_factory=lambda: memoryview(b""))
    """writable bytes, where the receiver placed them; empty if there are none"""


class Header(NamedTuple):
    """The fixed beginning of a message."""

    kind: int
    told_bytes: int
    payload_bytes: int
    told_digest: int
    payload_digest: int = 0
    tray: int = -1
    """where the payload lies already; -1: it follows"""

    def pack(self) -> bytes:
        """As it travels."""
        fields = _HEADER.pack(
            _MAGIC, self.kind, 0, 0, self.tray, self.told_bytes, self.payload_bytes,
            self.told_digest, self.payload_digest,
        )  # fmt: skip
        return fields + _CHECK.pack(xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF)

    @staticmethod
    def parse(packed: Buffer) -> Header:
        """From `HEADER_BYTES` bytes. Raises `LinkClosed` unless they are a header with legal lengths."""
        fields = memoryview(packed)[: _HEADER.size]
        magic, kind, _, _, tray, told, payload, told_digest, payload_digest = _HEADER.unpack(fields)
        (check,) = _CHECK.unpack_from(packed, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(fields) & 0xFFFFFFFF:
            raise LinkClosed("what came is no message of fivefold, or its head was damaged")
        if told > MOST_TOLD_BYTES:
            raise LinkClosed(
                f"a message announces {told} bytes of text; {MOST_TOLD_BYTES} is the most"
            )
        return Header(kind, told, payload, told_digest, payload_digest, tray)


def digest(parts: Iterable[Buffer]) -> int:
    """The checksum (xxh3_64) of parts, as if they were one."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def packed(
    kind: Kind, told: Mapping[str, Any], parts: Iterable[Buffer] = (), *, tray: int = -1
) -> tuple[bytes, int]:
    """Header and text of a message, and the size of its payload in bytes.

    A payload that lies in a tray already has no digest: it does not travel, and whoever reads it reads the
    memory it was written to.

    Raises:
        LinkError: `told` is longer than `MOST_TOLD_BYTES`, or is not made of what JSON knows.
    """
    text = text_of(told, kind)
    payload = list(parts)
    size = sum(map(len, payload))
    header = Header(
        kind=int(kind),
        told_bytes=len(text),
        payload_bytes=size,
        told_digest=xxhash.xxh3_64_intdigest(text),
        payload_digest=digest(payload) if size and tray < 0 else 0,
        tray=tray,
    )
    return header.pack() + text, size


def text_of(told: Mapping[str, Any], kind: Kind) -> bytes:
    """What is told, as it travels. Raises `LinkError` if it cannot."""
    try:
        text = _written(told).encode("ascii")
    except (TypeError, ValueError, RecursionError) as problem:
        raise LinkError(f"a message {kind.name} cannot be written as JSON: {problem}") from problem
    if len(text) > MOST_TOLD_BYTES:
        raise LinkError(
            f"a message {kind.name} has {len(text)} bytes of text; {MOST_TOLD_BYTES} is the most: send the "
            "rest as payload"
        )
    return text


def told_in(header: Header, text: Buffer) -> tuple[Kind, dict[str, Any]]:
    """Kind and text of a message. Raises `LinkError` if they were damaged."""
    if xxhash.xxh3_64_intdigest(text) != header.told_digest:
        raise LinkError("the text of a message was damaged on the way")
    try:
        kind = Kind(header.kind)
        told: object = json.loads(bytes(text))
    except (ValueError, RecursionError) as problem:
        raise LinkError(f"a message is not to be understood: {problem}") from None
    if not isinstance(told, dict):
        raise LinkError(f"a message {kind.name} tells no JSON object", kind)
    return kind, cast(dict[str, Any], told)
