"""Messages between trainers and helpers, and how they are framed.

    header (48 bytes)                               fields        payload
    magic kind flags buffer lengths digests check   JSON object   bytes, or nothing

Damaged fields or payload cost their own message only. A damaged header ends the link: nobody would know any
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
    "MOST_FIELDS_BYTES",
    "MOST_PAYLOAD_BYTES",
    "Buffer",
    "Header",
    "Kind",
    "LinkClosed",
    "LinkError",
    "Message",
    "digest",
    "encode_fields",
    "packed",
    "parse_fields",
]

Buffer = bytes | bytearray | memoryview
"""bytes in one piece; a memoryview is flat, of format B"""

MOST_FIELDS_BYTES = 1 << 20
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
    POOL = 2
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

    `kind` and `fields` are what is known of the message: None and empty if its head was damaged.
    """

    def __init__(
        self, message: str, kind: Kind | None = None, fields: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.kind, self.fields = kind, fields or {}


@dataclass(frozen=True)
class Message:
    """What has come over a link."""

    kind: Kind
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
        return head + _CHECK.pack(xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF)

    @staticmethod
    def parse(packed: Buffer) -> Header:
        """From `HEADER_BYTES` bytes. Raises `LinkClosed` unless they are a header with legal lengths."""
        head = memoryview(packed)[: _HEADER.size]
        magic, kind, _, _, buffer, fields, payload, fields_digest, payload_digest = _HEADER.unpack(
            head
        )
        (check,) = _CHECK.unpack_from(packed, _HEADER.size)
        if magic != _MAGIC or check != xxhash.xxh3_64_intdigest(head) & 0xFFFFFFFF:
            raise LinkClosed("what came is no message of fivefold, or its head was damaged")
        if fields > MOST_FIELDS_BYTES:
            raise LinkClosed(
                f"a message announces {fields} bytes of text; {MOST_FIELDS_BYTES} is the most"
            )
        return Header(kind, fields, payload, fields_digest, payload_digest, buffer)


def digest(parts: Iterable[Buffer]) -> int:
    """The checksum (xxh3_64) of parts, as if they were one."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def packed(
    kind: Kind, fields: Mapping[str, Any], parts: Iterable[Buffer] = (), *, buffer: int = -1
) -> tuple[bytes, int]:
    """Header and text of a message, and the size of its payload in bytes.

    A payload that lies in a buffer already has no digest: it does not travel, and whoever reads it reads the
    memory it was written to.

    Raises:
        LinkError: `fields` is longer than `MOST_FIELDS_BYTES`, or is not made of what JSON knows.
    """
    text = encode_fields(fields, kind)
    payload = list(parts)
    size = sum(map(len, payload))
    header = Header(
        kind=int(kind),
        fields_bytes=len(text),
        payload_bytes=size,
        fields_digest=xxhash.xxh3_64_intdigest(text),
        payload_digest=digest(payload) if size and buffer < 0 else 0,
        buffer=buffer,
    )
    return header.pack() + text, size


def encode_fields(fields: Mapping[str, Any], kind: Kind) -> bytes:
    """The fields, as they travel. Raises `LinkError` if it cannot."""
    try:
        text = _written(fields).encode("ascii")
    except (TypeError, ValueError, RecursionError) as problem:
        raise LinkError(f"a message {kind.name} cannot be written as JSON: {problem}") from problem
    if len(text) > MOST_FIELDS_BYTES:
        raise LinkError(
            f"a message {kind.name} has {len(text)} bytes of text; {MOST_FIELDS_BYTES} is the most: send the "
            "rest as payload"
        )
    return text


def parse_fields(header: Header, text: Buffer) -> tuple[Kind, dict[str, Any]]:
    """Kind and text of a message. Raises `LinkError` if they were damaged."""
    if xxhash.xxh3_64_intdigest(text) != header.fields_digest:
        raise LinkError("the text of a message was damaged on the way")
    try:
        kind = Kind(header.kind)
        fields: object = json.loads(bytes(text))
    except (ValueError, RecursionError) as problem:
        raise LinkError(f"a message is not to be understood: {problem}") from None
    if not isinstance(fields, dict):
        raise LinkError(f"a message {kind.name} tells no JSON object", kind)
    return kind, cast(dict[str, Any], fields)
