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

__all__ = [
    "CommError",
    "Pending",
    "all_gather",
    "all_reduce",
    "broadcast_all",
    "broadcast_text",
    "reduce_scatter",
    "start_all_reduce",
]
