"""What a node, or the persistent level, has of a generation: files that are as they were saved."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from fivefold.checkpoint.files import Written
from fivefold.checkpoint.manifest import Item, Manifest, redundancy_name
from fivefold.checkpoint.place import Place
from fivefold.checkpoint.schemes import scheme_named
from fivefold.checkpoint.store import Store

__all__ = ["PERSISTENT", "Holding", "Inventory", "look", "stocktaking"]

PERSISTENT = -1
"""number of the persistent level among the nodes"""


@dataclass(frozen=True)
class Holding:
    """What lies of one generation in one place."""

    manifest: Manifest
    """as read there, or, where it is missing or damaged, as it is elsewhere"""
    good: frozenset[str]
    """files of this save, anybody's, that are there and whole"""
    owner: int | None = None
    """the member whose storage it is; None where no node's files lie"""
    readable: bool = True
    """whether the manifest that lies there can be read; else nobody can be served from there"""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "manifest": self.manifest.to_json(),
            "good": sorted(self.good),
            "owner": self.owner,
            "readable": self.readable,
        }

    @staticmethod
    def of_dict(values: Mapping[str, Any]) -> Holding:
        """What `to_dict` gave. Raises `Damaged`, `Foreign`, `ValueError`, `KeyError` or `TypeError`."""
        owner = values["owner"]
        return Holding(
            Manifest.parse(values["manifest"]),
            frozenset(map(str, values["good"])),
            None if owner is None else int(owner),
            bool(values["readable"]),
        )


@dataclass(frozen=True)
class Inventory:
    """What lies of a run in one place."""

    node: int
    """number of the node in the present run, or `PERSISTENT`"""
    holdings: tuple[Holding, ...] = ()
    broken: Mapping[str, str] | None = None
    """directories that are no checkpoints, and why"""

    def to_json(self) -> str:
        """As it travels between nodes."""
        held = [holding.to_dict() for holding in self.holdings]
        return json.dumps({"node": self.node, "held": held, "broken": dict(self.broken or {})})

    @staticmethod
    def parse(text: str) -> Inventory:
        """What `to_json` wrote. Raises `Damaged`, `Foreign`, `ValueError`, `KeyError` or `TypeError`."""
        values = cast(dict[str, Any], json.loads(text))
        holdings = tuple(map(Holding.of_dict, values["held"]))
        return Inventory(int(values["node"]), holdings, dict(values["broken"]))


def stocktaking(
    store: Store, node: int, *, deep: bool, elsewhere: Iterable[Manifest] = ()
) -> Inventory:
    """All generations of a store.

    Args:
        store: of a node, or the persistent one.
        node: its number, or `PERSISTENT`.
        deep: read every byte; else presence and length count.
        elsewhere: manifests that other nodes have: files whose own manifest is lost or damaged are
            recognised by them.

    Raises:
        OSError: the store cannot be listed.
    """
    holdings: list[Holding] = []
    broken: dict[str, str] = {}
    told = {manifest.name: manifest for manifest in elsewhere}
    for generation in store.generations():
        own = generation.manifest
        if own is None:
            broken[generation.name] = generation.problem
        if (manifest := own or told.get(generation.name)) is not None:
            holdings.append(look(store, manifest, deep=deep))
    return Inventory(node, tuple(holdings), broken)


def look(store: Store, manifest: Manifest, *, deep: bool) -> Holding:
    """Which files of a save are whole in a store, whoever wrote them. See `stocktaking`."""
    generation = store.find(manifest.name)
    own = generation.manifest if generation is not None else None
    if own is not None and not own.same_save(manifest):
        return Holding(manifest, frozenset())  # of another save: nothing of this one
    listed = own.redundancy if own is not None else ()
    payload = [item for member in manifest.members for item in member.items]
    there = set(store.place.list(manifest.name))
    items = [item for item in (*payload, manifest.metadata, *listed) if item.name in there]
    good = {item.name for item in items if _whole(store.place, manifest.name, item, deep=deep)}
    for name, length in _redundancy_lengths(manifest).items():
        unlisted = name in there and name not in {item.name for item in listed}
        if unlisted and _length(store.place, f"{manifest.name}/{name}") == length:
            good.add(name)
    owner = own.me if own is not None else _likely_owner(manifest, there)
    return Holding(manifest, frozenset(good), owner, own is not None)


def _likely_owner(manifest: Manifest, there: set[str]) -> int | None:
    """Whose files lie in a directory without manifest."""
    counts = {m.number: sum(i.name in there for i in m.items) for m in manifest.members}
    most = max(counts, key=lambda number: counts[number])
    return most if counts[most] else None


def _whole(place: Place, folder: str, item: Item, *, deep: bool) -> bool:
    name = f"{folder}/{item.name}"
    try:
        if place.size(name) != item.length:
            return False
        return not deep or place.digest(name) == Written(item.length, item.digest)
    except OSError:
        return False


def _length(place: Place, name: str) -> int | None:
    try:
        return place.size(name)
    except OSError:
        return None


def _redundancy_lengths(manifest: Manifest) -> dict[str, int]:
    """Redundancy that was committed may not be listed yet: the node died before its manifest advanced.

    Its digest is unknown; whatever is rebuilt from it is compared with the digest of what was saved.
    """
    scheme = scheme_named(manifest.scheme)
    lengths: dict[str, int] = {}
    for group in manifest.sets if scheme.least > 1 else ():
        data = [manifest.members[member].length for member in group]
        for position, member in enumerate(group):
            recipe = scheme.recipe(data, position)
            lengths[redundancy_name(member)] = sum(piece.length for piece in recipe)
    return lengths
