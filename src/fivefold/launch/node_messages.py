"""What the launcher and the agents of nodes say to each other. L: the launcher sends it, A: an agent."""

from __future__ import annotations

import enum

from fivefold.wire import Frames, Protocol

__all__ = ["FRAMES", "PROTOCOL", "WINDOW_BYTES", "Kind", "weight"]

PROTOCOL = Protocol("fivefold node", "001")
_FRAME_BYTES = 128
"""about what frame and fields of a message with output take"""
WINDOW_BYTES = 1 << 16
"""of output on its way: less than any kernel buffers, so that a launcher that stands still blocks no agent"""


class Kind(enum.IntEnum):
    """What a message is for."""

    HELLO = 1
    """A: `number` in the list of hosts, where the agent was told; `names` of its node, `versions`, `cores`"""
    LISTEN = 2
    """L: `port` that rank 0 shall listen at, 0 for a free one; A: the port, held for it"""
    START = 3
    """L: payload: ranks to start as JSON, see `RankOrder`; environments may be long"""
    REFUSED = 4
    """A: `why` that cannot be done here"""
    OUTPUT = 5
    """A: `rank`, `stream` (out or err); payload: what it wrote"""
    TAKEN = 6
    """L: `bytes` of output that have been dealt with, see `weight`"""
    ENDED = 7
    """A: `rank`, `code`: its exit code, or minus the signal that killed it"""
    SIGNAL = 8
    """L: `signum`, for every rank that still runs"""
    KILL = 9
    """L: end all ranks, and what they have started, after `grace_s`"""
    CLEARED = 10
    """A: nothing of the ranks is left"""
    BYE = 11
    """L: that was all"""


FRAMES = Frames(Kind)


def weight(payload: bytes) -> int:
    """What a message with output counts for in the window."""
    return len(payload) + _FRAME_BYTES
