"""The file `run.json` of a persistent directory: which run this is, how often it started, and from where."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fivefold.checkpoint.manifest import RUN
from fivefold.checkpoint.sealed import Fields, seal, unseal
from fivefold.errors import Damaged, UsageError

__all__ = ["LOCAL", "RunHistory", "Start", "check_run_id", "new_run_id"]

LOCAL = "local"
"""of `RunHistory.extra`: the directory on each node's own storage, without the part named like the run"""
_VERSION = 1
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


def new_run_id() -> str:
    """A name that no other run has: 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def check_run_id(run: str) -> None:
    """Raise `UsageError` if it cannot be the name of a directory."""
    if not _RUN_ID.fullmatch(run):
        raise UsageError(f"run id {run!r}: letters, digits, '.', '_' and '-' only, at most 100")


@dataclass(frozen=True)
class Start:
    """One start of the run."""

    epoch: int
    resumed: tuple[int, int] | None = None
    """(step, epoch) of the generation that it went on from; None from the beginning"""


@dataclass(frozen=True)
class RunHistory:
    """A run over all its starts."""

    run: str
    starts: tuple[Start, ...]
    extra: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def epoch(self) -> int:
        """The number of the latest start."""
        return self.starts[-1].epoch if self.starts else 0

    def started(self, resumed: tuple[int, int] | None, epoch: int | None = None) -> RunHistory:
        """The same run after another start, whose epoch is one more than the last unless it is given."""
        following = self.epoch + 1 if epoch is None else epoch
        assert following > self.epoch, "epochs only grow"
        return RunHistory(self.run, (*self.starts, Start(following, resumed)), self.extra)

    def holds(self, step: int, epoch: int) -> bool:
        """Whether a generation belongs to what the run is today, and is no dead end of an earlier start.

            epoch 1   0 ─ 100 ─ 200 ─ 300 ─ 400     a node dies; its disk comes back with 300 and 400
            epoch 2              └─── 300 ─ ...     holds(200, 1) and holds(300, 2), not holds(300, 1)

        A generation of a start that is not recorded yet belongs to it.
        """
        starts = {start.epoch: start for start in self.starts}
        limit, at = None, self.epoch
        if epoch > at:
            return True
        while epoch != at:
            start = starts.get(at)
            if start is None or start.resumed is None:
                return False
            limit, at = start.resumed
        return limit is None or step <= limit

    def to_json(self) -> str:
        """The content of `run.json`."""
        return seal("run", _VERSION, {**asdict(self), "epoch": self.epoch})

    @staticmethod
    def parse(text: str | bytes, where: Path | str = RUN) -> RunHistory:
        """Read `run.json`. Raises `Damaged` or `Foreign`."""
        fields = unseal("run", _VERSION, text, where)
        try:
            starts = tuple(map(_start, fields.objects("starts")))
            run = RunHistory(fields.text("run"), starts, fields.object("extra").texts())
            check_run_id(run.run)
            if [s.epoch for s in starts] != sorted({s.epoch for s in starts}):
                raise ValueError("epochs do not grow")
            if any(s.resumed is not None and s.resumed[1] >= s.epoch for s in starts):
                raise ValueError("a start goes on from a later one")
        except (ValueError, TypeError, KeyError) as problem:
            raise Damaged("the run", where, f"it makes no sense: {problem!r}") from None
        return run


def _start(fields: Fields) -> Start:
    place = fields.optional_counts("resumed", 2)
    return Start(fields.count("epoch"), None if place is None else (place[0], place[1]))
