"""The generations of a run: on a node's own storage, and in the persistent directory.

Local level:        ROOT/RUN/step-00000120-epoch-1/     one directory per generation, on every node
Persistent level:   DIR/step-00000120-epoch-1/          a plain DCP directory and a manifest; DIR/run.json
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from fivefold.checkpoint.files import FileOps
from fivefold.checkpoint.manifest import (
    MANIFEST,
    RUN,
    Item,
    Manifest,
    State,
    generation_name,
    parse_generation_name,
)
from fivefold.checkpoint.note import is_note
from fivefold.checkpoint.place import LocalPlace, Place, place_at
from fivefold.checkpoint.run import RunHistory, check_run_id
from fivefold.errors import CheckpointError, Damaged, Foreign, UsageError, warn

__all__ = [
    "RUN_COPY",
    "UNENDED",
    "Generation",
    "LocalStore",
    "PersistentStore",
    "Problem",
    "Store",
    "check",
    "surplus",
]

RUN_COPY = "run-copy.json"
UNENDED = "it has no manifest: the save did not end"
_STATES: tuple[State, ...] = get_args(State)


@dataclass(frozen=True)
class Problem:
    """A file of a generation that is not what its manifest says."""

    name: str
    what: Literal["missing", "length", "digest", "unreadable"]
    detail: str

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}"


@dataclass(frozen=True)
class Generation:
    """One directory of a store: a checkpoint if it has a manifest, else `problem` says why not."""

    place: Place
    step: int
    epoch: int
    manifest: Manifest | None
    problem: str = ""
    ended: bool = True
    """False where there is no manifest: the save is under way, or did not end"""

    @property
    def name(self) -> str:
        """The directory's name."""
        return generation_name(self.step, self.epoch)

    @property
    def where(self) -> str:
        """Path or URL, for people."""
        return self.place.where(self.name)

    @property
    def path(self) -> Path:
        """The directory; only of a store on a file system."""
        assert isinstance(self.place, LocalPlace)
        return self.place.path(self.name)

    @property
    def order(self) -> tuple[int, int]:
        """Newer generations have a larger one: a later start of the run counts more than a later step."""
        return self.epoch, self.step


def check(place: Place, folder: str, items: Iterable[Item], *, deep: bool = True) -> list[Problem]:
    """What is wrong with files of a folder: presence and lengths; `deep` also reads all for their digests."""
    problems: list[Problem] = []
    for item in items:
        name = f"{folder}/{item.name}" if folder else item.name
        try:
            length = place.size(name)
            if length != item.length:
                problems.append(
                    Problem(item.name, "length", f"it has {length} bytes instead of {item.length}")
                )
            elif deep and (found := place.digest(name).digest) != item.digest:
                problems.append(
                    Problem(item.name, "digest", f"its xxh3 is {found}, not {item.digest}")
                )
        except FileNotFoundError:
            problems.append(Problem(item.name, "missing", "it is not there"))
        except OSError as error:
            problems.append(Problem(item.name, "unreadable", f"it cannot be read: {error}"))
    return problems


def surplus(
    generations: Sequence[Generation],
    keep: int,
    *,
    run: RunHistory | None = None,
    busy: Collection[str] = (),
) -> list[Generation]:
    """The generations that may be dropped, oldest first.

    At least `keep` checkpoints stay, the newest that is protected, and all that are newer: what one node
    alone has may be lost with it. What the run does not hold, by its record, neither counts nor protects.
    Everything else goes, directories without manifest too. `busy` names generations that are still needed,
    by a flush for instance.

    Raises:
        UsageError: `keep` is below 2.
    """
    if keep < 2:
        raise UsageError(f"keep is {keep}: at least 2 generations have to stay")
    newest_first = sorted(generations, key=lambda g: g.order, reverse=True)
    good = [g for g in newest_first if g.manifest and (run is None or run.holds(g.step, g.epoch))]
    safe = [g for g in good if g.manifest and g.manifest.state != "local"]
    if not safe:
        return []
    kept = {g.name for g in good[:keep]} | set(busy)
    return [g for g in reversed(newest_first) if g.order < safe[0].order and g.name not in kept]


class Store:
    """The generations in one place. Reading only; all methods raise `OSError`."""

    def __init__(self, place: Place, run: str | None = None) -> None:
        self.place, self.run = place, run

    def generations(self) -> list[Generation]:
        """All of them, also those that are no checkpoints, oldest first."""
        found = [g for name in self.place.list() if (g := self.find(name)) is not None]
        return sorted(found, key=lambda g: g.order)

    def find(self, name: str) -> Generation | None:
        """The generation in a directory; None if it is not called like one."""
        parsed = parse_generation_name(name)
        if parsed is None:
            return None
        step, epoch = parsed
        try:
            manifest = self._manifest(name)
        except FileNotFoundError:
            return Generation(self.place, step, epoch, None, UNENDED, ended=False)
        except (CheckpointError, OSError) as problem:
            return Generation(self.place, step, epoch, None, str(problem))
        return Generation(self.place, step, epoch, manifest)

    def _manifest(self, name: str) -> Manifest:
        where = self.place.where(f"{name}/{MANIFEST}")
        manifest = Manifest.parse(self.place.read(f"{name}/{MANIFEST}"), where)
        if manifest.name != name:
            raise Foreign(
                f"{where} is of {manifest.name}: it was copied or renamed; name it so again"
            )
        if self.run is not None and manifest.run != self.run:
            raise Foreign(f"{where} is of run {manifest.run}, not of {self.run}")
        return manifest

    def verify(self, generation: Generation, deep: bool = True) -> list[Problem]:
        """What is wrong with the files of a generation. `deep` reads all bytes."""
        if generation.manifest is None:
            return [Problem(MANIFEST, "missing", generation.problem)]
        return check(self.place, generation.name, generation.manifest.items(), deep=deep)

    def open(self, generation: Generation, name: str) -> BinaryIO:
        """A file of a generation, for reading."""
        return self.place.open(f"{generation.name}/{name}")

    def drop(self, generation: Generation) -> None:
        """Remove a generation: first its manifest, so that what is half removed is no checkpoint."""
        self.place.remove(f"{generation.name}/{MANIFEST}")
        self.place.remove_tree(generation.name)

    def keep(
        self, count: int, *, run: RunHistory | None = None, busy: Collection[str] = ()
    ) -> list[Generation]:
        """Drop what `surplus` names, and return it."""
        dropped = surplus(self.generations(), count, run=run, busy=busy)
        for generation in dropped:
            self.drop(generation)
        return dropped


class LocalStore(Store):
    """What a node keeps on its own storage, `root`, of a run.

    Raises:
        UsageError: `run` cannot be the name of a directory.
    """

    def __init__(self, root: Path, run: str, files: FileOps | None = None) -> None:
        check_run_id(run)
        self.files = files or FileOps()
        self.root = root.absolute() / run
        super().__init__(LocalPlace(self.root, self.files), run)

    def path(self, step: int, epoch: int) -> Path:
        """The directory of a generation."""
        return self.root / generation_name(step, epoch)

    def begin(self, step: int, epoch: int) -> Path:
        """An empty directory to write a generation to; once per node, before its ranks write.

        What an earlier attempt left there is removed.

        Raises:
            CheckpointError: the generation was saved already.
        """
        path = self.path(step, epoch)
        left = self.find(path.name)
        if left is not None and left.manifest is not None:
            raise CheckpointError(f"{path} was saved already; a step is saved once per start")
        if path.exists():
            self.files.remove_tree(path)
        self.files.make_dir(path)
        return path

    def commit(self, manifest: Manifest) -> Generation:
        """Write the manifest of a generation whose files are there: now it is a checkpoint.

        Raises:
            CheckpointError: a file is missing or has another length.
        """
        assert manifest.me is not None and manifest.run == self.run
        if problems := check(self.place, manifest.name, manifest.items(), deep=False):
            raise CheckpointError(f"{manifest.name} cannot be committed: {problems[0]}")
        self.place.write(f"{manifest.name}/{MANIFEST}", [manifest.to_json().encode()])
        return Generation(self.place, manifest.step, manifest.epoch, manifest)

    def advance(
        self, generation: Generation, state: State, redundancy: Sequence[Item] | None = None
    ) -> Generation:
        """Enter a later state, and what redundancy this node has written, into the manifest.

        Raises:
            CheckpointError: the generation is no checkpoint any more, or a file of it is missing.
        """
        now = self.find(generation.name)
        if now is None or now.manifest is None:
            raise CheckpointError(f"{generation.where} is no checkpoint: {now and now.problem}")
        later = max(state, now.manifest.state, key=_STATES.index)
        kept = now.manifest.redundancy if redundancy is None else tuple(redundancy)
        return self.commit(replace(now.manifest, state=later, redundancy=kept))


class PersistentStore(Store):
    """The directory or URL that a run flushes to.

    Raises:
        UsageError: the URL needs a package that is missing.
    """

    def __init__(self, url: str | Path, files: FileOps | None = None) -> None:
        super().__init__(place_at(url, files))

    def read_run(self) -> RunHistory | None:
        """The record of the run; None where nothing was saved yet.

        Where it is damaged or missing, its copy counts, with a warning.

        Raises:
            Damaged: neither can be read.
            Foreign: a newer version of Fivefold wrote it.
        """
        try:
            return self._run(RUN)
        except (FileNotFoundError, Damaged) as problem:
            first = problem
        try:
            copy = self._run(RUN_COPY)
        except (FileNotFoundError, Damaged):
            saved = any(g.manifest is not None for g in self.generations())
            saved = saved or any(map(is_note, self.place.list()))
            if saved or isinstance(first, Damaged):
                state = "damaged, and so is its copy" if isinstance(first, Damaged) else "missing"
                raise Damaged(
                    "the record of the run", self.place.where(RUN), f"it is {state}",
                    remedy="restore the file, or use another directory for a new run",
                ) from None  # fmt: skip
            return None
        warn(f"{first}: its copy is used instead")
        return copy

    def _run(self, name: str) -> RunHistory:
        return RunHistory.parse(self.place.read(name), self.place.where(name))

    def write_run(self, run: RunHistory) -> None:
        """Replace the record of the run, and its copy."""
        self.place.make_dir()
        # The copy first: it must not be older, or an epoch would be given twice.
        for name in (RUN_COPY, RUN):
            self.place.write(name, [run.to_json().encode()])

    def commit(self, manifest: Manifest) -> Generation:
        """Write the manifest of a generation whose files are all there, last of all.

        Raises:
            CheckpointError: a file is missing or has another length.
        """
        assert manifest.me is None
        if problems := check(self.place, manifest.name, manifest.items(), deep=False):
            raise CheckpointError(f"{manifest.name} cannot be committed: {problems[0]}")
        self.place.write(f"{manifest.name}/{MANIFEST}", [manifest.to_json().encode()])
        return Generation(self.place, manifest.step, manifest.epoch, manifest)
