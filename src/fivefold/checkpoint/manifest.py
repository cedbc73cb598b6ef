"""What a generation consists of: the file `manifest.json`, without which a directory is no checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from fivefold.checkpoint.sealed import Fields, count, seal, unseal
from fivefold.errors import Damaged

__all__ = [
    "FORMAT",
    "MANIFEST",
    "METADATA",
    "RUN",
    "Item",
    "Manifest",
    "Member",
    "State",
    "generation_name",
    "is_item_name",
    "parse_generation_name",
    "redundancy_name",
]

FORMAT = 1
"""version of the manifest's format"""
MANIFEST = "manifest.json"
METADATA = ".metadata"
"""DCP's"""
RUN = "run.json"

State = Literal["local", "protected", "flushed"]

_ITEM_NAME = re.compile(
    r"__[0-9]{1,9}_[0-9]{1,9}\.distcp|redundancy-[0-9]{1,9}\.bin|\.metadata", re.ASCII
)
_GENERATION = re.compile(r"step-([0-9]{8,})-epoch-([0-9]+)", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)


def generation_name(step: int, epoch: int) -> str:
    """The directory of a generation.

    >>> generation_name(120, 1)
    'step-00000120-epoch-1'
    """
    return f"step-{step:08}-epoch-{epoch}"


def parse_generation_name(name: str) -> tuple[int, int] | None:
    """Step and epoch of a directory's name; None if it is no generation's.

    >>> parse_generation_name("step-00000120-epoch-1"), parse_generation_name("logs")
    ((120, 1), None)
    """
    found = _GENERATION.fullmatch(name)
    if found is None or generation_name(int(found[1]), int(found[2])) != name:
        return None
    return int(found[1]), int(found[2])


def redundancy_name(member: int) -> str:
    """The file in which a member keeps what protects the others of its set."""
    return f"redundancy-{member}.bin"


def is_item_name(name: str) -> bool:
    """Whether a file of a generation may be called so: payload, redundancy or DCP's metadata."""
    return _ITEM_NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Item:
    """A file of a generation."""

    name: str
    length: int
    """bytes"""
    digest: str
    """xxh3_128 in hexadecimal"""


@dataclass(frozen=True)
class Member:
    """A node at the time of the save, and the payload that its ranks wrote."""

    number: int
    """from 0, in the order of the lowest ranks"""
    host: str
    ranks: tuple[int, ...]
    items: tuple[Item, ...]
    """sorted by name; one behind the other they are the member's data"""

    @property
    def length(self) -> int:
        """Bytes of the member's data."""
        return sum(item.length for item in self.items)


@dataclass(frozen=True)
class Manifest:
    """All files of a generation, over all nodes: lengths and digests survive wherever one copy does."""

    run: str
    epoch: int
    """how many times the run was started, this time included"""
    step: int
    save: str
    """of this very save: two saves of one step differ"""
    layout: Mapping[str, int]
    world: int
    """ranks at the time of the save"""
    scheme: str
    sets: tuple[tuple[int, ...], ...]
    """members that protect each other"""
    members: tuple[Member, ...]
    metadata: Item
    me: int | None
    """the member whose local storage this is; None in a persistent directory"""
    redundancy: tuple[Item, ...] = ()
    """files of this directory beyond payload and metadata"""
    state: State = "local"
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    """program, versions, time: for people"""

    @property
    def name(self) -> str:
        """The directory that it belongs to."""
        return generation_name(self.step, self.epoch)

    @property
    def length(self) -> int:
        """Bytes of payload over all members."""
        return sum(member.length for member in self.members)

    def items(self) -> tuple[Item, ...]:
        """The files that this directory has to hold, manifest apart."""
        members = self.members if self.me is None else (self.members[self.me],)
        payload = tuple(item for member in members for item in member.items)
        return (*payload, self.metadata, *self.redundancy)

    def set_of(self, member: int) -> tuple[int, ...]:
        """The set of a member; itself alone if it is in none."""
        return next((group for group in self.sets if member in group), (member,))

    def same_save(self, other: Manifest) -> bool:
        """Whether both tell of one and the same save, on whichever node and in whatever state."""
        return self._shared() == other._shared()

    def _shared(self) -> Manifest:
        return replace(self, me=None, redundancy=(), state="local", extra={})

    def to_json(self) -> str:
        """The content of `manifest.json`."""
        return seal("manifest", FORMAT, asdict(self))

    @staticmethod
    def parse(text: str | bytes, where: Path | str = MANIFEST) -> Manifest:
        """Read `manifest.json`; `where` is named in errors.

        Raises:
            Damaged: it is not what was written, be it by one bit.
            Foreign: it is intact, but of a newer version of Fivefold.
        """
        fields = unseal("manifest", FORMAT, text, where)
        try:
            return _manifest(fields)
        except (ValueError, TypeError, KeyError) as problem:
            raise Damaged("the manifest", where, f"it makes no sense: {problem!r}") from None


def _item(fields: Fields) -> Item:
    item = Item(fields.text("name"), fields.count("length"), fields.text("digest"))
    if not is_item_name(item.name) or not _DIGEST.fullmatch(item.digest):
        raise ValueError(f"{item} is no file of a checkpoint")
    return item


def _member(fields: Fields) -> Member:
    items = tuple(map(_item, fields.objects("items")))
    ranks = tuple(map(count, fields.array("ranks")))
    return Member(fields.count("number"), fields.text("host"), ranks, items)


def _manifest(fields: Fields) -> Manifest:
    manifest = Manifest(
        run=fields.text("run"),
        epoch=fields.count("epoch"),
        step=fields.count("step"),
        save=fields.text("save"),
        layout=fields.object("layout").counts(),
        world=fields.count("world"),
        scheme=fields.text("scheme"),
        sets=tuple(tuple(map(count, group)) for group in fields.array("sets")),
        members=tuple(map(_member, fields.objects("members"))),
        metadata=_item(fields.object("metadata")),
        me=fields.optional_count("me"),
        redundancy=tuple(map(_item, fields.objects("redundancy"))),
        state=cast(State, fields.text("state")),
        extra=fields.object("extra").texts(),
    )
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    """Raise `ValueError` where parts of a manifest contradict each other."""
    numbers = [member.number for member in manifest.members]
    grouped = [number for group in manifest.sets for number in group]
    ranks = [rank for member in manifest.members for rank in member.ranks]
    names = [item.name for member in manifest.members for item in member.items]
    for wrong, why in (
        (numbers != list(range(len(numbers))), "members are not numbered from 0"),
        (manifest.me is not None and manifest.me not in numbers, "it belongs to no member"),
        (len(set(grouped)) < len(grouped) or not {*grouped} <= {*numbers}, "sets overlap"),
        (sorted(ranks) != list(range(manifest.world)), "members do not hold each rank once"),
        (len(set(names)) < len(names), "two files have one name"),
        (manifest.metadata.name != METADATA, "metadata has another name"),
        (any(not name.endswith(".distcp") for name in names), "payload has another name"),
        (any(not i.name.endswith(".bin") for i in manifest.redundancy), "redundancy likewise"),
        (manifest.state not in get_args(State), f"there is no state {manifest.state!r}"),
    ):
        if wrong:
            raise ValueError(why)
