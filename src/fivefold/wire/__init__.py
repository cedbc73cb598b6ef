"""Connections between processes of a job: taking calls, and the handshake that proves who calls."""

from fivefold.wire.callers import Callers
from fivefold.wire.handshake import (
    KEY_BYTES,
    OtherKey,
    OtherProtocol,
    OtherVersion,
    Protocol,
    new_key,
)
from fivefold.wire.listener import Listener

__all__ = [
    "KEY_BYTES",
    "Callers",
    "Listener",
    "OtherKey",
    "OtherProtocol",
    "OtherVersion",
    "Protocol",
    "new_key",
]
