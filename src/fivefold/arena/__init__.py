"""Shared memory of a node: segments, who may see them, who holds what, and the C core that works on them.

    Segment     memory without a name, its size sealed, passed from process to process
    Heap        pieces of a segment, for the process that owns it
    Slots       pieces of equal size, with holders that may die at any moment
    CopyOnWrite a segment where a process sees its own changes alone until it shares them
                (in arena.copy_on_write, which needs numpy)
    Gate        where other processes of the same user ask for segments

Imports no torch. docs/explanation/arena.md tells what each of its users makes of it.
"""

from __future__ import annotations

from fivefold.arena.budget import available_bytes, check, limit_bytes
from fivefold.arena.gate import Connection, Gate, connect
from fivefold.arena.heap import Heap
from fivefold.arena.locality import node_name, watch
from fivefold.arena.native import ArenaError
from fivefold.arena.segment import Segment
from fivefold.arena.slots import Slots

__all__ = [
    "ArenaError",
    "Connection",
    "Gate",
    "Heap",
    "Segment",
    "Slots",
    "available_bytes",
    "check",
    "connect",
    "limit_bytes",
    "node_name",
    "watch",
]
