"""Frames as they travel, whole and spoilt, and links at whose other end a test writes bytes by hand."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from fivefold.helpers.arena_link import ArenaLink
from fivefold.helpers.messages import FRAMES, Kind
from fivefold.helpers.stream_link import StreamLink
from fivefold.wire.frames import HEADER_BYTES, Header, LinkClosed, LinkError, Message

__all__ = ["Heard", "framed", "heard", "link", "sealed", "spoilt"]


def framed(kind: Kind, fields: dict[str, Any], payload: bytes = b"") -> bytes:
    """A whole message."""
    head, _ = FRAMES.packed(kind, fields, [payload])
    return head + payload


def sealed(text: bytes, payload: bytes = b"", **fields: Any) -> bytes:
    """A message whose checksums are right, whatever `fields` of the header say."""
    header = Header(
        kind=Kind.LEASE,
        fields_bytes=len(text),
        payload_bytes=len(payload),
        fields_digest=zlib.crc32(text),
        payload_digest=xxhash.xxh3_64_intdigest(payload),
    )
    return header._replace(**fields).pack() + text + payload


@contextlib.contextmanager
def link(*, arena: bool = False, **options: Any) -> Iterator[tuple[StreamLink, socket.socket]]:
    """A link, and the socket of its peer."""
    ours, theirs = socket.socketpair()
    made = (ArenaLink if arena else StreamLink)(
        ours, "the peer", **{"queues": False, "timeout_s": 10.0, **options}
    )
    try:
        with theirs:
            yield made, theirs
    finally:
        made.close()


@dataclass
class Heard:
    """What a link made of some bytes."""

    messages: list[Message]
    damaged: list[LinkError]
    ended: str
    """why it was closed; empty while it is not"""


def heard(data: bytes, *, arena: bool = False, fds: Sequence[int] = (), most: int = 1000) -> Heard:
    """Let a link receive bytes, and then the end."""
    found = Heard([], [], "")
    with link(arena=arena) as (made, peer):
        if fds and data:
            socket.send_fds(peer, [data[:1]], fds)
            data = data[1:]
        peer.settimeout(10.0)
        for start in range(0, len(data) + 1, 1 << 16):
            peer.sendall(data[start : start + (1 << 16)])
            if not _heard_some(made, found, most):
                return found
        peer.close()
        assert not _heard_some(made, found, most), "the link does not notice the end"
    return found


def _heard_some(made: StreamLink, found: Heard, most: int) -> bool:
    """Whether the link is still open when it has received what there is."""
    for _ in range(most):
        try:
            message = made.receive(0.0)
        except LinkError as problem:
            found.damaged.append(problem)
            continue
        except LinkClosed as problem:
            found.ended = str(problem)
            return False
        if message is None:
            return True
        found.messages.append(message)
    raise AssertionError(f"more than {most} messages from so few bytes")


def spoilt(dice: random.Random) -> tuple[bytes, list[int]]:
    """Bytes that a peer gone wrong might send, and descriptors with them."""
    whole = _message(dice)
    data = dice.choice(_SPOILERS)(dice, whole)
    fds = [os.open(os.devnull, os.O_RDONLY)] if dice.random() < 0.05 else []
    return data, fds


def _message(dice: random.Random) -> bytes:
    kind = dice.choice(list(Kind))
    fields: dict[str, object] = {
        "lease": dice.randrange(1 << 40),
        "set": dice.randrange(3),
        "tray_bytes": 64,
        "count": 2,
    }
    if dice.random() < 0.1:
        fields["text"] = "x" * dice.randrange(1 << 17)
    return framed(
        kind, fields, dice.randbytes(dice.choice([0, 1, 63, 4096, dice.randrange(1 << 17)]))
    )


def _as_is(dice: random.Random, whole: bytes) -> bytes:
    return whole


def _random(dice: random.Random, whole: bytes) -> bytes:
    return dice.randbytes(dice.randrange(1, 300))


def _random_after(dice: random.Random, whole: bytes) -> bytes:
    return whole + dice.randbytes(dice.randrange(1, 300))


def _flipped(dice: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    for _ in range(dice.randrange(1, 9)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def _flipped_head(dice: random.Random, whole: bytes) -> bytes:
    data = bytearray(whole)
    data[dice.randrange(HEADER_BYTES)] ^= 1 << dice.randrange(8)
    return bytes(data)


def _cut(dice: random.Random, whole: bytes) -> bytes:
    return whole[: dice.randrange(len(whole))]


def _without_a_piece(dice: random.Random, whole: bytes) -> bytes:
    start = dice.randrange(len(whole))
    return whole[:start] + whole[start + dice.randrange(1, 100) :] + whole


def _long(dice: random.Random, whole: bytes) -> bytes:
    """A header that is right but for what it announces."""
    size = dice.choice([1 << 20, (1 << 20) + 1, 1 << 31, (1 << 32) - 1])
    if dice.random() < 0.5:
        return sealed(b"{}", fields_bytes=size) + whole
    return sealed(b"{}", payload_bytes=dice.choice([size, 1 << 40, (1 << 64) - 1])) + whole


def _in_a_buffer(dice: random.Random, whole: bytes) -> bytes:
    buffer = dice.choice([0, 1, 1 << 40, (1 << 63) - 1])
    return sealed(b'{"lease":1}', buffer=buffer, payload_bytes=dice.randrange(1 << 20)) + whole


def _strange_text(dice: random.Random, whole: bytes) -> bytes:
    texts = [b"", b"[]", b"1", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000, b"1" * 10_000]
    return sealed(dice.choice(texts), dice.randbytes(dice.randrange(100))) + whole


def _strange_kind(dice: random.Random, whole: bytes) -> bytes:
    return sealed(json.dumps({"lease": 1}).encode(), kind=dice.randrange(256)) + whole


_SPOILERS = [
    _as_is, _random, _random_after, _flipped, _flipped_head, _cut, _without_a_piece, _long, _in_a_buffer,
    _strange_text, _strange_kind,
]  # fmt: skip
