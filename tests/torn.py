"""What a power failure may leave of changes to a disk, which `Recorded` remembers.

The disk promises no more than POSIX does: bytes of a file are durable after an fsync of the file, names in
a directory after an fsync of the directory. What is not durable may be there, in part, or not at all:

    data       all of it, the first half, none, or zeros in its place (the length was durable, the bytes not)
    names      all changes of a directory, or all but the last one, two, ...
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fivefold.checkpoint.files import Bytes, FileOps

__all__ = ["Left", "Operation", "Recorded", "Tree", "materialize", "states_after_a_crash"]

Data = Literal["all", "half", "none", "zeros"]
Tree = dict[str, "Tree | bytes"]
"""A directory: its files, and directories below it."""


@dataclass(frozen=True)
class Operation:
    """One change of the disk: create, write, sync, rename, remove, make_dir, remove_dir or sync_dir."""

    kind: str
    path: Path
    target: Path | None = None
    """of a rename"""
    data: bytes = b""
    """of a write"""


class Recorded(FileOps):
    """Remembers every change in `operations`: a test replays what a power failure could have left of them."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []

    def raw(self, path: Path) -> io.FileIO:
        """A file whose writes are remembered as they reach the operating system."""
        self.done("create", path)
        return _RecordedFile(path, lambda data: self.done("write", path, data=data))

    def done(self, kind: str, path: Path, target: Path | None = None, data: bytes = b"") -> None:
        """Remember it."""
        self.operations.append(Operation(kind, path, target, data))


class _RecordedFile(io.FileIO):
    def __init__(self, path: Path, told: Callable[[bytes], None]) -> None:
        super().__init__(path, "x", opener=lambda path, flags: os.open(path, flags, 0o600))
        self._told = told

    def write(self, data: Bytes, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        count = super().write(data)
        self._told(bytes(memoryview(data)[:count]))
        return count


@dataclass(frozen=True)
class Left:
    """What is left when the power fails after `done` operations."""

    done: int
    data: Data
    lost_names: int
    tree: Tree = field(compare=False)


@dataclass
class _File:
    durable: bytes = b""
    pending: bytes = b""

    def left(self, data: Data) -> bytes:
        kept = {
            "all": self.pending, "half": self.pending[: len(self.pending) // 2], "none": b"",
            "zeros": bytes(len(self.pending)),
        }  # fmt: skip
        return self.durable + kept[data]


_Entries = dict[str, "_File | _Folder"]


@dataclass
class _Folder:
    now: _Entries = field(default_factory=dict[str, "_File | _Folder"])
    versions: list[_Entries] = field(default_factory=lambda: [{}])
    """the durable entries, and those after each change since"""

    def changed(self) -> None:
        self.versions.append(dict(self.now))

    def left(self, data: Data, lost_names: int) -> Tree:
        kept = self.versions[max(0, len(self.versions) - 1 - lost_names)]
        return {
            name: entry.left(data, lost_names) if isinstance(entry, _Folder) else entry.left(data)
            for name, entry in kept.items()
        }

    def pending(self) -> int:
        """Changes that are not durable, of the folder where most are."""
        below = [entry.pending() for entry in self.now.values() if isinstance(entry, _Folder)]
        return max([len(self.versions) - 1, *below])


def states_after_a_crash(operations: Sequence[Operation], root: Path) -> Iterator[Left]:
    """Every state that may be left below `root`, which existed before, after any number of operations."""
    disk = _Folder()
    for done in range(len(operations) + 1):
        if done:
            _apply(disk, operations[done - 1], root)
        for lost in range(disk.pending() + 1):
            for data in ("all", "half", "none", "zeros"):
                yield Left(done, data, lost, disk.left(data, lost))


def materialize(tree: Tree, root: Path) -> None:
    """Make real files of it."""
    root.mkdir()
    for name, entry in tree.items():
        if isinstance(entry, bytes):
            (root / name).write_bytes(entry)
        else:
            materialize(entry, root / name)


def _apply(disk: _Folder, operation: Operation, root: Path) -> None:
    path = operation.path
    if operation.kind == "sync_dir":
        if path == root or root in path.parents:
            folder = _folder(disk, path, root)
            folder.versions = [dict(folder.now)]
        return
    parent = _folder(disk, path.parent, root)
    if operation.kind in ("write", "sync"):
        file = parent.now[path.name]
        assert isinstance(file, _File)
        if operation.kind == "write":
            file.pending += operation.data
        else:
            file.durable, file.pending = file.durable + file.pending, b""
        return
    if operation.kind in ("create", "make_dir"):
        parent.now[path.name] = _File() if operation.kind == "create" else _Folder()
    elif operation.kind in ("remove", "remove_dir"):
        parent.now.pop(path.name, None)
    else:
        assert operation.kind == "rename" and operation.target is not None
        assert operation.target.parent == path.parent, "renaming across directories is not needed"
        parent.now[operation.target.name] = parent.now.pop(path.name)
    parent.changed()


def _folder(disk: _Folder, path: Path, root: Path) -> _Folder:
    for name in path.relative_to(root).parts:
        below = disk.now[name]
        assert isinstance(below, _Folder)
        disk = below
    return disk
