"""How far ranks are: each writes it where whoever supervises them can read it.

    rank       ff.start, model.step, Checkpointer ── 64 bytes of its own, through a mapping ──┐
    launcher, or the agent of the node            ◄── looks now and then ── FIVEFOLD_PROGRESS ┘

Nobody waits for anybody. A launcher that is killed leaves no file: the memory has no other name than that of
the descriptor.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from fivefold.closing import Closing
from fivefold.launch.environment import locate

__all__ = [
    "VARIABLE",
    "OwnProgress",
    "ProgressFile",
    "RankProgress",
    "is_told",
    "newest",
    "own_progress",
]

VARIABLE = "FIVEFOLD_PROGRESS"
_NAME = "fivefold-progress"
_RECORD = struct.Struct("<qqqqqqqq")
_REMEMBERED = 5


class RankProgress(NamedTuple):
    """How far a rank is."""

    signs: int = -1
    """of life: grows with every step, and in phases without; -1: before `ff.start()` and after the mesh has
    been stopped"""
    steps: int = -1
    """of training that this process has begun"""
    step: int = -1
    """the last that the run has ended, as its Checkpointer counts; -1: not known"""
    resumed: int = -1
    """the step of the save that this process went on from; -1: none"""
    run: int = -1
    """which run is saved: its id as a number; -1: not known"""
    given: int = -1
    """the last step whose batch the run's loop has been given; -1: not known"""
    saving_ms: int = -1
    """how long it may take to notice a request to end and to save; -1: not known"""
    copying_ms: int = -1
    """how long a save may take to the persistent level, as fast as it goes; -1: not known"""


def newest(ranks: Sequence[RankProgress]) -> RankProgress:
    """What is known of all of them: the most that any tells."""
    return max(
        ranks, key=lambda one: (one.step, one.given, one.steps, one.resumed), default=RankProgress()
    )


def is_told(path: str) -> bool:
    """Whether the first rank has called `ff.start()`."""
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - a Path would resolve what is no link
            return RankProgress(*_RECORD.unpack(file.read(_RECORD.size))).signs >= 0
    except OSError:
        return False


class ProgressFile(Closing):
    """Places for the ranks of a node, and the name by which they find them."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._fd = os.memfd_create(_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._fd, ranks * _RECORD.size)
        self._map = mmap.mmap(self._fd, ranks * _RECORD.size)
        self.path = f"/proc/{os.getpid()}/fd/{self._fd}"
        self.clear()

    def clear(self) -> None:
        """Nothing is known of them."""
        self._map[:] = _RECORD.pack(*RankProgress()) * self._ranks

    def read(self) -> list[RankProgress]:
        """How far each is, by its number on this node."""
        return [RankProgress(*record) for record in _RECORD.iter_unpack(self._map[:])]

    def close(self) -> None:
        """Read no more. What ranks still write goes nowhere."""
        self._map.close()
        os.close(self._fd)


class OwnProgress:
    """The place of this process; where nobody looks, in memory of its own."""

    def __init__(self, path: str = "", place: int = 0) -> None:
        self._told = RankProgress(signs=0, steps=0)
        self._noticing_s = 0.0
        self._lock = threading.RLock()
        self._saved_s, self._copied_s = (deque[float](maxlen=_REMEMBERED) for _ in range(2))
        self._map = mmap.mmap(-1, (place + 1) * _RECORD.size)
        self._start = place * _RECORD.size
        if path:
            # Where that cannot be opened, in a container with processes of its own, say, the launcher
            # knows nothing of this rank, and tells so if it was to watch.
            with contextlib.suppress(OSError, ValueError):
                self._map = _mapped(path, at_least=len(self._map))
        self._tell()

    def alive(self) -> None:
        """It goes on, if without a step."""
        self._tell(signs=self._told.signs + 1)

    def stepped(self) -> None:
        """A step of training begins."""
        self._tell(signs=self._told.signs + 1, steps=self._told.steps + 1)

    def leave(self) -> None:
        """Nobody shall wait for signs of life any more: training is over, and what follows takes its time."""
        self._tell(signs=-1)

    @contextlib.contextmanager
    def unwatched(self) -> Generator[None]:
        """Within the block the process waits for what may take its time, without signs of life."""
        self.leave()
        try:
            yield
        finally:
            self.alive()

    def given(self, step: int) -> None:
        """The run's loop gets the batch of a step."""
        self._tell(signs=self._told.signs + 1, given=step)

    def reached(self, step: int) -> None:
        """The run has ended `step` steps."""
        self._tell(signs=self._told.signs + 1, step=step)

    def went_on_from(self, step: int, run: str) -> None:
        """The state is that of the save after `step` steps of a run, whose id is hexadecimal; -1: of none."""
        at = {"step": step, "resumed": step, "run": int(run, 16)}
        self._tell(signs=self._told.signs + 1, **at)

    def noticed(self, after_s: float) -> None:
        """A request to end would have been noticed, that long after it might have come."""
        self._noticing_s = max(self._noticing_s, after_s)

    def saved(self, took_s: float) -> None:
        """A save was written and protected."""
        self._saved_s.append(took_s)
        self._tell(saving_ms=int(1e3 * (self._noticing_s + max(self._saved_s))))

    def copied(self, took_s: float) -> None:
        """A save was copied to the persistent level."""
        self._copied_s.append(took_s)
        self._tell(copying_ms=int(1e3 * max(self._copied_s)))

    def _tell(self, **changes: int) -> None:
        with self._lock:  # a thread tells of copies
            self._told = self._told._replace(**changes)
            _RECORD.pack_into(self._map, self._start, *self._told)


def _mapped(path: str, at_least: int) -> mmap.mmap:
    if not str(Path(path).readlink()).startswith(f"/memfd:{_NAME}"):
        raise FileNotFoundError(path)  # the process of that number is another one here
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, max(at_least, os.fstat(fd).st_size))
    finally:
        os.close(fd)


@functools.cache
def own_progress() -> OwnProgress:
    """Of this process."""
    path = os.environ.get(VARIABLE)
    return OwnProgress(path, locate().local_rank) if path else OwnProgress()
