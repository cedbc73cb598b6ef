"""Segments: shared memory without a name, gone when the last process that knows it is gone."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
from dataclasses import dataclass, field
from typing import Self

from fivefold.arena.budget import check, in_turn
from fivefold.arena.native import ArenaError
from fivefold.closing import Closing

__all__ = ["Segment"]

_MAP_NORESERVE = 0x4000
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass
class Segment(Closing):
    """A piece of shared memory, mapped here.

    It is a memory file without a name: nothing lies in /dev/shm that somebody would have to remove, and a
    container's small /dev/shm is no limit. Its size is sealed, so that no process can shrink it under
    another, which would die of SIGBUS. Pages that nobody has touched cost nothing.
    """

    fd: int
    """to be passed to other processes"""
    size_bytes: int
    memory: mmap.mmap = field(repr=False)
    _pin: ctypes.c_char = field(repr=False)

    @classmethod
    def create(cls, name: str, size_bytes: int, *, sparse: bool = False) -> Self:
        """New memory, zeroed. `name` shows in /proc/PID/maps.

        `sparse`: only part of it will ever be touched, and whoever touches it asks the budget.
        Raises `ArenaError` where the system offers no memory files, or has too little memory.
        """
        if not sparse:
            check(size_bytes, name)
        try:
            fd = os.memfd_create(f"fivefold-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as problem:
            raise ArenaError(
                f"no shared memory: memfd_create failed ({problem.strerror}); a container may forbid it: "
                'allow it in its seccomp profile, or choose comm.backend = "gloo"'
            ) from problem
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            return cls._mapped(fd, size_bytes)
        except (OSError, ValueError) as problem:
            os.close(fd)
            raise ArenaError(f"no shared memory of {size_bytes} bytes: {problem}") from problem

    @classmethod
    def attach(cls, fd: int) -> Self:
        """Map a segment that another process made; takes over `fd`.

        Raises `ArenaError` if `fd` is not a sealed memory file.
        """
        try:
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as problem:
            raise ArenaError("what was passed is no memory file") from problem
        if sealed & _SEALS != _SEALS:
            raise ArenaError("what was passed is not sealed: its owner could shrink it under us")
        return cls._mapped(fd, os.fstat(fd).st_size)

    @classmethod
    def _mapped(cls, fd: int, size_bytes: int) -> Self:
        memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED | _MAP_NORESERVE)
        return cls(fd, size_bytes, memory, ctypes.c_char.from_buffer(memory))

    @property
    def address(self) -> int:
        """Where the segment begins in this process."""
        return ctypes.addressof(self._pin)

    def view(self, offset: int, size_bytes: int) -> ctypes.Array[ctypes.c_char]:
        """Bytes of the segment as a buffer. Whoever holds it keeps the segment mapped."""
        return (ctypes.c_char * size_bytes).from_buffer(self.memory, offset)

    def touch(self, offset: int, size_bytes: int, what: str) -> None:
        """Let the system provide these pages now: 400 MiB take a second when first written, 25 ms later on.

        What they hold is lost. Raises `ArenaError` if there is no memory for them, where writing would kill
        the process.
        """
        start = offset // mmap.PAGESIZE * mmap.PAGESIZE
        with in_turn():
            check(size_bytes, what)
            try:
                self.memory.madvise(_POPULATE_WRITE, start, offset + size_bytes - start)
            except OSError as problem:
                if problem.errno != errno.EINVAL:
                    raise ArenaError(
                        f"no memory for {size_bytes} bytes of {what}: {problem}"
                    ) from None
                ctypes.memset(self.address + offset, 0, size_bytes)  # an older kernel

    def close(self) -> None:
        """Forget the segment here. Views that are still held keep it mapped until they go."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self._pin
        # If a view is held, the last one takes the mapping along.
        with contextlib.suppress(BufferError):
            self.memory.close()
        del self.memory

    def __del__(self) -> None:
        self.close()
