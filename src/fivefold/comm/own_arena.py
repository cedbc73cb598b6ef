"""The arena of this process, and those of the others as they are mapped here."""

from __future__ import annotations

import os
import threading
import weakref

from fivefold.arena import ArenaError, Heap, Segment, limit_bytes

__all__ = ["mapped", "own_arena"]

_lock = threading.Lock()
_own: Heap | None = None
_own_pid = 0
_known: weakref.WeakValueDictionary[int, Segment] = weakref.WeakValueDictionary()
"""by inode: a peer's arena is mapped once, however many groups it is met in"""


def own_arena() -> Heap:
    """Where this process makes tensors that its peers see. As large as all memory, but empty at first.

    Raises `ArenaError`.
    """
    global _own, _own_pid  # one per process: peers map it whole
    with _lock:
        if _own is None or _own_pid != os.getpid():
            physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            segment = Segment.create("arena", min(physical, limit_bytes()), sparse=True)
            _known[os.fstat(segment.fd).st_ino] = segment
            _own, _own_pid = Heap(segment), os.getpid()
        return _own


def mapped(fd: int) -> Segment:
    """The arena behind `fd`, which is taken over."""
    with _lock:
        inode = os.fstat(fd).st_ino
        segment = _known.get(inode)
        if segment is not None:
            os.close(fd)
            return segment
        try:
            segment = Segment.attach(fd)
        except ArenaError:
            os.close(fd)
            raise
        _known[inode] = segment
        return segment
