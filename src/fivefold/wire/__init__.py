"""Channels between processes of a job: taking calls, proving who calls, and messages in frames."""

from fivefold.wire.address import own_address
from fivefold.wire.callers import Callers
from fivefold.wire.channel import Channel, set_up_tcp
from fivefold.wire.frames import Frames, LinkClosed, LinkError, Message
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
    "Channel",
    "Frames",
    "LinkClosed",
    "LinkError",
    "Listener",
    "Message",
    "OtherKey",
    "OtherProtocol",
    "OtherVersion",
    "Protocol",
    "new_key",
    "own_address",
    "set_up_tcp",
]
