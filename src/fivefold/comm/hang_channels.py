"""How the watchers of a run's ranks reach each other while the ranks themselves stand still.

    Folder    files beside the traces: ranks of one node, or of nodes that share a file system
    Shared    the run's store, by a connection of its own: ranks of several nodes

Everything is a few keys that are written over: `ask` (a number that grows), `claim` (the rank that explains),
`state/3` (what rank 3 answered, and to which number). Nothing blocks training; what fails is None.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

__all__ = ["Channel", "Folder", "Shared"]


class Channel(Protocol):
    """Small texts by key."""

    def get(self, key: str) -> str | None:
        """What was put last; None if nothing was, or it cannot be reached."""
        ...

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        ...

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first to claim; it then explains for all."""
        ...

    def clear(self) -> None:
        """Take the claim back."""
        ...

    def close(self) -> None:
        """Remove what is left."""
        ...


class Folder:
    """Keys are hidden files of a folder, each replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._put: set[str] = set()

    def get(self, key: str) -> str | None:
        """What was put last."""
        try:
            return self._path(key).read_text()
        except OSError:
            return None

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            partial.write_text(text)
            partial.replace(path)
            self._put.add(key)

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first."""
        try:
            with self._path("claim").open("x") as file:
                file.write(str(rank))
        except OSError:
            return False
        return True

    def clear(self) -> None:
        """Take the claim back."""
        with contextlib.suppress(OSError):
            self._path("claim").unlink()

    def close(self) -> None:
        """Remove the files of this rank."""
        for key in self._put:
            with contextlib.suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f".hang-{key.replace('/', '-')}"


class Shared:
    """Keys of a store, under a prefix of their own. `store`: a client that nobody else uses."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("fivefold/hang", store)

    def get(self, key: str) -> str | None:
        """What was put last."""
        try:
            if not self._store.check([key]):
                return None
            return self._store.get(key).decode(errors="replace") or None
        except RuntimeError:  # the store has ended, as it does at the end of a run
            return None

    def put(self, key: str, text: str) -> None:
        """Replace it."""
        with contextlib.suppress(RuntimeError):
            self._store.set(key, text)

    def claim(self, rank: int) -> bool:
        """Whether this rank is the first."""
        try:
            told = self._store.compare_set("claim", "", str(rank))
        except RuntimeError:
            return False
        return told.decode() == str(rank)

    def clear(self) -> None:
        """Take the claim back."""
        self.put("claim", "")

    def close(self) -> None:
        """The keys go with the store."""
