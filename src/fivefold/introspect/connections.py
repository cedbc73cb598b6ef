"""Connections to a live report: until they show the token, few at a time and none for long."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from fivefold.wire import Callers

__all__ = ["ServerConnections", "keep_callers_faults_quiet"]

_GREETING_S = 10.0
"""from the connection to the token"""
_MOST, _OF_ONE = 64, 32
"""of those who have not shown it: a browser opens six"""


class ServerConnections:
    """Those of one server, in its thread. `protocol` is what uvicorn's `http` takes."""

    def __init__(self) -> None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        connections = self
        self._callers = Callers(_MOST, _OF_ONE)
        self._waiting: dict[Any, tuple[int, asyncio.TimerHandle]] = {}

        class Bounded(H11Protocol):
            """HTTP, hung up on whoever does not show the token in time."""

            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                connections.began(self.client, transport, self.loop)

            def connection_lost(self, exc: Exception | None) -> None:
                connections.known(self.client)
                super().connection_lost(exc)

        self.protocol: type[asyncio.Protocol] = Bounded

    def began(
        self, client: Any, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Somebody has connected, from a host and port."""
        number = self._callers.add(str(client[0]) if client else "", transport.abort)
        self._waiting[client] = number, loop.call_later(_GREETING_S, transport.abort)

    def known(self, client: Any) -> None:
        """The one at a host and port has shown the token, or is gone."""
        number, late = self._waiting.pop(client, (-1, None))
        self._callers.left(number)
        if late is not None:
            late.cancel()


def keep_callers_faults_quiet() -> None:
    """Let uvicorn say nothing of what callers do wrong, a traceback each; it tells faults of the server."""
    import h11

    def is_ours(record: logging.LogRecord) -> bool:
        problem = record.exc_info[1] if record.exc_info else None
        return not isinstance(problem, h11.ProtocolError)

    logging.getLogger("uvicorn.error").addFilter(is_ours)
