"""Made-up generations for the tests of checkpoints: real files, small and without torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import METADATA, Item, Manifest, Member, redundancy_name
from fivefold.checkpoint.place import Place
from fivefold.checkpoint.store import Generation, LocalStore, PersistentStore

__all__ = [
    "RUN_ID",
    "bytes_of",
    "item_of",
    "manifest_of",
    "save_flushed",
    "save_local",
    "write_local",
]

RUN_ID = "run-1"


def bytes_of(step: int, name: str, length: int) -> bytes:
    """The content of a file, a function of its generation and name."""
    return random.Random(f"{step}/{name}").randbytes(length)


def item_of(step: int, name: str, length: int) -> Item:
    import xxhash

    return Item(name, length, xxhash.xxh3_128_hexdigest(bytes_of(step, name, length)))


def manifest_of(
    step: int,
    epoch: int = 1,
    *,
    me: int | None,
    lengths: Sequence[int] = (300, 200),
    redundancy: bool = True,
    run: str = RUN_ID,
    scheme: str = "xor",
) -> Manifest:
    """One rank on each node, `lengths[i]` bytes of payload on node i."""
    members = tuple(
        Member(i, f"node{i}", (i,), (item_of(step, f"__{i}_0.distcp", length),))
        for i, length in enumerate(lengths)
    )
    extra = (item_of(step, redundancy_name(me), 300),) if me is not None and redundancy else ()
    return Manifest(
        run=run, epoch=epoch, step=step, save=f"save-{step}-{epoch}", layout={"data": len(lengths)},
        world=len(lengths), scheme=scheme, sets=(tuple(range(len(lengths))),), members=members,
        metadata=item_of(step, METADATA, 50), me=me, redundancy=extra,
        state="flushed" if me is None else "protected" if redundancy else "local",
    )  # fmt: skip


def _write(place: Place, manifest: Manifest) -> None:
    for item in manifest.items():
        data = bytes_of(manifest.step, item.name, item.length)
        place.write(f"{manifest.name}/{item.name}", [data])


def write_local(root: Path, manifest: Manifest, files: FileOps | None = None) -> Generation:
    """A generation in local storage, without redundancy."""
    store = LocalStore(root, RUN_ID, files)
    store.begin(manifest.step, manifest.epoch)
    _write(store.place, manifest)
    return store.commit(manifest)


def save_local(
    root: Path, step: int, epoch: int = 1, *, me: int = 0, redundancy: bool = True,
    files: FileOps | None = None,
) -> Generation:  # fmt: skip
    """A generation in the local storage `root` of node `me`, as the run and the agent write it."""
    generation = write_local(root, manifest_of(step, epoch, me=me, redundancy=False), files)
    if not redundancy:
        return generation
    store = LocalStore(root, RUN_ID, files)
    whole = manifest_of(step, epoch, me=me)
    for item in whole.redundancy:
        data = bytes_of(step, item.name, item.length)
        store.place.write(f"{whole.name}/{item.name}", [data])
    return store.advance(generation, "protected", whole.redundancy)


def save_flushed(
    url: str | Path, step: int, epoch: int = 1, files: FileOps | None = None
) -> Generation:
    """A generation in a persistent directory."""
    store = PersistentStore(url, files)
    manifest = manifest_of(step, epoch, me=None)
    store.place.make_dir(manifest.name)
    _write(store.place, manifest)
    return store.commit(manifest)
