"""A rank's trace as it is read: checked, copied, complete, whether its process runs or was killed."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.cluster.processes import process_stat
from fivefold.trace.file import TraceError, TraceFile
from fivefold.trace.fold import folded, merge
from fivefold.trace.schema import ProcessState

__all__ = ["RankTrace"]

_PATIENCE_S = 0.2
"""how long a writer may take to add up; one that was killed at it never ends"""


@dataclass(frozen=True)
class RankTrace:
    """One rank's recording. Tables are as `fivefold.trace.schema` describes them, ordered by time."""

    path: Path
    rank: int
    meta: dict[str, Any]
    state: ProcessState
    live: np.void
    events: NDArray[np.void]
    """the latest, in the order in which they began; those with `end_ns` 0 are under way"""
    sums: NDArray[np.void]
    """of the whole run, events not yet added up by the writer included"""
    windows: NDArray[np.void]
    notes: list[dict[str, Any]]
    stacks: dict[str, list[tuple[str, int]]] = field(
        default_factory=dict[str, list[tuple[str, int]]]
    )
    """by phase: where the main thread was seen, and how often, most often first"""
    problems: tuple[str, ...] = ()
    """what is missing or doubtful, in words"""

    @property
    def has_writer(self) -> bool:
        """Whether its process is there, and no later one of the same number. For traces of this node."""
        found = process_stat(int(self.live["pid"]))
        began = self.meta.get("began") or ""
        return found is not None and not found.ended and began in ("", found.began)

    @classmethod
    def load(cls, path: Path) -> RankTrace:
        """Read a file. Raises `TraceError` when it cannot be read at all."""
        file = TraceFile.open(path)
        problems: list[str] = []
        events, sums, windows, steady = _tables(file)
        if not steady:
            problems.append(
                "its writer was stopped while it added up: sums may lack the last second"
            )
        meta, wrong = checked(_document(file, "meta", problems))
        if wrong:
            problems.append(f"its meta makes no sense of {', '.join(wrong)[:200]}")
        live = file.live[0].copy()
        for name, what in (
            ("lost_events", "events"),
            ("lost_notes", "notes"),
            ("lost_sums", "events"),
        ):
            if live[name]:
                problems.append(f"{int(live[name]):,} {what} found no room")
        if not isinstance(meta.get("rank"), int):
            raise TraceError(
                f"{path} does not say which rank it is of: its rank records nothing yet, or ended before"
            )
        stacks, whole = checked_stacks(_document(file, "stacks", problems))
        if not whole:
            problems.append("its stacks cannot be read in part")
        return cls(
            path, meta["rank"], meta, _state(live), live, events, sums, windows, _notes(file, problems),
            stacks, tuple(problems),
        )  # fmt: skip


def _state(live: np.void) -> ProcessState:
    known = {int(state): state for state in ProcessState}
    return known.get(int(live["state"]), ProcessState.FAILED)


def _tables(file: TraceFile) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.void], bool]:
    """Events, sums and windows that fit each other; and whether they do for certain."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        before = int(file.live[0]["stamp"])
        live = file.live[0].copy()
        events = file.events[file.events["seq"] > 0]
        sums = file.sums[: int(live["sums"])].copy()
        sums = sums[sums["count"] > 0]  # a writer never leaves a row without
        windows = file.windows[: int(live["windows"])].copy()
        steady = before % 2 == 0 and int(file.live[0]["stamp"]) == before
        if steady or time.monotonic() > until:
            break
        time.sleep(0.001)
    fresh = events[(events["folded"] == 0) & (events["end_ns"] >= events["begin_ns"])]
    used = len(sums)
    if len(fresh):
        more = folded(fresh)
        sums = np.concatenate([sums[:used], np.zeros(len(more), sums.dtype)])
        used, _ = merge(sums, used, more)
    # Rows that were being written as they were copied end before they begin.
    whole = events[(events["end_ns"] == 0) | (events["end_ns"] >= events["begin_ns"])]
    return whole[np.argsort(whole["begin_ns"], kind="stable")], sums[:used], windows, steady


def _document(file: TraceFile, name: str, problems: list[str]) -> dict[str, Any]:
    text = file.text(name)
    try:
        found = read_json(text) if text else {}
    except ValueError:
        problems.append(f"its {name} cannot be read")
        return {}
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def _notes(file: TraceFile, problems: list[str]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for line in file.text("notes").splitlines():
        with contextlib.suppress(ValueError):
            told = read_json(line)
            note, wrong = (
                checked(cast("dict[str, Any]", told)) if isinstance(told, dict) else ({}, [])
            )
            if "kind" in note and not wrong:
                found.append(note)
                continue
        problems.append("a note cannot be read")
    return found


# ---- What a trace says in words, of the kinds that readers rely on: a damaged file says anything

_MOST_RANKS = 1 << 20
_INTEGERS = (
    "local_rank", "local_size", "node", "pid", "threads", "monotonic_ns", "wall_ns", "clock_offset_ns",
    "clock_error_ns", "at_ns", "step", "index",
)  # fmt: skip
_TEXTS = (
    "host",
    "began",
    "engine",
    "backend",
    "device",
    "started",
    "kind",
    "text",
    "level",
    "name",
)
_KINDS: dict[str, type[Any]] = {
    **dict.fromkeys(_TEXTS, str),
    **dict.fromkeys(("versions", "environment", "plan", "placement"), dict),
    **dict.fromkeys(("calibration", "links"), list),
}


def read_json(text: str) -> Any:
    """What JSON tells, nan and infinity as Python writes them included. Raises `ValueError`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def checked(told: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The fields of meta, or of a note, that are what they should be; and the names of the others."""
    wrong = [name for name, value in told.items() if value is not None and not _fits(name, value)]
    return {name: value for name, value in told.items() if name not in wrong}, wrong


def _fits(name: str, value: object) -> bool:
    if name in ("rank", "size"):
        return _is_count(value) and cast(int, value) < _MOST_RANKS
    if name in _INTEGERS:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    if isinstance(value, float) and not math.isfinite(value):
        return name == "value"  # a loss may be nan
    if name in ("seconds", "bytes"):
        return isinstance(value, int | float)
    if name in ("cores", "ranks"):
        return isinstance(value, list) and all(map(_is_count, cast("list[object]", value)))
    if name in ("layout", "coordinates"):
        return isinstance(value, dict) and all(
            map(_is_count, cast("dict[str, object]", value).values())
        )
    return name not in _KINDS or isinstance(value, _KINDS[name])


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def checked_stacks(told: Mapping[str, Any]) -> tuple[dict[str, list[tuple[str, int]]], bool]:
    """By phase: places and how often; and whether that was all that was told."""
    found: dict[str, list[tuple[str, int]]] = {}
    whole = True
    for phase, places in told.items():
        found[phase] = []
        for place in cast("list[Any]", places) if isinstance(places, list) else [None]:
            match place:
                case [str() as where, int() as count] if _is_count(count):
                    found[phase].append((where, count))
                case _:
                    whole = False
    return found, whole
