"""How a message is put together from bytes as they come: header, fields, payload, each received in place."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

from fivefold.wire.frames import HEADER_BYTES, Frames, Header, LinkError, Message

__all__ = ["InBuffer", "MessageReader", "Place", "no_place"]

Place = Callable[[int, dict[str, Any], int], memoryview | None]
"""Where a payload of so many bytes shall lie, given the message's kind and text. At least that many bytes,
writable; None: in fresh memory."""

InBuffer = Callable[[int, dict[str, Any], Header], memoryview]
"""The payload of a message that says it lies in a buffer. Raises `LinkError` if it does not."""

_WASTE_BYTES = 1 << 16


def no_place(kind: int, fields: dict[str, Any], size_bytes: int) -> None:
    """Every payload lies in fresh memory."""


class _Stage(enum.Enum):
    HEAD = enum.auto()
    TEXT = enum.auto()
    PAYLOAD = enum.auto()
    WASTE = enum.auto()
    """the payload of a message that was damaged"""


class MessageReader:
    """The message that is coming in.

    Whoever receives fills `room` from its beginning, tells how much by `took`, and gets the message when
    it is complete.

    Args:
        frames: what messages are made of.
        place: where payloads shall lie.
        in_buffer: the bytes of a payload that lies in a buffer already, where memory is shared.
    """

    def __init__(self, frames: Frames, place: Place, in_buffer: InBuffer | None = None) -> None:
        self._frames = frames
        self._place, self._payload_in_buffer = place, in_buffer
        self._begin()

    def _begin(self) -> None:
        self._stage = _Stage.HEAD
        self._rooms: memoryview = memoryview(bytearray(HEADER_BYTES))
        self.room = self._rooms
        """to be filled, never empty"""

    @property
    def at_head(self) -> bool:
        """Whether a header is coming in, with which descriptors may come."""
        return self._stage is _Stage.HEAD

    @property
    def begun(self) -> bool:
        """Whether part of a message has come."""
        return self._stage is not _Stage.HEAD or len(self.room) < HEADER_BYTES

    def took(self, count: int) -> Message | None:
        """So many bytes were received into `room`.

        Raises:
            LinkClosed: what comes is no message.
            LinkError: a message was damaged. The next is awaited.
        """
        if self._stage is _Stage.PAYLOAD:
            self._state.update(self.room[:count])
        elif self._stage is _Stage.WASTE:
            self._wasted += count
        self.room = self.room[count:]
        # An empty text or payload is complete at once.
        while not self.room:
            message = self._advance()
            if message is not None:
                return message
        return None

    def _advance(self) -> Message | None:
        """The stage is complete: go to the next, or end the message."""
        if self._stage is _Stage.HEAD:
            self._header = Header.parse(self._rooms)
            self._enter(_Stage.TEXT, memoryview(bytearray(self._header.fields_bytes)))
            return None
        if self._stage is _Stage.TEXT:
            return self._text()
        if self._stage is _Stage.WASTE:
            return self._waste()
        payload, kind, fields, header = self._rooms, self._kind, self._fields, self._header
        self._begin()
        if self._state.intdigest() != header.payload_digest:
            raise LinkError(
                f"the payload of a message {self._frames.name(kind)} was damaged on the way",
                kind,
                fields,
            )
        return Message(kind, fields, payload)

    def _enter(self, stage: _Stage, room: memoryview) -> None:
        self._stage, self._rooms, self.room = stage, room, room

    def _text(self) -> Message | None:
        header = self._header
        try:
            self._kind, self._fields = self._frames.parsed(header, self._rooms)
            if header.buffer >= 0:
                return self._in_buffer()
        except LinkError as problem:
            if header.buffer < 0 and header.payload_bytes:
                self._problem, self._wasted = problem, 0
                self._enter(_Stage.WASTE, memoryview(b""))
                return None
            self._begin()
            raise
        if not header.payload_bytes:
            kind, fields = self._kind, self._fields
            self._begin()
            return Message(kind, fields)
        room = self._place(self._kind, self._fields, header.payload_bytes)
        if room is None or len(room) < header.payload_bytes:
            room = self._frames.fresh(header.payload_bytes)
        self._state = self._frames.checksum()
        self._enter(_Stage.PAYLOAD, room[: header.payload_bytes])
        return None

    def _in_buffer(self) -> Message:
        kind, fields, header = self._kind, self._fields, self._header
        if self._payload_in_buffer is None:
            raise LinkError("a payload is said to lie in memory that is not shared", kind, fields)
        payload = self._payload_in_buffer(kind, fields, header)
        self._begin()
        return Message(kind, fields, payload)

    def _waste(self) -> Message | None:
        """Skip what belongs to a damaged message, a bit at a time."""
        left = self._header.payload_bytes - self._wasted
        if left:
            self.room = memoryview(bytearray(min(left, _WASTE_BYTES)))
            return None
        problem = self._problem
        self._begin()
        raise problem
