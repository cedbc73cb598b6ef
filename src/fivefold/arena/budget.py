"""How much memory there is to share: what the machine has, and what the control group grants."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

from fivefold.arena.native import ArenaError

__all__ = ["available_bytes", "check", "in_turn", "limit_bytes"]

_log = logging.getLogger(__name__)
_TURN_S = 600.0
_RETRY_S = 0.005

_ROOT = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""version 1 writes a number near 2**63 where there is no limit"""


def limit_bytes(root: Path = _ROOT, groups: Path = Path("/proc/self/cgroup")) -> int:
    """The smallest memory limit of the control groups that this process is in; 2**60 if there is none."""
    return min((limit for limit, _ in _limits(root, groups)), default=_NO_LIMIT)


def available_bytes(
    root: Path = _ROOT,
    groups: Path = Path("/proc/self/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> int:
    """What may still be touched before the system or a control group ends a process."""
    free = [limit - used for limit, used in _limits(root, groups)]
    lines = (line.split() for line in _lines(meminfo))
    free.extend(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    return max(0, min(free, default=_NO_LIMIT))


def check(size_bytes: int, what: str) -> None:
    """Raise `ArenaError` if `size_bytes` are not to be had; afterwards the system would kill a process."""
    available = available_bytes()
    if size_bytes > available:
        raise ArenaError(
            f"{what} needs {_told(size_bytes)} of shared memory, but {_told(available)} are left "
            f"(limit of the control group: {_told(limit_bytes())}): ask for more memory, or start fewer "
            "ranks per node"
        )


@contextlib.contextmanager
def in_turn() -> Generator[None]:
    """Hold the turn of this user's processes on this node to find memory and to take it.

    Two that look at once would both find the same memory left, and the system would end both. Raises
    `ArenaError` when others keep the turn for 10 minutes.
    """
    path = Path(tempfile.gettempdir()) / f"fivefold-{os.getuid()}-arena.lock"
    try:
        # Opened anew each time: a forked child would share the lock with its parent.
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as problem:
        _note_no_turns(f"{path}: {problem.strerror}")
        yield
        return
    try:
        if os.fstat(fd).st_uid == os.geteuid():
            _wait_for_turn(fd, path)
        else:
            _note_no_turns(f"{path} is another user's")
        yield
    finally:
        os.close(fd)


def _wait_for_turn(fd: int, path: Path) -> None:
    end = time.monotonic() + _TURN_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise ArenaError(
                    f"another process has been taking shared memory for {_TURN_S:.0f} s (it holds {path}): "
                    "is it stopped?"
                ) from None
            time.sleep(_RETRY_S)
        except OSError as problem:  # a file system without locks
            _note_no_turns(f"{path}: {problem.strerror}")
            return
        else:
            return


@functools.cache
def _note_no_turns(why: str) -> None:
    _log.warning(
        "%s: ranks of this node take shared memory without waiting for each other, and where it is short the "
        "system may end several; set TMPDIR to a folder of your own",
        why,
    )


def _limits(root: Path, groups: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) of every control group with a limit, from that of this process upwards."""
    for line in _lines(groups):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base, limit, used, cached = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cached = "total_inactive_file"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            most, now = _number(place / limit), _number(place / used)
            if most is not None and now is not None and most < _NO_LIMIT:
                yield most, max(0, now - _counted(place / "memory.stat", cached))
            if place == base:
                break


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.isdecimal() else None


def _counted(path: Path, key: str) -> int:
    """A counter of memory.stat: cached files are given up before anything is killed."""
    for line in _lines(path):
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _told(size_bytes: int) -> str:
    if size_bytes >= _NO_LIMIT:
        return "none"
    return f"{size_bytes / (1 << 20):,.0f} MiB"
