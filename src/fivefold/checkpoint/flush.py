"""Copying a generation to the persistent level: a path of the parallel file system, or a URL.

    every node   its own payload files  ->  DIR/step-.../        `copy_files`, in its agent
    one node     .metadata                                       the same
    one node     manifest.json, when all nodes have copied       `finish`: now it is a checkpoint

What was copied before a failure is not copied again. A file whose bytes have changed since the save is not
passed on: better no copy than one that looks right.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from fivefold.checkpoint.files import BLOCK_BYTES, FileOps, Written, crash_at, is_temporary
from fivefold.checkpoint.manifest import Item, Manifest
from fivefold.checkpoint.place import Place
from fivefold.checkpoint.problems import described
from fivefold.checkpoint.rate import Rate
from fivefold.checkpoint.store import Generation, PersistentStore
from fivefold.errors import CheckpointError, Damaged

__all__ = ["Copied", "copy_files", "finish", "items_of"]


@dataclass(frozen=True)
class Copied:
    """What a flush did on one node."""

    names: tuple[str, ...]
    """files that were copied; the others were there already"""
    copied_bytes: int
    cpu_s: float = 0.0
    """processor time of the agent for it"""
    waited_s: float = 0.0
    """to keep to the limit"""


def items_of(manifest: Manifest, members: Collection[int], *, metadata: bool) -> list[Item]:
    """The files that a node copies for these members."""
    payload = [item for number in members for item in manifest.members[number].items]
    return [*payload, manifest.metadata] if metadata else payload


def copy_files(
    source: Path,
    place: Place,
    manifest: Manifest,
    items: Collection[Item],
    *,
    rate: Rate | None = None,
    files: FileOps | None = None,
) -> Copied:
    """Copy files of a generation from the directory `source` into its folder at `place`.

    Raises:
        CheckpointError: the persistent level is full or fails; it names file and place. `Damaged`: a
            source is not what was saved. Nothing but whole files is left under their own names.
    """
    files, rate = files or FileOps(), rate or Rate()
    names: list[str] = []
    total = 0
    try:
        place.make_dir(manifest.name)
        _sweep(place, manifest.name, items)
    except OSError as problem:
        raise _failed(place, manifest.name, problem) from problem
    for item in items:
        target = f"{manifest.name}/{item.name}"
        try:
            if not _there(place, target, item):
                crash_at("flushing")
                _write(place, target, _checked(source / item.name, item, files, rate))
                names.append(item.name)
                total += item.length
        except OSError as problem:
            raise _failed(place, target, problem) from problem
    return Copied(tuple(names), total, waited_s=rate.waited_s)


def _write(place: Place, target: str, blocks: Iterator[memoryview]) -> None:
    try:
        place.write(target, blocks)
    except BaseException:
        if not place.commits_whole:  # else the file of this name is another copy's
            with contextlib.suppress(OSError):
                place.remove(target)
        raise


def _sweep(place: Place, folder: str, items: Collection[Item]) -> None:
    """Remove what an agent that was killed has begun to write; another copy under way fails for it."""
    for name in place.list(folder):
        if is_temporary(name) and any(name.startswith(f"{item.name}.") for item in items):
            place.remove(f"{folder}/{name}")


def finish(store: PersistentStore, manifest: Manifest) -> Generation:
    """Write the manifest, which makes the copy a checkpoint. All files of all nodes have to be there.

    Raises:
        CheckpointError: a file is missing or has another length, or writing failed.
    """
    flushed = replace(manifest, me=None, redundancy=(), state="flushed")
    try:
        return store.commit(flushed)
    except OSError as problem:
        raise _failed(store.place, manifest.name, problem) from problem


def _there(place: Place, target: str, item: Item) -> bool:
    """Whether the very same file was copied before: its digest counts, another save may have its length."""
    if not place.exists(target) or place.size(target) != item.length:
        return False
    return place.digest(target) == Written(item.length, item.digest)


def _checked(path: Path, item: Item, files: FileOps, rate: Rate) -> Iterator[memoryview]:
    """The bytes of a file; raises at its end if they are not what was saved."""
    found, length = xxhash.xxh3_128(), 0
    for block in files.blocks(path, BLOCK_BYTES):
        rate.take(len(block))
        found.update(block)
        length += len(block)
        yield block
        crash_at("flushing")
    if Written(length, found.hexdigest()) != Written(item.length, item.digest):
        raise Damaged("a file", path, "it is not what was saved, and was not copied")


def _failed(place: Place, name: str, problem: OSError) -> CheckpointError:
    return CheckpointError(
        f"{place.where(name)} was not written: {described(problem)}. The generation stays on the nodes: "
        "the next start of the run copies it, or `fivefold checkpoint flush`"
    )
