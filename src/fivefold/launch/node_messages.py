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
    PROGRESS = 12
    """A: `first` rank of its node, and how far its `ranks` are, the numbers of `RankProgress` for each;
    L: it was read, and another may follow"""
    ASK = 13
    """L: ask the ranks to save and end, each as soon as it handles SIGUSR1"""
    ASKED = 14
    """A: `ranks` that were"""
    TRACES = 15
    """L: send what has changed of traces; or `remove` them, all has come. A: `places` that have some, told at
    the `start` and when nothing has changed, after `spent_s` of a core; or payload: `pages` of the trace
    `name`, `bytes` long, for `folder`; or the `problem` for which there is none"""
    FACTS = 16
    """A: payload: what `rank` has told for --explain; -1: the report. L: the same, for the node of rank 0"""
    STAGE = 17
    """L: which copies of `trees`, keys, are not in `folder`? A: those it `lacks`, and the `port` where the
    node after it in a chain can take them; `why` that cannot be done"""
    COPY = 18
    """L: take `trees` from the node at `host` and `port`, and pass them on if it `passes` them; A, as STAGE:
    that has ended"""
    FLUSH = 19
    """L: no ranks follow: let checkpoint agents copy the last save, in `limit_s`; A: what they `told`"""


FRAMES = Frames(Kind)


def weight(payload: bytes) -> int:
    """What a message with output counts for in the window."""
    return len(payload) + _FRAME_BYTES
