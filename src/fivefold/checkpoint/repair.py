"""Repairing, flushing and fetching checkpoints without a run: from whatever directories can be reached.

Each directory plays a node: it is served on this host with a key of its own, so that the very code which
rebuilds during a run does it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.checkpoint.encoding import Peers, protect, rebuild
from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.flush import copy_files, finish
from fivefold.checkpoint.inventory import Holding, look
from fivefold.checkpoint.lease import Lease
from fivefold.checkpoint.local_reader import LocalReader
from fivefold.checkpoint.manifest import MANIFEST, Item, Manifest, redundancy_name
from fivefold.checkpoint.pieces import Address, Server
from fivefold.checkpoint.place import LocalPlace
from fivefold.checkpoint.recovery_plan import candidates
from fivefold.checkpoint.run import RunHistory, Start
from fivefold.checkpoint.schemes import scheme_named
from fivefold.checkpoint.store import Generation, LocalStore, PersistentStore, Store
from fivefold.errors import CheckpointError, Foreign, UsageError
from fivefold.wire import new_key

__all__ = ["NodeDirectories", "RepairResult"]


@dataclass(frozen=True)
class RepairResult:
    """What came of one save."""

    name: str
    made: tuple[str, ...] = ()
    """paths of files that were written"""
    problem: str = ""
    """why it is not whole; empty if it is"""


class _Repair:
    """What was made of a save, and what could not be."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.problems: list[str] = []

    def attempt(self, repair: Callable[..., Iterator[str]], *given: Any) -> None:
        """One part: a failure of one leaves the others their chance."""
        try:
            for path in repair(*given):
                self.made.append(path)
        except (CheckpointError, OSError) as problem:
            self.problems.append(str(problem))


class NodeDirectories:
    """Directories of one run, side by side.

    Args:
        nodes: local storage of nodes, `ROOT` or `ROOT/RUN`, also empty ones that replace lost nodes.
        persistent: the run's persistent directory, if it can be reached.

    Raises:
        UsageError: they are of several runs, or of none.
    """

    def __init__(self, nodes: Sequence[Path], persistent: PersistentStore | None = None) -> None:
        self.persistent = persistent
        self.run = _run_of(nodes, persistent)
        self.stores = [_store(path, self.run) for path in nodes]
        self._files = FileOps()
        self._seen: dict[tuple[str, int], Holding] = {}
        """what a node has of a save; read again after a change"""

    def saves(self) -> list[Manifest]:
        """All saves of which a manifest can be read, newest first."""
        stores: list[Store] = [*self.stores, *([self.persistent] if self.persistent else [])]
        found = [g.manifest for store in stores for g in store.generations()]
        return candidates(m for m in found if m is not None and m.run == self.run)

    def without_manifest(self) -> list[str]:
        """Directories of which nobody here knows what they should hold: saves that did not end."""
        known = {save.name for save in self.saves()}
        stores: list[Store] = [*self.stores, *([self.persistent] if self.persistent else [])]
        return [g.where for store in stores for g in store.generations() if g.name not in known]

    def repair(self, manifest: Manifest) -> RepairResult:
        """Make every copy of a save whole that lies here, and members that lie nowhere, in empty places.

        First all data, then what protects it: made from damaged data, it would pass the damage on.
        """
        work = _Repair()
        if not self._whole_on_nodes(manifest):
            with self._served(manifest) as (readers, peers):
                for number in peers.addresses:
                    work.attempt(self._repair_data, manifest, number, readers[number], peers)
                for number in peers.addresses:
                    work.attempt(self._repair_redundancy, manifest, number, readers[number], peers)
        if self._lies_far(manifest):
            work.attempt(self._repair_persistent, manifest)
        return RepairResult(
            manifest.name, tuple(work.made), "; ".join(dict.fromkeys(work.problems))
        )

    def flush(self, manifest: Manifest) -> RepairResult:
        """Copy a save to the persistent directory.

        Raises:
            CheckpointError: a file is nowhere whole, or could not be written; `repair` may help.
            InUse: a run is writing there. `Foreign`: the directory is of another run.
        """
        assert self.persistent is not None
        with Lease(self.persistent.place):
            self._record(manifest)
            copied = list(self._copy(manifest))
            finish(self.persistent, manifest)
        return RepairResult(manifest.name, tuple(copied))

    def fetch(self, manifest: Manifest, member: int | None) -> RepairResult:
        """Copy a save, or one member's part of it, from the persistent directory to each local storage here.

        Raises:
            CheckpointError: a file is damaged there.
        """
        assert self.persistent is not None
        numbers = range(len(manifest.members)) if member is None else [member]
        items = [i for number in numbers for i in manifest.members[number].items]
        made: list[str] = []
        for store in self.stores:
            local = replace(manifest, me=member or 0, redundancy=(), state="flushed")
            self._make_room(store, local)
            for item in (*items, manifest.metadata):
                made += self._fetch_item(store, manifest, item)
            store.commit(local)
        return RepairResult(manifest.name, tuple(made))

    # --- repairing ----------------------------------------------------------------------------

    def _holdings(self, manifest: Manifest) -> list[Holding]:
        """By node, with every byte read."""
        for node, store in enumerate(self.stores):
            if (manifest.save, node) not in self._seen:
                self._seen[manifest.save, node] = look(store, manifest, deep=True)
        return [self._seen[manifest.save, node] for node in range(len(self.stores))]

    def _changed(self, manifest: Manifest, store: LocalStore) -> None:
        self._seen.pop((manifest.save, self.stores.index(store)), None)

    def _places(self, manifest: Manifest) -> dict[int, int]:
        """By member: the node on which it lies or shall lie; members without any are left out."""
        holdings = self._holdings(manifest)
        owners = {h.owner: node for node, h in enumerate(holdings) if h.owner is not None}
        free = [
            node for node, store in enumerate(self.stores)
            if node not in owners.values() and not _holds_another(store, manifest)
        ]  # fmt: skip
        missing = [m.number for m in manifest.members if m.number not in owners]
        return owners | dict(zip(missing, free, strict=False))

    def _whole_on_nodes(self, manifest: Manifest) -> bool:
        """Whether nothing is left to do for the members that lie here."""
        holdings, places = self._holdings(manifest), self._places(manifest)
        return not _lost(manifest, holdings) & places.keys() and all(
            holdings[node].readable
            and manifest.metadata.name in holdings[node].good
            and self._keeps_its_part(manifest, number, self.stores[node])
            for number, node in places.items()
        )

    def _keeps_its_part(self, manifest: Manifest, number: int, store: LocalStore) -> bool:
        """Whether the redundancy of a member is there and whole."""
        if scheme_named(manifest.scheme).least == 1:
            return True
        now = store.find(manifest.name)
        # A manifest that was made anew lists none: nobody knows whether the file there is whole.
        listed = now is not None and now.manifest is not None and bool(now.manifest.redundancy)
        return listed and number not in _bare(manifest, self._holdings(manifest))

    @contextmanager
    def _served(self, manifest: Manifest) -> Generator[tuple[dict[int, LocalReader], Peers]]:
        """Every directory as a node that others can read from; all by member."""
        key = new_key()
        with ExitStack() as stack:
            readers: dict[int, LocalReader] = {}
            homes: dict[int, Address] = {}
            for number, node in sorted(self._places(manifest).items()):
                readers[number] = LocalReader(self.stores[node].root, self._files)
                server = Server("127.0.0.1", key, readers[number].answer)
                homes[number] = stack.enter_context(server).address
            yield readers, Peers(homes, key, timeout_s=30.0, patience_s=0.5)

    def _repair_data(
        self, manifest: Manifest, number: int, reader: LocalReader, peers: Peers
    ) -> Iterator[str]:
        """Payload, metadata and manifest of a member."""
        yield from self._help_from_persistent(manifest, number, reader)
        self._changed(manifest, self._store_of(reader))
        holdings = self._holdings(manifest)
        made = rebuild(
            reader, manifest, number, replace(peers, own=peers.addresses[number]), self._files,
            lost=_lost(manifest, holdings), bare=_bare(manifest, holdings),
        )  # fmt: skip
        self._changed(manifest, self._store_of(reader))
        yield from (str(reader.path(manifest.name) / name) for name in made)

    def _repair_redundancy(
        self, manifest: Manifest, number: int, reader: LocalReader, peers: Peers
    ) -> Iterator[str]:
        """What a member keeps for the others of its set."""
        store = self._store_of(reader)
        now = store.find(manifest.name)
        if now is None or now.manifest is None or self._keeps_its_part(manifest, number, store):
            return
        if unread := _lost(manifest, self._holdings(manifest)) & set(manifest.set_of(number)):
            raise CheckpointError(
                f"{redundancy_name(number)} needs the data of members {_listed(unread)}, which is not "
                "whole in these directories"
            )
        own = replace(peers, own=peers.addresses[number])
        items = protect(reader, manifest.name, own, self._files)
        store.advance(now, "protected", items)
        self._changed(manifest, store)
        yield from (str(reader.path(manifest.name) / item.name) for item in items)

    def _store_of(self, reader: LocalReader) -> LocalStore:
        return next(store for store in self.stores if store.root == reader.folder)

    def _help_from_persistent(
        self, manifest: Manifest, number: int, reader: LocalReader
    ) -> Iterator[str]:
        """What is not whole on the node is copied from the persistent directory, if it is whole there."""
        if not self._lies_far(manifest):
            return
        store = self._store_of(reader)
        store.place.make_dir(manifest.name)
        for item in (*manifest.members[number].items, manifest.metadata):
            # What is damaged there as well is left to the redundancy.
            with contextlib.suppress(CheckpointError, OSError):
                yield from self._fetch_item(store, manifest, item)

    def _lies_far(self, manifest: Manifest) -> bool:
        """Whether the persistent directory has this save, in whatever condition."""
        if self.persistent is None:
            return False
        generation = self.persistent.find(manifest.name)
        found = generation.manifest if generation is not None else None
        there = manifest.name in self.persistent.place.list()
        return there and (found is None or found.same_save(manifest))

    def _repair_persistent(self, manifest: Manifest) -> Iterator[str]:
        assert self.persistent is not None
        generation = self.persistent.find(manifest.name)
        assert generation is not None
        yield from self._copy(manifest)
        if generation.manifest is None:
            finish(self.persistent, manifest)
            yield self.persistent.place.where(f"{manifest.name}/{MANIFEST}")

    # --- copying ------------------------------------------------------------------------------

    def _copy(self, manifest: Manifest) -> Iterator[str]:
        """Bring what is missing or damaged in the persistent directory there from the nodes."""
        assert self.persistent is not None
        holdings = self._holdings(manifest)
        place = self.persistent.place
        far = look(self.persistent, manifest, deep=True)
        for item in (*(i for m in manifest.members for i in m.items), manifest.metadata):
            if item.name in far.good:
                continue
            having = [node for node, held in enumerate(holdings) if item.name in held.good]
            if not having:
                raise CheckpointError(
                    f"{manifest.name}/{item.name} is whole in none of these directories; name those of all "
                    "nodes, or run `fivefold checkpoint repair` first"
                )
            source = self.stores[having[0]].root / manifest.name
            copy_files(source, place, manifest, [item])
            yield place.where(f"{manifest.name}/{item.name}")

    def _record(self, manifest: Manifest) -> None:
        """The record of the run, where this is the first that is flushed."""
        assert self.persistent is not None
        record = self.persistent.read_run()
        if record is None:
            self.persistent.write_run(RunHistory(manifest.run, (Start(manifest.epoch),)))
        elif record.run != manifest.run:
            raise Foreign(
                f"{self.persistent.place.where()} is of run {record.run}, the save of {manifest.run}: "
                "use a directory of its own"
            )

    def _make_room(self, store: LocalStore, manifest: Manifest) -> None:
        there = store.find(manifest.name)
        if there is not None and there.manifest is not None:
            if not there.manifest.same_save(manifest):
                raise CheckpointError(f"{there.where} is of another save; it is left alone")
            raise CheckpointError(f"{there.where} is there already; `repair` makes it whole")
        store.begin(manifest.step, manifest.epoch)

    def _fetch_item(self, store: LocalStore, manifest: Manifest, item: Item) -> list[str]:
        """Copy a file from the persistent directory, unless it is whole here."""
        assert self.persistent is not None
        path = store.root / manifest.name / item.name
        if path.is_file() and _is(self._files, path, item):
            return []
        source = f"{manifest.name}/{item.name}"
        with self._files.create(path) as stream:
            for block in self.persistent.place.blocks(source):
                stream.write(block)
            if (stream.tell(), stream.digest()) != (item.length, item.digest):
                raise CheckpointError(f"{self.persistent.place.where(source)} is damaged")
            stream.commit()
        return [str(path)]


def _is(files: FileOps, path: Path, item: Item) -> bool:
    written = files.digest(path)
    return (written.length, written.digest) == (item.length, item.digest)


def _holds_another(store: LocalStore, manifest: Manifest) -> bool:
    there = store.find(manifest.name)
    found = there.manifest if there is not None else None
    return found is not None and not found.same_save(manifest)


def _lost(manifest: Manifest, holdings: Sequence[Holding]) -> set[int]:
    """Members whose data cannot be read from their own place."""
    whole = {
        h.owner for h in holdings
        if h.owner is not None
        and h.good.issuperset(i.name for i in manifest.members[h.owner].items)
    }  # fmt: skip
    return {m.number for m in manifest.members} - whole


def _bare(manifest: Manifest, holdings: Sequence[Holding]) -> set[int]:
    """Members whose redundancy cannot be read from their own place."""
    kept = {
        h.owner for h in holdings
        if h.owner is not None and redundancy_name(h.owner) in h.good
    }  # fmt: skip
    return {m.number for m in manifest.members} - kept


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _run_of(nodes: Sequence[Path], persistent: PersistentStore | None) -> str:
    found = {g.manifest.run for path in nodes for g in _generations(path) if g.manifest}
    if persistent is not None and (record := persistent.read_run()) is not None:
        found.add(record.run)
    if len(found) != 1:
        told = f"of several runs: {', '.join(sorted(found))}" if found else "no checkpoints"
        raise UsageError(f"these directories hold {told}; name those of one run (ROOT/RUN)")
    return found.pop()


def _generations(path: Path) -> list[Generation]:
    """Of a directory that is a node's storage of one run, or of several runs."""
    here = Store(LocalPlace(path)).generations()
    if here or not path.is_dir():
        return here
    below = [child for child in sorted(path.iterdir()) if child.is_dir()]
    return [g for child in below for g in Store(LocalPlace(child), child.name).generations()]


def _store(path: Path, run: str) -> LocalStore:
    inside = path.name == run or bool(Store(LocalPlace(path)).generations())
    if inside and path.name != run:
        raise UsageError(f"{path} holds run {run}, but is not named so: rename it to {run}")
    return LocalStore(path.parent if inside else path, run)
