"""Generations on disk for tests: payload of random bytes, and the manifests that belong to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import xxhash

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import MANIFEST, METADATA, Item, Manifest, Member
from fivefold.checkpoint.schemes import sets_of

__all__ = ["SavedState", "saved_state"]


class SavedState:
    """What a save of a whole run consists of, before it lies anywhere."""

    def __init__(self, manifest: Manifest, payload: dict[str, bytes]) -> None:
        self.manifest = manifest
        self.payload = payload

    def put(self, folder: Path, member: int | None, *, manifest: bool = True) -> Path:
        """Write what one node has (None: everything, as in a persistent directory). Returns the directory."""
        files, mine = FileOps(), replace(self.manifest, me=member)
        directory = folder / mine.name
        files.make_dir(directory)
        for item in mine.items():
            files.write(directory / item.name, [self.payload[item.name]])
        if manifest:
            files.write(directory / MANIFEST, [mine.to_json().encode()])
        return directory

    def data(self, member: int) -> bytes:
        """The data of a member."""
        return b"".join(self.payload[item.name] for item in self.manifest.members[member].items)


def saved_state(
    lengths: Sequence[Sequence[int]],
    *,
    step: int = 120,
    epoch: int = 1,
    scheme: str = "xor",
    size: int = 8,
    save: str = "s",
) -> SavedState:
    """A save of nodes that each write files of the given lengths, one rank per file."""
    draw = random.Random(f"{lengths}{step}{epoch}{save}")
    payload = {METADATA: draw.randbytes(123)}
    members: list[Member] = []
    rank = 0
    for number, sizes in enumerate(lengths):
        items: list[Item] = []
        ranks: list[int] = []
        for length in sizes:
            name = f"__{rank}_0.distcp"
            payload[name] = draw.randbytes(length)
            items.append(_item(name, payload[name]))
            ranks.append(rank)
            rank += 1
        items.sort(key=lambda item: item.name)
        members.append(Member(number, f"node{number}", tuple(ranks), tuple(items)))
    manifest = Manifest(
        run="r",
        epoch=epoch,
        step=step,
        save=save,
        layout={"data": rank},
        world=rank,
        scheme=scheme,
        sets=sets_of([member.host for member in members], scheme, size),
        members=tuple(members),
        metadata=_item(METADATA, payload[METADATA]),
        me=None,
    )
    return SavedState(manifest, payload)


def _item(name: str, content: bytes) -> Item:
    return Item(name, len(content), xxhash.xxh3_128_hexdigest(content))
