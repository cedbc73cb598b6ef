"""Exceptions whose messages are written for the person who reads them.

A message says what happened, why, and what to do; where a choice was wrong it lists the valid ones.
`UsageError` is for what a user can cause: the command line prints it in one line and exits with code 2.
Our own broken invariants are plain `assert`s and never reach this module.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Damaged",
    "DataError",
    "DataWarning",
    "FivefoldError",
    "Foreign",
    "InUse",
    "LaunchError",
    "OffloadWarning",
    "PlanError",
    "Unrecoverable",
    "UsageError",
    "suggest",
    "warn",
]


class FivefoldError(Exception):
    """Base of every error that Fivefold raises on purpose."""

    exit_code: int = 1
    label: str = "error"
    """what the command line puts before it"""


class UsageError(FivefoldError, ValueError):
    """Something asked for cannot be done as asked: bad input, a missing file, an impossible layout."""

    exit_code = 2


class PlanError(UsageError):
    """A plan is malformed, contradicts itself, or does not fit the processes that were started."""


class DataError(UsageError):
    """A data set is missing, empty or damaged; the message names the file."""


class LaunchError(FivefoldError):
    """Processes could not be started, could not meet, or died."""


class CheckpointError(FivefoldError):
    """A checkpoint could not be written or read."""


class CheckpointWarning(UserWarning):
    """A save or a copy of it failed, or an older save had to be loaded. Training goes on."""


class DataWarning(UserWarning):
    """Samples were left out of batches, as the plan allows."""


class OffloadWarning(UserWarning):
    """Something about helpers: one is lost, cannot help, or computes otherwise. Training goes on."""


class Damaged(CheckpointError):
    """Something of a checkpoint is not what was written.

    >>> print(Damaged("the manifest", "a/manifest.json", "it is empty", remedy="repair it"))
    the manifest in a/manifest.json is damaged: it is empty; repair it
    """

    def __init__(
        self,
        what: str,
        where: Path | str,
        why: str,
        remedy: str = "use another generation, or run `fivefold checkpoint repair`",
    ) -> None:
        super().__init__(f"{what} in {where} is damaged: {why}; {remedy}")
        self.what, self.where = what, where


class Unrecoverable(CheckpointError):
    """More of a checkpoint is lost than its redundancy can give back."""


class AllLost(Unrecoverable, UsageError):
    """A run has made saves, and none of them can be loaded: somebody has to decide."""


class Foreign(CheckpointError, UsageError):
    """A checkpoint of another run, or of a newer version of Fivefold."""


class InUse(CheckpointError, UsageError):
    """Another job writes to this directory of checkpoints."""


def suggest(value: str, valid: Iterable[str]) -> str:
    """The end of a message about a wrong choice: the nearest valid name, and all of them.

    >>> suggest("dat", ["data", "pipe"])
    "; did you mean 'data'? Valid: data, pipe"
    >>> suggest("zzz", ["data", "pipe"])
    '; valid: data, pipe'
    """
    names = list(valid)
    near = difflib.get_close_matches(value, names, n=1)
    listed = ", ".join(names)
    return f"; did you mean {near[0]!r}? Valid: {listed}" if near else f"; valid: {listed}"


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the script that led here: the innermost that is neither ours nor torch's.

    The same words come once in a process, unless filters ask for all of them.
    """
    if (message, category) in _told and not _all_wanted(category):
        return
    _told.add((message, category))
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    skipped = (*_BETWEEN, *([f"{Path(torch).parent}/"] if torch else []))
    here: FrameType = sys._getframe(1)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    frame: FrameType | None = here
    while frame is not None and frame.f_code.co_filename.startswith(skipped):
        frame = frame.f_back
    at = frame or here  # a thread of ours has no line of the script
    # Not the script's own registry, which every `warnings.catch_warnings` of a step would empty.
    # Nor without a module's name, as where a notebook runs text: what has none is dropped without a word.
    module = at.f_globals.get("__name__") or "__main__"
    warnings.warn_explicit(message, category, at.f_code.co_filename, at.f_lineno, module, {})


def _all_wanted(category: type[Warning]) -> bool:
    for action, text, kind, module, _ in warnings.filters:
        if text is None and module is None and issubclass(category, kind):
            return action in ("always", "error")
    return False


_BETWEEN = (f"{Path(__file__).parent}/", contextlib.__file__, threading.__file__)
_told: set[tuple[str, type[Warning]]] = set()
