"""Links: what carries messages between a trainer and a helper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.wire.frames import Buffer, Message
from fivefold.wire.reader import Place

if TYPE_CHECKING:
    from fivefold.helpers.receive_buffers import BufferPool

__all__ = ["Link", "Place"]


class Link(Protocol):
    """An ordered connection to one peer that has proved to know the job's key.

    One thread receives; any thread may send. Messages come complete, in order, or not at all.
    """

    peer: str
    """for people: "helper 1 (dpu01:21001)" """
    hello: dict[str, Any]
    """what the peer said of itself"""
    passes_memory: bool
    """whether payloads may be written into buffers by the peer itself"""
    place: Place
    """set by whoever has room for payloads"""

    def fileno(self) -> int:
        """Readable when `receive` has something to do; -1: it has to be asked now and then."""
        ...

    def share(self, pool: BufferPool) -> None:
        """Let the peer write into buffers. Without effect where memory is not shared, or called again."""
        ...

    def send(
        self,
        kind: int,
        fields: Mapping[str, Any],
        parts: Sequence[Buffer] = (),
        *,
        buffer: int = -1,
    ) -> None:
        """Send a message, its payload being `parts`, one after the other.

        Args:
            kind: of the message.
            fields: of the message; at most `MOST_FIELDS_BYTES` as JSON.
            parts: must stay as they are until sent: do not write to them again.
            buffer: the number of the peer's buffer that the payload shall lie in, where memory is shared. One
                that does not fit travels in the message. The parts are free again on return.

        Raises:
            LinkClosed: the peer is gone, or has read nothing for the link's timeout.
            LinkError: `fields` cannot travel. The link goes on.
        """
        ...

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None if none is complete within `timeout_s` (0: what is there already).

        Raises:
            LinkClosed: the peer is gone, or sent what is no message.
            LinkError: a message was damaged, and dropped. The link goes on.
        """
        ...

    def close(self) -> None:
        """Hang up. Calling it again does nothing."""
        ...
