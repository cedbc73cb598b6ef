"""What a start of a run has saved: a small file in the persistent directory, written after every save.

DIR/saved-epoch-3.json      the third start: its last save, on which nodes, and what saves and copies cost

It outlives the saves. Where none of them is left, it tells that there were some: a run that lost its saves
differs from one that never had any. Each start has a file of its own, so nobody overwrites another's.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fivefold.checkpoint.place import Place
from fivefold.checkpoint.run import RunHistory
from fivefold.checkpoint.sealed import seal, unseal
from fivefold.errors import CheckpointError, Damaged

__all__ = [
    "Note",
    "SavingCosts",
    "is_note",
    "last_save",
    "newest_note",
    "noted",
    "notes",
    "read_note",
    "write_note",
]

_VERSION = 1
_NAME = re.compile(r"saved-epoch-([0-9]+)\.json", re.ASCII)


@dataclass(frozen=True)
class SavingCosts:
    """By how much saving lengthens training, as measured while training, and what follows from it."""

    save_s: float = 0.0
    """seconds for each save; 0 where none was measured"""
    flush_s: float = 0.0
    """seconds for each copy to the persistent directory, beyond the save"""
    every_s: float = 0.0
    """seconds from save to save that were found best; 0 where steps decide"""
    mtbf_s: float = 0.0
    """mean seconds between failures that were stated"""
    flush_every: int = 0
    """every n-th save is copied; 0: the last alone"""


@dataclass(frozen=True)
class Note:
    """The last save of a start."""

    run: str
    epoch: int
    step: int
    hosts: tuple[str, ...]
    scheme: str
    costs: SavingCosts = SavingCosts()

    def __str__(self) -> str:
        return f"step {self.step} of start {self.epoch}, on {', '.join(self.hosts)} with scheme {self.scheme}"

    def to_json(self) -> str:
        """The content of the file."""
        return seal("saved", _VERSION, asdict(self))

    @staticmethod
    def parse(data: bytes, where: str) -> Note:
        """Read the file. Raises `Damaged` or `Foreign`."""
        fields = unseal("saved", _VERSION, data, where)
        try:
            told = fields.object("costs")
            numbers = {n: told.number(n) for n in ("save_s", "flush_s", "every_s", "mtbf_s")}
            costs = SavingCosts(**numbers, flush_every=told.count("flush_every"))
            hosts = tuple(map(str, fields.array("hosts")))
            return Note(
                fields.text("run"), fields.count("epoch"), fields.count("step"), hosts,
                fields.text("scheme"), costs,
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as problem:
            raise Damaged("the note", where, f"it makes no sense: {problem!r}") from None


def _name(epoch: int) -> str:
    return f"saved-epoch-{epoch}.json"


def is_note(name: str) -> bool:
    """Whether a file of this name tells what a start has saved."""
    return _NAME.fullmatch(name) is not None


def write_note(place: Place, note: Note) -> None:
    """Replace the note of a start. Raises `OSError`."""
    place.write(_name(note.epoch), [note.to_json().encode()])


def read_note(place: Place, epoch: int) -> Note | None:
    """The note of a start; None where it has completed no save. Raises `Damaged`, `Foreign`, `OSError`."""
    try:
        return Note.parse(place.read(_name(epoch)), place.where(_name(epoch)))
    except FileNotFoundError:
        return None


def newest_note(place: Place) -> Note | None:
    """That of the latest start which has one that can be read. Raises `OSError`."""
    epochs = [int(found[1]) for name in place.list() if (found := _NAME.fullmatch(name))]
    for epoch in sorted(epochs, reverse=True):
        try:
            return read_note(place, epoch)
        except CheckpointError:
            continue
    return None


def notes(place: Place) -> dict[str, str]:
    """What all starts have noted, as it stands there, by file. Raises `OSError`."""
    return {name: place.read(name).hex() for name in place.list() if is_note(name)}


def noted(run: RunHistory, read: Callable[[int], Note | None]) -> tuple[int, int]:
    """(epoch, step) of the last save that the run is known to have made; (0, 0) if none can be read."""
    if not run.starts:
        return 0, 0
    latest = run.starts[-1]
    try:
        note = read(latest.epoch)
    except CheckpointError:
        note = None
    if note is not None:
        return note.epoch, note.step
    return (0, 0) if latest.resumed is None else (latest.resumed[1], latest.resumed[0])


def last_save(run: RunHistory, read: Callable[[int], Note | None]) -> str:
    """The last save that the run is known to have made on the way that it took; empty if there was none.

    epoch 1   0 ─── 100 ─── 200          noted: step 200
    epoch 2           └──── lost         no note: it went on from step 100, so that was there
    epoch 3   0 ──                       began again, and made none: nothing to lose
    """
    if not run.starts:
        return ""
    latest = run.starts[-1]
    try:
        note = read(latest.epoch)
    except CheckpointError as problem:
        return f"one of start {latest.epoch}; {problem}"
    if note is not None:
        return str(note)
    if latest.resumed is None:
        return ""
    step, epoch = latest.resumed
    return f"step {step} of start {epoch}, from which start {latest.epoch} went on"
