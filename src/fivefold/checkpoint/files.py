"""The one place that touches the files of checkpoints, so that every byte is committed the same way.

    temporary file -> write -> flush -> fsync -> rename -> fsync of the directory

A file that is there under its own name is complete, also after a power failure; what was not committed
has a temporary name that nothing reads.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from fivefold.checkpoint.manifest import parse_generation_name
from fivefold.checkpoint.problems import doing
from fivefold.errors import UsageError, suggest

__all__ = [
    "BLOCK_BYTES",
    "CRASH_POINTS",
    "Bytes",
    "FileOps",
    "Stream",
    "Window",
    "Written",
    "crash_at",
    "is_temporary",
]

Bytes = bytes | bytearray | memoryview

BLOCK_BYTES = 1 << 20
"""how much is read, hashed and written at a time"""

_BUFFER_BYTES = 256 << 10
"""less than a block, so that blocks go to the system without a copy"""
_TEMPORARY = ".tmp"


@dataclass(frozen=True)
class Written:
    """What a file holds: its length, and the xxh3_128 digest of its bytes in hexadecimal."""

    length: int
    digest: str


def is_temporary(name: str) -> bool:
    """Whether a file of this name was not committed."""
    return name.endswith(_TEMPORARY)


def _nothing(_point: str) -> None:
    pass


def _private(path: str, flags: int) -> int:
    """Open a file that is to be made: only its owner may read the state of a run."""
    return os.open(path, flags, 0o600)


class Stream(io.BufferedIOBase):
    """A file that comes into being: hashed as it is written, and only there once it is committed.

    Made by `FileOps.create`. Closing without `commit` abandons it. Writing raises `OSError`, among others
    where the disk is full.
    """

    def __init__(self, files: FileOps, path: Path) -> None:
        super().__init__()
        self._files = files
        self.path = path
        self._temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        with doing("creating", path):
            self._raw = io.BufferedWriter(files.raw(self._temporary), _BUFFER_BYTES)
        # Only files of a generation count, so that a test knows which one it hits.
        self._crash = crash_at if parse_generation_name(path.parent.name) else _nothing
        self._hash = xxhash.xxh3_128()
        self._length = 0
        self._open = True

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Append bytes; returns how many."""
        first = self._length == 0
        view = memoryview(data).cast("B")
        # A block at a time: it is still in the processor's cache when it is written.
        with doing("writing", self.path):
            for start in range(0, view.nbytes, BLOCK_BYTES):
                block = view[start : start + BLOCK_BYTES]
                self._hash.update(block)
                self._raw.write(block)
        self._length += view.nbytes
        if first:  # once per file, as at the other points
            self._crash("writing")
        return view.nbytes

    def tell(self) -> int:
        """Bytes written so far."""
        return self._length

    def digest(self) -> str:
        """Of the bytes written so far."""
        return self._hash.hexdigest()

    def flush(self) -> None:
        """Hand what is buffered to the operating system; durable it is after `commit`."""
        if self._open:
            with doing("writing", self.path):
                self._raw.flush()

    def commit(self) -> Written:
        """Make the file durable under its name. Raises `OSError`; then the file is not there."""
        try:
            self.flush()
            self._crash("before-fsync")
            with doing("fsync of", self.path):
                self._files.sync(self._raw.fileno(), self._temporary)
                self._raw.close()
            self._crash("before-rename")
            self._files.rename(self._temporary, self.path)
        except BaseException:
            self.abandon()
            raise
        self._open = False
        return Written(self._length, self._hash.hexdigest())

    def abandon(self) -> None:
        """Give up: the temporary file goes away. After `commit` nothing happens."""
        if not self._open:
            return
        self._open = False
        with contextlib.suppress(OSError):  # what is buffered may find no room; it is not wanted
            self._raw.close()
        with contextlib.suppress(OSError):
            self._files.remove(self._temporary)

    def close(self) -> None:
        """`abandon`, unless it was committed."""
        self.abandon()
        super().close()


class Window(io.RawIOBase):
    """Bytes that lie elsewhere, as a file.

    Args:
        fill: fills a buffer from a position on, and returns how much there was.
        length: of all bytes.
    """

    def __init__(self, fill: Callable[[int, memoryview], int], length: int) -> None:
        super().__init__()
        self._fill, self._length, self._at = fill, length, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """As of any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"there is nothing at {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """As of any file."""
        return self._at

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As of any file."""
        wanted = max(0, min(len(buffer), self._length - self._at))
        count = self._fill(self._at, memoryview(buffer)[:wanted]) if wanted else 0
        self._at += count
        return count


class FileOps:
    """Operations on local files; every change is durable when a method returns. All raise `OSError`."""

    def create(self, path: Path) -> Stream:
        """A file to be written; what was there under that name stays until the commit."""
        return Stream(self, path)

    def write(self, path: Path, chunks: Iterable[Bytes]) -> Written:
        """Write a whole file."""
        with self.create(path) as stream:
            for chunk in chunks:
                stream.write(chunk)
            return stream.commit()

    def claim(self, path: Path, data: bytes) -> bool:
        """Write a file unless there is one of that name: of several that try, one gets True.

        Holds on network file systems too. Raises `OSError`, also where there are no hard links.
        """
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_TEMPORARY}")
        self.write(temporary, [data])
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        finally:
            self.remove(temporary)
        return True

    def open(self, path: Path) -> io.BufferedReader:
        """A committed file for reading; it can be sought in."""
        with doing("reading", path):
            return path.open("rb")

    def read(self, path: Path) -> bytes:
        """All bytes of a file."""
        with doing("reading", path):
            return path.read_bytes()

    def blocks(self, path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
        """The bytes of a file in pieces; each is valid until the next is asked for."""
        buffer = memoryview(bytearray(block_bytes))
        with self._open_raw(path) as file:
            while count := self._filled(file, buffer, path):
                yield buffer[:count]

    def _open_raw(self, path: Path) -> io.FileIO:
        """A committed file for reading in large pieces."""
        with doing("reading", path):
            return io.FileIO(path, "r")

    def _filled(self, file: io.FileIO, buffer: memoryview, path: Path) -> int:
        with doing("reading", path):
            return file.readinto(buffer) or 0

    def digest(self, path: Path) -> Written:
        """Read a whole file for its length and digest."""
        found, length = xxhash.xxh3_128(), 0
        for block in self.blocks(path):
            found.update(block)
            length += len(block)
        return Written(length, found.hexdigest())

    def size(self, path: Path) -> int:
        """Bytes in a file."""
        return path.stat().st_size

    def list(self, path: Path) -> list[str]:
        """Names in a directory, sorted; none if there is no such directory."""
        try:
            return sorted(entry.name for entry in path.iterdir())
        except FileNotFoundError:
            return []

    def make_dir(self, path: Path) -> None:
        """Make a directory and those above it, unless they are there."""
        if path.is_dir():
            return
        self.make_dir(path.parent)
        with contextlib.suppress(FileExistsError):  # another rank of this node was quicker
            self.done("make_dir", path)
            with doing("making", path):
                path.mkdir()
        self.sync_dir(path.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or directory another name, replacing a file that has it."""
        self.done("rename", source, target)
        with doing("renaming a file to", target):
            source.replace(target)
        if parse_generation_name(target.parent.name) is not None:
            crash_at("after-rename")
        self.sync_dir(target.parent)
        if source.parent != target.parent:
            self.sync_dir(source.parent)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        self._unlink(path)
        self.sync_dir(path.parent)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it, if it is there; symbolic links are not followed."""
        self._clear(path)
        self.sync_dir(path.parent)

    def _clear(self, path: Path) -> None:
        if path.is_symlink() or not path.is_dir():
            self._unlink(path)
            return
        for name in self.list(path):
            self._clear(path / name)
        self.done("remove_dir", path)
        with doing("removing", path):
            path.rmdir()

    def _unlink(self, path: Path) -> None:
        self.done("remove", path)
        with doing("removing", path):
            path.unlink(missing_ok=True)

    def raw(self, path: Path) -> io.FileIO:
        """An unbuffered file that did not exist before."""
        return io.FileIO(path, "x", opener=_private)

    def sync(self, fd: int, path: Path) -> None:
        """Make the bytes of an open file durable."""
        # An error is final: the kernel drops what it could not write, and the next fsync succeeds.
        os.fsync(fd)
        self.done("sync", path)

    def sync_dir(self, path: Path) -> None:
        """Make the names in a directory durable."""
        with doing("fsync of", path):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            except OSError as problem:
                # EINVAL: a file system that has no such thing, and needs none.
                if problem.errno != errno.EINVAL:
                    raise
            finally:
                os.close(fd)
        self.done("sync_dir", path)

    def done(self, kind: str, path: Path, target: Path | None = None, data: bytes = b"") -> None:
        """Told of every change; nothing here."""


# ---- Named places where a test lets a process or a whole node die

CRASH_POINTS = (
    "staged",
    "writing",
    "before-fsync",
    "before-rename",
    "after-rename",
    "encoding",
    "flushing",
    "rebuilding",
    "restarting",
)
"""In the order in which a save and a recovery pass them."""

_VARIABLE = "FIVEFOLD_CRASH_AT"
_NODE_GOES_S = 30.0

_passed: dict[str, int] = {}


def crash_at(point: str) -> None:
    """Die here if FIVEFOLD_CRASH_AT says so; else nothing happens.

    The variable is `POINT`, `POINT:N` for the N-th time that this process passes the point, and with
    `@pid1` behind it the whole node dies: process 1 of the namespace gets a SIGTERM, on which it has to
    exit at once (the kernel protects it from a SIGKILL that comes from inside). With `@parent` the process
    that started this one dies too, as when the ranks of a node and their agent go together.

    Raises:
        UsageError: the variable names no point.
    """
    assert point in CRASH_POINTS, point
    if told := os.environ.get(_VARIABLE):
        wanted, times, whose = _parsed(told)
        if wanted == point:
            _passed[point] = _passed.get(point, 0) + 1
            if _passed[point] == times:
                _die(whose)


def _parsed(told: str) -> tuple[str, int, str]:
    rest, _, whose = told.partition("@")
    point, _, times = rest.partition(":")
    if point not in CRASH_POINTS:
        raise UsageError(f"{_VARIABLE}={told}: no such point{suggest(point, CRASH_POINTS)}")
    if whose not in ("", "pid1", "parent") or (times and not times.isdecimal()):
        raise UsageError(f"{_VARIABLE}={told}: expected POINT[:N][@pid1 or @parent]")
    return point, int(times or 1), whose


def _die(whose: str) -> None:
    if whose == "pid1" and _in_a_namespace():
        os.kill(1, signal.SIGTERM)
        time.sleep(_NODE_GOES_S)  # the end of process 1 takes this one with it
    elif whose == "parent":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _in_a_namespace() -> bool:
    """Whether process 1 may be one of a test: user ids are mapped. A machine's own init is left alone."""
    inside, outside, count = Path("/proc/self/uid_map").read_text(encoding="ascii").split()[:3]
    return (inside, outside) != ("0", "0") or int(count) < 65536
