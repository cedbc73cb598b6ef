"""Communication over a torch ProcessGroup, every call with the tag that says what it is for."""

from __future__ import annotations

from fivefold.comm.collectives import (
    CommError,
    Pending,
    all_gather,
    all_reduce,
    broadcast_all,
    broadcast_text,
    reduce_scatter,
    start_all_reduce,
)
from fivefold.comm.messages import Messages, start_messages
from fivefold.comm.replay import Log

__all__ = [
    "CommError",
    "Log",
    "Messages",
    "Pending",
    "all_gather",
    "all_reduce",
    "broadcast_all",
    "broadcast_text",
    "reduce_scatter",
    "start_all_reduce",
    "start_messages",
]
