"""Reading from the generations that lie on this node, wherever their members' files are."""

from __future__ import annotations

from pathlib import Path

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import (
    MANIFEST,
    Item,
    Manifest,
    is_item_name,
    parse_generation_name,
    redundancy_name,
)
from fivefold.checkpoint.pieces import NotHere, Stretch
from fivefold.errors import CheckpointError, Damaged

__all__ = ["LocalReader"]

_REMEMBERED = 8
"""manifests that are not parsed again for every block"""


class LocalReader:
    """The directory with the generations of a run on this node; names from outside are checked.

    Args:
        folder: the directory of the run in the local storage.
        files: how files are touched.
    """

    def __init__(self, folder: Path, files: FileOps | None = None) -> None:
        self.folder = folder
        self._files = files or FileOps()
        self._known: dict[str, tuple[tuple[int, int, int], Manifest]] = {}

    def path(self, generation: str) -> Path:
        """The directory of a generation. Raises `CheckpointError` if the name is none."""
        if parse_generation_name(generation) is None:
            raise CheckpointError(f"{generation!r:.80} is no name of a generation")
        return self.folder / generation

    def manifest(self, generation: str) -> Manifest:
        """What the generation consists of. Raises `NotHere`, or `Damaged` if it cannot be read."""
        path = self.path(generation) / MANIFEST
        try:
            seen = path.stat()
            mark = (seen.st_ino, seen.st_mtime_ns, seen.st_size)
            known = self._known.get(generation)
            if known is not None and known[0] == mark:
                return known[1]
            manifest = Manifest.parse(self._files.read(path), path)
        except FileNotFoundError:
            raise NotHere(f"there is no {generation} here") from None
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        self._known[generation] = (mark, manifest)
        return manifest

    def answer(self, request: Stretch, into: memoryview) -> memoryview:
        """Read into the beginning of `into`, which is long enough. Returns what was filled.

        Raises:
            NotHere: no such generation, save or file on this node.
            Damaged: a file is shorter than the manifest says.
            CheckpointError: a name is none of a checkpoint.
            OSError: reading failed.
        """
        folder = self.path(request.generation)
        room = into[: request.length]
        if request.of == "file":
            if request.name != MANIFEST and not is_item_name(request.name):
                raise CheckpointError(f"{request.name!r:.80} is no file of a checkpoint")
            self._check(request)
            return self._stretch(folder / request.name, request.start, room)
        manifest = self._check(request)
        if request.member >= len(manifest.members):
            raise CheckpointError(f"{request.generation} has no member {request.member}")
        if request.of == "redundancy":
            return self._stretch(folder / redundancy_name(request.member), request.start, room)
        return self._data(folder, manifest.members[request.member].items, request.start, room)

    def _check(self, request: Stretch) -> Manifest:
        try:
            manifest = self.manifest(request.generation)
        except Damaged as problem:  # it may be repaired while the other node waits
            raise NotHere(str(problem)) from None
        if request.save and manifest.save != request.save:
            raise NotHere(f"{request.generation} is of another save here")
        return manifest

    def _data(
        self, folder: Path, items: tuple[Item, ...], start: int, room: memoryview
    ) -> memoryview:
        """A stretch of the items, one behind the other."""
        filled = 0
        for item in items:
            count = min(item.length - start, len(room) - filled)
            if start < item.length and count > 0:
                part = self._stretch(folder / item.name, start, room[filled : filled + count])
                if len(part) < count:
                    raise Damaged(
                        "a file", folder / item.name, "it is shorter than when it was saved"
                    )
                filled += count
            start = max(start - item.length, 0)
        return room[:filled]

    def _stretch(self, path: Path, start: int, room: memoryview) -> memoryview:
        try:
            with self._files.open(path) as file:
                file.seek(start)
                filled = 0
                # A file gives less than asked for only at its end, but nobody promises it.
                while filled < len(room) and (count := file.readinto(room[filled:])):
                    filled += count
        except FileNotFoundError:
            raise NotHere(f"there is no {path.parent.name}/{path.name} here") from None
        return room[:filled]
