"""Communication over a torch ProcessGroup, every call with the tag that says what it is for; and a backend
of torch.distributed, "fivefold", which torch knows once this package is imported.
"""

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
from fivefold.comm.registration import BACKEND, register
from fivefold.comm.replay import Log
from fivefold.comm.shared_tensor import SharedCopies, add_in_order, shared_zeros, shares_memory

__all__ = [
    "BACKEND",
    "CommError",
    "Log",
    "Messages",
    "Pending",
    "SharedCopies",
    "add_in_order",
    "all_gather",
    "all_reduce",
    "broadcast_all",
    "broadcast_text",
    "reduce_scatter",
    "register",
    "shared_zeros",
    "shares_memory",
    "start_all_reduce",
    "start_messages",
]

register()
