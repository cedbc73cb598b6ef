"""`fivefold checkpoint`: looks at checkpoints, checks, repairs and moves them. None of it needs torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from fivefold.cli import Command, parse_action
from fivefold.cli.interval import Interval
from fivefold.cli.printable import printable
from fivefold.errors import CheckpointError, UsageError, suggest

if TYPE_CHECKING:
    from fivefold.checkpoint.inspect import Copy
    from fivefold.checkpoint.manifest import Manifest
    from fivefold.checkpoint.repair import NodeDirectories, RepairResult

__all__ = ["ACTIONS", "Checkpoint", "Drop", "Fetch", "Flush", "List", "Repair", "Show", "Verify"]

_Paths = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="PATH...", help_behavior_hint="")
]
_Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
_Text = Annotated[str, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


def _option(metavar: str, hint: str | None = "") -> object:
    if hint is None:
        return tyro.conf.arg(metavar=metavar)
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class List:
    """List checkpoints: where they lie, how large and old they are, and which failures they survive.

    Takes directories that a run saves to, the local storage of nodes, URLs such as s3://bucket/run, and
    directories of torch.distributed.checkpoint. Of a directory that a run saves to, it also lists what the
    run keeps on the storage of this node, and tells what saves and flushes cost.

    Example: fivefold checkpoint list runs/a /local/scratch/ckpt
    """

    paths: _Paths
    """directories or URLs"""

    def run(self) -> int:
        """Print a table."""
        from rich.console import Console
        from rich.table import Table

        from fivefold.checkpoint.inspect import HEADINGS, costs_at, rows

        copies, notes = _copies_and_local(self.paths)
        for note in notes:
            print(printable(note))
        if not copies:
            print(f"there are no checkpoints in {', '.join(self.paths)}")
            return 0
        table = Table(box=None, pad_edge=False)
        for name in HEADINGS:
            right = name in ("size", "age")
            # A problem is told where the state would be, and may be long.
            table.add_column(name, justify="right" if right else "left", no_wrap=name != "state")
        for row in rows(copies):
            table.add_row(*printable(row))
        console = Console()
        console.width = max(console.width, 160)  # whole lines: for grep, and for wide host names
        console.print(table, markup=False)
        for path in self.paths:
            if told := costs_at(path):
                print(told)
        return 0


@dataclass(frozen=True)
class Show:
    """Show what a checkpoint consists of: nodes, ranks, files, and what it survives.

    One that is not in the directory of its run is looked for on the storage of this node.

    Example: fivefold checkpoint show runs/a/step-00000120-epoch-1
    """

    path: Annotated[str, tyro.conf.Positional, _option("PATH", None)]
    """one checkpoint"""
    contents: _Flag = False
    """list the tensors and values in it as well"""

    def run(self) -> int:
        """Print it."""
        from fivefold.checkpoint.inspect import described
        from fivefold.checkpoint.plain_dcp import read_contents

        copy = _one_or_local(self.path)
        for line in described(copy):
            print(printable(line))
        if self.contents:
            for entry in sorted(
                read_contents(copy.place, copy.folder).entries, key=lambda e: e.name
            ):
                shape = "x".join(map(str, entry.shape)) or "one number"
                what = f"{entry.dtype}, {shape}" if entry.dtype else "a value"
                print(f"  {printable(entry.name)}: {what}")
        return 0 if copy.generation is None or copy.manifest is not None else 1


@dataclass(frozen=True)
class Verify:
    """Check that every file of checkpoints is as it was saved. The exit code is 1 if one is not.

    A checkpoint whose manifest alone is missing is damaged, and so is a record of the run that cannot be
    read. What a save under way has written so far is no damage.

    Our own files are compared with the digests in their manifest; of directories that plain
    torch.distributed.checkpoint wrote, the checksums are computed that torch stores and never reads.

    Example: fivefold checkpoint verify runs/a
    """

    paths: _Paths
    """directories or URLs, as for `list`"""
    quick: _Flag = False
    """look at names and lengths only"""

    def run(self) -> int:
        """Read everything, and print a line for each checkpoint and each problem."""
        from fivefold.checkpoint.inspect import damaged_records

        wrong = 0
        _check_paths(self.paths)
        for path in self.paths:
            found = _copies([path])
            for copy in found:
                under_way = copy.generation is not None and not copy.generation.ended
                if under_way and len(found) > 1 and not copy.complete():
                    print(f"{copy.where} is no checkpoint: its save is under way, or did not end")
                else:
                    wrong += self._wrong(copy)
            for problem in damaged_records(path):
                print(printable(problem))
                wrong += 1
        return 1 if wrong else 0

    def _wrong(self, copy: Copy) -> bool:
        from fivefold.checkpoint.inspect import counted

        checked = copy.verify(deep=not self.quick)
        if checked.problems:
            print(f"{copy.where} is damaged:")
        else:
            what = counted(checked.parts, "part" if copy.generation is None else "file")
            lengths = f", {checked.unchecked} by length only" if checked.unchecked else ""
            print(f"{copy.where} is whole: {what} looked at{lengths}")
        for problem in checked.problems:
            print(f"  {printable(str(problem))}")
        return bool(checked.problems)


@dataclass(frozen=True)
class Repair:
    """Make checkpoints whole again from what lies in the directories given.

    Name the local storage of as many nodes as can be reached, and the run's persistent directory; an empty
    directory takes the place of a node that is lost. Stop the run first.

    Example: fivefold checkpoint repair /nodes/0/ckpt /nodes/1/ckpt /nodes/2/ckpt runs/a
    """

    paths: _Paths
    """directories or URLs of one run"""
    only: _Text = ""
    """one checkpoint, such as step-00000120-epoch-1"""

    def run(self) -> int:
        """Repair, newest first."""
        directories = _directories(self.paths)
        code = _tell([directories.repair(save) for save in _selected(directories, self.only)])
        for path in directories.without_manifest():
            print(f"{path}: left alone, for no manifest of it can be read")
        return code


@dataclass(frozen=True)
class Flush:
    """Copy a checkpoint from the local storage of nodes to a persistent directory.

    The copy is a directory that plain torch.distributed.checkpoint loads. Name the storage of all nodes.

    Example: fivefold checkpoint flush /nodes/0/ckpt /nodes/1/ckpt --to runs/a
    """

    paths: _Paths
    """local storage of all nodes"""
    to: Annotated[str, _option("PATH", None)]
    """directory or URL that it is copied to"""
    only: _Text = ""
    """which checkpoint; default: the newest"""

    def run(self) -> int:
        """Copy, and say what was written."""
        directories = _directories([*self.paths, self.to], persistent=self.to)
        return _tell([directories.flush(_newest(directories, self.only))])


@dataclass(frozen=True)
class Fetch:
    """Copy a checkpoint from a persistent directory to local storage, where a run starts from it faster.

    Example: fivefold checkpoint fetch runs/a --to /local/scratch/ckpt
    """

    path: Annotated[str, tyro.conf.Positional, _option("PATH", None)]
    """directory or URL of the run"""
    to: Annotated[Path, _option("DIR", None)]
    """local storage of this node"""
    member: Annotated[int | None, _option("N")] = None
    """only the files of this node of the run that saved; default: all"""
    only: _Text = ""
    """which checkpoint; default: the newest"""

    def run(self) -> int:
        """Copy, and say what was written."""
        self.to.mkdir(parents=True, exist_ok=True)
        directories = _directories([self.path, str(self.to)], persistent=self.path)
        save = _newest(directories, self.only)
        if self.member is not None and not 0 <= self.member < len(save.members):
            raise UsageError(
                f"--member {self.member}: {save.name} has members 0 to {len(save.members) - 1}"
            )
        return _tell([directories.fetch(save, self.member)])


@dataclass(frozen=True)
class Drop:
    """Remove checkpoints, each named by its directory.

    The last one of a directory that is whole stays unless --last is given.

    Example: fivefold checkpoint drop runs/a/step-00000120-epoch-1
    """

    paths: _Paths
    """checkpoints"""
    last: _Flag = False
    """remove also the last one of a directory"""

    def run(self) -> int:
        """Check all, then remove all."""
        from fivefold.checkpoint.store import Store

        found = [_one(path) for path in self.paths]
        for copy in found:
            if copy.generation is None:
                raise UsageError(
                    f"{copy.where} was not saved by Fivefold; remove it by other means"
                )
            gone = {other.folder for other in found if other.place.where() == copy.place.where()}
            every = [g for g in Store(copy.place).generations() if g.manifest is not None]
            if copy.manifest and not self.last and all(g.name in gone for g in every):
                raise UsageError(
                    f"{copy.where} is the last checkpoint in {copy.place.where()}; to remove it add --last"
                )
        for copy in found:
            assert copy.generation is not None
            Store(copy.place).drop(copy.generation)
            print(f"removed {copy.where}")
        return 0


ACTIONS: dict[str, tuple[type[Command], str]] = {
    "list": (List, "List checkpoints, and which failures they survive"),
    "show": (Show, "Show what a checkpoint consists of"),
    "verify": (Verify, "Check that every file is as it was saved"),
    "repair": (Repair, "Make checkpoints whole again"),
    "flush": (Flush, "Copy from the storage of nodes to a persistent directory"),
    "fetch": (Fetch, "Copy from a persistent directory to local storage"),
    "drop": (Drop, "Remove checkpoints"),
    "interval": (Interval, "Compute how often to save"),
}

_HELP = """\
usage: fivefold checkpoint ACTION [OPTIONS]

Looks at checkpoints, checks, repairs and moves them.

actions:
{actions}

options:
  -h, --help     show this help, or with an action, that action's

example:
  fivefold checkpoint list runs/a
"""


@dataclass(frozen=True)
class Checkpoint:
    """One of `ACTIONS`, with its options read."""

    action: Command

    def run(self) -> int:
        """Do it; a directory that cannot be read or written is told in one line."""
        try:
            return self.action.run()
        except OSError as problem:
            where = f"{problem.filename}: " if problem.filename else ""
            raise CheckpointError(f"{where}{problem.strerror or problem}") from problem

    @classmethod
    def parse(cls, words: Sequence[str]) -> Checkpoint:
        """The action that the words name."""
        return cls(parse_action(ACTIONS, words, "checkpoint", _HELP))


# --- what the actions share ------------------------------------------------------------------------


def _copies(paths: Sequence[str]) -> list[Copy]:
    from fivefold.checkpoint.inspect import copies_at

    _check_paths(paths)
    return [copy for path in paths for copy in copies_at(path)]


def _check_paths(paths: Sequence[str]) -> None:
    if not paths:
        raise UsageError("PATH is missing: name a directory of checkpoints")


def _copies_and_local(paths: Sequence[str]) -> tuple[list[Copy], list[str]]:
    """What lies in directories, each once, and what their runs have on this node; what to say of that."""
    from fivefold.checkpoint.inspect import copies_at, copies_on_node

    _check_paths(paths)
    found: dict[str, Copy] = {}
    notes: list[str] = []
    for path in paths:
        local, note = copies_on_node(path)
        notes += [note] if note else []
        try:
            copies = copies_at(path)
        except UsageError:
            if not local:
                raise
            copies = []
        found |= {copy.where: copy for copy in (*copies, *local) if copy.where not in found}
    return [*found.values()], notes


def _one(path: str) -> Copy:
    found = _copies([path])
    if len(found) != 1:
        raise _not_one(path, found)
    return found[0]


def _one_or_local(path: str) -> Copy:
    """The checkpoint at a path; where the directory of a run lacks it, that of this name on this node."""
    found, _ = _copies_and_local([path])
    by_name = {copy.folder: copy for copy in reversed(found)}
    if len(by_name) != 1:
        raise _not_one(path, [*by_name.values()][::-1])
    return by_name.popitem()[1]


def _not_one(path: str, found: Sequence[Copy]) -> UsageError:
    if not found:
        return UsageError(f"{path} holds no checkpoint")
    some = ", ".join(str(copy.where) for copy in found[-5:])
    return UsageError(f"{path} holds {len(found)} checkpoints; name one of them, such as {some}")


def _directories(paths: Sequence[str], persistent: str = "") -> NodeDirectories:
    """The directories side by side. Which one is persistent is seen by what lies there, unless told."""
    from fivefold.checkpoint.inspect import is_persistent
    from fivefold.checkpoint.repair import NodeDirectories
    from fivefold.checkpoint.store import PersistentStore

    _check_paths(paths)
    for path in paths:
        if path != persistent and "://" not in path and not Path(path).is_dir():
            raise UsageError(f"there is no directory {path}")
    far = [path for path in paths if path == persistent or (not persistent and is_persistent(path))]
    if len(far) > 1:
        raise UsageError(f"several persistent directories: {', '.join(far)}; name one")
    near = [Path(path).absolute() for path in paths if path not in far]
    return NodeDirectories(near, PersistentStore(far[0]) if far else None)


def _selected(directories: NodeDirectories, only: str) -> list[Manifest]:
    saves = directories.saves()
    names = [save.name for save in saves]
    if only and only not in names:
        raise UsageError(f"there is no checkpoint {only!r}{suggest(only, names)}")
    if not saves:
        raise UsageError("no manifest can be read in these directories: name those of more nodes")
    return [save for save in saves if only in ("", save.name)]


def _newest(directories: NodeDirectories, only: str) -> Manifest:
    return _selected(directories, only)[0]


def _tell(results: Sequence[RepairResult]) -> int:
    for one in results:
        for path in one.made:
            print(f"wrote {path}")
        state = f"not whole: {one.problem}" if one.problem else "whole"
        print(f"{one.name}: {state}")
    return 1 if any(one.problem for one in results) else 0
