"""A directory of checkpoints: on a file system, or in an object store that fsspec reaches.

Names are relative to the place, with `/` between their parts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import xxhash

from fivefold.checkpoint.files import BLOCK_BYTES, Bytes, FileOps, Written
from fivefold.checkpoint.problems import doing
from fivefold.errors import UsageError

__all__ = ["LocalPlace", "Place", "RemotePlace", "place_at"]


class Place(ABC):
    """Where files of checkpoints lie. All methods raise `OSError`; a missing file is `FileNotFoundError`."""

    commits_whole: ClassVar[bool] = False
    """whether a file has its name only when it is complete; stores may keep what was written until then"""

    @abstractmethod
    def where(self, name: str = "") -> str:
        """The path or URL, for people and for `place_at`."""

    @abstractmethod
    def list(self, folder: str = "") -> list[str]:
        """Names in a folder, sorted; none if there is no such folder."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes in a file."""

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """A file for reading; it can be sought in."""

    @abstractmethod
    def make_dir(self, folder: str = "") -> None:
        """Make a folder, unless it is there."""

    @abstractmethod
    def write(self, name: str, chunks: Iterable[Bytes]) -> Written:
        """Write a whole file; on a file system it appears under its name when it is complete."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove_tree(self, folder: str) -> None:
        """Remove a folder and all below it, if it is there."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""
        try:
            self.size(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str) -> bytes:
        """All bytes of a file."""
        with self.open(name) as file:
            return file.read()

    def blocks(self, name: str) -> Iterator[bytes]:
        """The bytes of a file in pieces of 1 MiB."""
        with self.open(name) as file:
            while block := file.read(BLOCK_BYTES):
                yield block

    def digest(self, name: str) -> Written:
        """Read a whole file for its length and digest."""
        found, length = xxhash.xxh3_128(), 0
        for block in self.blocks(name):
            found.update(block)
            length += len(block)
        return Written(length, found.hexdigest())


class LocalPlace(Place):
    """A directory of a file system, local or shared."""

    commits_whole = True

    def __init__(self, root: Path, files: FileOps | None = None) -> None:
        self.root = root.absolute()
        self.files = files or FileOps()

    def path(self, name: str = "") -> Path:
        """The path of a file or folder."""
        return self.root / _checked(name) if name else self.root

    def where(self, name: str = "") -> str:
        """The path."""
        return str(self.path(name))

    def list(self, folder: str = "") -> list[str]:
        """Names in a folder."""
        return self.files.list(self.path(folder))

    def size(self, name: str) -> int:
        """Bytes in a file."""
        return self.files.size(self.path(name))

    def open(self, name: str) -> BinaryIO:
        """A file for reading."""
        return self.files.open(self.path(name))

    def make_dir(self, folder: str = "") -> None:
        """Make a folder and those above it."""
        self.files.make_dir(self.path(folder))

    def write(self, name: str, chunks: Iterable[Bytes]) -> Written:
        """Write and commit a file."""
        return self.files.write(self.path(name), chunks)

    def remove(self, name: str) -> None:
        """Remove a file."""
        self.files.remove(self.path(name))

    def remove_tree(self, folder: str) -> None:
        """Remove a folder."""
        if self.path(folder).exists():
            self.files.remove_tree(self.path(folder))

    def digest(self, name: str) -> Written:
        """Read a whole file for its length and digest."""
        return self.files.digest(self.path(name))


class RemotePlace(Place):
    """A folder of an object store. Nothing relies on renaming: a manifest is written last."""

    def __init__(self, system: Any, root: str) -> None:
        self._system, self._root = system, root.rstrip("/")

    def where(self, name: str = "") -> str:
        """The URL."""
        return str(self._system.unstrip_protocol(self._full(name)))

    def list(self, folder: str = "") -> list[str]:
        """Names in a folder."""
        self._system.invalidate_cache()
        try:
            found = cast("list[str]", self._system.ls(self._full(folder), detail=False))
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found})

    def size(self, name: str) -> int:
        """Bytes in an object."""
        self._system.invalidate_cache()
        return int(self._system.info(self._full(name))["size"])

    def open(self, name: str) -> BinaryIO:
        """An object for reading."""
        return cast(BinaryIO, self._system.open(self._full(name), "rb"))

    def make_dir(self, folder: str = "") -> None:
        """Make a folder, where the store has such a thing."""
        self._system.makedirs(self._full(folder), exist_ok=True)

    def write(self, name: str, chunks: Iterable[Bytes]) -> Written:
        """Write an object, and ask the store for its size."""
        found, length = xxhash.xxh3_128(), 0
        with doing("writing", self.where(name)), self._system.open(self._full(name), "wb") as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                found.update(view)
                file.write(view)
                length += view.nbytes
        if (stored := self.size(name)) != length:
            raise OSError(f"{self.where(name)} has {stored} bytes after {length} were written")
        return Written(length, found.hexdigest())

    def remove(self, name: str) -> None:
        """Remove an object."""
        if self.exists(name):
            self._system.rm_file(self._full(name))

    def remove_tree(self, folder: str) -> None:
        """Remove all objects below a folder."""
        if self._system.exists(self._full(folder)):
            self._system.rm(self._full(folder), recursive=True)

    def _full(self, name: str) -> str:
        return f"{self._root}/{_checked(name)}" if name else self._root


def place_at(url: str | Path, files: FileOps | None = None) -> Place:
    """The place that a path or a URL such as `s3://bucket/runs/a` names; nothing is made yet.

    Raises:
        UsageError: the URL needs a package that is not installed, or its kind is unknown.
    """
    kind, colon, _ = str(url).partition("://")
    if not colon:
        return LocalPlace(Path(url).expanduser(), files)
    try:
        from fsspec.core import url_to_fs
    except ImportError as missing:
        raise UsageError(f"{url} needs fsspec: pip install 'fivefold[fsspec]'") from missing
    try:
        system, root = cast("tuple[Any, str]", url_to_fs(str(url)))
    except (ImportError, ValueError) as problem:
        raise UsageError(
            f"{url}: {problem}; install the package for {kind}://, or use a path"
        ) from None
    return LocalPlace(Path(root), files) if kind in ("file", "local") else RemotePlace(system, root)


def _checked(name: str) -> str:
    parts = name.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts):
        raise UsageError(f"{name!r} is no name below a directory of checkpoints")
    return name
