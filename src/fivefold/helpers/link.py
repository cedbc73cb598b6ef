"""Links: what carries messages between a trainer and a helper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fivefold.helpers.arrival import Place
from fivefold.helpers.messages import Buffer, Kind, Message

if TYPE_CHECKING:
    from fivefold.helpers.trays import Trays

__all__ = ["Link", "Place"]


class Link(Protocol):
    """An ordered line to one peer that has proved to know the job's key.

    One thread receives; any thread may send. Messages come complete, in order, or not at all.
    """

    peer: str
    """for people: "helper 1 (dpu01:21001)" """
    hello: dict[str, Any]
    """what the peer said of itself"""
    passes_memory: bool
    """whether payloads may be written into trays by the peer itself"""
    place: Place
    """set by whoever has room for payloads"""

    def fileno(self) -> int:
        """Readable when `receive` has something to do; -1: it has to be asked now and then."""
        ...

    def share(self, trays: Trays) -> None:
        """Let the peer write into trays. Without effect where memory is not shared, or called again."""
        ...

    def send(
        self, kind: Kind, told: Mapping[str, Any], parts: Sequence[Buffer] = (), *, tray: int = -1
    ) -> None:
        """Send a message, its payload being `parts`, one after the other.

        Args:
            kind: of the message.
            told: its text; at most `MOST_TOLD_BYTES` as JSON.
            parts: must stay as they are until sent: do not write to them again.
            tray: the number of the peer's tray that the payload shall lie in, where memory is shared. One
                that does not fit travels in the message. The parts are free again on return.

        Raises:
            LinkClosed: the peer is gone, or has read nothing for the link's timeout.
            LinkError: `told` cannot travel. The link goes on.
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
