"""A traced run as it lies on disk: the files of all ranks, what was decided, and what is missing."""

from __future__ import annotations

import json
import re
import socket
import time
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from fivefold.cluster.reading import numbers, spans
from fivefold.errors import UsageError
from fivefold.introspect.merging import merged
from fivefold.trace.file import SUFFIX, TraceError
from fivefold.trace.reader import RankTrace
from fivefold.trace.schema import ProcessState

__all__ = ["FULL", "TracedRun", "listed", "state_of", "trace_files"]

FULL = 64
"""up to so many ranks are told in full"""
_EVENTS, _WINDOWS = 4096, 512
"""of every rank that are kept when there are more ranks"""
_SILENT_S = 120.0
"""after which a rank on another host is taken for killed"""
_NAMED = 8
_RESTART = re.compile(r"restart-\d+")
"""as many ranks or files are named in a sentence"""

RankState = Literal["ended", "running", "failed", "killed"]


@dataclass(frozen=True)
class TracedRun:
    """The traces of a run, by rank, and what lies beside them."""

    path: Path
    folder: Path
    """where the trace files are"""
    ranks: list[RankTrace]
    """those that could be read, in order"""
    problems: tuple[str, ...] = ()
    """what is missing or doubtful, in words"""
    states: dict[int, RankState] = field(default_factory=dict[int, RankState])
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    """tables of plan.toml, its provenance included"""
    epochs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """lines of metrics.jsonl"""
    placement: dict[str, Any] | None = None

    @classmethod
    def load(cls, path: Path) -> TracedRun:
        """Read whatever can be read of a run.

        `path` is the run's folder, the folder with the trace files, or one of them.
        Raises `UsageError` if there is nothing to read.
        """
        files = trace_files(path)
        problems: list[str] = []
        ranks = _read(files, problems)
        if not ranks:
            told = problems[0] if len(problems) == 1 else f"no trace of {path} can be read"
            raise UsageError(told if len(problems) < 2 else f"{told}: {problems[0]}; and so on")
        states: dict[int, RankState] = {trace.rank: state_of(trace) for trace in ranks}
        _tell_missing(ranks, problems)
        _tell_states(states, problems)
        home = files[0].parent.parent if files[0].parent.name == "trace" else files[0].parent
        _tell_starts(path, home, problems)
        if _RESTART.fullmatch(home.name):
            home = home.parent
        plan, epochs = _plan(home, problems), _epochs(home, problems)
        return cls(
            path, files[0].parent, ranks, tuple(problems), states, plan, epochs,
            _placement(home, ranks),
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Ranks that the job had, as far as its files tell."""
        return _size(self.ranks)

    @property
    def state(self) -> RankState:
        """Of the run: the worst of its ranks."""
        found = set(self.states.values())
        order: tuple[RankState, ...] = ("failed", "killed", "running", "ended")
        return next(state for state in order if state in found)


def trace_files(path: Path) -> list[Path]:
    """The trace files of a run, by name. Raises `UsageError` if there are none."""
    if path.is_file() and path.suffix == SUFFIX:
        return [path]
    if not path.exists():
        raise UsageError(f"there is no directory {path}{_runs_near(path)}")
    if not path.is_dir():
        raise UsageError(f"{path} is no run: name its directory")
    for folder in (*_restarts(path), path / "trace", path, path / "run" / "trace"):
        try:
            files = sorted(folder.glob(f"*{SUFFIX}"))
        except OSError as problem:
            raise UsageError(f"cannot read {folder}: {problem.strerror}") from None
        if files:
            return files
    raise UsageError(
        f"{path} holds no trace files: it is no run, or was made without tracing; "
        f"`fivefold train` records, and so does `fivefold run --trace`{_runs_near(path / 'x')}"
    )


def _restarts(path: Path) -> list[Path]:
    """Folders with traces of ranks that were started again, the last first."""
    found = [
        folder for folder in path.glob("restart-*/trace") if _RESTART.fullmatch(folder.parent.name)
    ]
    return sorted(found, key=lambda folder: -int(folder.parent.name.partition("-")[2]))


def _tell_starts(path: Path, shown: Path, problems: list[str]) -> None:
    """That it is one of several starts, if the whole run was asked for; each has a folder with its logs."""
    again = sorted(int(p.name[8:]) for p in path.glob("restart-*") if _RESTART.fullmatch(p.name))
    starts = [path, *(path / f"restart-{number}" for number in again)]
    others = [start for start in starts if start != shown]
    if not again or shown not in starts:
        return
    named = ", ".join(
        str(start / "trace" if start == path else start)
        + ("" if any(start.glob(f"trace/*{SUFFIX}")) else " (no trace)")
        for start in others[:_NAMED]
    )
    which = "the first" if shown == path else shown.name
    problems.append(
        f"the ranks were started {len(starts)} times, and this is {which}; others are in {named}"
    )


def _runs_near(path: Path) -> str:
    try:
        found = sorted(
            (p.parent for p in path.parent.glob("*/trace") if any(p.glob(f"*{SUFFIX}"))),
            key=lambda p: p.stat().st_mtime,
        )
    except OSError:
        found = []
    return f"; the latest run there is {found[-1]}" if found else ""


def _read(files: list[Path], problems: list[str]) -> list[RankTrace]:
    found: dict[int, RankTrace] = {}
    many = len(files) > FULL
    doubtful: Counter[str] = Counter()
    example: dict[str, int] = {}
    for file in files:
        try:
            trace = RankTrace.load(file)
        except TraceError as problem:
            problems.append(str(problem))
            continue
        if trace.rank in found:
            problems.append(
                f"{file} and {found[trace.rank].path} are of the same rank: one is used"
            )
        for problem in trace.problems:
            doubtful[problem] += 1
            example.setdefault(problem, trace.rank)
        found[trace.rank] = _smaller(trace) if many else trace
    for problem, times in doubtful.items():
        others = f" (and {times - 1} more)" if times > 1 else ""
        problems.append(f"rank {example[problem]}{others}: {problem}")
    return [found[rank] for rank in sorted(found)]


def _smaller(trace: RankTrace) -> RankTrace:
    """Without what a report of many ranks does not need: spans, old events, steps one by one."""
    operations = trace.events[trace.events["kind"] > 0][-_EVENTS:].copy()
    return replace(trace, events=operations, windows=merged(trace.windows, _WINDOWS))


def state_of(trace: RankTrace) -> RankState:
    """What became of a rank. One that says it runs was killed when its process is gone, or long silent."""
    if trace.state != ProcessState.RUNNING:
        return "ended" if trace.state == ProcessState.ENDED else "failed"
    if trace.meta.get("host") == socket.gethostname():
        return "running" if trace.has_writer else "killed"
    return "running" if silent_s(trace) < _SILENT_S else "killed"


def silent_s(trace: RankTrace) -> float:
    """Seconds since a rank last said that it lives, by the wall clock; 0 if that is unknown."""
    meta, beat = trace.meta, int(trace.live["heartbeat_ns"])
    if not beat or "wall_ns" not in meta or "monotonic_ns" not in meta:
        return 0.0
    return max(0.0, (time.time_ns() - meta["wall_ns"] - (beat - meta["monotonic_ns"])) / 1e9)


def _size(ranks: list[RankTrace]) -> int:
    told = max((int(trace.meta.get("size") or 0) for trace in ranks), default=0)
    return max(told, ranks[-1].rank + 1)


def _tell_missing(ranks: list[RankTrace], problems: list[str]) -> None:
    missing = sorted(set(range(_size(ranks))) - {trace.rank for trace in ranks})
    if missing:
        be = "is" if len(missing) == 1 else "are"
        problems.append(
            f"{listed(missing)} of {_size(ranks)} {be} missing: figures are of the others"
        )
    if not any(len(trace.windows) for trace in ranks):
        problems.append("no step has ended yet: there are no figures per step")


def _tell_states(states: dict[int, RankState], problems: list[str]) -> None:
    told = {
        "running": "still running: figures go up to now",
        "killed": "killed, or ended without a word: figures go up to then",
        "failed": "ended by an error",
    }
    for state, meaning in told.items():
        found = [rank for rank, is_ in states.items() if is_ == state]
        if found:
            everybody = len(found) == len(states)
            who = "the run" if everybody else listed(found)
            be = "was" if state == "killed" else "" if state == "failed" else "is"
            if len(found) > 1 and not everybody:
                be = {"was": "were", "is": "are"}.get(be, be)
            problems.append(" ".join(word for word in (who, be, meaning) if word))


def listed(ranks: Iterable[int]) -> str:
    """Ranks for a sentence.

    >>> listed([3]), listed([0, 1, 2, 5]), listed(range(0, 64, 2))
    ('rank 3', 'ranks 0-2, 5', 'ranks 0, 2, 4, 6, 8, 10, 12, 14 and 24 more')
    """
    named = set(ranks)
    parts = spans(named).split(",")
    rest = len(numbers(",".join(parts[_NAMED:])))
    text = ", ".join(parts[:_NAMED]) + (f" and {rest} more" if rest else "")
    return f"{'rank' if len(named) == 1 else 'ranks'} {text}"


# --- what lies beside the traces -------------------------------------------------------------------


def _plan(home: Path, problems: list[str]) -> dict[str, Any]:
    path = home / "plan.toml"
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as problem:
        problems.append(f"{path} cannot be read: {problem}")
        return {}


def _epochs(home: Path, problems: list[str]) -> list[dict[str, Any]]:
    path = home / "metrics.jsonl"
    found: list[dict[str, Any]] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as problem:
        problems.append(f"{path} cannot be read: {problem}")
        return []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            if number < len(lines):  # the last one may still be growing
                problems.append(f"{path}: line {number} cannot be read")
            continue
        if isinstance(row, dict):
            found.append(cast("dict[str, Any]", row))
    return found


def _placement(home: Path, ranks: list[RankTrace]) -> dict[str, Any] | None:
    try:
        found = json.loads((home / "placement.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = ranks[0].meta.get("placement")
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def offsets_ns(ranks: list[RankTrace]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """What has to be added to the clock of each rank."""
    return np.array([int(t.meta.get("clock_offset_ns") or 0) for t in ranks], np.int64)
