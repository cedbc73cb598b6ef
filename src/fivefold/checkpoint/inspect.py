"""Looking at directories of checkpoints, whichever they are: for the command line and for people."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from socket import gethostname
from typing import Literal

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import (
    MANIFEST,
    METADATA,
    RUN,
    Item,
    Manifest,
    parse_generation_name,
)
from fivefold.checkpoint.note import Note, is_note, newest_note
from fivefold.checkpoint.place import LocalPlace, Place, place_at
from fivefold.checkpoint.plain_dcp import Checked, is_plain_dcp, read_contents, verify_plain_dcp
from fivefold.checkpoint.run import LOCAL, RunHistory, check_run_id
from fivefold.checkpoint.schemes import SCHEMES
from fivefold.checkpoint.store import (
    RUN_COPY,
    Generation,
    LocalStore,
    PersistentStore,
    Problem,
    Store,
)
from fivefold.errors import CheckpointError, UsageError

__all__ = [
    "HEADINGS",
    "Copy",
    "age_text",
    "can_lose",
    "copies_at",
    "copies_on_node",
    "costs_at",
    "counted",
    "damaged_records",
    "rows",
    "size_text",
    "stores_at",
]

Level = Literal["node", "persistent", "DCP", "-"]

HEADINGS = ("generation", "level", "state", "node", "size", "age", "can lose")


@dataclass(frozen=True)
class Copy:
    """A generation in one place, or a directory that plain DCP has written."""

    place: Place
    folder: str
    """within the place; empty: the place itself"""
    generation: Generation | None = None
    """None: of plain DCP"""

    @property
    def where(self) -> str:
        """Path or URL."""
        return self.place.where(self.folder)

    @property
    def manifest(self) -> Manifest | None:
        """None where there is none that can be read."""
        return None if self.generation is None else self.generation.manifest

    @property
    def level(self) -> Level:
        """Whose storage it is on, as far as that can be told."""
        if self.generation is None:
            return "DCP"
        if self.manifest is None:
            return "-"
        return "persistent" if self.manifest.me is None else "node"

    def complete(self) -> bool:
        """Whether metadata and payload are there: a manifest that is not was lost. Raises `OSError`."""
        names = self.place.list(self.folder)
        return METADATA in names and any(name.endswith(".distcp") for name in names)

    def verify(self, *, deep: bool = True) -> Checked:
        """What is wrong with its files. Raises `OSError`."""
        if self.generation is None:
            return verify_plain_dcp(self.place, self.folder, deep=deep)
        if not self.generation.ended and self.complete():
            gone = Problem(MANIFEST, "missing", "it is not there, and the other files are")
            return Checked((gone,), 0, 0)
        problems = tuple(Store(self.place).verify(self.generation, deep))
        files = len(self.manifest.items()) if self.manifest else 0
        return Checked(problems, files, 0 if deep else files)


def stores_at(url: str) -> list[Store]:
    """The stores that a path or URL means: the directory itself, or in a node's storage each run in it.

    Raises:
        UsageError: there is nothing like that, or its package is missing. `OSError`: it cannot be read.
    """
    place = _existing(url)
    store = Store(place)
    names = place.list()
    if RUN in names or any(parse_generation_name(name) for name in names):
        return [store]
    return [
        Store(place_at(place.where(name)), name)
        for name in names
        if _is_run_id(name) and any(map(parse_generation_name, place.list(name)))
    ]


def copies_at(url: str) -> list[Copy]:
    """The checkpoints that a path or URL means: one, those of a directory, or of a node's storage.

    Raises:
        UsageError: there are none, or a package is missing. `OSError`: it cannot be read.
    """
    place = _existing(url)
    above, _, name = place.where().rstrip("/").rpartition("/")
    if parse_generation_name(name) is not None:
        parent = place_at(above or "/")
        return [Copy(parent, name, Store(parent).find(name))]
    stores = stores_at(url)
    copies = [Copy(s.place, g.name, g) for s in stores for g in s.generations()]
    if not copies and not stores:
        if is_plain_dcp(place):
            return [Copy(place, "")]
        raise UsageError(
            f"there are no checkpoints in {url}: expected a directory that a run saves to, a node's local "
            "storage, one checkpoint in them, or a directory of torch.distributed.checkpoint"
        )
    return copies


def copies_on_node(url: str) -> tuple[list[Copy], str]:
    """What the run of a directory, or of one checkpoint in it, has on the storage of this node.

    And a sentence, if there are saves on other nodes that cannot be looked at from here. Raises `OSError`.
    """
    place = place_at(url)
    above, _, name = place.where().rstrip("/").rpartition("/")
    one = parse_generation_name(name) is not None
    persistent = PersistentStore((above or "/") if one else url)
    try:
        run = persistent.read_run()
    except CheckpointError as problem:
        return [], f"saves on this node were not looked for: {problem}"
    if run is None or LOCAL not in run.extra:
        return [], ""
    store = LocalStore(Path(run.extra[LOCAL]), run.run)
    if store.root.is_dir():
        found = [g for g in store.generations() if not one or g.name == name]
        return [Copy(store.place, g.name, g) for g in found], ""
    note = newest_note(persistent.place)
    hosts = ", ".join(note.hosts) if note else "its nodes"
    return (
        [],
        f"{url}: saves on nodes lie in {store.root} on {hosts}; there are none on {gethostname()}",
    )


def damaged_records(url: str) -> list[str]:
    """What is wrong with the records of a run, `run.json` and others, in a directory. Raises `OSError`."""
    place = _existing(url)
    names = place.list()
    notes = list(filter(is_note, names))
    if RUN not in names and RUN_COPY not in names and not notes:
        return []  # of a node, of one checkpoint, or copied by hand
    found: list[str] = []
    for name in (RUN, RUN_COPY, *notes):
        where = place.where(name)
        try:
            data = place.read(name)
            Note.parse(data, where) if is_note(name) else RunHistory.parse(data, where)
        except FileNotFoundError:
            found.append(f"{where} is missing")
        except CheckpointError as problem:
            found.append(str(problem))
    return found


def _existing(url: str) -> Place:
    place = place_at(url)
    there = place.root.is_dir() if isinstance(place, LocalPlace) else bool(place.list())
    if not there:
        raise UsageError(f"there is no directory {url}")
    return place


def _is_run_id(name: str) -> bool:
    try:
        check_run_id(name)
    except UsageError:
        return False
    return True


def is_persistent(url: str) -> bool:
    """Whether it is a directory that a run flushes to, and not the storage of a node. Raises `OSError`."""
    place = place_at(url)
    if not isinstance(place, LocalPlace) or place.exists(RUN):
        return True
    found = [g.manifest for g in Store(place).generations() if g.manifest is not None]
    return bool(found) and found[0].me is None


def described(copy: Copy) -> list[str]:
    """What a checkpoint consists of, line by line. Raises `OSError` or `Damaged`."""
    manifest = copy.manifest
    if copy.generation is None:
        contents = read_contents(copy.place, copy.folder)
        files = len({part.file for part in contents.parts})
        return [
            f"{copy.where} was written by torch.distributed.checkpoint",
            f"it holds {len(contents.entries)} tensors and values, in {counted(files, 'file')}",
        ]
    if manifest is None:
        return [f"{copy.where} is no checkpoint: {copy.generation.problem}"]
    layout = ", ".join(f"{axis}={size}" for axis, size in manifest.layout.items())
    owner = "all nodes" if manifest.me is None else f"node {_node(manifest, manifest.me)}"
    ranks, nodes = counted(manifest.world, "rank"), counted(len(manifest.members), "node")
    lines = [
        f"{copy.where}",
        f"was saved after step {manifest.step}, by start {manifest.epoch} of run {manifest.run}",
        f"by {ranks} on {nodes}, with the layout {layout or 'that nobody recorded'}, as {manifest.save}",
        f"is {manifest.state}, with the scheme {manifest.scheme}, and can lose {can_lose(manifest)}",
        f"holds {size_text(manifest.length)} of state; the files here are those of {owner}",
        *(f"{name}: {value}" for name, value in sorted(manifest.extra.items())),
    ]
    for member in manifest.members:
        ranks = ", ".join(map(str, member.ranks))
        plural = "s" if len(member.ranks) > 1 else ""
        lines.append(
            f"  node {member.number} ({member.host}) saved {size_text(member.length)}, "
            f"of rank{plural} {ranks}:"
        )
        lines += [f"    {_line(item)}" for item in member.items]
    shared = (manifest.metadata, *manifest.redundancy)
    return [*lines, "  for all of them:", *(f"    {_line(item)}" for item in shared)]


def _line(item: Item) -> str:
    return f"{item.name}  {item.length} bytes  xxh3 {item.digest}"


def can_lose(manifest: Manifest) -> str:
    """How many nodes may be lost, with what they store, before this save is: `1 of 4 nodes`."""
    if manifest.state == "flushed":
        return "all nodes"
    sets = manifest.sets or tuple((member.number,) for member in manifest.members)
    scheme = SCHEMES.get(manifest.scheme)
    lost = min((scheme.tolerates(len(group)) if scheme else 0 for group in sets), default=0)
    if manifest.state == "local" or not lost:
        return "no node"
    of = f"{len(manifest.members)} nodes" if len(sets) == 1 else "each set"
    sizes = sorted({len(group) for group in sets})
    return f"{lost} of {of}" + (f" of {'/'.join(map(str, sizes))}" if len(sets) > 1 else "")


def rows(copies: Sequence[Copy], now: float | None = None) -> list[tuple[str, ...]]:
    """The cells of a table under `HEADINGS`."""
    return [_row(copy, time.time() if now is None else now) for copy in copies]


def costs_at(url: str) -> str:
    """What saves and copies of the run in a directory cost, as it measured; empty where nothing is known.

    Raises:
        UsageError: a package is missing. `OSError`: the directory cannot be read.
    """
    note = newest_note(place_at(url))
    if note is None or not note.costs.save_s:
        return ""
    costs = note.costs
    often = f", and saved every {costs.every_s:.3g} s" if costs.every_s else ""
    return (
        f"{url}: a save costs {costs.save_s:.3g} s of training, and a flush {costs.flush_s:.3g} s more; "
        f"start {note.epoch} measured that{often}"
    )


def _row(copy: Copy, now: float) -> tuple[str, ...]:
    manifest = copy.manifest
    if manifest is None:
        name = copy.folder or copy.where
        problem = (
            copy.generation.problem
            if copy.generation
            else "written by torch.distributed.checkpoint"
        )
        return (name, copy.level, problem, "", "", age_text(_saved_s(copy), now), "")
    owner = "all" if manifest.me is None else _node(manifest, manifest.me)
    size = sum(item.length for item in manifest.items())
    age = age_text(_saved_s(copy), now)
    return (
        manifest.name,
        copy.level,
        manifest.state,
        owner,
        size_text(size),
        age,
        can_lose(manifest),
    )


def _node(manifest: Manifest, number: int) -> str:
    return f"{number} ({manifest.members[number].host})"


def _saved_s(copy: Copy) -> float | None:
    """When it was saved, in seconds since 1970, by the clock of whoever wrote it."""
    told = copy.manifest.extra.get("time", "") if copy.manifest else ""
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(told).timestamp()
    with contextlib.suppress(OSError):
        if isinstance(copy.place, LocalPlace):
            return _modified_s(copy.place.path(copy.folder))
    return None


def _modified_s(folder: Path) -> float:
    manifest = folder / MANIFEST
    return (manifest if FileOps().list(folder).count(MANIFEST) else folder).stat().st_mtime


def counted(number: int, one: str, many: str = "") -> str:
    """A number of things.

    >>> counted(1, "file"), counted(3, "file"), counted(2, "match", "matches")
    ('1 file', '3 files', '2 matches')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def size_text(size_bytes: int) -> str:
    """Bytes for people.

    >>> size_text(512), size_text(1536), size_text(500 << 30)
    ('512 B', '1.5 KiB', '500 GiB')
    """
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size_bytes >= 1 << shift:
            count = size_bytes / (1 << shift)
            return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"
    return f"{size_bytes} B"


def age_text(then: float | None, now: float) -> str:
    """How long ago something was, for people.

    >>> age_text(0.0, 30.0), age_text(0.0, 7200.0), age_text(0.0, 200000.0), age_text(None, 5.0)
    ('30 s', '2 h', '2 d', '')
    """
    if then is None:
        return ""
    age = max(0.0, now - then)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if age >= 2 * length:
            return f"{age / length:.0f} {unit}"
    return f"{age:.0f} s"
