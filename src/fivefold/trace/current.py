"""The one trace that this process writes, and what the operations of a thread are for."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fivefold.trace.trace import Trace

__all__ = ["Current", "Usage", "active", "current", "usage"]


class Current:
    """Where the trace of this process is found; read on the shortest ways, so an attribute and no call."""

    __slots__ = ("trace",)

    def __init__(self) -> None:
        self.trace: Trace | None = None


current = Current()


class Usage(threading.local):
    """Of the operations that this thread asks for."""

    tag: int = -1
    """what they are for: a number of a `Tag`, -1 where nobody said"""
    background: bool = False
    """whether training goes on while this thread waits: nothing that it waits for holds up a step"""


usage = Usage()


def active() -> Trace | None:
    """The trace that this process writes, if it does."""
    return current.trace


def _forget() -> None:
    current.trace = None


# The map is shared with a child: its spans would appear as ours.
os.register_at_fork(after_in_child=_forget)
