"""A link over a connected socket: payloads are sent."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fivefold.helpers.messages import FRAMES
from fivefold.wire.channel import Channel
from fivefold.wire.frames import Buffer

if TYPE_CHECKING:
    from fivefold.helpers.receive_buffers import BufferPool

__all__ = ["StreamLink"]


class StreamLink(Channel):
    """Messages over a socket. See `fivefold.helpers.link.Link`, and `Channel` for the arguments."""

    passes_memory = False

    def __init__(
        self, sock: socket.socket, peer: str, *, queues: bool, timeout_s: float = 60.0
    ) -> None:
        super().__init__(sock, peer, FRAMES, queues=queues, timeout_s=timeout_s)
        self.hello: dict[str, Any] = {}

    def share(self, pool: BufferPool) -> None:
        """Memory is not shared."""

    def send(
        self,
        kind: int,
        fields: Mapping[str, Any],
        parts: Sequence[Buffer] = (),
        *,
        buffer: int = -1,
    ) -> None:
        """See `Link.send`. The buffer is the receiver's business: it knows the lease."""
        del buffer
        super().send(kind, fields, parts)
